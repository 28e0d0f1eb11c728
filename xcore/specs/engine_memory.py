"""EngineMemory: the memory of a device that a serving engine takes, apart from weights and from keys and values."""

from dataclasses import dataclass, replace

from xcore.errors import InputError
from xcore.spec import Spec
from xcore.specs.cluster import ClusterSpec

_GIB = 2.0**30
_MULTICAST_BYTES_S = 2.5e11
"""Reduced bytes/s from which on a link counts as an NVSwitch that sums itself (NVLink 4 and later)."""


@dataclass(frozen=True)
class EngineMemory(Spec):
    """The memory that an engine takes of each device, in bytes."""

    fraction: float = 0.9
    """Share of the memory that it uses by default."""
    of_rest: bool = False
    """Whether keys and values get that share of the memory that everything else leaves.

    Otherwise they get all that remains of the share.
    """
    data_sheet: bool = False
    """Whether the share is of `memory_bytes`, what nvidia-smi counts, not of the memory that CUDA reports."""
    weights_alone: bool = False
    """Whether the share holds only weights, keys and values; everything else is in the rest of the memory."""
    base_bytes: float = 2.0**28
    """Context, libraries and the workspaces of kernels."""
    link_bytes: float = 0.0
    """Buffers of collectives, at a tensor-parallel degree of 2 or more."""
    multicast_bytes: float = 0.0
    """Buffers of collectives over links whose switch sums."""
    logit_bytes: float = 0.0
    """Bytes per logit of a sampler's largest run, in addition to the logit in the model's dtype; 0: not counted."""
    graph_layer_bytes: float = 0.0
    """Captured CUDA graphs, for each layer that a device holds a part of."""

    def __post_init__(self) -> None:
        sizes = (self.base_bytes, self.link_bytes, self.multicast_bytes, self.logit_bytes, self.graph_layer_bytes)
        if not 0 < self.fraction <= 1 or not all(0 <= size < 1e15 for size in sizes):
            raise InputError(
                f"An engine's memory has the share {self.fraction} and the bytes {sizes}: the share must be above 0 "
                "and at most 1, and the bytes must be at least 0."
            )

    def usable_bytes(self, cluster: ClusterSpec) -> float:
        """Return the memory of one device that the engine may fill."""
        memory = cluster.device.memory_bytes if self.data_sheet else cluster.device.shown_bytes
        return memory if self.of_rest else memory * cluster.memory_fraction

    def held_bytes(self, tp: int, layers: int, cluster: ClusterSpec) -> float:
        """Return the bytes that the engine holds on a device of a stage, in addition to what a step needs."""
        held = self.base_bytes + layers * self.graph_layer_bytes
        if tp == 1:
            return held
        multicast = cluster.intra.bandwidth_bytes_s >= _MULTICAST_BYTES_S
        return held + (self.multicast_bytes if multicast else self.link_bytes)


DATA_SHEET = EngineMemory(data_sheet=True)
"""Weights, the widest point of a layer and a quarter of a GiB, in the share of the data sheet's memory."""

