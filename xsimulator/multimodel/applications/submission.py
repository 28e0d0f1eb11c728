"""Applications as they turn out to be: the calls of each run, of which a scheduler knows only those that have ended."""

from collections.abc import Hashable
from dataclasses import dataclass

from exegpt.demand_graph import LLM
from xsimulator.multimodel.applications.demand import ServiceRates


@dataclass(frozen=True)
class Call:
    """One call of a unit."""

    unit: str
    backend: str
    input_tokens: int = 0
    """Of each of its parallel requests, on an LLM."""
    output_tokens: int = 0
    parallel: int = 1
    seconds: float = 0.0
    """On another backend."""

    @property
    def on_llm(self) -> bool:
        """Whether tokens are what it demands."""
        return self.backend == LLM

    def service_s(self, rates: ServiceRates) -> float:
        """Seconds of service, parallel requests summed."""
        if not self.on_llm:
            return self.seconds
        return self.parallel * (self.input_tokens * rates.prefill_s + self.output_tokens * rates.decode_s)


@dataclass(frozen=True)
class Submission:
    """One run of an application: its calls, each of which follows when the one before has ended."""

    index: int
    """Its place in the workload; unique."""
    name: str
    """By which its demand is known."""
    arrival_s: float
    calls: tuple[Call, ...]
    deadline_s: float | None = None
    adapter: Hashable = None
    """The LoRA adapter that its LLM calls need."""
    client: Hashable = None
    """Among whose applications VTC shares the LLM; None: a client of its own."""
