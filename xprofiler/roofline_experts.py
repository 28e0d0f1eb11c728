"""Seconds of a mixture-of-experts block: router, grouped products of the experts that a batch reads, shared expert."""

import math
from dataclasses import dataclass, replace

from xcore.specs.cluster import ClusterSpec
from xcore.specs.device_spec import DeviceSpec, LinkSpec
from xcore.specs.experts import Experts
from xcore.specs.model import BYTES, ModelSpec
from xprofiler.roofline_device import RooflineDevice, arithmetic


@dataclass(frozen=True)
class GroupedProducts:
    """What the kernels of a block of experts reach, from the choice of their rows to the sum of their results."""

    start_s: float
    flops_share: float
    """Share of the peak rate."""
    bandwidth_share: float
    """Share of the peak bandwidth."""


# vLLM's kernels on A100, H100 and B200 in the tables of aiconfigurator 0.12.0, with loads by power laws, fitted on a
# fifth of the rows (`python -m benchmarks.grouped_products`). Medians of the errors of the other rows: 7 to 22 %.
_AMPERE = {"bf16": GroupedProducts(30e-6, 0.35, 0.61), "int4": GroupedProducts(29e-6, 0.38, 0.57)}
_HOPPER = {
    "bf16": GroupedProducts(45e-6, 0.51, 0.78),
    "fp8": GroupedProducts(41e-6, 0.27, 0.71),
    "mxfp4": GroupedProducts(36e-6, 0.44, 0.55),
    "int4": GroupedProducts(33e-6, 0.18, 0.55),
}
_BLACKWELL = {
    "bf16": GroupedProducts(18e-6, 0.40, 0.73),
    "fp8": GroupedProducts(28e-6, 0.17, 0.61),
    "nvfp4": GroupedProducts(19e-6, 0.43, 0.62),
    "mxfp4": GroupedProducts(33e-6, 0.24, 0.54),  # with activations in 8 bits
    "int4": GroupedProducts(37e-6, 0.08, 0.31),
}
_NEAREST = {
    **dict.fromkeys(("fp32", "fp16", "fp8", "w8a16", "w8a32", "w4a32"), "bf16"),
    "int8": "fp8",
    "nvfp4": "mxfp4",
    "mxfp4": "int4",
}
"""Dtype of the weights → that of the kernels whose shares stand for it where its own were not measured."""
_VALUES = 2
"""Bytes of a value between the products."""


def grouped_products(spec: DeviceSpec, dtype: str) -> GroupedProducts:
    """Return what the grouped products of experts with weights of a dtype reach on a device.

    The shares are those of the newest measured generation whose number formats the device has.
    """
    if spec.kind == "cpu":
        return GroupedProducts(0.0, spec.flops_fraction, spec.bandwidth_fraction)
    measured = _BLACKWELL if spec.flops_s.get("fp4") else _HOPPER if spec.flops_s.get("fp8") else _AMPERE
    while dtype not in measured:
        dtype = _NEAREST[dtype]
    return measured[dtype]


@dataclass(frozen=True)
class ExpertsRoofline:
    """A model's blocks of experts on one of `tp` devices, which have a part of each expert, or whole experts."""

    model: ModelSpec
    experts: Experts
    device: RooflineDevice
    tp: int
    products: GroupedProducts
    flops_s: float
    """The peak rate of the experts' arithmetic, at the engine's clock."""
    weight_bytes: float
    expert_parallel: bool
    """Whether each device has whole experts."""
    link: LinkSpec
    """The link over which tokens go to the experts of other devices."""

    @staticmethod
    def of(
        model: ModelSpec, experts: Experts, device: RooflineDevice, tp: int, cluster: ClusterSpec, dtype: str
    ) -> "ExpertsRoofline":
        """Return the blocks of a model whose experts have weights of a dtype."""
        spec, link = cluster.device, cluster.intra
        if experts.attention_dp > cluster.devices_per_node:  # a node's devices share its network
            link = replace(cluster.inter, bandwidth_bytes_s=cluster.inter.bandwidth_bytes_s / cluster.devices_per_node)
        peak, whole = spec.flops_s[arithmetic(spec, dtype)] * device.engine.clock, model.expert_parallel(tp, dtype)
        return ExpertsRoofline(
            model, experts, device, tp, grouped_products(spec, dtype), peak, BYTES[dtype], whole, link
        )

    def seconds(self, tokens: float) -> float:
        """Return seconds of a block for a batch of `tokens` tokens.

        The weights are read of the distinct experts that the batch chooses (`Experts.distinct`), and every token is
        computed with its k experts.
        """
        model, experts, device = self.model, self.experts, self.device
        seconds = device.product(experts.count, model.hidden, tokens) + self.grouped(tokens) + self._exchange(tokens)
        if experts.shared_ffn:
            matrices = model.gated_matrices(experts.shared_ffn // self.tp)
            seconds += sum(device.product(n, k, tokens) for n, k in matrices)
            seconds += device.elementwise(tokens * (3 if model.gated else 2) * experts.shared_ffn / self.tp, 1)
        return seconds

    def _exchange(self, tokens: float) -> float:
        """Return seconds to send tokens to the devices of their experts, and the results back."""
        experts, link = self.experts, self.link
        if experts.attention_dp == 1:
            return 0.0
        remote = experts.ranks_of_token(experts.attention_dp) * (1.0 - 1.0 / experts.attention_dp)
        sent = tokens * remote * self.model.hidden * self.device.activation_bytes
        return 2.0 * (link.latency_s + sent / link.bandwidth_bytes_s)

    def grouped(self, tokens: float) -> float:
        """Return seconds of the chosen experts, from the choice of their rows to the sum of their results.

        With whole experts, these are the seconds of the device with the most rows. With attention data parallelism,
        each device brings `tokens` tokens.
        """
        experts, hidden, ranks = self.experts, self.model.hidden, self.tp * self.experts.attention_dp
        width, tokens = experts.ffn if self.expert_parallel else experts.ffn // self.tp, tokens * experts.attention_dp
        rows, read = tokens * experts.per_token, experts.distinct(tokens)
        if self.expert_parallel:
            rows, read = rows * experts.fullest(tokens, ranks) / ranks, read / ranks
        weights = sum(n * k for n, k in self.model.gated_matrices(width))
        computed = 2.0 * rows * weights / (self.products.flops_share * self.flops_s)
        moved = read * weights * self.weight_bytes + rows * (4 * hidden + 3 * width) * _VALUES
        return self.products.start_s + math.hypot(
            computed, moved / (self.products.bandwidth_share * self.device.memory_bytes_s)
        )