# vLLM's `determine_available_memory` (vllm/v1/worker/gpu_worker.py): the share of the memory that CUDA reports, less
# weights, less the peak of a run of max_num_batched_tokens tokens and a sampler's run of max_num_seqs sequences (on the
# last pipeline stage), less what isn't PyTorch's. Those parts are in the start-up logs of vLLM 0.19 on H100 of
# llm-d-planner's accuracy report (50 runs of 29 models): not PyTorch's are 0.25 GiB at TP 1, 2.07 at TP 2 and 2.13 at
# TP 4, for all models alike. The difference is NCCL's buffers for sums in the switch: pull request 10511 of vLLM logs
# the same one (1.79 GiB, H100, 2024). Without such a switch logs show none: 0.25 GiB in all on RTX 4090 at TP 2 (issue
# 13061), 0.2 on RTX 3090 (pull request 14447), 0.33 on RTX 5090 (issue 14452).
#
# A sampler's run: each sequence's logits are copied to 32 bits, and there are its probabilities and random numbers in
# 32 bits (pull request 32558 measures 384 MiB for 256 × 131,072). To 0.16 top-k and top-p sorted: sorted logits,
# 64-bit places, both again while sorting, softmax and sum, 36 bytes (the same page: 1.25 GB). The peak of Qwen3-14B
# fell from 5.64 GiB (0.15, 0.16) to 2.23 (0.17 to 0.19) in that report; these bytes make it 5.70 and 2.23. What the
# peaks of six models have beyond logits and layers, 0.10 to 0.15 GiB, are workspaces of kernels (0.12 here).
#
# CUDA graphs: from 0.21 on they are part of what is subtracted. 51 + 35 graphs take 0.53 GiB in logs for models of 28
# layers, and 0.51 to 1.85 GiB (mean 1.03) in that report, whose largest model has 80 layers: 22 MiB a layer.
VLLM = EngineMemory(
    fraction=0.92,
    base_bytes=0.37 * _GIB,
    multicast_bytes=1.82 * _GIB,
    logit_bytes=12.0,
    graph_layer_bytes=22 * 2.0**20,
)
"""vLLM from 0.21 on."""
_VLLM_0_20 = replace(VLLM, graph_layer_bytes=0.0)
_VLLM_0_17 = replace(_VLLM_0_20, fraction=0.9)  # pull request 38284 of vLLM made the default 0.92
_VLLM_EARLIER = replace(_VLLM_0_17, logit_bytes=36.0)

TENSORRT_LLM = EngineMemory(
    of_rest=True, data_sheet=True, base_bytes=3.5 * _GIB, link_bytes=0.39 * _GIB, multicast_bytes=0.39 * _GIB
)
"""Keys and values get `free_gpu_memory_fraction` of the remaining memory, by default 0.9.

The bytes are aiconfigurator 0.12.0's for an engine and for NCCL, which it takes of the data sheet's memory.
"""

SGLANG = EngineMemory(fraction=0.84, weights_alone=True, base_bytes=0.0)
"""`--mem-fraction-static` covers weights, keys and values (sglang/srt/server_args.py, version 0.5).

By default it leaves 1.5 MiB for each token of a chunk, 0.5 GiB, 2 MiB for each sequence of the graphs and 1/8 GiB for
each rank: 13 of the 80 GiB of an H100. It was compared with no start-up log.
"""

OWN_ON_CPU = EngineMemory(base_bytes=0.65 * _GIB, logit_bytes=12.0)
"""exegpt's own engine on a CPU, measured by `python -m benchmarks.own_memory`.

It takes 0.2 to 0.65 GiB in addition to weights, cache and activations, and 0.17 GiB more for 256 × 64,000 logits. While
they are loaded, the weights are in memory twice for a moment.
"""
OWN_ON_GPU = EngineMemory(
    base_bytes=0.76 * _GIB, multicast_bytes=1.82 * _GIB, logit_bytes=4.0, graph_layer_bytes=4 * 2.0**20
)
"""exegpt's own engine on a GPU, where it was never measured.

It is the sum of a context (0.51 GiB in vLLM's logs of an H100), the workspace of FlashInfer (256 MiB), a copy of the
logits in 32 bits, NCCL as in vLLM, and 15 graphs instead of 86. There are 20 to 60 now, whose memory was not measured.
"""


def vllm_memory(version: str) -> EngineMemory:
    """Return the memory of a version of vLLM, like 0.19.0; a date counts as a version before 0.17."""
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return _VLLM_EARLIER
    known = int(parts[0]), int(parts[1])
    for since, memory in (((0, 21), VLLM), ((0, 20), _VLLM_0_20), ((0, 17), _VLLM_0_17)):
        if known >= since:
            return memory
    return _VLLM_EARLIER
