"""What a serving engine takes by itself for the settings that its command line leaves out."""

from dataclasses import dataclass

from xcore.batching.admission import Admission
from xcore.specs.cluster import ClusterSpec

_GIB = 2**30


@dataclass(frozen=True)
class EngineDefaults:
    """An engine's own settings on a device."""

    engine: str
    max_num_batched_tokens: int
    max_num_seqs: int
    admission: Admission = "reserve"
    prefix_caching: bool = False


def engine_defaults(engine: str, cluster: ClusterSpec) -> EngineDefaults:
    """The defaults of an engine by its preset's name; those of a preset that is no server are vLLM's, but that it
    reserves blocks and keeps no prefixes.
    """
    device = cluster.device
    if engine == "tensorrt-llm":  # trtllm-serve 1.2: max_num_tokens, max_batch_size, GUARANTEED_NO_EVICT, block reuse
        return EngineDefaults(engine, 8192, 2048, "reserve", prefix_caching=True)
    # vLLM 0.32, vllm/engine/arg_utils.py, for a server: by the memory that CUDA reports, and the device's name
    memory = device.shown_bytes
    if memory >= 160 * _GIB:
        sizes = 16_384, 1024
    elif memory >= 70 * _GIB and "A100" not in device.kind and not cluster.is_cpu:
        sizes = 8192, 1024
    else:
        sizes = 2048, 256
    if engine == "sglang":  # sglang/srt/server_args.py of 0.5: chunks by memory; as many requests as 2,048 at least
        chunk = next((size for gib, size in ((160, 16_384), (60, 8192), (35, 4096)) if memory >= gib * _GIB), 2048)
        return EngineDefaults(engine, chunk, 2048, "grow", prefix_caching=True)
    if engine.startswith("vllm"):
        return EngineDefaults(engine, *sizes, "grow", prefix_caching=True)
    return EngineDefaults("vllm", *sizes)
