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
import math
from collections.abc import Callable
from dataclasses import dataclass

from xcore.errors import InputError
from xcore.specs.cluster import ClusterSpec
from xcore.specs.device_spec import DeviceSpec, LinkSpec
from xcore.specs.engine_spec import NO_ENGINE, EngineSpec
from xcore.specs.model import BYTES, ModelSpec, activation_bytes, usual_kv_dtype
from xcore.specs.profile import DegreeTables, LayerTables, Profile, Table
from xprofiler.rings import ring_all_gather_s, ring_all_reduce_s

_TOKENS = tuple(sorted(float(base << i) for base, most in ((1, 18), (3, 16)) for i in range(most)))
_BATCHES = tuple(float(2**i) for i in range(13))
_LENGTHS = (1.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0)
_BYTES = tuple(float(2**i) for i in range(10, 33, 2))


@dataclass(frozen=True)
class _Launches:
    """Seconds that a kernel of each kind takes in addition to its work."""

    product: float = 0.0
    elementwise: float = 0.0
    prompts: float = 0.0
    decoding: float = 0.0


_GPU = _Launches(product=4.5e-6, elementwise=2e-6, prompts=5e-6, decoding=7e-6)
"""Least times in the tables of aiconfigurator 0.12.0, started from graphs."""
_DECODE_HEAD_S = {1: 7e-9, 2: 31e-9}
"""Bytes of a key's or value's number → seconds of decoding attention per sequence and KV head in addition to reading.

Medians on Hopper in the same tables, grouped heads (vLLM's kernels: 31 and 25 ns).
"""
_DECODE_SINGLE_HEAD_S = 8e-9
"""The same where every head has separate keys and values."""
_SAMPLING_BYTES = 2 + 4 + 4 + 4 + 4
"""Bytes moved for each logit: copied to 32 bits, penalised and scaled in place, chosen from."""
_CPU = _Launches()
_DECODE_FRACTION = 0.88
"""Share of a GPU's peak bandwidth at which decoding attention reads keys and values, in the same tables."""
_QKV_PASSES = 5
"""How often attention over prompts moves queries, keys and values: to rotate them, to write the cache, to read them."""


@dataclass(frozen=True)
class _Device:
    """The speeds that kernels on one device and the links reach, in FLOP/s, bytes/s and seconds."""

    flops_s: float
    """Rate of the layers' products."""
    outer_flops_s: float
    """Rate of the output head's product, in 16 bits where the layers' products are in 8."""
    attention_flops_s: float
    bandwidth_bytes_s: float
    decode_bytes_s: float
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    on_gpu: bool
    launches: _Launches
    link: LinkSpec
    engine: EngineSpec
    memory_bytes_s: float
    """The memory's peak bandwidth."""

    def product(self, n: int, k: int, rows: float) -> float:
        """Return seconds of a [rows, k] by [k, n] matrix product of a layer."""
        return self._product(n, k, rows, self.flops_s, self.weight_bytes)

    def outer_product(self, n: int, k: int, rows: float) -> float:
        """Return the seconds of the output head's product."""
        return self._product(n, k, rows, self.outer_flops_s, self.activation_bytes)

    def _product(self, n: int, k: int, rows: float, flops_s: float, value_bytes: int) -> float:
        moved = (n * k + rows * k) * value_bytes + rows * n * self.activation_bytes
        return self.launches.product + math.hypot(2.0 * rows * n * k / flops_s, moved / self.bandwidth_bytes_s)

    def elementwise(self, values: float, kernels: int) -> float:
        """Return seconds of `kernels` kernels that read and write `values` activations in all.

        Their computation is negligible.
        """
        return kernels * self.launches.elementwise + values * self.activation_bytes / self.bandwidth_bytes_s

    def decode_head_s(self, group: int) -> float:
        """Return seconds of decoding attention per sequence and KV head, in addition to reading.

        `group` heads share a KV head.
        """
        if not self.on_gpu:
            return 0.0
        return _DECODE_HEAD_S[min(self.kv_bytes, 2)] if group > 1 else _DECODE_SINGLE_HEAD_S

    def all_reduce(self, values: float, tp: int) -> float:
        """Return seconds of an all-reduce of `values` activations over `tp` devices, until the last has arrived."""
        if tp == 1:
            return 0.0
        size, link = values * self.activation_bytes, self.link
        wait = self.engine.wait(link.bandwidth_bytes_s, tp)
        if link.ring_bytes_s:
            return ring_all_reduce_s(size, tp, link.reached_bytes_s(tp)) + wait
        return 2.0 * (tp - 1) / tp * size / link.bandwidth_bytes_s + link.latency_s + wait

    def all_gather(self, values: float, tp: int) -> float:
        """Return seconds until each of `tp` devices has all of `values` activations."""
        if tp == 1:
            return 0.0
        size, link = values * self.activation_bytes, self.link
        if link.ring_bytes_s:
            return ring_all_gather_s(size, tp, link.reached_bytes_s(tp))
        return (tp - 1) / tp * size / link.bandwidth_bytes_s + link.latency_s


