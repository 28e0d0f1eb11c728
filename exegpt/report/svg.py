"""Charts as SVG text: simple shapes, no library, readable in light and dark mode."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from xcore.console.series import Series
from xcore.duration import duration_text
from xcore.quantity import figure_text

WIDTH, HEIGHT = 760, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 14, 44
PHASES = {"encode": "#d9822b", "decode": "#3b74b9", "mixed": "#7a5aa8", "overhead": "#8a8f98"}


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round values from `low` to `high`, at most about `most`."""
    if high <= low:
        return [low]
    raw = (high - low) / most
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


class _Axes:
    """Linear axes from zero over a chart's inner rectangle."""

    def __init__(self, right: float, top: float, height: int = HEIGHT):
        self.right, self.top, self.height = right, top, height

    def x(self, value: float) -> float:
        return _LEFT + value / self.right * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return self.height - _BOTTOM - value / self.top * (self.height - _TOP - _BOTTOM)

    def drawn(self, x_title: str, y_title: str) -> list[str]:
        """Return the grid, its numbers and the titles."""
        bottom = self.height - _BOTTOM
        shapes = []
        for value in ticks(0, self.top):
            y = self.y(value)
            shapes.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
            shapes.append(_text(_LEFT - 8, y + 4, figure_text(value), "end"))
        for value in ticks(0, self.right, 8):
            shapes.append(_text(self.x(value), bottom + 17, figure_text(value), "middle"))
        shapes.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{WIDTH - _RIGHT}"/>')
        shapes.append(_text((WIDTH + _LEFT) / 2, self.height - 8, x_title, "middle"))
        middle = (_TOP + bottom) / 2
        shapes.append(f'<text transform="translate(16 {middle:.0f}) rotate(-90)" text-anchor="middle">{y_title}</text>')
        return shapes


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(shapes: Iterable[str], height: int, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">' + "\n".join(shapes) + "</svg>"
    )


def frontier(series: Sequence[Series], bound_s: float | None) -> str:
    """Return a chart of throughput over latency by policy; measured points are rings, the bound is a dashed line."""
    every = [p for s in series for p in (*s.points, *([s.measured] if s.measured else []))]
    if not every:
        return "<p>No policy has a feasible schedule.</p>"
    right = 1.05 * max([x for x, _ in every] + [bound_s or 0.0])
    axes = _Axes(right, 1.1 * max(y for _, y in every))
    shapes = axes.drawn("bounded latency, s", "output tokens/s")
    if bound_s:
        x = axes.x(bound_s)
        shapes.append(f'<path class="bound" d="M{x:.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>')
        shapes.append(_text(x + 5, _TOP + 10, "bound"))
    for row, policy in enumerate(series):
        points = sorted(policy.points)
        path = "M" + "L".join(f"{axes.x(x):.1f} {axes.y(y):.1f}" for x, y in points) if points else ""
        shapes.append(f'<path d="{path}" fill="none" stroke="{policy.colour}" stroke-width="2"/>')
        for x, y in points:
            title = f"<title>{escape(policy.name)}: {figure_text(y)} tokens/s at {duration_text(x)}, predicted</title>"
            shapes.append(
                f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3.5" fill="{policy.colour}">{title}</circle>'
            )
        if policy.measured:
            x, y = policy.measured
            title = f"<title>{escape(policy.name)}: {figure_text(y)} tokens/s at {duration_text(x)}, measured</title>"
            at = f'cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}"'
            shapes.append(f'<circle {at} r="7" fill="none" stroke="{policy.colour}" stroke-width="2">{title}</circle>')
        x = _LEFT + 90 * row
        shapes.append(f'<rect x="{x}" y="{HEIGHT + 2}" width="10" height="10" fill="{policy.colour}"/>')
        shapes.append(_text(x + 15, HEIGHT + 11, policy.name))
    return _svg(shapes, HEIGHT + 20, "Throughput and latency by policy")


