"""A run compared with its prediction, as table rows and sentences."""

from collections.abc import Sequence

from xcore.console import output
from xcore.console.comparison import Comparison, relative
from xcore.duration import format_duration

COMPARISON_COLUMNS = ("", "predicted", "measured", "error")


def comparison_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Return a table's rows: for each figure and policy, predicted, measured and error."""
    rows = []
    for c in comparisons:
        error = c.error()
        for key, name, text in (
            ("throughput_tok_s", "output tokens/s", output.number),
            ("latency_s", "bounded latency", output.seconds),
            ("ttft_s", "time to first token", output.seconds),
            ("tpot_s", "time per output token", output.seconds),
        ):
            figures = (getattr(c.predicted, key), getattr(c.measured, key))
            rows.append([f"{c.schedule.policy:8} {name}", *map(text, figures), output.share(error[key])])
        if c.steady and c.steady.feasible and not c.schedule.prefix_caching:  # the steady state ignores prefix caching
            steady, window = c.steady.throughput_tok_s, c.steady_measured_tok_s
            texts = (output.number(steady), output.number(window), output.share(relative(window, steady)))
            rows.append([f"{c.schedule.policy:8} output tokens/s, steady", *texts])
        predicted, measured = c.predicted_timeline.phase_means(), c.measured_timeline.phase_means()
        for phase in sorted(predicted.keys() & measured.keys()):
            figures = (output.seconds(predicted[phase]), output.seconds(measured[phase]))
            error_text = output.share(relative(measured[phase], predicted[phase]))
            rows.append([f"{c.schedule.policy:8} {phase} iteration", *figures, error_text])
    return rows


def bound_text(run: Comparison, checked: str) -> str:
    """Return whether the measured run kept the schedule's bound, by what margin, and the predictions.

    `checked` names the prediction that was checked against the bound. Empty without a bound.
    """
    bound_s, measured = run.schedule.latency_bound_s, run.measured.latency_s
    if bound_s is None or measured is None:
        return ""
    planned = (("steady state", run.steady), ("replay of these requests", run.predicted))
    figures = ", ".join(f"{name} {output.seconds(estimate.latency_s)}" for name, estimate in planned if estimate)
    policy, off = run.schedule.policy, measured / bound_s - 1
    text = f"The bound of {format_duration(bound_s)} was checked against the {checked} ({figures}). "
    if off <= 0:
        return f"{text}{policy} meets it: measured {output.seconds(measured)}, {-off:.1%} below."
    slower = relative(measured, run.predicted.latency_s) or 0.0
    why = f"the run took {slower:.1%} longer than the replay predicted"
    if run.predicted.latency_s and run.predicted.latency_s > bound_s:
        why = "its replay misses it too, because all requests arrive at the start, unlike in the steady state"
    return f"{text}{policy} misses it by {off:.1%}: measured {output.seconds(measured)}; {why}."


def speed_text(slowdown: tuple[float, float, float]) -> str:
    """Return how the machine's present speed scales a prediction; empty within 3 %."""
    if max(abs(1 - factor) for factor in slowdown) <= 0.03:
        return ""
    compute, read, stream = (f"{factor:.2f} times as long" for factor in slowdown)
    return (
        f"the machine's speed has changed since it was profiled: computing takes {compute}, reading weights {read}, "
        f"the head and attention {stream}; the prediction is scaled accordingly (`exegpt profile` measures again)"
    )
