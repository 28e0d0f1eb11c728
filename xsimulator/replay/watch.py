"""Watch: bounds that end a replay early, and what a replay counts of them."""

from dataclasses import dataclass, field
from math import inf

import numpy as np

from xcore.arrays import Array


@dataclass
class Watch:
    """Bounds that end a replay once too many requests miss one.

    Arrays are [3]: the time to first token, the time per output token and the latency.
    """

    limits: Array
    """Seconds since arrival (per output token: since the first token); infinite: no bound."""
    allowed: Array
    """Number of requests that may miss each bound."""
    missed: Array
    """Number of requests that missed each bound; several replicas add up."""
    used: Array = field(default_factory=lambda: np.zeros(3))
    """[3], over all replicas: the largest batch, the most KV blocks used, the most candidates of an adjusted batch.

    The batch counts resident sequences, or the prompts of a step if the policy limits these. The candidates are the
    waiting requests from which a batch is chosen.
    """

    @staticmethod
    def nothing() -> "Watch":
        """Return a watch without bounds."""
        return Watch(np.full(3, inf), np.full(3, inf), np.zeros(3))
