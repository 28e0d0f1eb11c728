"""A run compared with its prediction, as table rows and sentences."""

from collections.abc import Sequence

from xcore.console import output
from xcore.console.comparison import Comparison, relative
from xcore.duration import format_duration
from xcore.specs.slowdown import Slowdown

COMPARISON_COLUMNS = ("", "predicted", "measured", "error")
SUMMARY_COLUMNS = ("policy", "predicted tok/s", "measured tok/s", "error")


def summary_columns(comparisons: Sequence[Comparison]) -> tuple[str, ...]:
    """Return the columns of `summary_rows`; only runs under a bound have a last one."""
    meaning = comparisons[0].schedule.meaning
    latency = "latency of long outputs" if meaning.of_length else f"p{meaning.percentile:g} latency"
    bounded = ("bound met",) if comparisons[0].holds_bound is not None else ()
    return (*SUMMARY_COLUMNS, f"predicted {latency}", "measured", *bounded)


def summary_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Return a table's row for each run: tokens/s, the bounded latency, and whether the bound is met."""
    rows = []
    for c in comparisons:
        rates = (c.predicted.throughput_tok_s, c.measured.throughput_tok_s)
        times = (c.predicted.latency_s, c.measured.latency_s)
        error = output.share(c.error()["throughput_tok_s"])
        met = [] if c.holds_bound is None else ["yes" if c.holds_bound else "no"]
        rows.append([c.schedule.policy, *map(output.number, rates), error, *map(output.seconds, times), *met])
    return rows


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
        rows += detail_rows([c])
    return rows


def detail_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Return a table's rows: each policy's tokens/s in the steady state, and the mean seconds of its iterations."""
    rows = []
    for c in comparisons:
        if c.steady and c.steady.feasible and not c.schedule.prefix_caching:  # the steady state ignores prefix caching
            steady, window = c.steady.throughput_tok_s, c.steady_measured_tok_s
            texts = (output.number(steady), output.number(window), output.share(relative(window, steady)))
            rows.append([f"{c.schedule.policy:8} output tokens/s, steady", *texts])
        predicted, measured = c.predicted_timeline.phase_means(), c.measured_timeline.phase_means()
        for phase in sorted(predicted.keys() & measured.keys()):
            times = (output.seconds(predicted[phase]), output.seconds(measured[phase]))
            error = output.share(relative(measured[phase], predicted[phase]))
            rows.append([f"{c.schedule.policy:8} {phase} iteration", *times, error])
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
    text = f"The bound of {format_duration(bound_s)} was checked against the {checked} ({figures}). "
    below = f"{run.schedule.policy} meets it: measured {output.seconds(measured)}, {1 - measured / bound_s:.1%} below."
    return text + (miss_text(run) or below)


def miss_text(run: Comparison) -> str:
    """Return by how much the measured run missed the schedule's bound, and why; empty if it kept the bound."""
    bound_s, measured = run.schedule.latency_bound_s, run.measured.latency_s
    if bound_s is None or measured is None or measured <= bound_s:
        return ""
    slower = relative(measured, run.predicted.latency_s) or 0.0
    why = f"the run took {slower:.1%} longer than the replay predicted"
    if run.predicted.latency_s and run.predicted.latency_s > bound_s:
        why = "its replay misses it too, because all requests arrive at the start, unlike in the steady state"
    off, bound = measured / bound_s - 1, format_duration(bound_s)
    return (
        f"{run.schedule.policy} misses the bound of {bound} by {off:.1%}: measured {output.seconds(measured)}; {why}."
    )


def speed_text(slowdown: Slowdown) -> str:
    """Return how the machine's present speed scales a prediction; empty within 3 %."""
    if slowdown.change <= 0.03:
        return ""
    compute, read, stream, attention = (f"{factor:.2f} times as long" for factor in slowdown.factors)
    return (
        f"the machine's speed has changed since it was profiled: computing takes {compute}, reading weights {read}, "
        f"the head {stream}, attention {attention}; the prediction is scaled accordingly "
        "(`exegpt profile` measures again)"
    )
