"""The roofline source: a Profile from a device's rates alone, so that a measured one is never required.

A matrix product takes the longer of FLOPs over the achieved rate and bytes over the achieved bandwidth; attention
likewise; an all-reduce of n bytes over tp devices moves 2 (tp-1)/tp n bytes over the link. Real kernels are slower at
small sizes, and an engine has overhead: both are parameters here, not knowledge.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from exegpt.cluster import ClusterSpec, LinkSpec
from exegpt.errors import InputError
from exegpt.model import BYTES, ModelSpec
from exegpt.profile import DegreeTables, LayerTables, Profile, Table

_TOKENS = tuple(sorted(float(base << i) for base, most in ((1, 18), (3, 16)) for i in range(most)))
_BATCHES = tuple(float(2**i) for i in range(13))
_LENGTHS = (1.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0)
_BYTES = tuple(float(2**i) for i in range(10, 33, 2))


@dataclass(frozen=True)
class _Rates:
    """What one device and the links reach, in FLOP/s and bytes/s."""

    flops_s: float
    bandwidth_bytes_s: float
    value_bytes: int
    link: LinkSpec

    def product(self, n: int, k: int, rows: float) -> float:
        """Seconds of a [rows, k] by [k, n] matrix product."""
        moved = (n * k + rows * (n + k)) * self.value_bytes
        return max(2.0 * rows * n * k / self.flops_s, moved / self.bandwidth_bytes_s)

    def all_reduce(self, size: float, tp: int) -> float:
        """Seconds of an all-reduce of `size` bytes over `tp` devices."""
        if tp == 1:
            return 0.0
        return 2.0 * (tp - 1) / tp * size / self.link.bandwidth_bytes_s + self.link.latency_s


def _table(axes: tuple[str, ...], points: tuple[tuple[float, ...], ...], seconds: Callable[..., float]) -> Table:
    return Table(axes, points, tuple(seconds(*at) for at in itertools.product(*points)))


def _layer(model: ModelSpec, rates: _Rates, tp: int, encoder: bool) -> LayerTables:
    heads, size = model.heads // tp, model.head_size
    kv_token = 2 * -(-model.kv_heads // tp) * size * rates.value_bytes
    reduces = 3 if model.encoder_layers and not encoder else 2

    def rest(tokens: float) -> float:
        products = sum(rates.product(n, k, tokens) for n, k in model.token_matrices(tp, encoder))
        return products + reduces * rates.all_reduce(tokens * model.hidden * rates.value_bytes, tp)

    def attention(batch: float, new: float, past: float) -> float:
        """Each of `new` tokens attends to `past` and to the new ones before it (all of them without a causal mask), as
        far as the model's window reaches.
        """
        seen = new * new if encoder else model.seen(new, past)
        flops = 4.0 * batch * seen * heads * size
        read = min(past + new, (model.window or math.inf) + new - 1)
        moved = batch * (read * kv_token + 2 * new * heads * size * rates.value_bytes)
        return max(flops / rates.flops_s, moved / rates.bandwidth_bytes_s)

    return LayerTables(
        rest=_table(("tokens",), (_TOKENS,), rest),
        encode_attention=_table(("batch", "length"), (_BATCHES, _LENGTHS), lambda b, s: attention(b, s, 0.0)),
        chunk_attention=_table(("chunk", "past"), (_LENGTHS, (0.0, *_LENGTHS)), lambda c, p: attention(1.0, c, p)),
        decode_attention=_table(
            ("batch", "context"), (_BATCHES, _LENGTHS), lambda b, c: attention(b, 1.0, max(c - 1.0, 0.0))
        ),
        cross_projection=None
        if encoder or not model.encoder_layers
        else _table(("tokens",), (_TOKENS,), lambda t: rates.product(*model.cross_projection(tp), t)),
    )


def _degree(model: ModelSpec, rates: _Rates, tp: int) -> DegreeTables:
    hidden, vocab = model.hidden, model.vocab // tp
    return DegreeTables(
        tp=tp,
        decoder=_layer(model, rates, tp, encoder=False),
        encoder=_layer(model, rates, tp, encoder=True) if model.encoder_layers else None,
        embedding=_table(
            ("tokens",), (_TOKENS,), lambda t: 2 * t * hidden * rates.value_bytes / rates.bandwidth_bytes_s
        ),
        head=_table(("rows",), (_TOKENS,), lambda r: rates.product(vocab, hidden, r)),
    )


def _send(link: LinkSpec) -> Table:
    return _table(("bytes",), (_BYTES,), lambda b: link.latency_s + b / link.bandwidth_bytes_s)


def roofline_profile(
    model: ModelSpec,
    cluster: ClusterSpec,
    dtype: str = "fp16",
    degrees: tuple[int, ...] | None = None,
    overhead_s: float = 0.0,
) -> Profile:
    """The roofline's Profile of a model on a cluster's devices, for the given tensor-parallel degrees (by default all
    that divide the model within a node). `overhead_s` is the engine's own time per iteration.

    Raises InputError where the device doesn't compute in `dtype`.
    """
    device = cluster.device
    if device.flops_s.get(dtype, 0.0) <= 0 or device.bandwidth_bytes_s <= 0:
        known = ", ".join(device.flops_s) or "none"
        raise InputError(f"Device '{device.kind}' has no rate for {dtype}: it has rates for {known}.")
    flops_s = device.reached_flops_s(dtype)
    bandwidth = device.bandwidth_bytes_s * device.bandwidth_fraction
    rates = _Rates(flops_s, bandwidth, BYTES[dtype], cluster.intra)
    return Profile(
        version=Profile.VERSION,
        source="roofline",
        model=model.fingerprint,
        dtype=dtype,
        device=device.kind,
        degrees=tuple(_degree(model, rates, tp) for tp in degrees or model.tp_degrees(cluster.devices_per_node)),
        overhead=Table(("batch",), ((1.0,),), (overhead_s,)),
        send=_send(cluster.intra),
        send_between_nodes=_send(cluster.inter),
        provenance={
            "flops_s": f"{flops_s:.4g}",
            "bandwidth_bytes_s": f"{bandwidth:.4g}",
            "link_bytes_s": f"{cluster.intra.bandwidth_bytes_s:.4g}",
            "overhead_s": f"{overhead_s:.4g}",
        },
    )
