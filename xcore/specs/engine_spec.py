"""EngineSpec: what a serving engine adds to the kernels that it runs; the engines that are known by name.

Kernels belong to a device and are in its roofline. This module holds the engine's own part: another engine on the same
device, with the same kernels, is slower or faster by it.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

from xcore.arrays import Array
from xcore.errors import InputError
from xcore.spec import Spec
from xcore.specs.device_spec import at_degree
from xcore.specs.engine_memory import (
    DATA_SHEET,
    OWN_ON_CPU,
    OWN_ON_GPU,
    SGLANG,
    TENSORRT_LLM,
    VLLM,
    EngineMemory,
    vllm_memory,
)
from xcore.specs.profile import Profile, Table

Rows = TypeVar("Rows", float, Array)

_MANY = 4096.0
"""Sequences at the end of an engine's table; the table is linear, so its slope continues."""


SORT_VOCABULARY = 128_256
"""Llama 3's."""
SORT_BYTES_S = 3.35e12
"""Memory bandwidth of an H100-SXM."""
NVLINK3_BYTES_S, NVLINK4_BYTES_S, NVLINK5_BYTES_S = 100e9, 250e9, 400e9
"""Least bandwidth of an all-reduce over NVLink of each generation, eight devices of a node."""
MOST_IN_FLIGHT = 2
"""Most iterations in flight: no engine decides further ahead."""


@dataclass(frozen=True)
class LinkWait(Spec):
    """Seconds that tensor-parallel ranks wait for one another at each all-reduce over links of some speed."""

    least_bytes_s: float
    """Least bandwidth that an all-reduce reaches on these links."""
    by_degree: tuple[tuple[int, float], ...]
    """Tensor-parallel degrees and seconds: linear over the logarithm between two, the nearest one beyond them."""

    def __post_init__(self) -> None:
        if not self.by_degree or min(self.by_degree)[0] < 2 or not self.least_bytes_s >= 0:
            raise InputError("An engine's wait per all-reduce needs seconds for tensor-parallel degrees of at least 2.")

    def seconds(self, tp: int) -> float:
        """Return the wait at a tensor-parallel degree."""
        return at_degree(self.by_degree, tp)