def timelines(rows: Sequence[tuple[str, Sequence[tuple[str, float, float]]]]) -> str:
    """Return rows of (phase, start, end) in seconds over one time axis; neighbours of one phase form one span."""
    height = _TOP + 46 * len(rows) + _BOTTOM
    last = max((end for _, spans in rows for _, _, end in spans), default=0.0)
    axes = _Axes(last or 1.0, 1.0, height)
    shapes = [_text(axes.x(t), height - _BOTTOM + 17, figure_text(t), "middle") for t in ticks(0, last, 10)]
    shapes.append(_text((WIDTH + _LEFT) / 2, height - 8, "seconds", "middle"))
    for number, (name, spans) in enumerate(rows):
        y = _TOP + 46 * number
        shapes.append(_text(_LEFT - 6, y + 22, name, "end"))
        shapes.append(f'<rect class="lane" x="{_LEFT}" y="{y}" width="{WIDTH - _LEFT - _RIGHT}" height="36"/>')
        for phase, start, end in joined(spans):
            x, width = axes.x(start), max(0.3, axes.x(end) - axes.x(start))
            shapes.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="36" fill="{PHASES[phase]}">'
                f"<title>{phase}, {start:.3f}–{end:.3f} s</title></rect>"
            )
    return _svg(shapes, height, "Timelines, predicted over measured")


@dataclass(frozen=True)
class Block:
    """A rectangle in a lane: begin and end in seconds, and its top and height as shares of the lane's height."""

    start_s: float
    end_s: float
    top: float
    height: float
    colour: str
    title: str


