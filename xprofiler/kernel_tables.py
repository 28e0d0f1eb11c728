"""KernelTables: the published kernel measurements that `exegpt profile import aiconfigurator` reads: facts.

They are those of aiconfigurator-core 0.12.0 (Apache-2.0). A head size is listed if every built-in model with that size
can be imported.
"""

from dataclasses import dataclass

from xcore.specs.model import ModelSpec


@dataclass(frozen=True)
class KernelTables:
    """Measurements of one engine's kernels on one device."""

    system: str
    """The package's name of the device."""
    device: str
    kernels: str
    """The package's name of the engine."""
    head_sizes: tuple[int, ...]
    """Head sizes of the attention tables for keys and values in 16 bits."""
    head_sizes_kv8: tuple[int, ...]
    """Head sizes of the attention tables for keys and values in 8 bits."""
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp8")
    """Dtypes of the weights."""

    DEGREES = (1, 2, 4, 8)
    """The tensor-parallel degrees of all tables."""

    def cover(self, model: ModelSpec, dtype: str, kv_dtype: str) -> bool:
        """Return whether a model can be imported in these dtypes."""
        sizes = self.head_sizes_kv8 if kv_dtype == "fp8" else self.head_sizes if kv_dtype in ("bf16", "fp16") else ()
        return not (model.encoder_layers or model.beyond_dense) and dtype in self.dtypes and model.head_size in sizes


_BOTH = (64, 128)
TABLES = (
    # On A100, TensorRT-LLM's tables lack the heads that most models have on each of four and eight devices.
    *(KernelTables("a100_sxm", "A100-80GB", kernels, (128,), (), ("bf16", "fp16")) for kernels in ("vllm", "sglang")),
    *(
        KernelTables(system, device, kernels, _BOTH, _BOTH)
        for system, device in (
            ("h100_sxm", "H100-SXM"),
            ("h200_sxm", "H200-SXM"),
            ("b200_sxm", "B200"),
            ("b300_sxm", "B300-SXM"),
        )
        for kernels in ("vllm", "trtllm", "sglang")
    ),
    KernelTables("l40s", "L40S", "vllm", _BOTH, (64,)),
    *(KernelTables("l40s", "L40S", kernels, _BOTH, _BOTH) for kernels in ("trtllm", "sglang")),
    *(KernelTables("rtx_pro_6000_server", "RTXPRO6000", kernels, _BOTH, (64,)) for kernels in ("vllm", "sglang")),
    KernelTables("rtx_pro_6000_server", "RTXPRO6000", "trtllm", _BOTH, _BOTH),
)
KERNELS = {"vllm": "vllm", "vllm-0.11": "vllm", "sglang": "sglang", "tensorrt-llm": "trtllm"}
"""Engine presets → the engine whose kernels they run."""


def tables_for(device: str, engine: str) -> KernelTables | None:
    """Return the tables of an engine preset's kernels on a device; None if there are none."""
    return next((t for t in TABLES if (t.device, t.kernels) == (device, KERNELS.get(engine))), None)