@dataclass(frozen=True)
class EngineSpec(Spec):
    """What an engine adds to its kernels' times."""

    name: str
    wait_s: float = 0.0
    """Seconds that tensor-parallel ranks wait for one another at each all-reduce, over links not in `waits`."""
    clock: float = 1.0
    """Sustained share of the device's peak rates while it serves: kernels are timed on cool, idle devices."""
    iteration_s: float = 0.0
    """Seconds of the engine's own time per iteration."""
    sequence_s: float = 0.0
    """Seconds of the engine's own time per sequence of an iteration."""
    kv8_rate: float = 1.0
    """Share of the bandwidth of decoding attention that its kernel reaches on keys and values in 8 bits."""
    nvfp4_product_s: float = 0.0
    """Seconds that a product in NVFP4 takes longer than the launch of one in 16 bits, with the quantising of its input.
    """
    waits: tuple[LinkWait, ...] = ()
    """Waits by link and degree; a link takes the entry of the fastest links that it belongs to.

    They were fitted together with data sheets, so they contain what a data sheet's all-reduce lacks.
    """
    in_flight: int = 1
    """Iterations between the decision of one and its end.

    1: an iteration is decided when the previous one has ended. 2: it is decided when the previous one starts, so that a
    new request waits for one whole iteration more (asynchronous).
    """
    front_end_s: float = 0.0
    """Seconds of each request outside the engine: HTTP, tokenising, process messages, the first flush.

    They add to time to first token and to latency, and occupy nothing. They belong to the deployment: `--front-end`
    sets them.
    """
    sort_s: float = 0.0
    """Seconds per iteration of sorting logits, if the checkpoint's sampling defaults have top-p or top-k."""
    sort_sequence_s: float = 0.0
    """Seconds of sorting per sequence, for `SORT_VOCABULARY` logits at `SORT_BYTES_S`."""
    memory: EngineMemory = DATA_SHEET
    """Memory that the engine takes of each device."""

    def __post_init__(self) -> None:
        waits = [seconds for wait in self.waits for _, seconds in wait.by_degree]
        own = (self.wait_s, self.iteration_s, self.sequence_s, self.front_end_s, self.sort_s, self.sort_sequence_s)
        rates = (self.clock, self.kv8_rate)
        if not all(0 < rate <= 1 for rate in rates) or not all(
            0 <= seconds <= 60 for seconds in (*own, *waits, self.nvfp4_product_s)
        ):
            raise InputError(
                f"Engine '{self.name}' is not usable: its times must be from 0 to 60 s, and its rates above 0 and "
                "at most 1."
            )
        if not 1 <= self.in_flight <= MOST_IN_FLIGHT:
            raise InputError(
                f"Engine '{self.name}' has {self.in_flight} iterations in flight: it must have 1 to {MOST_IN_FLIGHT}."
            )

    def wait(self, link_bytes_s: float, tp: int) -> float:
        """Return the seconds that `tp` ranks wait at an all-reduce over a link that reaches `link_bytes_s`."""
        if tp == 1:
            return 0.0
        by_speed = sorted(self.waits, key=lambda wait: -wait.least_bytes_s)
        return next((wait.seconds(tp) for wait in by_speed if link_bytes_s >= wait.least_bytes_s), self.wait_s)

    @property
    def wait_beside_measured_s(self) -> float:
        """Return the seconds that ranks wait at an all-reduce whose own time was measured.

        They are 0 if waits were fitted by link and degree, since the measured time contains them (`python -m
        benchmarks.vllm_terms --tables`).
        """
        return 0.0 if self.waits else self.wait_s

    def sampling_text(self, sorts_logits: bool | None) -> str:
        """Return the assumption about sampling; empty if sampling costs nothing.

        `sorts_logits`: whether the checkpoint's defaults sort logits.
        """
        if not (self.sort_s or self.sort_sequence_s):
            return ""
        if sorts_logits:
            return "sampling by top-p or top-k as in the checkpoint's generation_config.json"
        unknown = " (its generation_config.json is not known)" if sorts_logits is None else ""
        return f"sampling without top-p and top-k{unknown}"

    def sorting(self, rows: Rows, vocab: int, bandwidth_bytes_s: float) -> Rows:
        """Return the seconds of sorting `rows` rows of `vocab` logits on a device of this memory bandwidth."""
        work = rows * vocab / SORT_VOCABULARY * SORT_BYTES_S / bandwidth_bytes_s
        return self.sort_s + self.sort_sequence_s * work

    def overhead(self, more_s: float = 0.0) -> Table:
        """Return the engine's own time by the sequences of an iteration [batch], with `more_s` more per iteration."""
        each = self.iteration_s + more_s
        if not self.sequence_s:
            return Table(("batch",), ((1.0,),), (each,))
        return Table(("batch",), ((0.0, _MANY),), (each, each + _MANY * self.sequence_s))


