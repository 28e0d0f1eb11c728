"""Defaults of serving engines for the settings that a command line leaves out."""

from dataclasses import dataclass

from xcore.batching.admission import Admission
from xcore.specs.cluster import ClusterSpec

_GIB = 2**30


@dataclass(frozen=True)
class EngineDefaults:
    """The default settings of an engine on a device."""

    engine: str
    max_num_batched_tokens: int
    max_num_seqs: int
    admission: Admission = "reserve"
    prefix_caching: bool = False


def engine_defaults(engine: str, cluster: ClusterSpec) -> EngineDefaults:
    """Return the defaults of an engine by the name of its preset.

    A preset that is no server has vLLM's sizes, but reserves blocks and caches no prefixes.
    """
    device = cluster.device
    if engine == "tensorrt-llm":  # trtllm-serve 1.2: max_num_tokens, max_batch_size, GUARANTEED_NO_EVICT, block reuse
        return EngineDefaults(engine, 8192, 2048, "reserve", prefix_caching=True)
    # vLLM 0.32, vllm/engine/arg_utils.py, server defaults: depend on the memory that CUDA reports and the device's name
    memory = device.shown_bytes
    if memory >= 160 * _GIB:
        sizes = 16_384, 1024
    elif memory >= 70 * _GIB and "A100" not in device.kind and not cluster.is_cpu:
        sizes = 8192, 1024
    else:
        sizes = 2048, 256
    if engine == "sglang":  # sglang/srt/server_args.py of 0.5: chunk size by memory; at least 2,048 requests
        chunk = next((size for gib, size in ((160, 16_384), (60, 8192), (35, 4096)) if memory >= gib * _GIB), 2048)
        return EngineDefaults(engine, chunk, 2048, "grow", prefix_caching=True)
    if engine.startswith("vllm"):
        return EngineDefaults(engine, *sizes, "grow", prefix_caching=True)
    return EngineDefaults("vllm", *sizes)
