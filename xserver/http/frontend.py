"""Frontend: the shared state of a model's requests, and whether requests are accepted."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from xcore import __version__, document
from xcore.batching.kv_capacity import blocks_needed
from xcore.batching.prefix_pool import extend_keys
from xcore.requests.engine_protocol import Opened, short_keys
from xcore.requests.request import Request
from xserver.admission.admission_control import Admission
from xserver.admission.loop_lag import LoopLag
from xserver.admission.tokenizer_queue import TokenizerQueue
from xserver.engines.engine_link import EngineLink, Output
from xserver.http.api_error import ApiError, invalid, unavailable
from xserver.http.generation import Choice
from xserver.http.journal import Journal
from xserver.http.served_model import ServedModel
from xserver.nodes.node_link import NodeLink
from xserver.telemetry.monitor import Monitor
from xserver.telemetry.request_reports import Reports

STALL_S, STALL_CYCLES = 5.0, 10
"""An engine has stalled if it makes no step for this time: seconds, and predicted cycles, whichever is longer."""
_RETRY_S = 5
"""Seconds after which clients should retry while the engine loads."""


class AdmissionMaker(Protocol):
    """Creates the admission of a model, like `Admission`."""

    def __call__(
        self,
        opened: Opened,
        outputs: Callable[[], Sequence[Output]],
        max_waiting: int,
        *,
        usual_input: int = ...,
        lag_s: Callable[[], float] = ...,
    ) -> Admission:
        """Create it without requests; the arguments are those of `Admission`."""


class JointAdmissions(Protocol):
    """Creates the admission of models that share devices, so that each keeps its bound."""

    def opened(self, name: str, opened: Opened, accept: Callable[[AdmissionMaker], None]) -> None:
        """Record that a model has opened; once all have, call each one's `accept`."""


