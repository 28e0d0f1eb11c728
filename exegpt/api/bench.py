"""`bench`: run one list of requests under several schedules and with peers, and compare the runs with their replays."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from exegpt.api.compare import compare_policies
from exegpt.options.bench import BenchOptions
from xcore.choices import check_choice, check_columns
from xcore.columns import parse_columns
from xcore.console import output
from xcore.console.comparison import Comparison
from xcore.errors import InputError
from xcore.files import check_distinct, check_output, model_directory, read_schedule
from xcore.requests.request import Request
from xcore.requests.request_lists import draw, read_for_model
from xcore.requests.requests import random_requests
from xcore.specs.model import ModelSpec
from xcore.specs.request_times import summarise
from xcore.specs.schedule import Schedule
from xcore.traces.fit_context import fit_context
from xcore.traces.trace import parse_rate, parse_workload, with_poisson_arrivals
from xprofiler.profiles import find_profile
from xrunner.comm.ranks import Ranks
from xrunner.models import attention_planning
from xrunner.models.device import find_device
from xrunner.threads import set_threads
from xscheduler.policy_names import policy_names
from xscheduler.setting_search import reasons, search_schedule
from xscheduler.settings import Setting, find_setting

if TYPE_CHECKING:
    import torch

DRAWN = 64
"""Default number of drawn requests."""


class PeerRow(TypedDict):
    """A peer's figures, and the first schedule's throughput relative to the peer's."""

    peer: str
    setting: str
    tokens_s: float
    latency_s: float | None
    ratio: float
    alike: float


@dataclass(frozen=True)
class BenchPlan:
    """The runs to compare, the same on every rank."""

    schedules: tuple[Schedule, ...]
    setting: Setting
    requests: tuple[Request, ...]
    notes: tuple[str, ...]
    peers: tuple[str, ...]
    attention: str
    """The attention kernels, as in `Model`."""
    described: str | None
    """The attention kernels with their version; None on the CPU."""


def bench(options: BenchOptions, ranks: Ranks) -> tuple[BenchPlan, list[Comparison], list[PeerRow]]:
    """Return the plan, each schedule's median run, and the peers' rows (`serve_with`).

    All ranks call it; only the first one gets results.
    """
    ranks.agree(
        lambda: {"schedule": str(options.schedule), "policy": str(options.policy), "repeats": str(options.repeats)}
    )
    kind = ranks.agree(lambda: {"device": find_device(options.device, ranks.local).type})["device"]
    device = find_device(kind, ranks.local)
    plan = ranks.share(lambda: _plan(options, ranks.size, device), BenchPlan)
    ranks.agree(lambda: {"threads": str(ranks.threads(options.threads))})
    set_threads(ranks.threads(options.threads))
    where = (ranks, device, plan.attention)
    directory = Path(options.model)
    comparisons = compare_policies(directory, plan.schedules, plan.setting, plan.requests, options.repeats, *where)
    peers = () if ranks.rank else plan.peers
    rows = [
        row
        for name in peers
        for row in serve_with(name, directory, plan.requests, comparisons[0], options.repeats, device)
    ]
    return plan, comparisons, rows


def _plan(options: BenchOptions, ranks: int, device: "torch.device") -> BenchPlan:
    """Read the files, and search the best schedules of the other policies."""
    directory, given, peers = model_directory(options.model), read_schedule(options.schedule), peer_names(options.peers)
    check_output(options.report)
    check_distinct((options.report,), (options.requests, options.schedule, options.profile, options.workload))
    requests, notes = _requests(options, given, directory)
    attention, why = attention_planning.choose_attention(options.attention, given.model.spec, given.dtype, device)
    setting = _setting(options, given, ranks, device.type, attention)
    others, missing = other_schedules(setting, given, options.policy)
    schedules = (given, *others)
    return BenchPlan(
        schedules,
        setting,
        tuple(requests),
        (*notes, *why, *missing),
        peers,
        attention,
        attention_planning.described(attention, device),
    )


