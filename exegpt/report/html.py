"""The HTML report: one file without scripts or network access."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape

from exegpt.report import svg
from exegpt.report.comparison_text import COMPARISON_COLUMNS, detail_rows
from xcore.console.comparison import KEYS, Comparison
from xcore.console.series import Series
from xcore.quantity import figure_text, signed_percent
from xcore.specs.timeline import Timeline
from xcore.specs.workload import Workload

_STYLE = """
:root { --ink: #1c2026; --soft: #68707c; --line: #dfe3e8; --page: #ffffff; --lane: #f3f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9aa2ad; --line: #343a42; --page: #15181c; --lane: #20242a; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
  max-width: 74rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
p, figcaption, dt { color: var(--soft); } figure { margin: 0; max-width: 60rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; } dd { margin: 0; }
svg { width: 100%; height: auto; display: block; font: 12px system-ui, sans-serif; }
svg text { fill: var(--soft); } .grid { stroke: var(--line); } .axis { stroke: var(--soft); fill: none; }
.bound { stroke: var(--ink); stroke-dasharray: 5 4; } .lane { fill: var(--lane); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .25rem .45rem; font-size: 13px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); } th:first-child, td:first-child { text-align: left; }
th[colspan] { text-align: center; color: var(--ink); }
td:nth-child(3n + 2), th[colspan] { border-left: 1px solid var(--line); }
.plain td, .plain th { text-align: left; white-space: normal; vertical-align: top; border-left: none; }
.scroll { overflow-x: auto; } .key { display: inline-block; width: .7em; height: .7em; margin: 0 .3em 0 1em; }
"""

_TITLES = {
    "throughput_seq_s": "requests/s",
    "throughput_tok_s": "output tokens/s",
    "latency_s": "bounded latency, s",
    "latency_p50_s": "latency, p50, s",
    "latency_p99_s": "latency, p99, s",
    "ttft_s": "time to first token, s",
    "tpot_s": "time per output token, s",
    "ttft_p99_s": "time to first token, p99, s",
    "tpot_p99_s": "time per output token, p99, s",
}


@dataclass(frozen=True)
class Report:
    """The contents of a report; without comparisons, the report of a search only."""

    title: str
    facts: tuple[tuple[str, str], ...]
    """The problem that was searched: (name, text) pairs."""
    workload: Workload
    frontier: tuple[Series, ...]
    """The predicted frontier; measured points are drawn from the comparisons."""
    bound_s: float | None
    comparisons: tuple[Comparison, ...] = field(default=())
    """The runs with their predictions; the first one is that of the chosen schedule."""
    policies: tuple[tuple[str, ...], ...] = ()
    """A row for every policy.

    It has the name, output tokens per second, latency, the 99th percentiles of TTFT and TPOT, and the reason for its
    place.
    """
    stages: tuple[tuple[str, ...], ...] = ()
    """The chosen schedule's stages, with the names of the columns first."""
    advice: tuple[str, ...] = ()
    """Sentences on what a looser bound or another cluster would give."""


def page(report: Report) -> str:
    """Return the complete HTML document."""
    measured = {c.schedule.policy: c for c in report.comparisons}
    series = [replace(policy, measured=_point(measured.get(policy.name))) for policy in report.frontier]
    caption = "Dots show the predicted steady state of each policy's best schedule under several bounds."
    if measured:
        caption += " Rings show measured runs, including ramp-up and drain."
    parts = [
        f"<h1>{escape(report.title)}</h1>",
        "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in report.facts) + "</dl>",
        "<h2>Throughput and latency</h2>",
        f"<figure>{svg.frontier(series, report.bound_s)}<figcaption>{caption}</figcaption></figure>",
    ]
    if report.policies:
        columns = ("policy", "output tokens/s", "latency", "TTFT p99", "TPOT p99", "why")
        parts += ["<h2>Policies</h2>", _plain_table((columns, *report.policies))]
    if report.stages:
        parts += ["<h2>Stages of the chosen schedule</h2>", _plain_table(report.stages)]
    if report.advice:
        parts += ["<h2>Advice</h2>", *(f"<p>{escape(text)}.</p>" for text in report.advice)]
    if report.comparisons:
        parts += _comparison_parts(report.comparisons)
    distributions = [
        ("input", svg.PHASES["encode"], report.workload.input.lengths, report.workload.input.probabilities),
        ("output", svg.PHASES["decode"], report.workload.output.lengths, report.workload.output.probabilities),
    ]
    parts += ["<h2>Lengths of the requests</h2>", f"<figure>{svg.lengths(distributions)}</figure>"]
    return document(report.title, "\n".join(parts))


def document(title: str, body: str) -> str:
    """Return a complete HTML document in the reports' style."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _plain_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first row names the columns; sentences may wrap."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f'<div class="scroll"><table class="plain"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _point(comparison: Comparison | None) -> tuple[float, float] | None:
    if comparison is None or comparison.measured.latency_s is None:
        return None
    return comparison.measured.latency_s, comparison.measured.throughput_tok_s


def _comparison_parts(comparisons: Sequence[Comparison]) -> list[str]:
    chosen = comparisons[0]
    key = "".join(
        f'<span class="key" style="background:{svg.PHASES[phase]}"></span>{phase}'
        for phase in ("encode", "decode", "mixed")
    )
    rows = [("predicted", _spans(chosen.predicted_timeline)), ("measured", _spans(chosen.measured_timeline))]
    return [
        "<h2>Predicted and measured</h2>",
        "<p>Predicted: a replay of the requests that were run. Error: (measured − predicted) / measured.</p>",
        f'<div class="scroll">{_table(comparisons)}</div>',
        "<h2>Steady state and iterations</h2>",
        _plain_table((COMPARISON_COLUMNS, *detail_rows(comparisons))),
        f"<h2>Timelines of policy {escape(chosen.schedule.policy)}</h2>",
        f"<figure>{svg.timelines(rows)}<figcaption>{key}</figcaption></figure>",
    ]


def _spans(timeline: Timeline) -> list[tuple[str, float, float]]:
    return [(span.phase, span.start_s, span.end_s) for span in timeline.spans if span.device == 0]


def _table(comparisons: Sequence[Comparison]) -> str:
    policies = "".join(f'<th colspan="3">{escape(c.schedule.policy)}</th>' for c in comparisons)
    columns = "<th>predicted</th><th>measured</th><th>error</th>" * len(comparisons)
    head = f"<tr><th></th>{policies}</tr><tr><th></th>{columns}</tr>"
    rows = []
    for key in KEYS:
        cells = []
        for c in comparisons:
            cells += [figure_text(getattr(c.predicted, key)), figure_text(getattr(c.measured, key))]
            cells.append(signed_percent(c.error()[key]))
        rows.append(f"<tr><td>{_TITLES[key]}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"
