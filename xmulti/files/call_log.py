"""Call logs: the calls of applications' runs as JSONL, and the demand graphs learned from them."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from xcore import document
from xcore.applications.demand_graph import END, LLM, MOST_SAMPLES, DemandGraph, DemandStep, JointRecords
from xcore.errors import InputError
from xcore.spec import Spec


@dataclass(frozen=True)
class LoggedCall(Spec):
    """One call of a run: one line of a log."""

    application: str
    run: str | int
    unit: str
    next: str | None = None
    """The run's next unit, or `end`; None: the run's next line tells it by its `parent`, and the last call ends it."""
    input_tokens: int | None = None
    """Input tokens of each of its parallel requests; None on backends other than LLMs."""
    output_tokens: int | None = None
    parallel: int = 1
    seconds: float | None = None
    """Duration on backends other than LLMs."""
    backend: str | None = None
    """None: an LLM if there are tokens, else a backend with the unit's name."""
    parent: str | None = None
    """The unit of the run's previous call; None: it is the run's first call, or the previous call names it as `next`.
    """

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
    """Yield the calls of a JSONL log, each with its `next`; a run's calls are in order.

    Raises:
        InputError: A line is wrong; the message names it.
    """
    before: dict[tuple[str, str | int], LoggedCall] = {}
    """By run: its latest call, which is yielded already if it has a `next`."""
    for number, line in enumerate(document.read_lines(path, "log of calls"), 1):
        if not line.strip():
            continue
        where = f"'{path}', line {number}"
        call = document.from_dict(LoggedCall, document.parse_json(line, where), where)
        run = (call.application, call.run)
        previous = before.get(run)
        _check_follows(call, previous, where)
        if previous and previous.next is None:
            yield replace(previous, next=call.unit)
        if call.next is not None:
            yield call
        before[run] = call
    yield from (replace(call, next=END) for call in before.values() if call.next is None)


def _check_follows(call: LoggedCall, previous: LoggedCall | None, where: str) -> None:
    """Check that a call may follow its run's previous call; None: there is none.

    Raises:
        InputError: The two lines contradict each other, or neither names the other's unit.
    """
    run = f"run '{call.run}' of '{call.application}'"
    if previous is None and call.parent is not None:
        raise InputError(f"{where}: {run} begins with '{call.unit}', but names '{call.parent}' as its parent.")
    if previous is None:
        return
    if previous.next is None and call.parent is None:
        raise InputError(
            f"{where}: {run} calls '{call.unit}' without a parent, but its previous call has no next: add one of them."
        )
    if call.parent is not None and call.parent != previous.unit:
        raise InputError(
            f"{where}: {run} names '{call.parent}' as the parent of '{call.unit}', but its previous call is "
            f"'{previous.unit}': log calls that run at the same time as one call with parallel."
        )
    if previous.next not in (None, call.unit):
        raise InputError(
            f"{where}: {run} calls '{call.unit}', but its previous call names '{previous.next}' as the next unit."
        )


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


Sample = TypeVar("Sample")


def _recent() -> "deque[Sample]":
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
        backend, nexts = self.backends[name], tuple(call.next or END for call in calls)
        if backend != LLM:
            return DemandStep(name, backend, nexts, seconds=tuple(call.seconds or 0.0 for call in calls))
        inputs, outputs, parallel = zip(*map(_demand, calls), strict=True)
        return DemandStep(name, backend, nexts, inputs, outputs, parallel)


def _demand(call: LoggedCall) -> tuple[int, int, int]:
    """Return input tokens, output tokens, parallel requests."""
    return call.input_tokens or 0, call.output_tokens or 0, call.parallel
