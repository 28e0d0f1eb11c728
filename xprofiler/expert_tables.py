"""Measured blocks of experts: grouped products by number of tokens, for each measured split of the experts."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from xcore.arrays import Array
from xcore.errors import InputError
from xcore.specs.cluster import ClusterSpec
from xcore.specs.engine_spec import NO_ENGINE
from xcore.specs.experts import Experts
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Table
from xprofiler.operator_tables import MS, OperatorTables
from xprofiler.roofline_device import roofline_device
from xprofiler.roofline_experts import ExpertsRoofline

Split = tuple[int, int]
"""Devices that have a part of each expert, and groups of devices with whole experts."""
_KINDS = {
    "bf16": ("bfloat16",),
    "fp16": ("bfloat16",),  # 16-bit formats have one rate
    "fp8": ("fp8_block", "fp8"),  # checkpoints of experts in 8 bits have a scale for each block of 128 x 128
    "int4": ("int4_wo",),
    "mxfp4": ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4"),  # where the device computes with 8-bit activations, engines do
    "nvfp4": ("nvfp4",),
}
"""Dtype of the weights → the tables' names, in order of preference."""
_LATENCY_KERNEL, _NOT_GATED = "_min_latency", "_nongated"


@dataclass(frozen=True)
class ExpertTables:
    """Seconds of a model's chosen experts on one device, from the choice of their rows to the sum of their results."""

    model: ModelSpec
    experts: Experts
    dtype: str
    kind: str
    """The tables' name of the dtype."""
    distribution: str
    """The distribution of the experts' loads."""
    measured: Mapping[Split, Table]
    """[tokens]: tokens of all devices that share the experts."""
    cluster: ClusterSpec

    @staticmethod
    def of(
        model: ModelSpec, experts: Experts, tables: OperatorTables, cluster: ClusterSpec, dtype: str
    ) -> "ExpertTables":
        """Return the tables of a model's experts.

        Raises:
            InputError: The tables don't hold these experts in this dtype, or not with their skew.
        """
        distribution = f"power_law_{experts.skew:g}" if experts.skew else "balanced"
        shape: dict[str, object] = {
            "hidden_size": model.hidden,
            "inter_size": experts.ffn,
            "topk": experts.per_token,
            "num_experts": experts.count,
        }
        for kind in _KINDS.get(dtype, ()):
            rows = tables.find("moe", "moe", shape | {"moe_dtype": kind, "distribution": distribution})
            if rows is not None:
                measured = _by_split(rows, model.gated)
                return ExpertTables(model, experts, dtype, kind, distribution, measured, cluster)
        raise InputError(
            f"System '{tables.folder.name}' has no experts like those of '{model.name}' in the tables of "
            f"{tables.engine} ({experts.count} of width {experts.ffn}, {experts.per_token} per token, hidden size "
            f"{model.hidden}, {dtype}, loads '{distribution}'): pass another --engine, --system or --dtype, or leave "
            "--profile out to use the data sheet."
        )

    def seconds(self, split: Split, tokens: Array) -> Array:
        """Return seconds for numbers of tokens.

        A split that was not measured takes the time of the nearest measured one, times the ratio that the data sheet
        has for the two.
        """
        if split in self.measured:
            return np.asarray(self.measured[split](tokens))
        near = self.nearest(split)
        sheets = (self._sheet(of, tokens) for of in (split, near))
        return np.asarray(self.measured[near](tokens)) * np.divide(*sheets)

    def nearest(self, split: Split) -> Split:
        """Return the measured split that is most like `split`, without splits of both kinds."""
        devices, whole = max(split), split[1] > 1
        pure = [of for of in self.measured if min(of) == 1]
        if not pure:
            raise InputError(
                f"The tables hold the experts of '{self.model.name}' only in parts of whole groups: leave --profile "
                "out to use the data sheet."
            )
        return min(pure, key=lambda of: (abs(np.log2(max(of) / devices)), (of[1] > 1) != whole))

    def split(self, tp: int) -> Split:
        """Return how the devices of a tensor-parallel group, and those that share experts with it, divide these."""
        shared = self.experts.attention_dp
        return (1, tp * shared) if self.model.expert_parallel(tp, self.dtype) else (tp, 1)

    def facts(self, degrees: tuple[int, ...]) -> dict[str, str]:
        """Return what a profile's provenance says about the experts."""
        derived = [split for split in map(self.split, degrees) if split not in self.measured]
        texts = [f"{_text(split)} from {_text(self.nearest(split))}" for split in derived]
        facts = {"experts": f"{self.kind}, loads {self.distribution}"}
        if texts:
            facts["experts_derived"] = f"by the data sheet's ratio: {', '.join(texts)}"
        return facts

    def _sheet(self, split: Split, tokens: Array) -> Array:
        """Return the data sheet's seconds."""
        alone = replace(self.experts, attention_dp=1, expert_parallel=split[1] > 1)
        spec, devices = self.cluster.device, max(split)
        device = roofline_device(spec, self.cluster.intra, self.model.dense_dtype(self.dtype), "bf16", NO_ENGINE)
        model = replace(self.model, experts=alone)
        block = ExpertsRoofline.of(model, alone, device, devices, self.cluster, self.dtype)
        block = replace(block, expert_parallel=split[1] > 1)
        return np.array([block.grouped(float(n)) for n in tokens])


def _text(split: Split) -> str:
    return f"whole experts on {split[1]} devices" if split[1] > 1 else f"parts on {split[0]}"


def _by_split(rows: dict[str, Array], gated: bool) -> dict[Split, Table]:
    """Return tables by split, of the kernel with which most of a split's rows were measured.

    Kernels for experts without a gate, and the second kernel for few tokens, are left out.
    """
    columns = ("moe_tp_size", "moe_ep_size", "kernel_source", "num_tokens", "latency")
    by_split: dict[Split, list[tuple[str, float, float]]] = {}
    for tp, ep, kernel, tokens, latency in zip(*(rows[name].tolist() for name in columns), strict=True):
        if not kernel.endswith(_LATENCY_KERNEL) and kernel.endswith(_NOT_GATED) != gated:
            by_split.setdefault((tp, ep), []).append((kernel, float(tokens), latency * MS))
    return {split: _shortest(measured) for split, measured in by_split.items()}


def _shortest(measured: list[tuple[str, float, float]]) -> Table:
    """Return the shortest times of the commonest kernel."""
    commonest = Counter(kernel for kernel, _, _ in measured).most_common(1)[0][0]
    best: dict[float, float] = {}
    for kernel, tokens, seconds in measured:
        if kernel == commonest:
            best[tokens] = min(seconds, best.get(tokens, np.inf))
    at = tuple(sorted(best))
    return Table(("tokens",), (at,), tuple(best[n] for n in at))
