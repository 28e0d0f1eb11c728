"""Frontend: what every request to a model is answered with, and whether any can be."""

import hashlib
from dataclasses import dataclass, field, replace

from exegpt import __version__, document
from exegpt.app.engines.engine_link import EngineLink
from exegpt.engine_protocol import Opened
from exegpt.server.admission import Admission
from exegpt.server.errors import invalid, unavailable
from exegpt.server.journal import Journal
from exegpt.server.monitor import Monitor
from exegpt.server.reports import Reports
from exegpt.server.served_model import ServedModel

STALL_S, STALL_CYCLES = 5.0, 10
"""An engine has stalled that does no step for so long: seconds, and predicted cycles, whichever is longer."""
_RETRY_S = 5
"""After which clients ask again whether the engine has loaded."""


@dataclass(eq=False)
class Frontend:
    """What every request to a model is answered with."""

    model: ServedModel
    link: EngineLink
    fingerprint: str
    """Of version, model, dtype and schedule: `system_fingerprint`."""
    max_output: int | None
    """None: the context."""
    stall_s: float
    """A reader that takes nothing for so long is taken for gone."""
    max_waiting: int
    """Sequences that may wait for the engine."""
    admission: Admission | None = None
    """While there is an engine."""
    journal: Journal | None = None
    """The server's."""
    restarting: bool = False
    """Whether an engine was lost."""
    draining: bool = False
    active: int = 0
    """Requests that are being answered."""
    arrived: int = 0
    """Sequences that an engine could have taken, accepted or not; not those that are known to have come before."""
    reports: Reports = field(default_factory=Reports)
    shares: tuple[str, ...] = ()
    """Models on the same devices. With any, no bound is promised: the pace depends on the others."""

    def __post_init__(self) -> None:
        self.monitor = Monitor(self.link, self.model.name, self.reports)

    def check_ready(self) -> None:
        """ApiError while no request can be taken."""
        if self.draining:
            raise unavailable("The server is being shut down.", "draining", _RETRY_S)
        if self.admission is None:
            if self.restarting:
                raise unavailable("The engine is started again.", "engine_restarting", _RETRY_S)
            raise unavailable("The engine is starting.", "loading", _RETRY_S)

    def opened(self, opened: Opened) -> None:
        """Take requests: there is an engine."""
        if self.shares:
            opened = self.link.opened = without_bound(opened, self.shares)
        self.fingerprint = fingerprint(self.model, opened)
        self.admission = Admission(opened, lambda: list(self.link.outputs.values()), self.max_waiting)
        self.monitor.opened(opened)

    def lost(self) -> None:
        """Take no requests until there is another engine, which goes on with those that were accepted."""
        self.admission, self.restarting = None, True
        self.monitor.lost()

    @property
    def stall_limit_s(self) -> float:
        """For how long a running engine may be silent."""
        return max(STALL_S, STALL_CYCLES * self.admission.cycle_s) if self.admission else float("inf")

    def limited(self, prompt_tokens: int, max_tokens: int | None, param: str, prompt: str = "prompt") -> int:
        """The most output tokens of a prompt; ApiError where they don't fit, for the limit's key or the prompt's."""
        context = self.model.spec.context
        left = context - prompt_tokens
        if left < 1 or (max_tokens is not None and max_tokens > left):
            asked = f" and {max_tokens:,} of output" if max_tokens is not None else ""
            raise invalid(
                f"{prompt_tokens:,} tokens of prompt{asked} don't fit the context of {context:,} tokens.",
                param if left >= 1 else prompt,
                "context_length_exceeded",
            )
        most = min(left, self._usual(prompt_tokens)) if max_tokens is None else max_tokens
        return most if self.max_output is None else min(most, self.max_output)

    def _usual(self, prompt_tokens: int) -> int:
        """The most output tokens where a client sets no limit: those for which there are KV blocks. Where all are
        reserved beforehand, the longest output that the schedule was found for.
        """
        if self.link.opened is None:
            return self.model.spec.context
        schedule = self.link.opened.schedule
        if schedule.admission == "reserve":
            return schedule.workload.output.max
        return max(1, schedule.kv_blocks * schedule.block_size - prompt_tokens)


def without_bound(opened: Opened, shares: tuple[str, ...]) -> Opened:
    """An engine that promises nothing, as models share its devices."""
    why = f"shares its devices with {', '.join(shares)}: no latency bound is promised"
    schedule = replace(opened.schedule, latency_bound_s=None)
    others = (assumption for assumption in opened.assumptions if assumption != why)
    return replace(opened, schedule=schedule, goodput_seq_s=None, assumptions=(*others, why))


def fingerprint(model: ServedModel, opened: Opened) -> str:
    """`system_fingerprint`: what answers depend on beside the request."""
    schedule = document.fingerprint(document.to_dict(opened.schedule))
    facts = [__version__, model.spec.fingerprint, opened.schedule.dtype, schedule]
    return "fp_" + hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