def _setting(options: BenchOptions, given: Schedule, ranks: int, device: str, attention: str) -> Setting:
    """Return the setting on this machine's device, or with several ranks on the schedule's own cluster."""
    if ranks == 1:
        return find_setting(
            options.model,
            "local",
            given.workload,
            options.profile,
            dtype=given.dtype,
            kv_dtype=given.kv_dtype,
            device=device,
            attention=attention,
        )
    where = given.model.spec, given.cluster, given.dtype
    profile, which = find_profile(options.profile, *where, kv_dtype=given.kv_dtype, attention=attention)
    return Setting(given.model.spec, given.cluster, given.workload, profile, given.kv_dtype, (which,))


def _requests(options: BenchOptions, given: Schedule, directory: Path) -> tuple[list[Request], list[str]]:
    """Return the requests of a file, or requests drawn from the lengths of a workload, and notes.

    The default workload is that of the schedule.
    """
    spec, source, seed = ModelSpec.from_directory(directory), options.requests, options.seed
    given.check_model(spec)
    named = parse_columns(options.columns) if options.columns else None
    check_columns(options.columns, source, options.workload, scale=options.scale_to_context)
    for option in ("workload", "num", "rate"):
        value = getattr(options, option)
        if source and value:
            raise InputError(
                f"--requests '{source}' already gives the requests: leave --{option} {value} or --requests out."
            )
    notes: list[str] = []
    if source:
        scale = options.scale_to_context
        return read_for_model(source, directory, spec, options.columns, seed, notes.append, scale=scale)[0], notes
    workload = parse_workload(options.workload, named, note=notes.append) if options.workload else given.workload
    workload, scaling = fit_context(workload, spec, options.scale_to_context)
    num = options.num or DRAWN
    lengths = draw(workload, num, seed, spec.longest_request)
    if options.rate:
        lengths = with_poisson_arrivals(lengths, parse_rate(options.rate), seed)
    which = f"{num} requests of workload {workload.name}"
    return random_requests(lengths, spec.vocab, seed), [which, *notes, *scaling]


def other_schedules(setting: Setting, given: Schedule, policy: str | None) -> tuple[list[Schedule], list[str]]:
    """Return the best schedule of each requested policy under the given schedule's bound, and why others have none.

    `all` means every other policy.
    """
    if policy is None:
        return [], []
    names = tuple(name for name in policy_names(None if policy == "all" else policy) if name != given.policy)
    if not names:
        return [], []
    answer = search_schedule(setting, given.latency_bound_s, bound=given.meaning, policies=names)
    missing = reasons(a for a in answer.alternatives if a.schedule is None)
    return [a.schedule for a in answer.alternatives if a.schedule], [f"not run: {reason}" for reason in missing]


def peer_names(text: str | None) -> tuple[str, ...]:
    """Return the peers in a comma-separated list; InputError for one that isn't known or installed."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(","))) if text else ()
    for name in names:
        check_choice(name, ("transformers",), "Peer")
        if importlib.util.find_spec(name) is None:
            raise InputError(f"Peer '{name}' is not installed: pip install {name}.")
    return names


def serve_with(
    name: str,
    directory: Path,
    requests: Sequence[Request],
    first: Comparison,
    repeats: int,
    device: "torch.device",
) -> list[PeerRow]:
    """Run a peer with the same weights and requests, and return a row for each of its ways to serve.

    Each way runs `repeats` times; the median run counts. A row has the useful output tokens per second and the bound's
    latency. It also has the ratio between the tokens/s of the first schedule and of the peer, and the share of equal
    tokens.
    """
    from exegpt.api import peers

    ours = {result.id: list(result.output_ids) for result in first.results}
    tokens = sum(map(len, ours.values()))
    model = peers.load(directory, first.schedule.dtype, device)
    rows: list[PeerRow] = []
    for way, serve in peers.WAYS.items():
        output.note(f"{name}: {way} …")
        runs = sorted((serve(model, requests) for _ in range(repeats)), key=lambda run: run.seconds)
        median = runs[(repeats - 1) // 2]
        theirs = {request.id: ids for request, ids in zip(requests, median.outputs, strict=True)}
        same = sum(a == b for key, ids in ours.items() for a, b in zip(ids, theirs[key], strict=False))
        measured = summarise(median.served, median.seconds, first.schedule.meaning)
        rows.append(
            {
                "peer": name,
                "setting": way,
                "tokens_s": median.tokens_s,
                "latency_s": measured.latency_s,
                "ratio": first.measured.throughput_tok_s / median.tokens_s,
                "alike": same / tokens,
            }
        )
    return rows
