"""The speeds that kernels on one device reach: matrix products, kernels between them, attention and all-reduces."""

import math
from dataclasses import dataclass

from xcore.errors import InputError
from xcore.specs.device_spec import DeviceSpec, LinkSpec
from xcore.specs.engine_spec import EngineSpec
from xcore.specs.model import ARITHMETIC, BYTES, activation_bytes
from xprofiler.rings import ring_all_gather_s, ring_all_reduce_s


@dataclass(frozen=True)
class Launches:
    """Seconds that a kernel of each kind takes in addition to its work."""

    product: float = 0.0
    elementwise: float = 0.0
    prompts: float = 0.0
    decoding: float = 0.0


_GPU = Launches(product=4.5e-6, elementwise=2e-6, prompts=5e-6, decoding=7e-6)
"""Least times in the tables of aiconfigurator 0.12.0, started from graphs."""
_DECODE_HEAD_S = {1: 7e-9, 2: 31e-9}
"""Bytes of a key's or value's number → seconds of decoding attention per sequence and KV head in addition to reading.

Medians on Hopper in the same tables, grouped heads (vLLM's kernels: 31 and 25 ns).
"""
_DECODE_SINGLE_HEAD_S = 8e-9
"""The same where every head has separate keys and values."""
SAMPLING_BYTES = 2 + 4 + 4 + 4 + 4
"""Bytes moved for each logit: copied to 32 bits, penalised and scaled in place, chosen from."""
_CPU = Launches()
_DECODE_FRACTION = 0.88
"""Share of a GPU's peak bandwidth at which decoding attention reads keys and values, in the same tables."""


@dataclass(frozen=True)
class ProductRates:
    """Matrix products with weights of one dtype."""

    flops_s: float
    """The rate that large products reach."""
    weight_bytes: float
    input_bytes: float
    longer_s: float = 0.0
    """Seconds in addition to a launch."""


@dataclass(frozen=True)
class RooflineDevice:
    """The speeds that kernels on one device and the links reach, in FLOP/s, bytes/s and seconds."""

    weights: ProductRates
    """The layers' products, but those of experts."""
    outer: ProductRates
    """The output head's product, in 16 bits where the layers' weights have fewer."""
    attention_flops_s: float
    bandwidth_bytes_s: float
    decode_bytes_s: float
    activation_bytes: int
    kv_dtype: str
    on_gpu: bool
    launches: Launches
    link: LinkSpec
    engine: EngineSpec
    memory_bytes_s: float
    """The memory's peak bandwidth."""

    def product(self, n: int, k: int, rows: float) -> float:
        """Return seconds of a [rows, k] by [k, n] matrix product of a layer."""
        return self._product(n, k, rows, self.weights)

    def outer_product(self, n: int, k: int, rows: float) -> float:
        """Return the seconds of the output head's product."""
        return self._product(n, k, rows, self.outer)

    def _product(self, n: int, k: int, rows: float, how: ProductRates) -> float:
        moved = n * k * how.weight_bytes + rows * k * how.input_bytes + rows * n * self.activation_bytes
        return (
            self.launches.product
            + how.longer_s
            + math.hypot(2.0 * rows * n * k / how.flops_s, moved / self.bandwidth_bytes_s)
        )

    def elementwise(self, values: float, kernels: float) -> float:
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
        return _DECODE_HEAD_S[1 if BYTES[self.kv_dtype] < 2 else 2] if group > 1 else _DECODE_SINGLE_HEAD_S

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


def half_dtype(spec: DeviceSpec) -> str:
    """Return the dtype of 16 bits in which a device computes; InputError if it has none."""
    for half in ("bf16", "fp16"):
        if spec.flops_s.get(half):
            return half
    known = ", ".join(name for name in spec.flops_s if name in BYTES) or "none"
    raise InputError(f"Device '{spec.kind}' has no rate in 16 bits: pass one of {known} as --dtype.")


def arithmetic(spec: DeviceSpec, dtype: str) -> str:
    """Return the dtype in which a device computes products with weights of a dtype.

    That is 16 bits for weights of fewer bits that the device doesn't compute with: kernels then convert them.

    Raises:
        InputError: The device computes in neither.
    """
    native = ARITHMETIC.get(dtype, dtype)
    if spec.flops_s.get(native):
        return native
    if BYTES[dtype] < 2:
        return half_dtype(spec)
    known = ", ".join(name for name in spec.flops_s if name in BYTES) or "none"
    raise InputError(f"Device '{spec.kind}' has no rate for {dtype}: pass one of {known} as --dtype.")


def _product_rates(spec: DeviceSpec, dtype: str, engine: EngineSpec) -> ProductRates:
    computed = arithmetic(spec, dtype)
    native = computed == ARITHMETIC.get(dtype, dtype)
    longer_s = engine.nvfp4_product_s if native and dtype == "nvfp4" else 0.0
    inputs = BYTES[dtype] if native and computed != "fp32" else activation_bytes(dtype)
    return ProductRates(spec.reached_flops_s(computed) * engine.clock, BYTES[dtype], inputs, longer_s)


def roofline_device(spec: DeviceSpec, link: LinkSpec, dtype: str, kv_dtype: str, engine: EngineSpec) -> RooflineDevice:
    """Return the speeds of a device whose layers have weights of a dtype.

    Raises:
        InputError: The device doesn't compute in a dtype.
    """
    on_gpu = spec.kind != "cpu"
    bandwidth = spec.bandwidth_bytes_s * spec.bandwidth_fraction
    outer = dtype if BYTES[dtype] >= 2 else "fp32" if activation_bytes(dtype) == 4 else half_dtype(spec)
    # Attention computes in 8 bits where all that it reads has them.
    both = dtype if dtype == kv_dtype and arithmetic(spec, dtype) == dtype else outer
    kv_rate = engine.kv8_rate if BYTES[kv_dtype] == 1 else 1.0
    share = spec.attention_fractions.get(both, spec.attention_fraction)
    return RooflineDevice(
        weights=_product_rates(spec, dtype, engine),
        outer=_product_rates(spec, outer, engine),
        attention_flops_s=spec.flops_s[outer] * share * engine.clock,
        bandwidth_bytes_s=bandwidth,
        decode_bytes_s=(spec.bandwidth_bytes_s * _DECODE_FRACTION if on_gpu else bandwidth) * kv_rate,
        activation_bytes=activation_bytes(dtype),
        kv_dtype=kv_dtype,
        on_gpu=on_gpu,
        launches=_GPU if on_gpu else _CPU,
        link=link,
        engine=engine,
        memory_bytes_s=spec.bandwidth_bytes_s,
    )
