"""EngineSpec: what a serving engine adds to the kernels that it runs; the engines that are known by name.

Kernels belong to a device and are in its roofline. What is here belongs to the engine: another one on the same device,
with the same kernels, is slower or faster by it.
"""

from dataclasses import dataclass

from exegpt.engine_memory import DATA_SHEET, OWN_ON_CPU, OWN_ON_GPU, TENSORRT_LLM, VLLM, EngineMemory
from exegpt.errors import InputError
from exegpt.noun import Noun
from exegpt.profile import Profile, Table

_MANY = 4096.0
"""Sequences up to which an engine's table goes; it is linear, so that its slope goes on."""


@dataclass(frozen=True)
class EngineSpec(Noun):
    """What an engine adds to its kernels' times."""

    name: str
    wait_s: float = 0.0
    """Seconds for which tensor-parallel ranks wait for one another at each all-reduce."""
    clock: float = 1.0
    """Share of the device's peak rates that is sustained while it serves: kernels are timed on cool, idle devices."""
    iteration_s: float = 0.0
    """Seconds of the engine's own time per iteration."""
    sequence_s: float = 0.0
    """The same per sequence of an iteration."""
    memory: EngineMemory = DATA_SHEET
    """What it takes of each device's memory."""

    def __post_init__(self) -> None:
        times = (self.wait_s, self.iteration_s, self.sequence_s)
        if not 0 < self.clock <= 1 or not all(0 <= seconds <= 60 for seconds in times):
            raise InputError(
                f"Engine '{self.name}' is not usable: its times are 0 to 60 s, its clock above 0, at most 1."
            )

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
        EngineSpec(
            "tensorrt-llm", wait_s=23e-6, clock=0.88, iteration_s=1.03e-3, sequence_s=0.5e-6, memory=TENSORRT_LLM
        ),
        # Time per iteration calibrated on every tenth request of a vLLM 0.19 server's run (benchmarks/silicon.py,
        # table a); no published measurement distinguishes the others from TensorRT-LLM's.
        EngineSpec("vllm", wait_s=23e-6, clock=0.88, iteration_s=1.03e-3, sequence_s=0.5e-6, memory=VLLM),
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


_KERNELS = {"trtllm": "tensorrt-llm", "vllm": "vllm", "sglang": "vllm"}
"""Whose kernels imported tables have → the engine that is taken to run them, where none is named."""


def engine_of(profile: Profile) -> EngineSpec:
    """The engine whose time is in a profile; `none` where none is. A measured one has the times of our own."""
    facts = profile.provenance
    if profile.source == "measured":
        return EngineSpec("exegpt", memory=OWN_ON_CPU if profile.device == "cpu" else OWN_ON_GPU)
    named = facts.get("serving", facts.get("engine", "none"))
    if profile.source == "operators" and named == "none":
        named = _KERNELS.get(facts.get("engine", ""), "vllm")
    return ENGINES.get(named, NO_ENGINE)
