"""Static batches (FasterTransformer): encode a batch, decode until its last sequence ends, then take the next."""

from exegpt.batching import ENDLESS, Ledger, Step
from exegpt.policies.traits import Nearest, Traits
from exegpt.schedule import Schedule, StagePhase


class StaticPolicy:
    """`batch` sequences at a time; finished ones are computed along to the end (no early termination)."""

    def __init__(self, batch: int):
        self.batch = batch

    def next_step(self, ledger: Ledger, now: float, phase: StagePhase = "both") -> Step | None:
        """The next iteration, or None while nothing can run."""
        if ledger.decoding:
            ledger.grow_decoding(now)
        if ledger.decoding:  # unless the last unfinished row was preempted
            return Step(decode=tuple(ledger.decoding), repeats=ENDLESS)
        admitted = ledger.admit(self.batch, now)
        return Step(encode=tuple((s, s.to_prefill) for s in admitted)) if admitted else None


def nearest(schedule: Schedule) -> Nearest:
    """Whole batches encoded in one iteration."""
    batch = schedule.variable("encode_batch")
    lost = "finished sequences leave at once instead of with their batch"
    return Nearest(batch, batch * schedule.workload.input.max, (lost,))


TRAITS = Traits(
    name="static",
    what="a batch runs to its longest output (FasterTransformer)",
    variables={"encode_batch": "prompts"},
    make=lambda schedule, _: StaticPolicy(schedule.variable("encode_batch")),
    nearest=nearest,
    compiled=0,
    early_termination=False,
    grows=True,
    complexity=5,
    mark="s",
    colour="#5c8f3c",
)
