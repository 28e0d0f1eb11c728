"""The frontier as a small plot for terminals."""

from collections.abc import Sequence

from xcore.console.series import Series
from xcore.duration import duration_text
from xcore.quantity import figure_text


def plot(frontier: Sequence[Series], bound_s: float | None, width: int = 64, height: int = 13) -> str:
    """Plot throughput (up, output tokens/s) over latency (right, seconds) of every policy, with one letter each.

    If points coincide, the policy with more throughput is visible. Empty text without points.
    """
    points = sorted((y, x, policy.name, policy.mark) for policy in frontier for x, y in policy.points)
    if not points:
        return ""
    right = max([x for _, x, *_ in points] + [bound_s or 0.0])
    top = max(y for y, *_ in points)
    grid = [[" "] * width for _ in range(height)]
    if bound_s:
        for row in grid:
            row[round(bound_s / right * (width - 1))] = "┊"
    for y, x, _, mark in points:
        up = round(y / top * (height - 1)) if top else 0
        grid[height - 1 - up][round(x / right * (width - 1)) if right else 0] = mark
    lines = []
    for number, row in enumerate(grid):
        up = height - 1 - number
        label = f"{figure_text(top * up / (height - 1)):>8}" if up % 3 == 0 else " " * 8
        lines.append(f"{label} │{''.join(row).rstrip()}")
    lines.append(f"{'':8} └{'─' * width}")
    lines.append(f"{'tok/s':>8}  0{f'latency {duration_text(right)}':>{width - 1}}")
    legend = "  ".join(f"{policy.mark} {policy.name}" for policy in frontier)
    return "\n".join([*lines, f"{'':10}{legend}" + ("  ┊ bound" if bound_s else "")])
