"""Control: a policy's own variables, a frozen record in the policy's file; other code reads them by their kinds."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeVar, get_type_hints

from xcore.batching import Ledger, MicroBatching, Step
from xcore.batching.admission import Admission
from xcore.batching.step import StagePhase
from xcore.errors import InputError
from xcore.policies.adjustment import Adjustment
from xcore.spec import Spec
from xcore.specs.workload import MAX_TOKENS, Workload

Kind = Literal["prompts", "residents", "tokens", "period", "micro-batches", "encode-micro-batches", "target"]
"""Kinds of control variables.

The first three set the most prompts encoded in one iteration, resident sequences, or tokens computed in one iteration.
The next sets the decode iterations between two encoding phases. The next two, which may be left out, set the
micro-batches of decoding and of encoding. A target (B_D) follows from the others: schedules have it, searches don't set
it.
"""

Prompts = Annotated[int, "prompts"]
Residents = Annotated[int, "residents"]
Tokens = Annotated[int, "tokens"]
Period = Annotated[int, "period"]
MicroBatches = Annotated[int, "micro-batches"]
EncodeMicroBatches = Annotated[int | None, "encode-micro-batches"]
Target = Annotated[int, "target"]


@dataclass(frozen=True)
class OneOf:
    """Values of a variable without a kind: a search tries each of them."""

    values: tuple[int, ...]


class Policy(Protocol):
    """Decides the next iteration."""

    def next_step(self, ledger: Ledger, now: float, phase: StagePhase = "both") -> Step | None:
        """Return the next iteration at time `now` (seconds) on the stages of a phase; None while nothing can run there.

        The phase is `both` unless the policy is disaggregated. After None, nothing can run until a request or an
        encoded batch arrives, or blocks are freed.
        """


@dataclass(frozen=True)
class PolicyContext:
    """Facts that a policy gets from its schedule in addition to the control variables."""

    workload: Workload
    admission: Admission
    encode_stages: int
    """Stages that only encode."""
    adjustment: Adjustment | None = None
    """How batches are kept near the target, if the policy has one."""


Record = TypeVar("Record", bound="Control")


@dataclass(frozen=True, kw_only=True)
class Control(Spec):
    """Base class of control records.

    `Annotated` types say what each variable sets. The steps of any policy can be split into micro-batches.
    """

    micro_batches: int | None = None
    """B_m: micro-batches of a decoding step; None: one for each stage."""
    encode_micro_batches: int | None = None
    """Micro-batches of a step that only encodes; None: those of the sequences."""

    def __post_init__(self) -> None:
        optional = {field.name for field in dataclasses.fields(self) if field.default is None}
        for name, value in self.variables.items():
            if not (1 <= (value or 0) <= MAX_TOKENS or (value is None and name in optional)):
                raise InputError(
                    f"The control variable {name} can't be {value}: it must be from 1 to {MAX_TOKENS:,}"
                    f"{', or null' if name in optional else ''}."
                )

    def make(self, context: PolicyContext) -> Policy:
        """Return the policy with these variables."""
        raise NotImplementedError

    @classmethod
    def check(cls, variables: Mapping[str, int], rows: int = 1) -> None:
        """Raise InputError for variables that contradict each other; a part of the record's variables suffices.

        `rows`: the tokens of a decoding sequence in an iteration, with its draft tokens.
        """

    @property
    def variables(self) -> dict[str, int | None]:
        """Return all variables by name."""
        return {name: getattr(self, name) for name in kinds(type(self))}

    @property
    def decisions(self) -> dict[str, int | None]:
        """Return the variables that decide what runs: all but the target."""
        return {name: value for name, value in self.variables.items() if kinds(type(self))[name] != "target"}

    def of_kind(self, kind: Kind) -> int | None:
        """Return the variable of a kind; None if the policy has none."""
        return next((getattr(self, name) for name, own in kinds(type(self)).items() if own == kind), None)

    @property
    def batch(self) -> int:
        """Return the limit of running sequences, or of a batch's prompts if those are limited; 0: no limit."""
        return self.of_kind("residents") or self.of_kind("prompts") or 0

    def with_batch(self: Record, batch: int) -> Record:
        """Return the record with another batch."""
        return dataclasses.replace(self, **{batch_name(type(self)): batch})

    @property
    def besides_batch(self) -> tuple[int | None, ...]:
        """Return the variables that decide what runs, without the batch."""
        batch = batch_name(type(self))
        return tuple(value for name, value in self.decisions.items() if name != batch)

    @property
    def limit(self) -> int:
        """Return the second limit: tokens or prompts of an iteration, or iterations of a period; 0: none."""
        prompts = self.of_kind("prompts") if self.of_kind("residents") else None
        return self.of_kind("tokens") or prompts or self.of_kind("period") or 0

    def micro_batching(self, stages: int, replicas: int = 1) -> MicroBatching:
        """Return how steps are split on `stages` stages."""
        return MicroBatching(self.micro_batches or stages, self.encode_micro_batches, replicas)


_KINDS: dict[type, dict[str, Kind | OneOf | None]] = {}


def kinds(record: type[Control]) -> dict[str, Kind | OneOf | None]:
    """Return what each of a record's variables sets, in the order of display.

    None: the pipeline's own variables, which searches leave out.
    """
    if record not in _KINDS:
        _KINDS[record] = _annotated(record)
    return _KINDS[record]


def _annotated(record: type[Control]) -> dict[str, Kind | OneOf | None]:
    hints = get_type_hints(record, include_extras=True)
    shared = {field.name for field in dataclasses.fields(Control)}
    names = sorted((field.name for field in dataclasses.fields(record)), key=lambda name: name in shared)
    return {name: next(iter(getattr(hints[name], "__metadata__", ())), None) for name in names}


def name_of(record: type[Control], kind: Kind) -> str | None:
    """Return the name of a record's variable of a kind; None if there is no such variable."""
    return next((name for name, own in kinds(record).items() if own == kind), None)


def batch_name(record: type[Control]) -> str:
    """Return the name of the variable that is the batch."""
    name = name_of(record, "residents") or name_of(record, "prompts")
    assert name is not None, f"{record.__name__} limits neither resident sequences nor prompts"
    return name
