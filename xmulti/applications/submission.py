"""Applications with their actual calls; a scheduler knows only the calls that have ended."""

from collections.abc import Hashable
from dataclasses import dataclass

from xcore.applications.demand import ServiceRates
from xcore.applications.demand_graph import LLM


@dataclass(frozen=True)
class Call:
    """One call of a unit."""

    unit: str
    backend: str
    input_tokens: int = 0
    """Per parallel request, for an LLM call."""
    output_tokens: int = 0
    parallel: int = 1
    seconds: float = 0.0
    """Duration, for a call to another backend."""

    @property
    def on_llm(self) -> bool:
        """Whether the call goes to the LLM."""
        return self.backend == LLM

    def service_s(self, rates: ServiceRates) -> float:
        """Return seconds of service, parallel requests summed."""
        if not self.on_llm:
            return self.seconds
        return self.parallel * (self.input_tokens * rates.prefill_s + self.output_tokens * rates.decode_s)


@dataclass(frozen=True)
class Submission:
    """One run of an application; each call starts when the call before has ended."""

    index: int
    """Its place in the workload; unique."""
    name: str
    """The name under which its demand is estimated."""
    arrival_s: float
    calls: tuple[Call, ...]
    deadline_s: float | None = None
    adapter: Hashable = None
    """The LoRA adapter that its LLM calls need."""
    client: Hashable = None
    """The client for fair sharing by VTC; None: a separate client."""
