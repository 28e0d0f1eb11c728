"""Gantt charts of the models on each device over time: text for terminals, SVG for reports."""

import itertools
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from exegpt.report import svg
from xcore.duration import duration_text
from xcore.quantity import percent_text
from xcore.specs.cluster_plan import Plan, PlannedModel
from xmulti.files.stage_plan import StagePlan

MARKS = string.ascii_uppercase + string.ascii_lowercase + string.digits
"""Letters for models on a terminal; with more models they repeat."""
MOST_ROWS = 32
"""Maximum rows on a terminal; with more devices, neighbours that run the same models share a row."""
IDLE, ON = "·", "→"
"""An idle device, and a bar that continues for as long as requests arrive."""


@dataclass(frozen=True)
class Bar:
    """A model on a device, with times in seconds since the plan began."""

    name: str
    start_s: float
    end_s: float | None
    """The end; None: for as long as requests arrive."""
    share: str = ""
    """How it shares the device; empty if it has the device alone."""
    part: float = 1.0
    """Share of the height of the device's row, relative to other models' shares."""


@dataclass(frozen=True)
class Gantt:
    """The bars of each device, and the models by their order."""

    names: tuple[str, ...]
    devices: tuple[tuple[Bar, ...], ...]

    @property
    def seconds(self) -> float | None:
        """When the last bar ends; None if no bar ends."""
        ends = [bar.end_s for bars in self.devices for bar in bars if bar.end_s is not None]
        return max(ends, default=None)

    @property
    def shares(self) -> dict[str, str]:
        """How models share devices, by their names."""
        return {bar.name: bar.share for bars in self.devices for bar in bars if bar.share}


def of_plan(plan: Plan) -> Gantt:
    """Return the chart of a plan of budgets: each model's bar goes from the start until its requests are done."""
    devices = tuple(
        tuple(_bar(model) for model in plan.models if device in model.devices) for device in range(plan.cluster.devices)
    )
    return Gantt(tuple(plan.replicas), devices)


def _bar(model: PlannedModel) -> Bar:
    share = model.share
    if share is None:
        return Bar(model.name, 0.0, model.seconds)
    text = f"space, {percent_text(share.decode)}" if share.by == "space" else share.by
    return Bar(model.name, 0.0, model.seconds, text, share.decode if share.by == "space" else 1.0)


def of_stages(plan: StagePlan) -> Gantt:
    """Return the chart of stages; a model that continues in the next stage is one bar."""
    names = dict.fromkeys(node.name for stage in plan.stages for node in stage.nodes)
    devices: list[list[Bar]] = [[] for _ in range(plan.devices)]
    for stage in plan.stages:
        for node in stage.nodes:
            for device in node.devices:
                bars = devices[device]
                if bars and bars[-1].name == node.name and bars[-1].end_s == stage.start_s:
                    bars[-1] = replace(bars[-1], end_s=stage.end_s)
                else:
                    bars.append(Bar(node.name, stage.start_s, stage.end_s))
    return Gantt(tuple(names), tuple(map(tuple, devices)))


def text(gantt: Gantt, width: int = 64) -> str:
    """Return the chart as text: a row for each device, a letter for each model.

    The letters of models that share a device alternate in its row.
    """
    marks = dict(zip(gantt.names, itertools.cycle(MARKS)))
    last_s = gantt.seconds
    lines = [f"{'device':>8}"]
    lines += [f"{label:>8} │{_cells(bars, marks, last_s, width)}" for label, bars in _rows(gantt)]
    if last_s is not None:
        lines += [f"{'':8} └{'─' * width}", f"{'':10}0{duration_text(last_s):>{width - 1}}"]
    shares = gantt.shares
    key = [f"{marks[name]} {name}" + (f" ({shares[name]})" if name in shares else "") for name in gantt.names]
    if any(not bars for bars in gantt.devices) or last_s is not None:
        key.append(f"{IDLE} idle")
    return "\n".join([*lines, *_lines(key, width + 10)])


def _rows(gantt: Gantt) -> list[tuple[str, tuple[Bar, ...]]]:
    """Return labels and bars; if there are many devices, neighbours with the same bars share a row."""
    if len(gantt.devices) <= MOST_ROWS:
        return [(str(device), bars) for device, bars in enumerate(gantt.devices)]
    rows: list[tuple[str, tuple[Bar, ...]]] = []
    first = 0
    for bars, alike in itertools.groupby(gantt.devices):
        count = len(list(alike))
        rows.append((f"{first}–{first + count - 1}" if count > 1 else str(first), bars))
        first += count
    return rows


def _cells(bars: Sequence[Bar], marks: dict[str, str], last_s: float | None, width: int) -> str:
    """Return a row of the chart; short bars are drawn over long ones, and none is narrower than a cell."""
    cells = [IDLE] * width
    for (start_s, end_s), together in _spans(bars):
        begin = min(width - 1, round(start_s / last_s * width)) if last_s else 0
        end = width if end_s is None or not last_s else max(begin + 1, round(end_s / last_s * width))
        for cell in range(begin, end):
            cells[cell] = marks[together[(cell - begin) % len(together)].name]
        if end_s is None:
            cells[-1] = ON
    return "".join(cells)


def _spans(bars: Iterable[Bar]) -> list[tuple[tuple[float, float | None], list[Bar]]]:
    """Group bars by begin and end, the longest first."""
    spans: dict[tuple[float, float | None], list[Bar]] = {}
    for bar in bars:
        spans.setdefault((bar.start_s, bar.end_s), []).append(bar)
    endless = float("inf")
    return sorted(spans.items(), key=lambda span: span[0][0] - (endless if span[0][1] is None else span[0][1]))


def _lines(entries: Sequence[str], width: int) -> list[str]:
    """Return the legend, in lines no wider than the chart, unless a single entry is wider."""
    lines: list[str] = []
    for entry in entries:
        if lines and len(lines[-1]) + 2 + len(entry) <= width:
            lines[-1] += f"  {entry}"
        else:
            lines.append(f"{'':10}{entry}")
    return lines


def drawing(gantt: Gantt) -> str:
    """Return the chart as SVG: a row for each device, a colour for each model."""
    last_s = gantt.seconds
    colours = {name: _colour(place) for place, name in enumerate(gantt.names)}
    rows = [
        (str(device), [block for span in _spans(bars) for block in _blocks(*span, colours, last_s or 1.0)])
        for device, bars in enumerate(gantt.devices)
    ]
    shares = gantt.shares
    key = [(name + (f" ({shares[name]})" if name in shares else ""), colours[name]) for name in gantt.names]
    return svg.lanes(rows, last_s, key)


def _blocks(
    span: tuple[float, float | None], bars: Sequence[Bar], colours: dict[str, str], last_s: float
) -> list[svg.Block]:
    """Return rectangles for bars that begin and end together; each has its part of the row's height."""
    start_s, end_s = span
    until = "for as long as requests arrive" if end_s is None else f"until {duration_text(end_s)}"
    whole, top, blocks = sum(bar.part for bar in bars), 0.0, []
    for bar in bars:
        height = bar.part / whole
        share = f" ({bar.share})" if bar.share else ""
        title = f"{bar.name}{share}, from {duration_text(start_s)} {until}"
        blocks.append(svg.Block(start_s, last_s if end_s is None else end_s, top, height, colours[bar.name], title))
        top += height
    return blocks


def _colour(place: int) -> str:
    """Return a hue that is far from the other hues for any number of models, by the golden angle."""
    return f"hsl({place * 137.508 % 360:.0f} 55% 50%)"
