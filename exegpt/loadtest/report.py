"""The output of `bench serve` for people: tables, a plot and an HTML page."""

import math
from collections.abc import Sequence
from pathlib import Path

from exegpt.loadtest.load_test import RequestLoad, rate_text
from exegpt.loadtest.measurements import RunMeasurements
from exegpt.report import svg
from exegpt.report.figures import PERCENTILES, percentile_rows
from exegpt.report.sections import Section, page
from xcore import document
from xcore.console import output
from xcore.console.series import Series
from xcore.quantity import counted, figure_text, percent_text

RUN_COLUMNS = (
    *("rate", "offered/s", "requests", "answered", "rejected", "failed"),
    *("requests/s", "output tok/s", "goodput/s", "within"),
    *("TTFT p50", "TTFT p99", "TPOT p50", "latency p50", "latency p99"),
)
_COLOURS = ("#3b74b9", "#d9822b", "#7a5aa8", "#2f9e6e", "#c2456b", "#8a8f98", "#a68a1f")
_MARKS = "abcdefghijklmnopqrstuvwxyz"


def run_rows(load: RequestLoad, runs: Sequence[RunMeasurements]) -> list[tuple[str, ...]]:
    """Return a table row for each rate."""
    return [
        (
            rate_text(rate),
            figure_text(run.offered_seq_s),
            *(f"{count:,}" for count in (run.requests, run.completed, run.rejected, run.failed)),
            *map(figure_text, (run.throughput_seq_s, run.throughput_tok_s, run.goodput_seq_s)),
            percent_text(run.within_bounds),
            *map(output.seconds, (run.ttft["p50"], run.ttft["p99"])),
            _tpot(run, "p50"),
            *map(output.seconds, (run.latency["p50"], run.latency["p99"])),
        )
        for rate, run in zip(load.rates, runs, strict=True)
    ]


def time_rows(run: RunMeasurements) -> list[list[str]]:
    """Return the distributions of one run's times: since arrival, per token, since sending, and of the client's lag."""
    rows = percentile_rows({"ttft": run.ttft, "tpot": run.tpot, "latency": run.latency})
    rows[1][1:] = [_tpot(run, key) for key in PERCENTILES]
    others = {"latency since sent": run.since_sent["latency"], "send lag of this client": run.client.send_lag}
    return rows + [[name, *(output.seconds(spread[key]) for key in PERCENTILES)] for name, spread in others.items()]


def _tpot(run: RunMeasurements, key: str) -> str:
    """Return a figure of the time per output token, or the text that it can't be measured."""
    value = run.tpot[key]
    return "not measurable" if value is None and run.in_one_chunk else output.seconds(value)


TIME_COLUMNS = ("", *PERCENTILES)


def sentences(load: RequestLoad, runs: Sequence[RunMeasurements]) -> list[str]:
    """Return what the tables lack: errors with messages, unexpected lengths, the client, and why a run is invalid."""
    texts = []
    for rate, run in zip(load.rates, runs, strict=True):
        at = f"{rate_text(rate)}: "
        for kind, count in {**run.errors, **({"rejected": run.rejected} if run.rejected else {})}.items():
            texts.append(f"{at}{count:,} × {kind}: {run.messages.get(kind, 'no message')}")
        if run.other_lengths:
            texts.append(f"{at}{run.other_lengths:,} outputs don't have the requested length")
        if run.retries:
            texts.append(f"{at}{run.retries:,} times, the client waited for an overloaded server's Retry-After")
        share = percent_text(run.client.cpu_share)
        texts.append(f"{at}the client used {share} of {run.client.cores} cores, {run.client.connections:,} connections")
    return texts + warnings(load, runs)


def warnings(load: RequestLoad, runs: Sequence[RunMeasurements]) -> list[str]:
    """Return why figures are missing, or why they describe the client instead of the server."""
    texts = []
    for rate, run in zip(load.rates, runs, strict=True):
        if run.in_one_chunk:
            judged = "they don't count as within --tpot" if run.goodput_seq_s is not None else "--tpot can't be judged"
            so = f", so {judged}" if load.bounds.tpot_s is not None else ""
            answers = counted(run.in_one_chunk, "answer")
            texts.append(f"{rate_text(rate)}: {answers} came in one chunk: the TPOT is not measurable{so}")
        texts += [f"{rate_text(rate)}: INVALID: {warning}" for warning in run.warnings]
    return texts + without_done(runs)


def without_done(runs: Sequence[RunMeasurements]) -> list[str]:
    """Return the sentence about streams that end without [DONE], if such answers count."""
    if not any(run.without_done for run in runs):
        return []
    return ["no stream of this endpoint ends with [DONE]: an answer with a finish reason counts as complete"]


def series(load: RequestLoad, runs: Sequence[RunMeasurements]) -> list[Series]:
    """Return each run's point: its output tokens per second over the 99th percentile of its latency."""
    points = []
    for place, (rate, run) in enumerate(zip(load.rates, runs, strict=True)):
        p99 = run.latency["p99"]
        if p99 is not None:
            at = (p99, run.throughput_tok_s)
            colour, mark = _COLOURS[place % len(_COLOURS)], _MARKS[place % len(_MARKS)]
            points.append(Series(rate_text(rate), (at,), mark, colour, at))
    return points


def write_report(path: Path, load: RequestLoad, runs: Sequence[RunMeasurements]) -> None:
    """Write the HTML page."""
    drawn = [Series(point.name, (), point.mark, point.colour, point.measured) for point in series(load, runs)]
    drawing = svg.frontier(drawn, load.bounds.latency_s) if drawn else ""
    notes = (*sentences(load, runs), "The plot shows output tokens per second over the 99th percentile of the latency.")
    parts = [Section("Runs", RUN_COLUMNS, tuple(run_rows(load, runs)), notes, drawing)]
    for rate, run in zip(load.rates, runs, strict=True):
        parts.append(Section(rate_text(rate), TIME_COLUMNS, tuple(map(tuple, time_rows(run)))))
    facts = (f"{load.options.url}: {load.endpoint.model}, --api {load.options.api}", described(load), *load.notes)
    document.write_text(path, page("Load on an endpoint", facts, parts))


def described(load: RequestLoad) -> str:
    """Return a sentence that describes the load."""
    arrivals = load.options.arrivals
    how = f"bursts (burstiness {load.burstiness:g})" if arrivals == "burst" else arrivals
    bounds = (("latency", load.bounds.latency_s), ("TTFT", load.bounds.ttft_s), ("TPOT", load.bounds.tpot_s))
    within = ", ".join(f"{name} {output.seconds(bound)}" for name, bound in bounds if bound is not None)
    arrive = "all at once" if all(rate == math.inf for rate in load.rates) else f"arrivals: {how}"
    return f"lengths {load.workload.name}, {arrive}, seed {load.options.seed}; bounds: {within or 'none'}"
