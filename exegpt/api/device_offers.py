"""`tune --devices`: how many devices of which kind sustain a rate, and the best schedule on them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from exegpt.api.tune_settings import setting_on
from exegpt.api.tuning import ClusterOffer, TuneProblem, arrival_rates, drafting, tune_rate, written
from xcore.console import output
from xcore.quantity import figure_text
from xcore.specs.price import device_price
from xscheduler.device_search import Option, cheapest, options_of
from xscheduler.expert_divisions import divided
from xscheduler.goodput import RateBounds
from xscheduler.rate_sample import arrivals_of
from xscheduler.replica_layout import DevicesNeeded, RateQuestion, larger_layouts, replica_layouts
from xscheduler.settings import Setting

TOO_LATE = "no replica on up to 32 devices keeps the bounds"
"""Why a kind is left out if one replica doesn't serve a single request in time."""


@dataclass(frozen=True)
class DeviceOffers:
    """The answers to how many devices of which kind sustain a rate."""

    asked: RateQuestion
    needed: tuple[DevicesNeeded, ...]
    """The best layouts, the best first; empty if none sustains the rate."""
    best: ClusterOffer | None
    """The answer on the devices of the best layout."""
    others: tuple[Option, ...]
    """The best option of each kind that is not among the answers, with what it needs at least."""
    left_out: dict[str, str]
    """Why a kind is not considered."""


def device_offers(problem: TuneProblem) -> DeviceOffers:
    """Search the kinds of the problem's settings, at its first rate within its first bound.

    Writes the best schedule and the report.
    """
    rate_seq_s, left_out = arrival_rates(problem)[0], dict(problem.left_out)
    first, search, options = problem.settings[0], problem.search, problem.options
    bounds = RateBounds(problem.bounds_s[0], search.ttft_s, search.tpot_s)
    asked = RateQuestion(
        rate_seq_s,
        bounds,
        search,
        arrivals_of(first, options.arrivals, options.seed),
        options.caches_prefixes,
        _prices(problem),
        problem.drafts,
    )
    considered: list[Option] = []
    for setting in problem.settings:
        of_kind = _options(problem, setting, asked)
        if not of_kind:
            left_out[setting.cluster.device.kind] = TOO_LATE
        considered += of_kind
    with output.progress(f"{len(considered)} layouts at {figure_text(rate_seq_s, 6)}/s") as progress:
        needed, rest = cheapest(considered, asked, options.top, progress)
    known = {*(one.layout.kind for one in needed), *(option.layout.kind for option in rest), *left_out}
    left_out |= {option.layout.kind: TOO_LATE for option in considered if option.layout.kind not in known}
    best = _tuned_on(problem, needed[0]) if needed else None
    if best and best.rated.tuned.schedule:
        schedule = best.rated.tuned.schedule
        needed[0] = replace(
            needed[0], schedule=schedule, goodput_seq_s=best.rated.sustained[schedule.policy].goodput_seq_s
        )
    return DeviceOffers(asked, tuple(needed), best, _others(needed, rest), left_out)


def _prices(problem: TuneProblem) -> dict[str, float] | None:
    if problem.prices is None:
        return None
    kinds = [setting.cluster.device.kind for setting in problem.settings]
    return {kind: price for kind in kinds if (price := device_price(problem.prices, kind)) is not None}


def _options(problem: TuneProblem, setting: Setting, asked: RateQuestion) -> list[Option]:
    """Return the layouts of a replica on one kind that keep the bounds, on several nodes if one doesn't suffice."""
    for layouts in (replica_layouts, larger_layouts):
        every = divided(replace(setting, divides=not problem.options.expert_parallel))
        first, *others = (layouts(each, problem.search.fixed) for each in every)
        parts = {(one.tp, one.pp) for one in first if not one.expert_parallel}
        new = [one for each in others for one in each if one.shared > 1 or one.expert_parallel]
        of_kind = first + [one for one in new if (one.tp, one.pp) in parts]
        if in_time := options_of(of_kind, asked):
            return in_time
    return []


def _others(needed: Sequence[DevicesNeeded], rest: Sequence[Option]) -> tuple[Option, ...]:
    """Return the first option of each kind without an answer."""
    first: dict[str, Option] = {}
    for option in rest:
        first.setdefault(option.layout.kind, option)
    answered = {one.layout.kind for one in needed}
    return tuple(option for kind, option in first.items() if kind not in answered)


def _tuned_on(problem: TuneProblem, needed: DevicesNeeded) -> ClusterOffer:
    """Return the answer on the devices of a layout, searched as on a cluster that is named."""
    layout, options = needed.layout, problem.options
    asked = replace(options, devices=None)
    if experts := layout.setting.model.experts:
        asked = replace(asked, expert_parallel=experts.expert_parallel, attention_dp=experts.attention_dp)
    setting = setting_on(asked, needed.cluster.name, None)
    search = replace(problem.search, fixed=problem.search.fixed | layout.fixed(needed.replicas))
    there = replace(problem, settings=(setting,), search=search)
    if problem.drafts is None:
        return tune_rate(there)[0]
    speculation = needed.schedule.speculation
    drafts = replace(problem.drafts, lengths=(speculation.drafted if speculation else 0,))
    offer = tune_rate(replace(there, settings=(replace(setting, speculation=speculation),), drafts=drafts))[0]
    return replace(offer, drafting=drafting(there, written(there, offer.rated.tuned)))
