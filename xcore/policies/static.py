"""Static batches (FasterTransformer): encode a batch, decode until its last sequence ends, then take the next."""

from dataclasses import dataclass

from xcore.batching import ENDLESS, Ledger, Step
from xcore.batching.step import StagePhase
from xcore.policies.control import Control, Policy, PolicyContext, Prompts
from xcore.policies.traits import Traits


class StaticPolicy:
    """Runs `batch` sequences until the last one ends; finished sequences still take part (no early termination)."""

    def __init__(self, batch: int):
        self.batch = batch

    def next_step(self, ledger: Ledger, now: float, phase: StagePhase = "both") -> Step | None:
        """Return the next iteration; None while nothing can run."""
        if ledger.decoding:
            ledger.grow_decoding(now)
        if ledger.decoding:  # unless the last unfinished row was preempted
            return Step(decode=tuple(ledger.decoding), repeats=ENDLESS)
        admitted = ledger.admit(self.batch, now)
        return Step(encode=tuple((s, s.to_prefill) for s in admitted)) if admitted else None


@dataclass(frozen=True, kw_only=True)
class StaticControl(Control):
    """Variables of static batches."""

    encode_batch: Prompts
    """B_E: sequences of a batch."""

    def make(self, context: PolicyContext) -> Policy:
        """Return the policy with these variables."""
        return StaticPolicy(self.encode_batch)


TRAITS = Traits(
    name="static",
    what="a batch runs until its longest output ends (FasterTransformer)",
    control=StaticControl,
    compiled=0,
    early_termination=False,
    grows=True,
    complexity=5,
    mark="s",
    colour="#5c8f3c",
)
