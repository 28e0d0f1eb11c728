"""Measured points, stored as they come, so that an interrupted measurement continues where it stopped."""

import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from xcore.specs.profile import Table
from xprofiler.timing import Timing
from xrunner.comm.ranks import Ranks


@dataclass(frozen=True)
class Grid:
    """The points at which one table is measured: increasing coordinates along each axis."""

    table: str
    axes: tuple[str, ...]
    points: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(list(itertools.product(*self.points)))

    def of_degree(self, tp: int) -> "Grid":
        """Return the same points for a tensor-parallel degree, recorded under a separate name."""
        return self if tp == 1 else replace(self, table=f"{self.table} tp={tp}")


class Recorder:
    """Records points of grids and appends each to `path` (JSON lines); points in the file are not measured again.

    A point is measured once in every pass, so that a slow moment of the machine affects one pass only. `progress` is
    called after every measurement with the name of its table. In a job of several `ranks` all record the same points in
    the same order. They measure each point at once, as they compute at once in a run. The median rank's time counts,
    and only rank 0 writes the file.
    """

    def __init__(
        self, path: Path | None = None, progress: Callable[[str], None] | None = None, ranks: Ranks | None = None
    ):
        self._ranks = ranks or Ranks()
        self._path = path if self._ranks.rank == 0 else None
        self._progress = progress or (lambda table: None)
        self._points: dict[tuple[str, tuple[int, ...]], dict[int, Timing]] = {}
        text = self._path.read_text(encoding="utf-8", errors="replace") if self._path and self._path.is_file() else ""
        for line in self._ranks.all(text)[0].splitlines():
            self._load(line)
        if self._path and text and not text.endswith("\n"):  # torn: the next entry starts on a new line
            self._path.write_text(text + "\n", encoding="utf-8")

    def _load(self, line: str) -> None:
        try:
            row = json.loads(line)
            timing = Timing(float(row["seconds"]), float(row["spread"]))
            self._points.setdefault((row["table"], tuple(row["at"])), {})[int(row["turn"])] = timing
        except (ValueError, LookupError, TypeError, RecursionError):
            return  # a line torn by the interruption: its point is measured again

    def record(self, table: str, at: tuple[int, ...], turn: int, measure: Callable[[], Timing | None]) -> None:
        """Measure the point `at` of a table in pass `turn`, unless it is known; a rank without a part returns None."""
        turns = self._points.setdefault((table, at), {})
        if turn not in turns:
            timings = [timing for timing in self._ranks.all(measure(), Timing) if timing]
            timing = turns[turn] = Timing(
                statistics.median(t.seconds for t in timings), statistics.median(t.spread for t in timings)
            )
            if self._path:
                row = {"table": table, "at": at, "turn": turn, "seconds": timing.seconds, "spread": timing.spread}
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        self._progress(table)

    def compiled(self, grid: Grid, scale: float = 1.0) -> Table:
        """Return the grid's points as a Table: the median over the passes, divided by `scale`.

        `scale` is the number of layers that one call ran.
        """
        turns = [list(self._points[grid.table, at].values()) for at in itertools.product(*grid.points)]
        return Table(
            axes=grid.axes,
            points=tuple(tuple(float(x) for x in axis) for axis in grid.points),
            values=tuple(statistics.median(t.seconds for t in point) / scale for point in turns),
            spread=tuple(statistics.median(t.spread for t in point) for point in turns),
        )

    def forget(self) -> None:
        """Remove the file: the profile is complete."""
        if self._path:
            self._path.unlink(missing_ok=True)
