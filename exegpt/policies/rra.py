"""RRA, round-robin allocation (paper section 4.1): encode B_E sequences, decode N_D iterations, again."""

from exegpt.policies.ledger import Ledger, Step


class RRAPolicy:
    """`encode_batch` (B_E) sequences join before every `decode_iterations` (N_D) decoding iterations; finished ones
    leave at once.
    """

    early_termination = True

    def __init__(self, encode_batch: int, decode_iterations: int):
        self.encode_batch = encode_batch
        self.decode_iterations = decode_iterations
        self._left = 0
        """Decoding iterations left in this phase."""

    def next_step(self, ledger: Ledger, now: float) -> Step | None:
        """The next iteration, or None while nothing can run."""
        if self._left == 0 or not ledger.resident:
            admitted = ledger.admit(self.encode_batch, now)
            self._left = self.decode_iterations
            if admitted:
                return Step(encode=tuple((s, s.input_tokens) for s in admitted))
        if not ledger.resident:
            return None
        self._left -= 1
        return Step(decode=tuple(ledger.resident))
