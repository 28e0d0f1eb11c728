"""What models have of a KV memory that they share on one device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from exegpt.batching.kv_pool import KVPool
from exegpt.batching.shared_pool import merged_pools
from exegpt.errors import InputError
from exegpt.models import KVCache
from exegpt.models.cache import scattered_zeros
from exegpt.models.device import CPU, free_memory
from exegpt.schedule import Schedule


@dataclass(frozen=True)
class SharedCache:
    """One model's blocks of a memory."""

    cache: KVCache
    pool: KVPool


def merged_caches(schedules: Sequence[Schedule], device: torch.device = CPU) -> list[SharedCache]:
    """For each schedule its blocks of one memory, as large as their blocks come to together. InputError where the
    device hasn't got it.
    """
    merged, pools = merged_pools(schedules)
    need, free = merged.total * merged.bytes, free_memory(device)
    if need > free:
        raise InputError(
            f"The KV blocks of {len(schedules)} models need {need / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are "
            "available: plan with a smaller --memory-fraction."
        )
    memory = scattered_zeros((need,), torch.uint8, device)
    memory.zero_()  # so that the system maps it now and not during a run
    return [SharedCache(_view(memory, schedule), pool) for schedule, pool in zip(schedules, pools, strict=True)]


def _view(memory: torch.Tensor, schedule: Schedule) -> KVCache:
    spec = schedule.model.spec
    return KVCache.over(memory, spec, spec.layers, schedule.block_size, schedule.kv_dtype)