@dataclass(eq=False)
class Frontend:
    """The shared state of a model's requests."""

    model: ServedModel
    link: EngineLink
    fingerprint: str
    """Hash of version, model, dtype and schedule: `system_fingerprint`."""
    max_output: int | None
    """Maximum output tokens of a request; None: limited by the context."""
    stall_s: float
    """A client that reads nothing for this time counts as disconnected."""
    max_waiting: int
    """Maximum number of waiting sequences."""
    admission: Admission | None = None
    """Admission control; None while there is no engine."""
    journal: Journal | None = None
    """The server's journal."""
    restarting: bool = False
    """Whether an engine was lost."""
    draining: bool = False
    active: int = 0
    """Requests that are being answered."""
    arrived: int = 0
    """Sequences that an engine could have taken, accepted or not, without known retries."""
    reports: Reports = field(default_factory=Reports)
    lag: LoopLag = field(default_factory=LoopLag)
    """The lag of the process's event loop."""
    tokenizing: TokenizerQueue = field(default_factory=TokenizerQueue)
    preparing: int = 0
    """Requests that were sent to this frontend and whose sequences the engine doesn't have yet."""
    unit: "tuple[Frontend, ...]" = ()
    """The frontends of all models of its engine, including this one; empty before the engine is known."""
    node: NodeLink | None = None
    """The node whose launcher runs its engine; None: this machine."""
    shares: tuple[str, ...] = ()
    """Other models on the same devices."""
    together: JointAdmissions | None = None
    """Creates its admission together with that of `shares`; None: if it shares devices, it promises no bound."""

    _usual_input: int = field(default=0, init=False)
    """Input tokens up to which requests are under the bound, by the first schedule: one for shorter prompts, after a
    drift, doesn't lower it.
    """

    def __post_init__(self) -> None:
        self.monitor = Monitor(self.link, self.model.name, self.reports)

    def check_ready(self) -> None:
        """Raise ApiError while no request can be accepted."""
        if self.draining:
            raise unavailable("The server is shutting down.", "draining", _RETRY_S)
        if self.admission is None:
            if self.node and not self.node.up:
                raise unavailable(f"{self.node.address} can't be reached: {self.node.why}.", "node_lost", _RETRY_S)
            if self.restarting:
                raise unavailable("The engine is restarting.", "engine_restarting", _RETRY_S)
            raise self.starting

    @property
    def ready(self) -> bool:
        """Whether requests can be accepted."""
        return self.admission is not None and not self.draining

    def has_room_for(self, request: Request) -> bool:
        """Return whether there is an engine whose KV blocks are enough for this accepted request, also in a drain."""
        opened = self.link.opened
        if self.admission is None or opened is None:
            return False
        return blocks_needed(request, opened.schedule) <= opened.schedule.kv_blocks

    @property
    def engine_requests(self) -> int:
        """The number of requests that the engine has or is about to get, to all of its models."""
        return sum(frontend.preparing + len(frontend.link.outputs) for frontend in self.unit or (self,))

    @property
    def starting(self) -> ApiError:
        """The error while the engine starts, with the present step of its start."""
        what = self.link.starting
        return unavailable(f"The engine is starting{': ' if what else ''}{what}.", "loading", _RETRY_S)

    def opened(self, opened: Opened) -> None:
        """Accept requests: there is an engine."""
        if self.shares and self.together is None:
            opened = self.link.opened = without_bound(opened, self.shares)
        self.fingerprint = fingerprint(self.model, opened)
        if self.together:
            self.together.opened(self.model.name, opened, partial(self._accept, opened))
        else:
            self._accept(opened, Admission)
        self.monitor.opened(opened)

    def _accept(self, opened: Opened, make: AdmissionMaker) -> None:
        self.admission = make(
            opened,
            lambda: list(self.link.outputs.values()),
            self.max_waiting,
            usual_input=self._usual_input,
            lag_s=lambda: self.lag.recent_s,
        )
        self._usual_input = self._usual_input or self.admission.usual_input

    def lost(self) -> None:
        """Stop accepting requests until there is another engine, which continues the accepted ones."""
        self.admission, self.restarting = None, True
        self.monitor.lost()

    @property
    def stall_limit_s(self) -> float:
        """The maximum silence of a running engine, in seconds."""
        return max(STALL_S, STALL_CYCLES * self.admission.cycle_s) if self.admission else float("inf")

    def block_keys(self, prompt_ids: Sequence[int], salt: str | None) -> list[int]:
        """Return a short key for each full block of a prompt, without its last token, which is always computed.

        There are none if prefixes aren't cached, or no bound depends on them.
        """
        opened = self.link.opened
        if opened is None or not opened.schedule.prefix_caching or opened.schedule.latency_bound_s is None:
            return []
        keys: list[bytes] = []
        extend_keys(keys, prompt_ids[:-1], opened.schedule.block_size, salt)
        short: list[int] = short_keys(keys).tolist()
        return short

    def cached_tokens(self, choice: Choice) -> int:
        """Return how many tokens of a sequence's prompt are in the engine's cache of prefixes."""
        opened = self.link.opened
        if opened is None or choice.request.prompt_logprobs:  # a prefix from the cache has no logits
            return 0
        return self.link.hit(choice.keys) * opened.schedule.block_size

    def limited(self, prompt_tokens: int, max_tokens: int | None, param: str, prompt: str = "prompt") -> int:
        """Return the maximum output tokens of a prompt.

        Raises ApiError if they don't fit. It names the parameter of the limit, or of the prompt if the prompt itself is
        too long.
        """
        context = self._longest_request
        left = context - prompt_tokens
        if left < 1 or (max_tokens is not None and max_tokens > left):
            asked = f" + {max_tokens}" if max_tokens is not None else ""
            raise invalid(
                f"This model's maximum context length is {context} tokens; the request needs {prompt_tokens}{asked}.",
                param if left >= 1 else prompt,
                "context_length_exceeded",
            )
        most = min(left, self._usual(prompt_tokens)) if max_tokens is None else max_tokens
        return most if self.max_output is None else min(most, self.max_output)

    @property
    def _longest_request(self) -> int:
        """The maximum tokens of a request: the model's own limit, otherwise the capacity of the engine's cache."""
        opened = self.link.opened
        if opened and self.model.spec.longest_request is None:
            return opened.schedule.kv_blocks * opened.schedule.block_size
        return self.model.longest_request

    def _usual(self, prompt_tokens: int) -> int:
        """Return the default for the maximum output tokens: as many as fit in the KV blocks.

        If blocks are reserved, it is the longest output of the schedule's workload.
        """
        if self.link.opened is None:
            return self._longest_request
        schedule = self.link.opened.schedule
        if schedule.admission == "reserve":
            return schedule.workload.output.max
        return max(1, schedule.kv_blocks * schedule.block_size - prompt_tokens)


def without_bound(opened: Opened, shares: tuple[str, ...]) -> Opened:
    """Return the engine's description without a promised bound, because other models share its devices."""
    why = f"shares its devices with {', '.join(shares)}: no latency bound is promised"
    schedule = replace(opened.schedule, latency_bound_s=None)
    others = (assumption for assumption in opened.assumptions if assumption != why)
    return replace(opened, schedule=schedule, goodput_seq_s=None, assumptions=(*others, why))


def fingerprint(model: ServedModel, opened: Opened) -> str:
    """Return the `system_fingerprint`: a hash of everything that answers depend on except the request."""
    schedule = document.fingerprint(document.to_dict(opened.schedule))
    facts = [__version__, model.spec.fingerprint, opened.schedule.dtype, schedule]
    return "fp_" + hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
