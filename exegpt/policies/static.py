"""Static batches (FasterTransformer): encode a batch, decode until its last sequence ends, then take the next."""

from exegpt.batching import ENDLESS, Ledger, Step


class StaticPolicy:
    """`batch` sequences at a time; finished ones are computed along to the end (no early termination)."""

    early_termination = False

    def __init__(self, batch: int):
        self.batch = batch

    def next_step(self, ledger: Ledger, now: float) -> Step | None:
        """The next iteration, or None while nothing can run."""
        if ledger.decoding:
            return Step(decode=tuple(ledger.decoding), repeats=ENDLESS)
        admitted = ledger.admit(self.batch, now)
        return Step(encode=tuple((s, s.input_tokens) for s in admitted)) if admitted else None
