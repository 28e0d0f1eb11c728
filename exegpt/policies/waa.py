"""WAA, workload-aware allocation (paper section 4.2): encoding and decoding on stages of their own, asynchronously."""

from dataclasses import replace

from exegpt.batching import ENDLESS, Ledger, Step
from exegpt.policies.adjustment import PEEKED_BATCHES, Adjustment
from exegpt.policies.traits import Nearest, Traits
from exegpt.schedule import Schedule, StagePhase


def most_underway(stages: int) -> int:
    """Batches that the encoding side may hold at once: one on each of its stages and one before each but the first.

    More would not make it faster, only hold blocks.
    """
    return 2 * stages - 1


class WAAPolicy:
    """Each side is asked on its own, whenever its first stage is free.

    The encoding side takes up to `encode_batch` (B_E) sequences whose blocks are free on the decoding side; from then
    on they hold them. The decoding side gives a token to everybody whose keys and values have arrived (`ready_s`), so
    an iteration's end is when encoded sequences join. With an `adjustment`, prompts are picked for their lengths.
    """

    def __init__(self, encode_batch: int, adjustment: Adjustment | None = None):
        self.encode_batch = encode_batch
        self.adjustment = adjustment

    def next_step(self, ledger: Ledger, now: float, phase: StagePhase = "both") -> Step | None:
        """The next batch to encode, or the next decoding iteration: a WAA schedule has no stages of both phases."""
        return self.next_decode(ledger, now) if phase == "decode" else self.next_encode(ledger, now)

    def next_encode(self, ledger: Ledger, now: float) -> Step | None:
        """The next batch to encode, or None while nobody waits or no blocks are free."""
        if self.adjustment is None:
            admitted = ledger.admit(self.encode_batch, now)
        else:
            candidates = ledger.waiting.first(self.encode_batch * PEEKED_BATCHES, now)
            admitted = ledger.admit_these(self.adjustment.pick(candidates, self.encode_batch))
        return Step(encode=tuple((s, s.input_tokens) for s in admitted)) if admitted else None

    def next_decode(self, ledger: Ledger, now: float) -> Step | None:
        """The next decoding iteration, or None while nobody can be decoded."""
        decode = tuple([s for s in ledger.decoding if s.ready_s <= now])
        return Step(decode=decode, repeats=ENDLESS, arrivals=True) if decode else None


def _nearest(schedule: Schedule) -> Nearest:
    residents = schedule.decode_batch or 1
    budget = residents + (schedule.encode_batch or 1) * schedule.workload.input.quantile(0.99)
    return Nearest(residents, budget, ("prompts are encoded beside decoding instead of on devices of their own",))


WAA_C = Traits(
    name="waa-c",
    what="devices split between the phases by computing time (ExeGPT)",
    variables={"encode_batch": "prompts", "decode_batch": "target", "micro_batches": "micro-batches"},
    make=lambda schedule, adjustment: WAAPolicy(schedule.encode_batch or 0, adjustment),
    nearest=_nearest,
    compiled=4,
    disaggregated=True,
    complexity=3,
    mark="W",
    colour="#d98032",
)
WAA_M = replace(
    WAA_C,
    name="waa-m",
    what="devices split between the phases by memory (ExeGPT)",
    complexity=4,
    mark="w",
    colour="#b08a1e",
)
