"""An engine's own time by a few named rows: what its measured kernels lack while it serves.

Four constants, none negative: seconds per iteration, seconds per sequence of an iteration, the relative time by which
the products of an iteration of more than 512 tokens are longer (engines capture graphs of smaller ones), and seconds
of each request outside the engine. They have the least relative errors of TTFT and TPOT over the rows, with
predictions linear in the constants.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from benchmarks.silicon import Aggregated
from xcore.specs.profile import DegreeTables, Profile, Table

CAPTURED = 512
"""Most tokens of an iteration that engines start from a graph."""
MOST_ROWS = 8
_STEPS = (0.5e-3, 5e-6, 0.25)
"""Steps of the first three constants at which predictions are compared with bare ones."""
_REQUEST_S = 0.02
Times = tuple[float, float]
"""TTFT and TPOT in milliseconds."""


@dataclass(frozen=True)
class EngineTime:
    """What an engine adds to its kernels' times."""

    iteration_s: float = 0.0
    sequence_s: float = 0.0
    longer: float = 0.0
    """Share by which products of more than `CAPTURED` tokens take longer."""
    request_s: float = 0.0

    def of(self, profile: Profile) -> Profile:
        """The profile with this time instead of an engine's."""

        def served(degree: DegreeTables) -> DegreeTables:
            rest = degree.decoder.rest
            factors = 1 + self.longer * (np.array(rest.points[0]) > CAPTURED)
            slower = replace(rest, values=tuple((np.array(rest.values) * factors).tolist()))
            return replace(degree, decoder=replace(degree.decoder, rest=slower))

        own = (self.iteration_s, self.iteration_s + self.sequence_s)
        return replace(
            profile,
            degrees=tuple(map(served, profile.degrees)),
            overhead=Table(("batch",), ((0.0, 1.0),), own),
            front_end_s=self.request_s,
        )

    @property
    def text(self) -> str:
        """The constants."""
        return (
            f"{self.iteration_s * 1e3:.2f} ms per iteration, {self.sequence_s * 1e6:.1f} us per sequence, products of "
            f"more than {CAPTURED} tokens {self.longer:.0%} longer, {self.request_s * 1e3:.0f} ms per request"
        )


def tenth(rows: Sequence[Aggregated]) -> list[Aggregated]:
    """Every tenth row in the order of degrees, lengths and clients, at most eight."""
    ordered = sorted(rows, key=lambda row: (row.tp, row.input, row.output, row.clients, row.name))
    chosen = ordered[: len(ordered) // 10 * 10 : 10]
    return chosen[:: -(-len(chosen) // MOST_ROWS)] if chosen else []


def calibrated(rows: Sequence[Aggregated], predict: Callable[[Aggregated, EngineTime], Times]) -> EngineTime:
    """The engine's time with the least relative errors over the rows."""
    if not rows:
        return EngineTime()
    measured = np.array([(row.ttft_ms, row.tpot_ms) for row in rows])
    bare = np.array([predict(row, EngineTime()) for row in rows])
    columns = []
    for index, step in enumerate(_STEPS):
        changed = EngineTime(*(step if i == index else 0.0 for i in range(len(_STEPS))))
        moved = np.array([predict(row, changed) for row in rows])
        columns.append((moved - bare) / step)
    columns.append(np.array([[1e3, 0.0]] * len(rows)))
    scale = np.array((*_STEPS, _REQUEST_S))
    matrix = np.stack([column / measured for column in columns], axis=-1).reshape(-1, len(scale)) * scale
    solution, _ = nnls(matrix, (1 - bare / measured).ravel())
    return EngineTime(*(float(value) for value in solution * scale))
