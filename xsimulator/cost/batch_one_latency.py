"""The times of requests alone on a replica: batch 1, from the start of the prefill to the last token."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from xcore.arrays import Array
from xsimulator.cost.cost_model import ReplicaCost


@dataclass(frozen=True)
class BatchOneTimes:
    """Seconds of requests that are alone on a replica, each [n]."""

    prefill: Array
    total: Array


def batch_one_times(replica_cost: ReplicaCost, inputs: ArrayLike, outputs: ArrayLike) -> BatchOneTimes:
    """Return the times of requests with these tokens.

    Each prompt is prefilled in one iteration. Every decode step has the cost at the mean context.
    """
    tokens, made = np.asarray(inputs, dtype=np.float64), np.asarray(outputs, dtype=np.float64)
    encode, decode = replica_cost.encode, replica_cost.decode
    encoder_decoder = replica_cost.encoder_decoder
    prefill = sum((cost.encode_fixed(np.ones_like(tokens), tokens) for cost in encode.costs), np.zeros_like(tokens))
    prefill += [encode.hops_together(float(count)) for count in tokens]
    iterations = made - (not encoder_decoder)
    context = tokens + np.maximum(made, 1.0) / 2
    iteration = decode.decode(np.ones_like(context), context).sum(axis=-1) + decode.hops_together(1.0)
    return BatchOneTimes(prefill, prefill + iterations * iteration)
