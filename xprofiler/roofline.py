"""The roofline source: a Profile from a device's rates and kernels' extra times, so that no measurement is needed.

A kernel takes a launch, and the root of the sum of squares of two times: its FLOPs over the rate and its bytes over the
bandwidth. Neither hides the other completely where both matter. In addition to matrix products and attention there are
the kernels between them, which tensor parallelism doesn't divide, and all-reduces. An `EngineSpec` has what depends on
the engine rather than on the device: how long ranks wait for one another, the sustained clock, its own time per
iteration.

The constants agree with TensorRT-LLM's kernels in the tables of aiconfigurator 0.12.0: products of 16 to 8,192 rows
within 4 to 6 % (median). No constant here is fitted to the speed of engines.
"""

import itertools
from collections.abc import Callable

from xcore.errors import InputError
from xcore.specs.cluster import ClusterSpec
from xcore.specs.device_spec import LinkSpec
from xcore.specs.engine_spec import NO_ENGINE, EngineSpec
from xcore.specs.model import ModelSpec, usual_kv_dtype
from xcore.specs.profile import DegreeTables, LayerTables, Profile, Table
from xprofiler.roofline_attention import AttentionRoofline
from xprofiler.roofline_device import SAMPLING_BYTES, RooflineDevice, roofline_device
from xprofiler.roofline_experts import ExpertsRoofline

_TOKENS = tuple(sorted(float(base << i) for base, most in ((1, 18), (3, 16)) for i in range(most)))
_BATCHES = tuple(float(2**i) for i in range(13))
_LENGTHS = (1.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0)
_BYTES = tuple(float(2**i) for i in range(10, 33, 2))


Function = Callable[[float], float] | Callable[[float, float], float]
"""Seconds by one or two coordinates."""


def _table(axes: tuple[str, ...], points: tuple[tuple[float, ...], ...], seconds: Function) -> Table:
    return Table(axes, points, tuple(itertools.starmap(seconds, itertools.product(*points))))


def _layer(
    model: ModelSpec, device: RooflineDevice, tp: int, encoder: bool, experts: ExpertsRoofline | None = None
) -> LayerTables:
    crosses = bool(model.encoder_layers) and not encoder
    blocks = 3 if crosses else 2  # each with a norm before and an all-reduce after it
    attention = AttentionRoofline(model, device, tp, encoder)
    dense = 1.0 - experts.experts.layers / model.layers if experts else 1.0
    inner = (3 if model.gated else 2) * model.ffn / tp * dense  # the activation's inputs and output

    def rest(tokens: float) -> float:
        products = 0.0
        if dense:
            products += dense * sum(device.product(n, k, tokens) for n, k in model.token_matrices(tp, encoder))
        if experts:
            shared = sum(device.product(n, k, tokens) for n, k in model.attention_matrices(tp))
            products += (1 - dense) * (shared + experts.seconds(tokens))
        between = device.elementwise(tokens * (4 * blocks * model.hidden + inner), blocks + 1)
        return products + between + blocks * device.all_reduce(tokens * model.hidden, tp)

    return LayerTables(
        rest=_table(("tokens",), (_TOKENS,), rest),
        encode_attention=_table(("batch", "length"), (_BATCHES, _LENGTHS), attention.prompts),
        chunk_attention=_table(
            ("chunk", "past"), (_LENGTHS, (0.0, *_LENGTHS)), lambda c, p: attention.prompts(1.0, c, p)
        ),
        decode_attention=_table(("batch", "context"), (_BATCHES, _LENGTHS), attention.decoding),
        cross_projection=_table(("tokens",), (_TOKENS,), lambda t: device.product(*model.cross_projection(tp), t))
        if crosses
        else None,
    )


def _degree(model: ModelSpec, device: RooflineDevice, tp: int, cluster: ClusterSpec, dtype: str) -> DegreeTables:
    hidden, vocab = model.hidden, model.vocab // tp
    experts = ExpertsRoofline.of(model, model.experts, device, tp, cluster, dtype) if model.experts else None

    def head(rows: float) -> float:
        norm = device.elementwise(4 * rows * hidden, 1)
        logits = device.outer_product(vocab, hidden, rows) + device.all_gather(rows * model.vocab, tp)
        sampling = rows * model.vocab * SAMPLING_BYTES / device.bandwidth_bytes_s
        if model.sorts_logits:
            sampling += device.engine.sorting(rows, model.vocab, device.memory_bytes_s)
        return norm + logits + sampling

    return DegreeTables(
        tp=tp,
        decoder=_layer(model, device, tp, False, experts),
        encoder=_layer(model, device, tp, encoder=True) if model.encoder_layers else None,
        embedding=_table(("tokens",), (_TOKENS,), lambda t: device.elementwise(2 * t * hidden, 1)),
        head=_table(("rows",), (_TOKENS,), head),
    )


def _send(link: LinkSpec) -> Table:
    return _table(("bytes",), (_BYTES,), lambda b: link.latency_s + b / link.bandwidth_bytes_s)


def roofline_profile(
    model: ModelSpec,
    cluster: ClusterSpec,
    dtype: str = "fp16",
    degrees: tuple[int, ...] | None = None,
    overhead_s: float = 0.0,
    *,
    kv_dtype: str | None = None,
    engine: EngineSpec = NO_ENGINE,
) -> Profile:
    """Return the roofline's Profile of a model on a cluster's devices, for the given tensor-parallel degrees.

    By default these are all degrees that divide the model within a node. Keys and values have `usual_kv_dtype` unless
    `kv_dtype` is given. `overhead_s` is time per iteration in addition to the engine's.

    Raises:
        InputError: The device doesn't compute in `dtype`.
    """
    spec, kv_dtype = cluster.device, kv_dtype or usual_kv_dtype(dtype)
    if spec.bandwidth_bytes_s <= 0:
        raise InputError(f"Device '{spec.kind}' has no memory bandwidth: give bandwidth_bytes_s in the cluster file.")
    degrees = degrees or model.tp_degrees(cluster.devices_per_node)
    device = roofline_device(spec, cluster.intra, model.dense_dtype(dtype), kv_dtype, engine)
    return Profile(
        version=Profile.VERSION,
        source="roofline",
        model=model.fingerprint,
        layers=model.layers_fingerprint,
        dtype=dtype,
        device=spec.kind,
        degrees=tuple(
            _degree(model, device, tp, cluster, dtype) for tp in degrees or model.tp_degrees(cluster.devices_per_node)
        ),
        overhead=engine.overhead(overhead_s),
        send=_send(cluster.intra),
        send_between_nodes=_send(cluster.inter),
        in_flight=engine.in_flight,
        front_end_s=engine.front_end_s,
        provenance={
            "flops_s": f"{device.weights.flops_s:.4g}",
            "bandwidth_bytes_s": f"{device.bandwidth_bytes_s:.4g}",
            "link_bytes_s": f"{cluster.intra.bandwidth_bytes_s:.4g}",
            "kv_dtype": kv_dtype,
            "engine": engine.name,
            **({"sampling": sampling} if (sampling := engine.sampling_text(model.sorts_logits)) else {}),
            "overhead_s": f"{engine.iteration_s + overhead_s:.4g}",
        },
    )
