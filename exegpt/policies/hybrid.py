"""Hybrid static batches (DeepSpeed-Inference): as static ones, with micro-batches of two sizes.

Prompts go through the pipeline in `encode_micro_batches` micro-batches, tokens in `micro_batches`: the first wants
small ones that leave no bubbles, the second large ones that read the weights less often. Both are variables of the
schedule, which the pipeline follows; what comes next is decided as for static batches.
"""

from exegpt.policies.static import StaticPolicy


class HybridPolicy(StaticPolicy):
    """`batch` sequences at a time; finished ones are computed along to the end (no early termination)."""
