"""An upper bound on the rates of models that share devices, without a replay.

Requests are treated as a fluid. Prompts run in the best batches. Decoding runs in the largest batch that fits the
memory and in which an output of mean length is in time. Then a request of model m takes p_m seconds of prefill and d_m
of decoding. One job of a model runs at a time, and jobs together have 1 + OVERLAP of the multiprocessors. Decoding on
DECODE_SATURATES of them is as fast as on all:

    f · r_m · (p_m + d_m) <= 1,    f · Σ r_m · (p_m + DECODE_SATURATES · d_m) <= 1 + OVERLAP.
"""

from collections.abc import Sequence

import numpy as np

from xcore.policies.sharing import SpatialSharing
from xmulti.sharing.iteration_cost import DECODE_SATURATES
from xmulti.sharing.placement import MOST_SEQS, Popular

SLACK = 1.1
"""Margin for random lengths and rounding."""
BATCHES = tuple(sorted({round(2 ** (k / 2)) for k in range(17)}))


def highest_factor(
    models: Sequence[Popular], bounds_s: Sequence[float | None], devices: int, kv_bytes: float, prompts: int
) -> float:
    """Return the factor of all rates that the models can't exceed on a mesh with this memory for keys and values.

    Return 0 if one of them can't run. `prompts`: maximum tokens of one prefill.
    """
    alone, together = [], 0.0
    for model, bound_s in zip(models, bounds_s, strict=True):
        room = kv_bytes - sum(other.least_bytes for other in models if other is not model)
        seconds = _seconds(model, bound_s, devices, room, prompts)
        if seconds is None:
            return 0.0
        prefill_s, decode_s = seconds
        alone.append(model.rate_seq_s * (prefill_s + decode_s))
        together += model.rate_seq_s * (prefill_s + DECODE_SATURATES * decode_s)
    return SLACK * min(1 / max(alone), (1 + SpatialSharing.OVERLAP) / together)


def _seconds(
    model: Popular, bound_s: float | None, devices: int, room: float, prompts: int
) -> tuple[float, float] | None:
    """Return the seconds of a request's prefill and decoding, on complete devices in the best batches.

    Return None if the model can't run.
    """
    cost = model.cost(devices)
    if cost is None or room < model.least_bytes:
        return None
    length = max(1, round(model.input))
    together = [batch for batch in BATCHES if batch * length <= prompts] or [1]
    prefill_s = min(cost.prefill_seconds([length] * batch, 1.0) / batch for batch in together)
    context = np.array([model.input + model.output / 2])
    most = min(MOST_SEQS, max(1, int(room / model.kv_bytes)))
    decodes = {b: model.output * float(cost.decode_seconds(b, context, 1.0)[0]) for b in (*BATCHES, most) if b <= most}
    in_time = [seconds / batch for batch, seconds in decodes.items() if bound_s is None or seconds <= SLACK * bound_s]
    return (prefill_s, min(in_time)) if in_time else None
