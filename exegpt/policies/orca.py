"""Iteration-level scheduling (Orca; vLLM before chunked prefill): requests join and leave at every iteration."""

from exegpt.batching import ENDLESS, Ledger, Step


class OrcaPolicy:
    """At most `max_num_seqs` resident, of which at most `prefills_per_step` encode in one iteration beside the
    others' decoding.
    """

    early_termination = True

    def __init__(self, max_num_seqs: int, prefills_per_step: int):
        self.max_num_seqs = max_num_seqs
        self.prefills_per_step = prefills_per_step

    def next_step(self, ledger: Ledger, now: float) -> Step | None:
        """The next iteration, or None while nothing can run."""
        decode = tuple(ledger.decoding)
        room = min(self.prefills_per_step, self.max_num_seqs - len(decode))
        admitted = ledger.admit(room, now) if room > 0 else []
        if admitted:
            return Step(tuple((s, s.input_tokens) for s in admitted), decode)
        return Step(decode=decode, repeats=ENDLESS, arrivals=room > 0) if decode else None
