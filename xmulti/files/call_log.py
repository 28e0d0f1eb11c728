"""Call logs: the calls of applications' runs as JSONL, and the demand graphs learned from them."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xcore import document
from xcore.errors import InputError
from xcore.spec import Spec
from xmulti.files.demand_graph import LLM, MOST_SAMPLES, DemandGraph, DemandStep, JointRecords


@dataclass(frozen=True)
class LoggedCall(Spec):
    """One call of a run: one line of a log."""

    application: str
    run: str | int
    unit: str
    next: str
    """The run's next unit, or `end`."""
    input_tokens: int | None = None
    """Input tokens of each of its parallel requests; None on backends other than LLMs."""
    output_tokens: int | None = None
    parallel: int = 1
    seconds: float | None = None
    """Duration on backends other than LLMs."""
    backend: str | None = None
    """None: an LLM if there are tokens, else a backend with the unit's name."""

    def __post_init__(self) -> None:
        tokens = (self.input_tokens, self.output_tokens)
        if None in tokens and (tokens != (None, None) or self.seconds is None):
            raise InputError(f"a call of '{self.unit}' needs input_tokens and output_tokens, or seconds")
        if self.on_llm and self.input_tokens is None:
            raise InputError(f"a call of '{self.unit}' on an LLM needs input_tokens and output_tokens")
        if not self.on_llm and self.seconds is None:
            raise InputError(f"a call of '{self.unit}' on '{self.backend}' needs seconds")
        if self.backend is None and None not in (self.input_tokens, self.seconds):
            raise InputError(
                f"a call of '{self.unit}' has both tokens and seconds: leave one of them out, or add a backend"
            )

    @property
    def on_llm(self) -> bool:
        """Whether its demand is tokens."""
        return self.backend == LLM or (self.backend is None and self.input_tokens is not None)


def read_calls(path: Path) -> Iterator[LoggedCall]:
    """Yield the calls of a JSONL log; a run's calls are in order.

    Raises:
        InputError: A line is wrong; the message names it.
    """
    expected: dict[tuple[str, str | int], str] = {}
    """By run: the unit that its last call named as the next."""
    for number, line in enumerate(document.read_lines(path, "log of calls"), 1):
        if not line.strip():
            continue
        where = f"'{path}', line {number}"
        call = document.from_dict(LoggedCall, document.parse_json(line, where), where)
        run = (call.application, call.run)
        if expected.get(run, call.unit) != call.unit:
            raise InputError(
                f"{where}: run '{call.run}' of '{call.application}' calls '{call.unit}', but its previous call "
                f"names '{expected[run]}' as the next unit."
            )
        expected[run] = call.next
        yield call


def learn(calls: Iterable[LoggedCall]) -> tuple[DemandGraph, ...]:
    """Return a demand graph of each application in the calls.

    A run's calls must be in order, runs may be mixed. Of more than MOST_SAMPLES calls the last ones count.

    Raises:
        InputError: There are no calls, or no run of an application could end.
    """
    applications: dict[str, _Learner] = defaultdict(_Learner)
    for call in calls:
        applications[call.application].add(call)
    if not applications:
        raise InputError("There are no calls to learn from: record at least one run of an application.")
    return tuple(learner.graph(name) for name, learner in applications.items())


def _recent() -> "deque[Any]":
    return deque(maxlen=MOST_SAMPLES)


class _Learner:
    """One application's samples so far."""

    def __init__(self) -> None:
        self.start: deque[str] = _recent()
        self.backends: dict[str, str] = {}
        self.calls: dict[str, deque[LoggedCall]] = defaultdict(_recent)
        self.joint: dict[tuple[str, str], deque[tuple[int, ...]]] = defaultdict(_recent)
        self.upstream: dict[str | int, LoggedCall | None] = {}
        """Each run's last call on an LLM."""

    def add(self, call: LoggedCall) -> None:
        """Add one more call of a run."""
        if call.run not in self.upstream:
            self.start.append(call.unit)
            self.upstream[call.run] = None
        backend = LLM if call.on_llm else call.backend or call.unit
        if self.backends.setdefault(call.unit, backend) != backend:
            raise InputError(
                f"Unit '{call.unit}' of '{call.application}' is called on both {self.backends[call.unit]} and "
                f"{backend}: use a different unit name for each backend."
            )
        self.calls[call.unit].append(call)
        if call.on_llm:
            before = self.upstream[call.run]
            if before:
                self.joint[before.unit, call.unit].append((*_demand(before), *_demand(call)))
            self.upstream[call.run] = call

    def graph(self, application: str) -> DemandGraph:
        """Return the learned graph."""
        units = tuple(self._unit(name, calls) for name, calls in self.calls.items())
        joint = tuple(JointRecords(*pair, tuple(records)) for pair, records in self.joint.items())  # type: ignore[arg-type]
        return DemandGraph(DemandGraph.VERSION, application, tuple(self.start), units, joint)

    def _unit(self, name: str, calls: "deque[LoggedCall]") -> DemandStep:
        backend, nexts = self.backends[name], tuple(call.next for call in calls)
        if backend != LLM:
            return DemandStep(name, backend, nexts, seconds=tuple(call.seconds or 0.0 for call in calls))
        inputs, outputs, parallel = zip(*map(_demand, calls), strict=True)
        return DemandStep(name, backend, nexts, inputs, outputs, parallel)


def _demand(call: LoggedCall) -> tuple[int, int, int]:
    """Return input tokens, output tokens, parallel requests."""
    return call.input_tokens or 0, call.output_tokens or 0, call.parallel
