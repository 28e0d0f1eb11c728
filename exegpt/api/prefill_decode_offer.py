"""`tune --disaggregated`: prefill replicas beside decode replicas, and what starts them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exegpt.options.tune import TuneOptions
from xcore.errors import InputError
from xscheduler.exports.disaggregated_launch import SideCommand, check_engine, side_commands
from xscheduler.policy_names import policy_names

if TYPE_CHECKING:
    from exegpt.api.tuning import TuneProblem
    from xscheduler.goodput import RateBounds
    from xscheduler.prefill_decode_search import PrefillDecodeAnswer
    from xscheduler.rate_sample import Arrivals
    from xscheduler.settings import Setting


@dataclass(frozen=True)
class PrefillDecodeOffer:
    """The best layout of a cluster."""

    answer: "PrefillDecodeAnswer | None"
    """None: no layout keeps the bounds."""
    layouts: int
    """The number of layouts that fit on the cluster."""
    commands: tuple[SideCommand, ...] = ()
    """The commands that start a replica of each side; empty without an export."""


def check_disaggregated(options: TuneOptions, settings: "Sequence[Setting]") -> None:
    """Raise InputError for options that --disaggregated can't be combined with, or settings that can't be divided."""
    if not options.disaggregated:
        return
    from xscheduler.prefill_decode_search import POLICY, check_divisible

    if not options.open_system:
        raise InputError("--disaggregated is for requests that arrive over time: add --rate, like --rate 5/s.")
    for name, value in (
        *((f"--{name.replace('_', '-')}", value) for name, value in options.fixed.items()),
        ("--devices", options.devices),
        ("--prefix-caching", options.prefix_caching),
        ("--prefix-hit", options.prefix_hit),
        ("--draft-acceptance", options.draft_acceptance),
        ("--attention-dp", options.attention_dp),
        ("--load-curve", options.load_curve),
        ("--report", options.report),
        ("--export-out", options.export_out),
        (f"--admission {options.admission}", options.admission != "reserve"),
        ("several clusters", options.cluster and "," in options.cluster),
        ("several rates", options.rate and "," in options.rate),
        ("several bounds", options.latency_bound and "," in options.latency_bound),
    ):
        if value:
            raise InputError(f"--disaggregated can't be combined with {name}: leave one of them out.")
    if POLICY not in policy_names(options.policy):
        raise InputError(
            f"The replicas of --disaggregated follow policy {POLICY}, which --policy {options.policy} leaves out: add "
            f"{POLICY}, or leave one of the two options out."
        )
    if options.export:
        check_engine(options.export, options.export_as)
    for setting in settings:
        check_divisible(setting)


def prefill_decode_offer(
    problem: "TuneProblem", setting: "Setting", arrivals: "Arrivals", bounds: "RateBounds", rate_seq_s: float
) -> PrefillDecodeOffer | None:
    """Return a cluster's best layout with its figures at a rate; None without --disaggregated."""
    if not problem.options.disaggregated:
        return None
    from xscheduler.prefill_decode_search import PrefillDecodeQuestion

    question = PrefillDecodeQuestion(setting, arrivals, bounds, problem.search.bound)
    answer = question.best(rate_seq_s)
    target = problem.target
    commands = side_commands(target, answer.plan, setting.profile) if target and answer else ()
    return PrefillDecodeOffer(answer, len(question.layouts), commands)
