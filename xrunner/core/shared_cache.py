"""Shared caches: the blocks of several models in one KV memory of a device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from xcore.batching.shared_pool import MergedPool, block_size, merged_bytes, shared_pools
from xcore.specs.schedule import Schedule
from xrunner.comm.ranks import Ranks
from xrunner.core.capacity import check_memory
from xrunner.models import KVCache
from xrunner.models.cache import scattered_zeros
from xrunner.models.device import CPU
from xrunner.models.shard import Shard


@dataclass(frozen=True)
class SharedCache:
    """One model's blocks of a shared memory."""

    cache: KVCache
    pool: MergedPool


def shared_caches(
    schedules: Sequence[Schedule], pool: Literal["quotas", "merged"], ranks: Ranks, device: torch.device = CPU
) -> list[SharedCache]:
    """Return, for each schedule of one stage, its blocks of one memory of this rank. All ranks call it.

    The memory has one merged block more than the pools.

    Raises:
        InputError: On all ranks, if a device hasn't enough memory.
    """
    merged, pools = shared_pools(schedules, pool)
    need = merged.total * merged.bytes + merged_bytes(map(block_size, schedules))  # the extra block is for padding rows
    what = f"The memory for the KV blocks of {len(schedules)} models"
    check_memory(device, ranks, what, need, "plan with a smaller --gpu-memory-fraction")
    memory = scattered_zeros((need,), torch.uint8, device)
    memory.zero_()  # so that the system maps it now and not during a run
    return [SharedCache(_view(memory, schedule), own) for schedule, own in zip(schedules, pools, strict=True)]


def _view(memory: torch.Tensor, schedule: Schedule) -> KVCache:
    spec = Shard(0, schedule.stages[0].tp, lambda x: x).share(schedule.model.spec)
    return KVCache.over(memory, spec, spec.layers, schedule.block_size, schedule.kv_dtype)
