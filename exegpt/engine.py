"""EngineSpec: what a serving engine adds to the kernels that it runs; the engines that are known by name.

Kernels belong to a device and are in its roofline. What is here belongs to the engine: another one on the same device,
with the same kernels, is slower or faster by it.
"""

import math
from dataclasses import dataclass
from typing import Any

from exegpt.errors import InputError
from exegpt.noun import Noun
from exegpt.profile import Table

_MANY = 4096.0
"""Sequences up to which an engine's table goes; it is linear, so that its slope goes on."""


SORT_VOCABULARY = 128_256
"""Llama 3's."""
SORT_BYTES_S = 3.35e12
"""Memory bandwidth of an H100-SXM."""
MOST_IN_FLIGHT = 2
"""Iterations: no engine decides further ahead."""


@dataclass(frozen=True)
class LinkWait(Noun):
    """How long tensor-parallel ranks wait for one another at each all-reduce over links of some speed."""

    least_bytes_s: float
    """For links on which an all-reduce reaches at least this."""
    by_degree: dict[int, float]
    """Tensor-parallel degree → seconds; between two degrees on a line over the logarithm, beyond them as the last."""

    def __post_init__(self) -> None:
        if not self.by_degree or min(self.by_degree) < 2 or not self.least_bytes_s >= 0:
            raise InputError("A wait per all-reduce needs seconds for tensor-parallel degrees of 2 or more.")

    def seconds(self, tp: int) -> float:
        """Return the wait at a tensor-parallel degree."""
        degrees = sorted(self.by_degree)
        below = max((degree for degree in degrees if degree <= tp), default=degrees[0])
        above = min((degree for degree in degrees if degree >= tp), default=degrees[-1])
        first, last = self.by_degree[below], self.by_degree[above]
        if above <= below:
            return first if below <= tp else last
        return first + (last - first) * math.log(tp / below) / math.log(above / below)


@dataclass(frozen=True)
class EngineSpec(Noun):
    """What an engine adds to its kernels' times."""

    name: str
    wait_s: float = 0.0
    """Seconds for which tensor-parallel ranks wait for one another at each all-reduce, over links not in `waits`."""
    clock: float = 1.0
    """Share of the device's peak rates that is sustained while it serves: kernels are timed on cool, idle devices."""
    iteration_s: float = 0.0
    """Seconds of the engine's own time per iteration."""
    sequence_s: float = 0.0
    """The same per sequence of an iteration."""
    waits: tuple[LinkWait, ...] = ()
    """Waits by link and degree: the entry of the fastest links that a link belongs to."""
    in_flight: int = 1
    """Iterations between the decision of one and its end. 1: an iteration is decided when the one before it has ended.
    2: when the one before it starts, so that a new request waits for one whole iteration more (asynchronous).
    """
    front_end_s: float = 0.0
    """Seconds of each request outside the engine: HTTP, tokenising, process messages, the first flush. They add to time
    to first token and to latency, and occupy nothing. They belong to the deployment: `--front-end` sets them.
    """
    sort_s: float = 0.0
    """Seconds per iteration of sorting logits, where the checkpoint's sampling defaults have top-p or top-k."""
    sort_sequence_s: float = 0.0
    """The same per sequence, for `SORT_VOCABULARY` logits at `SORT_BYTES_S`."""

    def __post_init__(self) -> None:
        waits = [seconds for wait in self.waits for seconds in wait.by_degree.values()]
        own = (self.wait_s, self.iteration_s, self.sequence_s, self.front_end_s, self.sort_s, self.sort_sequence_s)
        if not 0 < self.clock <= 1 or not all(0 <= seconds <= 60 for seconds in (*own, *waits)):
            raise InputError(
                f"Engine '{self.name}' is not usable: its times are 0 to 60 s, its clock above 0, at most 1."
            )
        if not 1 <= self.in_flight <= MOST_IN_FLIGHT:
            raise InputError(
                f"Engine '{self.name}' has {self.in_flight} iterations in flight: 1 or {MOST_IN_FLIGHT} can be."
            )

    def wait(self, link_bytes_s: float, tp: int) -> float:
        """Return the seconds that `tp` ranks wait at an all-reduce over a link that reaches `link_bytes_s`."""
        if tp == 1:
            return 0.0
        by_speed = sorted(self.waits, key=lambda wait: -wait.least_bytes_s)
        return next((wait.seconds(tp) for wait in by_speed if link_bytes_s >= wait.least_bytes_s), self.wait_s)

    def sorting(self, rows: Any, vocab: int, bandwidth_bytes_s: float) -> Any:
        """Return the seconds of sorting `rows` rows of `vocab` logits on a device of this memory bandwidth."""
        work = rows * vocab / SORT_VOCABULARY * SORT_BYTES_S / bandwidth_bytes_s
        return self.sort_s + self.sort_sequence_s * work

    def overhead(self, more_s: float = 0.0) -> Table:
        """The engine's own time by the sequences of an iteration [batch], with `more_s` more per iteration."""
        each = self.iteration_s + more_s
        if not self.sequence_s:
            return Table(("batch",), ((1.0,),), (each,))
        return Table(("batch",), ((0.0, _MANY),), (each, each + _MANY * self.sequence_s))


ENGINES = {
    engine.name: engine
    for engine in (
        # Wait, clock and time per sequence fitted by `python -m benchmarks.published --fit` to 81 of TensorRT-LLM's
        # published throughputs (every fifth by hash); those don't determine the time per iteration: as vLLM's.
        EngineSpec("tensorrt-llm", wait_s=23e-6, clock=0.88, iteration_s=1.03e-3, sequence_s=0.5e-6),
        # Time per iteration calibrated on every tenth request of a vLLM 0.19 server's run (benchmarks/silicon.py,
        # table a); no published measurement distinguishes the others from TensorRT-LLM's.
        EngineSpec("vllm", wait_s=23e-6, clock=0.88, iteration_s=1.03e-3, sequence_s=0.5e-6),
        # The ExeGPT paper's, made of FasterTransformer: with the kernels alone its Table 6 comes out 8 to 11 % slow.
        EngineSpec("paper"),
        EngineSpec("none"),
    )
}
"""By name."""
NO_ENGINE = ENGINES["none"]


def find_engine(name: str) -> EngineSpec:
    """The engine of this name; InputError with the list for an unknown one."""
    if name not in ENGINES:
        raise InputError(f"There is no engine '{name}': use one of {', '.join(ENGINES)}.")
    return ENGINES[name]
