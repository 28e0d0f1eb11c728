"""Compare runs of requests under a schedule with the predictions for the same requests."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xcore.batching import Hints, Order, Preemption
from xcore.console import output
from xcore.console.comparison import Comparison, median
from xcore.orders import fcfs
from xcore.requests.request import Request, Result
from xcore.specs.profile import Profile
from xcore.specs.request_times import summarise
from xcore.specs.schedule import Schedule
from xcore.specs.slowdown import Slowdown
from xcore.specs.workload import RequestLengths
from xprofiler.present_speed import slowdown_now
from xscheduler.settings import Setting

if TYPE_CHECKING:
    import torch

    from xrunner.comm.ranks import Ranks
    from xrunner.core.run_report import RunReport
    from xrunner.models import Model


def execute(
    model: "Model",
    schedule: Schedule,
    profile: Profile,
    requests: Sequence[Request],
    on_finish: Callable[[Result], None] | None = None,
) -> Comparison:
    """Run `requests` on a loaded model, then predict the same requests at the machine's speed during the run."""
    from xrunner.comm.ranks import Ranks
    from xrunner.core.engine import Engine

    engine, alone = Engine(model, schedule), Ranks()
    before = slowdown_now(profile, model, alone)
    report = engine.run(requests, on_finish)
    return compare(
        schedule,
        profile,
        report,
        slowdown=slowdown_between(before, slowdown_now(profile, model, alone)),
        requests=requests,
    )


def slowdown_between(before: Slowdown | None, after: Slowdown | None) -> Slowdown | None:
    """Return the machine's slowdown during a run, from measurements before and after it: their geometric means."""
    if before is None or after is None:
        return None
    return Slowdown(*(math.sqrt(a * b) for a, b in zip(before.factors, after.factors, strict=True)))


def compare(
    schedule: Schedule,
    profile: Profile,
    report: "RunReport",
    slowdown: Slowdown | None = None,
    requests: Sequence[Request] = (),
    order: Order = fcfs,
    hints: Mapping[str, Hints] | None = None,
    preemption: Preemption | None = None,
) -> Comparison:
    """Compare a finished run with the replay of its requests, at the machine's speed during the run.

    The replay has the output lengths of the run. With `requests`, it reserves the cache for the tokens that they
    allowed, and reuses common prefixes of their prompts. `hints` are by the requests' ids, if the `order` needs any.
    `preemption` as in `replay`.
    """
    import xsimulator
    from xcore.specs.schedule import ranks_needed
    from xprofiler.rates import rescaled
    from xsimulator.replay.event_simulator import replay

    if slowdown:
        profile = rescaled(profile, schedule.model.spec, slowdown)
    done = sorted(report.served, key=lambda s: s.index)
    lengths = [RequestLengths(s.input_tokens, s.output_tokens, s.arrival_s) for s in done]
    caps = [requests[s.index].max_tokens for s in done] if requests else None
    prompts = [requests[s.index].prompt_ids for s in done] if requests else None
    own = [hints[requests[s.index].id] for s in done] if hints else None
    how = (order, own, False, preemption)
    predicted = replay(schedule, profile, lengths, True, False, caps, prompts, *how)
    busy = dict.fromkeys(range(ranks_needed(schedule)), 0.0)
    for span in report.timeline.spans:
        busy[span.device] += span.end_s - span.start_s
    return Comparison(
        schedule=schedule,
        measured=summarise(
            report.served,
            report.seconds,
            schedule.meaning,
            utilisation=tuple(seconds / report.seconds if report.seconds else 0.0 for seconds in busy.values()),
        ),
        predicted=predicted.estimate,
        steady=xsimulator.estimate(schedule, profile) if xsimulator.has_steady_state(schedule) else None,
        results=tuple(report.results),
        served=tuple(report.served),
        seconds=report.seconds,
        measured_timeline=report.timeline,
        predicted_timeline=predicted.timeline,
        changes=report.changes,
        preemptions=report.preemptions,
        predicted_preemptions=predicted.preemptions,
        reused=report.reused,
        predicted_reused=predicted.reused,
        slowdown=slowdown or Slowdown(),
    )


def compare_policies(
    directory: Path,
    schedules: Sequence[Schedule],
    setting: Setting,
    requests: Sequence[Request],
    repeats: int,
    ranks: "Ranks",
    device: "torch.device",
    attention: str = "triton",
) -> list[Comparison]:
    """Run the requests under each schedule, and return each schedule's median run, on rank 0 only.

    The schedules take turns, so that a slow moment doesn't affect only one of them.
    """
    from xrunner.core.engine import Engine
    from xrunner.core.run_report import RunReport

    runs: list[list[Comparison]] = [[] for _ in schedules]
    total = len(schedules) * repeats * len(requests)
    with output.progress("running requests") as progress:
        finished = 0

        def on_finish(_: object) -> None:
            nonlocal finished
            finished += 1
            progress(finished, total)

        for _ in range(repeats):
            for schedule_runs, schedule in zip(runs, schedules, strict=True):
                engine = Engine.load(directory, schedule, ranks, device=device, attention=attention)
                before = slowdown_now(setting.profile, engine.model, ranks)
                report = engine.run(requests, on_finish)
                slowdown = slowdown_between(before, slowdown_now(setting.profile, engine.model, ranks))
                reports = ranks.gather(report if engine.leads else None, 0, RunReport)
                schedule_runs += [compare(schedule, setting.profile, r, slowdown=slowdown) for r in reports if r]
                engine.close()
    return [median(schedule_runs) for schedule_runs in runs if schedule_runs]
