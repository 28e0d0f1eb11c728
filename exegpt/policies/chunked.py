"""Chunked prefill (Sarathi; vLLM v1): a token budget per iteration, decoding first, the rest for pieces of prompts."""

from exegpt.policies.ledger import Ledger, Step


class ChunkedPolicy:
    """At most `max_num_seqs` resident and `max_num_batched_tokens` computed in one iteration."""

    early_termination = True

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int):
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens

    def next_step(self, ledger: Ledger, now: float) -> Step | None:
        """The next iteration, or None while nothing can run."""
        decode = tuple(s for s in ledger.resident if s.encoded)[: self.max_num_batched_tokens]
        budget = self.max_num_batched_tokens - len(decode)
        encode = []
        for sequence in [s for s in ledger.resident if not s.encoded]:
            if budget <= 0:
                break
            count = min(budget, sequence.input_tokens - sequence.cached)
            encode.append((sequence, count))
            budget -= count
        while budget > 0 and len(ledger.resident) < self.max_num_seqs:
            admitted = ledger.admit(1, now)
            if not admitted:
                break
            count = min(budget, admitted[0].input_tokens)
            encode.append((admitted[0], count))
            budget -= count
        if not decode and not encode:
            return None
        return Step(encode=tuple(encode), decode=decode)