OWN_ENGINE = "exegpt"
"""The preset of this project's engine, which runs every policy."""
FRONT_END_S = 7e-3
"""Seconds for HTTP, tokenising, process messages and the first flush of a request.

6.75 ms in 51 published runs of vLLM 0.15 on H100, A100 and L40S, whatever the model and the load; 12.1 to 14.5 ms in a
run of vLLM 0.11 that reports both sides.
"""
OWN_FRONT_END_S = 3.6e-3
"""The front-end seconds of our server: HTTP's part of a first token.

Measured by `python -m benchmarks.serving_overhead`, on a CPU.
"""
OWN_ITERATION_S, OWN_SEQUENCE_S = 0.1e-3, 2.9e-6
"""The host's part of a decode iteration of our engine on an H100.

It is the line through 0.29 ms for 64 sequences and 0.86 for 256 (`python -m benchmarks.gpu --parts profile`). It was
0.15, 0.05 and 0.09 ms for 1, 4 and 16.
"""
OWN_SORT_S = 0.33e-3
"""What top-p adds to greedy sampling of 256 rows on an H100 (`python -m benchmarks.gpu --parts times`).

Up to 264 rows take as long, since each row is a program's and that many run at a time.
"""
_VLLM_WAITS = (
    # Fitted by `python -m benchmarks.vllm_terms --fit` to every fifth, by hash, of vLLM's fp8 rows of Llama-3.1-70B on
    # H100, H200 (NVLink 4) and B200 (NVLink 5).
    LinkWait(NVLINK5_BYTES_S, ((2, 0.0), (4, 3.2e-6), (8, 2.8e-6))),
    LinkWait(NVLINK4_BYTES_S, ((2, 6.1e-6), (4, 10.4e-6), (8, 14.5e-6))),
    # Published runs of vLLM 0.15 on A100-80GB.
    LinkWait(NVLINK3_BYTES_S, ((2, 15e-6), (4, 25e-6))),
    # PCIe: no serving run was fitted. The time that the rings lack counts as the engine's, as over NVLink 4.
    LinkWait(0.0, ((2, 6.1e-6), (4, 10.4e-6), (8, 14.5e-6))),
)
_VLLM = EngineSpec(
    "vllm",
    clock=0.88,
    # Asynchronous scheduling, the default from version 0.14: published runs of vLLM 0.15.
    iteration_s=0.3e-3,
    sequence_s=10e-6,
    # FlashAttention 3 and FlashInfer on 8-bit keys and values take 0.66 (H100), 0.79 (H200) and 0.61 (B200) of the time
    # on 16-bit ones (aiconfigurator 0.12.0, medians from 200 MB on), which half of the bytes alone would halve.
    kv8_rate=0.7,
    # B200 in the same tables: products of 16 and 128 rows take 3.2 and 2.6 µs longer than the roofline (medians of 166
    # shapes), and the kernel that quantises their input, in 8 bits there, 2.2 µs.
    nvfp4_product_s=5.2e-6,
    waits=_VLLM_WAITS,
    in_flight=2,
    front_end_s=FRONT_END_S,
    # The same runs; H100.
    sort_s=0.3e-3,
    sort_sequence_s=8.8e-6,
    memory=VLLM,
)
ENGINES = {
    engine.name: engine
    for engine in (
        # Wait, clock and time per sequence fitted by `python -m benchmarks.published --fit` to 81 of TensorRT-LLM's
        # published throughputs (every fifth by hash); those don't determine the time per iteration: as vLLM 0.11's.
        EngineSpec(
            "tensorrt-llm",
            wait_s=23e-6,
            clock=0.88,
            iteration_s=1.03e-3,
            sequence_s=0.5e-6,
            front_end_s=FRONT_END_S,
            memory=TENSORRT_LLM,
        ),
        _VLLM,
        # Synchronous scheduling. Time per iteration calibrated on every tenth request of a vLLM server's run
        # (benchmarks/silicon.py, table a), sampling included; the part of each sequence was not separated there.
        replace(
            _VLLM,
            name="vllm-0.11",
            iteration_s=1.03e-3,
            sequence_s=0.0,
            in_flight=1,
            sort_s=0.0,
            sort_sequence_s=0.0,
            memory=vllm_memory("0.11"),
        ),
        # Its scheduler overlaps iterations as vLLM's does, and runs the same kernels. It is assumed equal to vLLM's,
        # without a comparison.
        replace(_VLLM, name="sglang", memory=SGLANG),
        # Ours. Its own time and its sampler were measured on one H100; links are assumed equal to vLLM's. It decides
        # synchronously: the planning ahead of a one-GPU replica (`xrunner/core/ahead.py`) is ignored.
        replace(
            _VLLM,
            name=OWN_ENGINE,
            iteration_s=OWN_ITERATION_S,
            sequence_s=OWN_SEQUENCE_S,
            in_flight=1,
            front_end_s=OWN_FRONT_END_S,
            sort_s=OWN_SORT_S,
            sort_sequence_s=0.0,
            memory=OWN_ON_GPU,
        ),
        # The ExeGPT paper's, made of FasterTransformer: with the kernels alone its Table 6 comes out 8 to 11 % slow.
        EngineSpec("paper"),
        EngineSpec("none"),
    )
}
"""The engines by name."""
NO_ENGINE = ENGINES["none"]


def find_engine(name: str) -> EngineSpec:
    """Return the engine of this name; InputError with the list for an unknown one."""
    if name not in ENGINES:
        raise InputError(f"There is no engine '{name}': use one of {', '.join(ENGINES)}.")
    return ENGINES[name]


_KERNELS = {"trtllm": "tensorrt-llm", "vllm": "vllm", "sglang": "sglang"}
"""Engine whose kernels imported tables have → the engine that is assumed to run them, if none is named."""


def engine_of(profile: Profile) -> EngineSpec:
    """Return the engine whose time is in a profile; the engine `none` if it contains none.

    A measured profile has the times of our own engine.
    """
    facts = profile.provenance
    if profile.source == "measured":
        return EngineSpec(OWN_ENGINE, memory=OWN_ON_CPU if profile.device == "cpu" else OWN_ON_GPU)
    named = facts.get("serving", facts.get("engine", "none"))
    if profile.source == "operators" and named == "none":
        named = _KERNELS.get(facts.get("engine", ""), "vllm")
    engine = ENGINES.get(named, NO_ENGINE)
    return replace(engine, memory=OWN_ON_CPU) if engine.name == OWN_ENGINE and profile.device == "cpu" else engine
