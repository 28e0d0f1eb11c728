"""Running requests under a schedule and laying what happened beside what was predicted for them."""

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from exegpt.profile import Profile
from exegpt.report.comparison import Comparison, relative
from exegpt.request import Request, Result
from exegpt.schedule import Schedule
from exegpt.served import summarise
from exegpt.workload import RequestLengths

if TYPE_CHECKING:
    from pathlib import Path

    from exegpt.cli.inputs import Setting
    from exegpt.models import Model
    from xprofiler.rates import Slowdown
    from xrunner.comm.ranks import Ranks
    from xrunner.core.report import RunReport


def execute(
    model: Any,
    schedule: Schedule,
    profile: Profile,
    requests: Sequence[Request],
    on_finish: Callable[[Result], None] | None = None,
) -> Comparison:
    """Run `requests` on a loaded model, then predict the very same ones at the machine's speed then."""
    from xrunner.comm.ranks import Ranks
    from xrunner.core.engine import Engine

    engine, alone = Engine(model, schedule), Ranks()
    before = slowdown_now(profile, model, alone)
    report = engine.run(requests, on_finish)
    return compare(
        schedule, profile, report, slowdown=least(before, slowdown_now(profile, model, alone)), requests=requests
    )


def slowdown_now(profile: Profile, model: "Model", ranks: "Ranks") -> "Slowdown | None":
    """How much slower this machine is now than its profile; None where the profile isn't one that this machine
    measured. All ranks call it.
    """
    from xprofiler import machine
    from xprofiler.rates import measured_slowdown

    fact = "device" if model.device.type == "cuda" else "processor"
    own = profile.source == "measured" and profile.provenance.get(fact) == machine.provenance(model.device)[fact]
    return measured_slowdown(profile, model, ranks) if all(ranks.all(own)) else None


def least(before: "Slowdown | None", after: "Slowdown | None") -> "Slowdown | None":
    """The machine's slowdown during a run, of those timed before and after it: a moment's disturbance, which one of
    them may have met, is no slower machine.
    """
    from xprofiler.rates import Slowdown

    if before is None or after is None:
        return None
    pairs = zip(astuple(before), astuple(after), strict=True)
    return Slowdown(*(min(pair) for pair in pairs))


def compare(
    schedule: Schedule,
    profile: Profile,
    report: "RunReport",
    adjustment: float | None = None,
    slowdown: "Slowdown | None" = None,
    requests: Sequence[Request] = (),
) -> Comparison:
    """A finished run beside the replay of its requests, with the output lengths that they turned out to have, at the
    machine's speed then. With the `requests`, the cache is reserved for as many tokens as they allowed, and has what
    their prompts have in common.
    """
    import xsimulator
    from xprofiler.rates import rescaled
    from xrunner.comm.place import ranks_needed
    from xsimulator.replay.event_simulator import replay

    if slowdown:
        profile = rescaled(profile, schedule.model.spec, slowdown)
    done = sorted(report.served, key=lambda s: s.index)
    lengths = [RequestLengths(s.input_tokens, s.output_tokens, s.arrival_s) for s in done]
    caps = [requests[s.index].max_tokens for s in done] if requests else None
    prompts = [requests[s.index].prompt_ids for s in done] if requests else None
    predicted = replay(schedule, profile, lengths, adjustment=adjustment, caps=caps, prompts=prompts)
    busy = dict.fromkeys(range(ranks_needed(schedule)), 0.0)
    for span in report.timeline.spans:
        busy[span.device] += span.end_s - span.start_s
    return Comparison(
        schedule=schedule,
        measured=summarise(
            report.served,
            report.seconds,
            schedule.bound,
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
        slowdown=(slowdown.compute, slowdown.read, slowdown.stream) if slowdown else (1.0, 1.0, 1.0),
    )


def write_report(path: "Path", title: str, setting: "Setting", comparisons: list[Comparison]) -> None:
    """An HTML report with the frontier of all policies and these runs."""
    import math

    from exegpt import document
    from exegpt.cli.answer import frontier, frontier_bounds, report_facts, schedule_text, search_schedule
    from exegpt.report.html import Report, page

    chosen = comparisons[0].schedule
    answers = [search_schedule(setting, b, bound=chosen.bound) for b in frontier_bounds(setting, bound=chosen.bound)]
    bound_s = chosen.latency_bound_s if chosen.latency_bound_s and math.isfinite(chosen.latency_bound_s) else None
    facts = (*report_facts(setting), ("schedule", schedule_text(chosen)))
    report = Report(title, facts, setting.workload, frontier(answers), bound_s, tuple(comparisons))
    document.write_text(path, page(report))


def bound_text(done: Comparison, checked: str) -> str:
    """Whether the measured run held the schedule's bound, by how much, and what it was planned by: `checked` says which
    of the two predictions was held against it. Empty without a bound.
    """
    from exegpt.cli import output
    from exegpt.duration import format_duration

    bound_s, measured = done.schedule.latency_bound_s, done.measured.latency_s
    if bound_s is None or measured is None:
        return ""
    planned = (("steady state", done.steady), ("replay of these very requests", done.predicted))
    figures = ", ".join(f"{name} {output.seconds(one.latency_s)}" for name, one in planned if one)
    policy, off = done.schedule.policy, measured / bound_s - 1
    text = f"The bound of {format_duration(bound_s)} was checked against the {checked} ({figures}). "
    if off <= 0:
        return f"{text}{policy} holds it: measured {output.seconds(measured)}, {-off:.1%} below."
    slower = relative(measured, done.predicted.latency_s) or 0.0
    why = f"the run took {slower:.1%} longer than the replay predicted"
    if done.predicted.latency_s and done.predicted.latency_s > bound_s:
        why = "its replay misses it too: a list that begins all at once is not the steady state that was searched"
    return f"{text}{policy} misses it by {off:.1%}: measured {output.seconds(measured)}; {why}."


def comparison_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """A table's rows: for each figure and policy, predicted, measured and error."""
    from exegpt.cli import output

    rows = []
    for c in comparisons:
        error = c.error()
        for key, name, text in (
            ("throughput_tok_s", "output tokens/s", output.number),
            ("latency_s", "latency of the bound", output.seconds),
            ("ttft_s", "time to first token", output.seconds),
            ("tpot_s", "time per output token", output.seconds),
        ):
            figures = (getattr(c.predicted, key), getattr(c.measured, key))
            rows.append([f"{c.schedule.policy:8} {name}", *map(text, figures), output.share(error[key])])
        if c.steady and c.steady.feasible and not c.schedule.prefix_caching:  # it reckons without
            steady, window = c.steady.throughput_tok_s, c.steady_measured_tok_s
            figures = (output.number(steady), output.number(window), output.share(relative(window, steady)))
            rows.append([f"{c.schedule.policy:8} output tokens/s, steady", *figures])
        predicted, measured = c.predicted_timeline.phase_means(), c.measured_timeline.phase_means()
        for phase in sorted(predicted.keys() & measured.keys()):
            one, two = predicted[phase], measured[phase]
            rows.append(
                [
                    f"{c.schedule.policy:8} {phase} iteration",
                    output.seconds(one),
                    output.seconds(two),
                    output.share(relative(two, one)),
                ]
            )
    return rows


COMPARISON_COLUMNS = ("", "predicted", "measured", "error")
