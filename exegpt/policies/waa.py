"""WAA, workload-aware allocation (paper section 4.2): encoding and decoding on stages of their own, asynchronously."""

from exegpt.batching import ENDLESS, Ledger, Step
from exegpt.policies.adjustment import PEEKED_BATCHES, Adjustment


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

    early_termination = True

    def __init__(self, encode_batch: int, adjustment: Adjustment | None = None):
        self.encode_batch = encode_batch
        self.adjustment = adjustment

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
