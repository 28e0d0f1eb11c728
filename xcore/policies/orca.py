"""Iteration-level scheduling (Orca): requests join and leave at every iteration."""

from dataclasses import dataclass

from xcore.batching import ENDLESS, Ledger, Step
from xcore.batching.step import StagePhase
from xcore.policies.control import Control, Policy, PolicyContext, Prompts, Residents
from xcore.policies.traits import Traits


class OrcaPolicy:
    """Limits the residents to `max_num_seqs` and the prompts encoded in one iteration to `prefills_per_step`.

    The other residents decode in the same iteration.
    """

    def __init__(self, max_num_seqs: int, prefills_per_step: int):
        self.max_num_seqs = max_num_seqs
        self.prefills_per_step = prefills_per_step

    def next_step(self, ledger: Ledger, now: float, phase: StagePhase = "both") -> Step | None:
        """Return the next iteration; None while nothing can run."""
        ledger.giving_way.make_way(now, self.max_num_seqs)
        decode, preempted = ledger.grow_decoding(now)
        room = min(self.prefills_per_step, self.max_num_seqs - len(decode) - len(ledger.leaving))
        admitted = ledger.admit(room, now) if room > 0 and not preempted else []
        if admitted:
            return Step(tuple((s, s.to_prefill) for s in admitted), decode)
        arrivals = ledger.giving_way.ranks_running or room > 0
        return Step(decode=decode, repeats=ENDLESS, arrivals=arrivals) if decode else None


@dataclass(frozen=True, kw_only=True)
class OrcaControl(Control):
    """Variables of iteration-level scheduling."""

    max_num_seqs: Residents
    prefills_per_step: Prompts
    """Prompts encoded in one iteration; 1 is the paper's Orca."""

    def make(self, context: PolicyContext) -> Policy:
        """Return the policy with these variables."""
        return OrcaPolicy(self.max_num_seqs, self.prefills_per_step)


TRAITS = Traits(
    name="orca",
    what="requests join and leave at every iteration (Orca)",
    control=OrcaControl,
    # Other engines bound the tokens of whole prompts in an iteration, not their number (vLLM without chunked prefill).
    compiled=1,
    mixed=True,
    grows=True,
    caches_prefixes=True,
    gives_way=True,
    complexity=1,
    mark="o",
    colour="#3b74b9",
)
