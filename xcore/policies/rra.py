"""RRA, round-robin allocation (paper section 4.1): encode B_E sequences, decode N_D iterations, again."""

from dataclasses import dataclass

from xcore.batching import Ledger, Step
from xcore.batching.step import StagePhase
from xcore.policies.control import Control, EncodeMicroBatches, Period, Policy, PolicyContext, Prompts, Target
from xcore.policies.joining import Joining
from xcore.policies.traits import Traits


class RRAPolicy:
    """Admits `encode_batch` (B_E) sequences before every `decode_iterations` (N_D) decode iterations.

    Finished sequences leave at once.
    """

    def __init__(self, encode_batch: int, decode_iterations: int, joining: Joining | None = None):
        self.encode_batch = encode_batch
        self.decode_iterations = decode_iterations
        self.joining = joining or Joining()
        self._phase_ends = 0
        """The ledger's count of iterations at which this phase is over."""

    def next_step(self, ledger: Ledger, now: float, phase: StagePhase = "both") -> Step | None:
        """Return the next iteration; None while nothing can run."""
        if ledger.iterations >= self._phase_ends or not ledger.decoding:
            self._phase_ends = ledger.iterations + self.decode_iterations
            admitted = self.joining.admit(ledger, now, self.encode_batch)
            if admitted:
                return Step(encode=tuple((s, s.to_prefill) for s in admitted))
        decode, _ = ledger.grow_decoding(now)
        return Step(decode=decode, repeats=self._phase_ends - ledger.iterations) if decode else None


@dataclass(frozen=True, kw_only=True)
class RRAControl(Control):
    """Variables of round-robin allocation."""

    encode_batch: Prompts
    """B_E: sequences encoded in one encoding phase."""
    decode_iterations: Period
    """N_D: decoding iterations between two encoding phases."""
    decode_batch: Target
    """B_D: sequences being decoded at the start of a decoding phase; derived."""
    encode_micro_batches: EncodeMicroBatches = None

    def make(self, context: PolicyContext) -> Policy:
        """Return the policy with these variables."""
        joining = Joining.of(context, self.decode_iterations)
        return RRAPolicy(self.encode_batch, self.decode_iterations, joining)


TRAITS = Traits(
    name="rra",
    what="prefill of a batch, then N_D decode iterations, repeated (ExeGPT)",
    control=RRAControl,
    compiled=3,
    grows=True,
    complexity=2,
    mark="R",
    colour="#c23b53",
)