def lanes(rows: Sequence[tuple[str, Sequence[Block]]], last_s: float | None, key: Sequence[tuple[str, str]]) -> str:
    """Return named rows of blocks over one time axis; `key` holds names with colours.

    The axis isn't drawn if no block ends.
    """
    tall, columns = 22, 3
    floor = _TOP + (tall + 4) * len(rows)
    axes, height = _Axes(last_s or 1.0, 1.0), floor + _BOTTOM + 18 * -(-len(key) // columns)
    shapes = [_text(axes.x(t), floor + 14, figure_text(t), "middle") for t in ticks(0, last_s, 10)] if last_s else []
    unit = "seconds" if last_s else "as long as requests arrive"
    shapes.append(_text((WIDTH + _LEFT) / 2, floor + 32, unit, "middle"))
    for number, (name, blocks) in enumerate(rows):
        y = _TOP + (tall + 4) * number
        shapes.append(_text(_LEFT - 6, y + 15, name, "end"))
        shapes.append(f'<rect class="lane" x="{_LEFT}" y="{y}" width="{WIDTH - _LEFT - _RIGHT}" height="{tall}"/>')
        for block in blocks:
            x, width = axes.x(block.start_s), max(0.5, axes.x(block.end_s) - axes.x(block.start_s))
            shapes.append(
                f'<rect x="{x:.1f}" y="{y + tall * block.top:.1f}" width="{width:.1f}" '
                f'height="{tall * block.height:.1f}" fill="{block.colour}"><title>{escape(block.title)}</title></rect>'
            )
    for place, (name, colour) in enumerate(key):
        x, y = _LEFT + place % columns * (WIDTH - _LEFT) / columns, floor + _BOTTOM + 18 * (place // columns)
        shapes.append(f'<rect x="{x:.1f}" y="{y}" width="10" height="10" fill="{colour}"/>')
        shapes.append(_text(x + 15, y + 9, name))
    return _svg(shapes, height, "Devices and their models over time")


def joined(spans: Sequence[tuple[str, float, float]], gap_s: float = 0.002) -> list[tuple[str, float, float]]:
    """Merge neighbouring spans of one phase that are less than `gap_s` apart."""
    merged: list[tuple[str, float, float]] = []
    for phase, start, end in spans:
        if merged and merged[-1][0] == phase and start - merged[-1][2] < gap_s:
            merged[-1] = (phase, merged[-1][1], end)
        else:
            merged.append((phase, start, end))
    return merged


def lengths(distributions: Sequence[tuple[str, str, Sequence[int], Sequence[float]]], bins: int = 40) -> str:
    """Return the distributions of lengths as outlined histograms: (name, colour, lengths, probabilities)."""
    height = 220
    most = max(values[-1] for _, _, values, _ in distributions)
    width = max(1, math.ceil(most / bins))
    heights = []
    for _, _, values, weights in distributions:
        bars = [0.0] * (math.ceil(most / width))
        for value, weight in zip(values, weights, strict=True):
            bars[(value - 1) // width] += weight
        heights.append(bars)
    axes = _Axes(width * len(heights[0]), 1.1 * max(map(max, heights)), height)
    shapes = axes.drawn("tokens", f"share per {width} tokens")
    for row, ((name, colour, _, _), bars) in enumerate(zip(distributions, heights, strict=True)):
        path = f"M{_LEFT} {height - _BOTTOM}" + "".join(
            f"V{axes.y(bar):.1f}H{axes.x((i + 1) * width):.1f}" for i, bar in enumerate(bars)
        )
        shapes.append(f'<path d="{path}V{height - _BOTTOM}Z" fill="{colour}" fill-opacity=".25" stroke="{colour}"/>')
        shapes.append(f'<rect x="{WIDTH - 110}" y="{_TOP + 17 * row}" width="10" height="10" fill="{colour}"/>')
        shapes.append(_text(WIDTH - 95, _TOP + 9 + 17 * row, name))
    return _svg(shapes, height, "Distribution of input and output length")


@dataclass(frozen=True)
class Panel:
    """A small chart: groups of bars, with one bar per series (None: no bar), and optionally a line over the groups.

    The line has its own axis, which begins at zero.
    """

    title: str
    groups: tuple[tuple[str, tuple[float | None, ...]], ...]
    line: tuple[float, ...] = ()


def panels(charts: Sequence[Panel], series: Sequence[tuple[str, str]], title: str, line: str = "") -> str:
    """Return charts side by side, each with its own scale.

    `series` holds names and colours, `title` describes the bars, and `line` describes the lines.
    """
    columns, row_height = min(3, len(charts)), 190
    height = -(-len(charts) // columns) * row_height + 24
    shapes = []
    for number, chart in enumerate(charts):
        left, top = number % columns * WIDTH / columns, number // columns * row_height
        shapes += _panel(chart, [colour for _, colour in series], left, top, WIDTH / columns, row_height)
    for place, (name, colour) in enumerate([*series, *([(line, "currentColor")] if line else [])]):
        x = 40 + 150 * place
        shapes.append(f'<rect x="{x}" y="{height - 16}" width="10" height="10" fill="{colour}"/>')
        shapes.append(_text(x + 15, height - 7, name))
    shapes.append(_text(WIDTH - 8, height - 7, title, "end"))
    return _svg(shapes, height, title)


def _panel(chart: Panel, colours: Sequence[str], left: float, top: float, width: float, height: float) -> list[str]:
    inner, ceiling, floor = left + 44, top + 26, top + height - 26
    above = 1.6 if chart.line else 1.05  # leave space for the line above the bars
    highest = above * max((bar or 0.0 for _, bars in chart.groups for bar in bars), default=0.0) or 1.0
    shapes = [_text(inner, top + 14, chart.title)]
    for value in ticks(0, highest, 4):
        y = floor - value / highest * (floor - ceiling)
        shapes.append(f'<path class="grid" d="M{inner:.1f} {y:.1f}H{left + width - 8:.1f}"/>')
        shapes.append(_text(inner - 5, y + 4, figure_text(value), "end"))
    step = (left + width - 8 - inner) / max(len(chart.groups), 1)
    bar_width = 0.8 * step / len(colours)
    for place, (label, bars) in enumerate(chart.groups):
        x = inner + (place + 0.1) * step
        shapes.append(_text(x + 0.4 * step, floor + 16, label, "middle"))
        for number, (bar, colour) in enumerate(zip(bars, colours, strict=True)):
            if bar is not None:
                tall = bar / highest * (floor - ceiling)
                shapes.append(
                    f'<rect x="{x + number * bar_width:.1f}" y="{floor - tall:.1f}" width="{bar_width:.1f}" '
                    f'height="{tall:.1f}" fill="{colour}"><title>{figure_text(bar)}</title></rect>'
                )
    if chart.line:
        scale = (floor - ceiling) / (1.1 * max(chart.line))
        at = [(inner + (i + 0.5) * step, floor - value * scale, value) for i, value in enumerate(chart.line)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in at)
        shapes.append(f'<path class="axis" d="{path}" stroke-width="2"/>')
        shapes += [_text(x, y - 5, f"{value:.2f}", "middle") for x, y, value in at]
    return shapes
