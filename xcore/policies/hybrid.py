"""Hybrid static batches (DeepSpeed-Inference): static batches with micro-batches of two sizes.

Prompts go through the pipeline in `encode_micro_batches` micro-batches, tokens in `micro_batches`. Small ones leave no
bubbles when prompts are encoded; large ones read the weights less often in decoding. Both are variables of the
schedule, which the pipeline follows. The next step is decided as for static batches.
"""

from dataclasses import dataclass, field

from xcore.policies import static
from xcore.policies.control import Control, EncodeMicroBatches, MicroBatches, Policy, PolicyContext, Prompts
from xcore.policies.traits import Traits


class HybridPolicy(static.StaticPolicy):
    """Decides as static batching does; the pipeline splits prompts and tokens into micro-batches of two sizes."""


@dataclass(frozen=True, kw_only=True)
class HybridControl(Control):
    """Variables of hybrid static batches."""

    encode_batch: Prompts
    """B_E: sequences of a batch."""
    micro_batches: MicroBatches = field()
    encode_micro_batches: EncodeMicroBatches = None

    def make(self, context: PolicyContext) -> Policy:
        """Return the policy with these variables."""
        return HybridPolicy(self.encode_batch)


TRAITS = Traits(
    name="hybrid",
    what="static batches, with more micro-batches for encode than for decode (DeepSpeed)",
    control=HybridControl,
    compiled=0,
    early_termination=False,
    grows=True,
    complexity=6,
    mark="h",
    colour="#2f8f83",
)