def _table(axes: tuple[str, ...], points: tuple[tuple[float, ...], ...], seconds: Callable[..., float]) -> Table:
    return Table(axes, points, tuple(seconds(*at) for at in itertools.product(*points)))


def _layer(model: ModelSpec, device: _Device, tp: int, encoder: bool) -> LayerTables:
    heads, size, kv_heads = model.heads // tp, model.head_size, -(-model.kv_heads // tp)
    crosses = bool(model.encoder_layers) and not encoder
    blocks = 3 if crosses else 2  # each with a norm before and an all-reduce after it
    inner = (3 if model.gated else 2) * model.ffn / tp  # the activation's inputs and output

    def rest(tokens: float) -> float:
        products = sum(device.product(n, k, tokens) for n, k in model.token_matrices(tp, encoder))
        between = device.elementwise(tokens * (4 * blocks * model.hidden + inner), blocks + 1)
        return products + between + blocks * device.all_reduce(tokens * model.hidden, tp)

    def seconds(batch: float, new: float, past: float) -> tuple[float, float]:
        """Return seconds of FLOPs, and of reading cached keys and values.

        Each of `new` tokens attends to `past` and to the new tokens before it, within the model's window. Without a
        causal mask, it attends to all new tokens.
        """
        seen = new * new if encoder else model.seen(new, past)
        read = min(past, (model.window or math.inf) - 1)
        moved = batch * read * 2 * kv_heads * size * device.kv_bytes
        return 4.0 * batch * seen * heads * size / device.attention_flops_s, moved / device.decode_bytes_s

    def prompts(batch: float, new: float, past: float = 0.0) -> float:
        passed = _QKV_PASSES * batch * new * (heads + 2 * kv_heads) * size * device.activation_bytes
        return device.launches.prompts + passed / device.bandwidth_bytes_s + sum(seconds(batch, new, past))

    def decoding(batch: float, context: float) -> float:
        started = device.launches.decoding + batch * kv_heads * device.decode_head_s(heads // kv_heads)
        return started + max(seconds(batch, 1.0, max(context - 1.0, 0.0)))

    return LayerTables(
        rest=_table(("tokens",), (_TOKENS,), rest),
        encode_attention=_table(("batch", "length"), (_BATCHES, _LENGTHS), prompts),
        chunk_attention=_table(("chunk", "past"), (_LENGTHS, (0.0, *_LENGTHS)), lambda c, p: prompts(1.0, c, p)),
        decode_attention=_table(("batch", "context"), (_BATCHES, _LENGTHS), decoding),
        cross_projection=_table(("tokens",), (_TOKENS,), lambda t: device.product(*model.cross_projection(tp), t))
        if crosses
        else None,
    )


def _degree(model: ModelSpec, device: _Device, tp: int) -> DegreeTables:
    hidden, vocab = model.hidden, model.vocab // tp

    def head(rows: float) -> float:
        norm = device.elementwise(4 * rows * hidden, 1)
        logits = device.outer_product(vocab, hidden, rows) + device.all_gather(rows * model.vocab, tp)
        sampling = rows * model.vocab * _SAMPLING_BYTES / device.bandwidth_bytes_s
        if model.sorts_logits:
            sampling += device.engine.sorting(rows, model.vocab, device.memory_bytes_s)
        return norm + logits + sampling

    return DegreeTables(
        tp=tp,
        decoder=_layer(model, device, tp, encoder=False),
        encoder=_layer(model, device, tp, encoder=True) if model.encoder_layers else None,
        embedding=_table(("tokens",), (_TOKENS,), lambda t: device.elementwise(2 * t * hidden, 1)),
        head=_table(("rows",), (_TOKENS,), head),
    )


def _send(link: LinkSpec) -> Table:
    return _table(("bytes",), (_BYTES,), lambda b: link.latency_s + b / link.bandwidth_bytes_s)


def _device(spec: DeviceSpec, link: LinkSpec, dtype: str, kv_dtype: str, engine: EngineSpec) -> _Device:
    on_gpu = spec.kind != "cpu"
    bandwidth = spec.bandwidth_bytes_s * spec.bandwidth_fraction
    outer = dtype if dtype != "fp8" else next((half for half in ("bf16", "fp16") if spec.flops_s.get(half)), dtype)
    both = dtype if dtype == kv_dtype else outer  # attention computes in 8 bits where all that it reads has them
    kv_rate = engine.kv8_rate if BYTES[kv_dtype] == 1 else 1.0
    share = spec.attention_fractions.get(both, spec.attention_fraction)
    return _Device(
        flops_s=spec.reached_flops_s(dtype) * engine.clock,
        outer_flops_s=spec.reached_flops_s(outer) * engine.clock,
        attention_flops_s=spec.flops_s[outer] * share * engine.clock,
        bandwidth_bytes_s=bandwidth,
        decode_bytes_s=(spec.bandwidth_bytes_s * _DECODE_FRACTION if on_gpu else bandwidth) * kv_rate,
        weight_bytes=BYTES[dtype],
        activation_bytes=activation_bytes(dtype),
        kv_bytes=BYTES[kv_dtype],
        on_gpu=on_gpu,
        launches=_GPU if on_gpu else _CPU,
        link=link,
        engine=engine,
        memory_bytes_s=spec.bandwidth_bytes_s,
    )


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
    if spec.flops_s.get(dtype, 0.0) <= 0 or spec.bandwidth_bytes_s <= 0:
        known = ", ".join(name for name in spec.flops_s if name in BYTES) or "none"
        raise InputError(f"Device '{spec.kind}' has no rate for {dtype}: pass one of {known} as --dtype.")
    device = _device(spec, cluster.intra, dtype, kv_dtype, engine)
    return Profile(
        version=Profile.VERSION,
        source="roofline",
        model=model.fingerprint,
        layers=model.layers_fingerprint,
        dtype=dtype,
        device=spec.kind,
        degrees=tuple(_degree(model, device, tp) for tp in degrees or model.tp_degrees(cluster.devices_per_node)),
        overhead=engine.overhead(overhead_s),
        send=_send(cluster.intra),
        send_between_nodes=_send(cluster.inter),
        in_flight=engine.in_flight,
        front_end_s=engine.front_end_s,
        provenance={
            "flops_s": f"{device.flops_s:.4g}",
            "bandwidth_bytes_s": f"{device.bandwidth_bytes_s:.4g}",
            "link_bytes_s": f"{cluster.intra.bandwidth_bytes_s:.4g}",
            "kv_dtype": kv_dtype,
            "engine": engine.name,
            **({"sampling": sampling} if (sampling := engine.sampling_text(model.sorts_logits)) else {}),
            "overhead_s": f"{engine.iteration_s + overhead_s:.4g}",
        },
    )
