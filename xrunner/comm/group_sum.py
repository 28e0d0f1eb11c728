"""Sums over a tensor-parallel group of GPUs: small tensors by torch's symmetric memory, others by the communicator.

In a one-shot all-reduce each GPU reads the tensors of all others and adds them itself: one kernel without NCCL's steps,
but each rank reads as much as all have, so for small tensors alone. CUDA graphs capture it: the buffer keeps its
address, and nothing waits on the host.

`one_shot_all_reduce` adds in the order of the ranks, so all get the same bits (`load_and_reduce` in torch's
CUDASymmetricMemory-inl). `multimem_one_shot_all_reduce` has the switch add for each rank anew, in no promised order.
"""

import os

import torch
import torch.distributed as dist

from xrunner.comm.ranks import Ranks

LIMIT_BYTES = 2**20
_DTYPES = torch.float32, torch.bfloat16
"""Dtypes for which the kernel is compiled (`AT_DISPATCH_FLOAT_AND_BFLOAT16`); float16 is not among them."""
_VECTOR_BYTES = 16
"""The kernel's widest loads. It refuses sizes that are no multiple of 4, and has narrower loads for those between."""


class GroupSum:
    """Sums tensors over a rank's tensor-parallel group; all ranks of the job construct it at once.

    A rank without a group passes None. Small tensors go by symmetric memory if every group of the job has it
    and no rank has EXEGPT_SYMM_MEM=0. The sums of one group must all be queued on one stream.
    """

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup | None, device: torch.device):
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        buffer = _shared_buffer(ranks, self._group, device)
        self.symmetric = all(ranks.all(self._group is None or buffer is not None))
        """Whether small tensors go by symmetric memory, the same on all ranks."""
        self._buffer = buffer if self.symmetric else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of a contiguous tensor over the group, queued like a kernel. May overwrite x."""
        if self._group is None:
            return x
        if self._buffer is None or not _is_small(x):
            dist.all_reduce(x, group=self._group)
            return x
        # One buffer is enough. The kernel begins and ends with a barrier of its blocks with those of the same number on
        # all ranks (`sync_remote_blocks`). At the first, every copy below is complete, as the kernel before it in its
        # stream. Past the last, no rank reads this buffer any more, so the next copy may overwrite it.
        # `one_shot_all_reduce_copy` would copy by itself, but between its copy and the barrier lacks a `__syncthreads`.
        mine = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        mine.copy_(x)
        total: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(mine, "sum", self._group.group_name)
        return total


def wanted() -> bool:
    """Return whether symmetric memory may be used; EXEGPT_SYMM_MEM=0 turns it off."""
    return os.environ.get("EXEGPT_SYMM_MEM") != "0"


def _is_small(x: torch.Tensor) -> bool:
    """Return whether a tensor goes by symmetric memory.

    Only its shape and dtype decide, which are the same on all ranks.
    """
    return x.dtype in _DTYPES and 0 < x.nbytes <= LIMIT_BYTES and x.nbytes % _VECTOR_BYTES == 0


def _shared_buffer(ranks: Ranks, group: dist.ProcessGroup | None, device: torch.device) -> torch.Tensor | None:
    """Return this rank's buffer, uint8 [LIMIT_BYTES], which the other ranks of its group can read.

    Return None if symmetric memory is not available.
    """
    buffer = None
    try:
        if group is not None and wanted():
            buffer = _allocated(ranks, group, device)
    except (ImportError, AttributeError, RuntimeError):  # torch without it, too old, or without memory for it
        pass
    if not all(ranks.all(group is None or buffer is not None)) or group is None or buffer is None:
        return None  # on all ranks: a single rank would wait at the rendezvous for ever
    from torch.distributed import _symmetric_memory as symm_mem

    try:
        shared = symm_mem.rendezvous(buffer, group.group_name)
    except RuntimeError:  # GPUs that don't reach each other, or all have number 0 of those that their processes see
        return None
    # A buffer may come from the midst of a block of torch's pool, and the kernel reads from the block's beginning.
    return buffer if getattr(shared, "offset", 0) == 0 else None


def _allocated(ranks: Ranks, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """Return a buffer that can be shared within the group.

    Raises:
        RuntimeError: No rank of this group could share one.
    """
    from torch.distributed import _symmetric_memory as symm_mem

    if not any(set(dist.get_process_group_ranks(group)) <= set(node) for node in ranks.nodes):
        raise RuntimeError("the group spans nodes")
    if symm_mem.get_backend(device) != "CUDA" or torch.cuda.get_device_capability(device) < (8, 0):
        raise RuntimeError("the kernel adds bfloat16 from sm_80 on")
    return symm_mem.empty(LIMIT_BYTES, dtype=torch.uint8, device=device)
