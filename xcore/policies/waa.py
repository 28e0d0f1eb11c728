"""WAA, workload-aware allocation (paper section 4.2): encoding and decoding on different stages, asynchronously."""

from dataclasses import dataclass, field, replace

from xcore.batching import ENDLESS, Ledger, Step
from xcore.batching.step import StagePhase
from xcore.policies.control import Control, MicroBatches, Policy, PolicyContext, Prompts, Target
from xcore.policies.joining import Joining
from xcore.policies.traits import Traits


def most_underway(stages: int) -> int:
    """Return how many batches, or steps, stages may hold at once: one on each, and one before each except the first.

    More batches would only hold blocks and delay requests.
    """
    return 2 * stages - 1


def most_in_transfer(stages: int) -> int:
    """Return the most batches between their admission and their first decode iteration.

    Each has buffers on both sides. These are the batches on the `stages` encoding stages, one in transfer, and one that
    waits for its transfer. If the transfer is slower than encoding, more batches would only fill memory.
    """
    return most_underway(stages) + 2


class WAAPolicy:
    """Decides the steps of each side on its own, whenever the side's first stage is free.

    The encoding side takes about `encode_batch` (B_E) sequences whose blocks are free on the decoding side; they hold
    the blocks from then on. The decoding side gives a token to every sequence whose keys and values have arrived
    (`kv_arrived_s`), so encoded sequences join at the end of an iteration.
    """

    def __init__(self, encode_batch: int, joining: Joining | None = None):
        self.encode_batch = encode_batch
        self.joining = joining or Joining()

    def next_step(self, ledger: Ledger, now: float, phase: StagePhase = "both") -> Step | None:
        """Return the next batch to encode, or the next decode iteration: no stage of a WAA schedule has both phases."""
        return self.next_decode(ledger, now) if phase == "decode" else self.next_encode(ledger, now)

    def next_encode(self, ledger: Ledger, now: float) -> Step | None:
        """Return the next batch to encode; None while no sequence waits or no blocks are free."""
        admitted = self.joining.admit(ledger, now, self.encode_batch)
        return Step(encode=tuple((s, s.to_prefill) for s in admitted)) if admitted else None

    def next_decode(self, ledger: Ledger, now: float) -> Step | None:
        """Return the next decode iteration; None while no sequence can decode."""
        decode, _ = ledger.grow_decoding(now)
        return Step(decode=decode, repeats=ENDLESS, arrivals=True) if decode else None


@dataclass(frozen=True, kw_only=True)
class WAAControl(Control):
    """Variables of workload-aware allocation."""

    encode_batch: Prompts
    """B_E: sequences encoded together."""
    decode_batch: Target
    """B_D: sequences being decoded; derived."""
    micro_batches: MicroBatches = field()

    def make(self, context: PolicyContext) -> Policy:
        """Return the policy with these variables.

        Batches join one after the other, about one per iteration, so the forecast looks ahead to the last batch under
        way.
        """
        return WAAPolicy(self.encode_batch, Joining.of(context, most_in_transfer(context.encode_stages)))


WAA_C = Traits(
    name="waa-c",
    what="devices split between the phases by computing time (ExeGPT)",
    control=WAAControl,
    compiled=4,
    grows=True,
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
