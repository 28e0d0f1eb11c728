"""A policy of one's own: chunked prefill that goes on decoding until a batch of prompts has gathered.

Every iteration with a prompt's chunk makes all decoding sequences wait for it. Where few such iterations carry many
prompts, tokens come more evenly, and each prompt waits longer for its first token.

    exegpt tune --plugin examples/policy_of_ones_own.py --policy gathering,chunked --latency-bound 10s \
        --model opt-13b --cluster 1xA100-80GB --workload T --max-num-seqs 32 --out schedule.json
    exegpt simulate --plugin examples/policy_of_ones_own.py --schedule schedule.json --replay trace.jsonl
    exegpt run --plugin examples/policy_of_ones_own.py --schedule schedule.json --model DIR --requests requests.jsonl
"""

from dataclasses import dataclass
from typing import Annotated

from xcore.batching import ENDLESS, Ledger, Step
from xcore.batching.step import StagePhase
from xcore.policies import Policy, Traits
from xcore.policies.chunked import ChunkedPolicy
from xcore.policies.control import Control, OneOf, PolicyContext, Residents, Tokens


class GatheringPolicy(ChunkedPolicy):
    """Decides as chunked prefill does, but admits no prompt beside decoding until `gathered` of them wait."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, gathered: int):
        super().__init__(max_num_seqs, max_num_batched_tokens)
        self.gathered = gathered

    def next_step(self, ledger: Ledger, now: float, phase: StagePhase = "both") -> Step | None:
        """Return the next iteration, or None while nothing can run."""
        if not ledger.encoding and len(ledger.waiting.first(self.gathered, now)) < self.gathered:
            decode, _ = ledger.grow_decoding(now, self.max_num_batched_tokens)
            if decode:  # the next arrival may complete the batch
                return Step(decode=decode, repeats=ENDLESS, arrivals=True)
        return super().next_step(ledger, now, phase)


@dataclass(frozen=True, kw_only=True)
class GatheringControl(Control):
    """The control variables; a search without a space of the policy's own tries a grid over them."""

    max_num_seqs: Residents
    max_num_batched_tokens: Tokens
    gathered: Annotated[int, OneOf((1, 4, 16))]

    def make(self, context: PolicyContext) -> Policy:
        """Return the policy with these variables."""
        return GatheringPolicy(self.max_num_seqs, self.max_num_batched_tokens, self.gathered)


TRAITS = Traits(
    name="gathering",
    what="chunked prefill, once a batch of prompts has gathered",
    control=GatheringControl,
    mixed=True,
    splits_prompts=True,
    grows=True,
    caches_prefixes=True,
)
