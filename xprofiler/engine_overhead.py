"""The time that the engine adds to an iteration: batch assembly, bookkeeping and results.

It is measured as the remainder of iterations over the times of the model's parts.
"""

import numpy as np

from xcore.policies import static
from xcore.requests.request import Request
from xcore.specs.cluster import local_cluster
from xcore.specs.model import ModelSpec
from xcore.specs.profile import DegreeTables
from xcore.specs.schedule import BLOCK_SIZE, ModelReference, ProfileReference, Schedule, Stage
from xcore.specs.workload import Workload
from xprofiler.timing import Timing
from xrunner.core.engine import Engine
from xrunner.models import Model

_PROMPT = 1
_OUTPUT = 24


def measure_overhead(model: Model, degree: DegreeTables, batch: int) -> Timing:
    """Return the mean seconds per iteration of `batch` decoding sequences beyond the model's parts; never negative.

    On the CPU that is the time outside the model. A GPU computes beside the host: its parts are in `degree`'s tables.
    """
    longest = model.spec.longest_request or _PROMPT + _OUTPUT
    prompt = min(_PROMPT, longest // 2)
    output = min(_OUTPUT, longest - prompt)
    rng = np.random.default_rng(batch)
    requests = [
        Request(str(i), tuple(rng.integers(model.spec.vocab, size=prompt).tolist()), output, ignore_eos=True)
        for i in range(batch)
    ]
    engine = Engine(model, _static_schedule(model, batch, prompt, output))
    spans = engine.run(requests).timeline.spans
    if not spans:
        return Timing(0.0, 0.0)
    if model.device.type == "cpu":
        seconds = spans[-1].end_s - spans[0].start_s - engine.worker.compute.model_s
        return Timing(max(0.0, seconds / len(spans)), 0.0)
    decoding = [span for span in spans if span.phase == "decode"]
    if not decoding:
        return Timing(0.0, 0.0)
    layer, contexts = degree.decoder, prompt + 1 + np.arange(len(decoding))
    parts = len(model.layers) * (layer.rest(batch) + layer.decode_attention(batch, contexts))
    parts = parts + degree.embedding(batch) + degree.head(batch)
    # An iteration lasts to the start of the next: in between the engine books results.
    starts = np.array([span.start_s for span in decoding] + [decoding[-1].end_s])
    remainder = np.diff(starts) - parts
    low, high = np.percentile(remainder, [25, 75])
    mean = float(remainder.mean())
    return Timing(max(0.0, mean), float((high - low) / max(abs(mean), 1e-9)))


def _static_schedule(model: Model, batch: int, prompt: int, output: int) -> Schedule:
    """Return the schedule of one batch that is decoded to completion on this machine's only device."""
    spec: ModelSpec = model.spec
    return Schedule(
        version=Schedule.VERSION,
        policy=static.TRAITS.name,
        control=static.StaticControl(encode_batch=batch),
        model=ModelReference(spec, spec.fingerprint),
        cluster=local_cluster(),
        workload=Workload.fixed(prompt, output),
        profile=ProfileReference("measured", ""),
        stages=(Stage((0,), 1, "both", None, (0, len(model.layers))),),
        kv_blocks=batch * -(-(prompt + output) // BLOCK_SIZE),
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
    )
