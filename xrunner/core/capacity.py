"""Capacity: the KV blocks and bytes that a rank needs, checked against its memory before they are allocated."""

import torch

from xcore.batching import Preemption
from xcore.errors import InputError
from xcore.policies.from_schedule import most_prompts
from xcore.policies.waa import most_in_transfer
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import Schedule
from xrunner.comm import kv_transfer
from xrunner.comm.place import Place
from xrunner.comm.ranks import Ranks
from xrunner.models import Model
from xrunner.models.device import CPU, free_memory, identity
from xrunner.models.weights import torch_dtype
from xrunner.rank.swap_space import blocks_at_once
from xrunner.rank.warm_up import Extent


def cache_blocks(place: Place, spec: ModelSpec) -> int:
    """Return the KV blocks of a rank.

    On a rank that only encodes, one batch has the whole cache, and frees it once it is encoded.
    """
    schedule = place.schedule
    if place.line[0].phase != "encode":
        return schedule.kv_blocks
    if spec.longest_request is None:
        return schedule.kv_blocks
    longest = -(-spec.longest_request // schedule.block_size)
    return min(schedule.kv_blocks, _most_encoded(schedule) * longest)


def _most_encoded(schedule: Schedule) -> int:
    """Return the most sequences of a batch on ranks that only encode."""
    most = most_prompts(schedule)
    assert most, "disaggregated policies limit the prompts of a batch"
    return most


def cache_bytes(model: Model, schedule: Schedule, blocks: int) -> int:
    """Return the bytes of a rank's KV cache with `blocks` blocks."""
    tokens = blocks * schedule.block_size
    return tokens * model.cached_layers * model.share.kv_bytes(1, model.kv_dtype)


def buffer_bytes(model: Model, place: Place, extent: Extent) -> int:
    """Return the bytes of the buffers in which this rank receives, and of the largest message that it sends."""
    spec, schedule = model.spec, place.schedule
    states = extent.tokens * spec.hidden * torch_dtype(model.dtype).itemsize
    batches = 1 if place.line[0].phase == "both" else most_in_transfer(len(place.encoder.line))
    if spec.encoder_layers:
        sends_or_receives = place.encoded_by is not None or bool(place.encodes_for)
        return ((place.before is not None) + batches * sends_or_receives) * states
    transferred = 0
    if place.line[0].phase != "both":
        a_batch = extent.tokens // schedule.block_size + _most_encoded(schedule)
        transferred = min(batches * a_batch, schedule.kv_blocks)
    return (place.before is not None) * states + kv_transfer.buffer_bytes(place, spec, transferred)


def swap_buffer_bytes(model: Model, schedule: Schedule) -> int:
    """Return the bytes of a GPU's buffer for swapped blocks."""
    block = cache_bytes(model, schedule, 1)
    return blocks_at_once(block) * block


def check_buffers(
    model: Model, place: Place, ranks: Ranks, extent: Extent, preemption: Preemption | None = None
) -> None:
    """Check a rank's buffers, and the keys and values of swapped sequences on its host, as `check_memory` does."""
    blocks = preemption.host_blocks if preemption else 0
    what, need = f"A buffer for {extent.tokens} tokens on each rank", buffer_bytes(model, place, extent)
    if blocks and model.device.type == "cuda":
        what, need = f"{what}, and one for swapped blocks,", need + swap_buffer_bytes(model, place.schedule)
    check_memory(model.device, ranks, what, need)
    if blocks:
        what = f"A swap space of {blocks} KV blocks on the host of each rank"
        check_memory(CPU, ranks, what, cache_bytes(model, place.schedule, blocks), "pass --swap-blocks")


def check_memory(
    device: torch.device, ranks: Ranks, what: str, need: int, instead: str = "use a schedule with fewer blocks"
) -> None:
    """Check that the `need` bytes that each rank is about to allocate fit into their device's free memory.

    `what` begins the error's sentence, and `instead` is the way out.

    Raises:
        InputError: On all ranks, if a device has too little memory.
    """
    mine = ranks.host, identity(device)
    everyone = ranks.all((mine, need))

    def check() -> dict[str, str]:
        total, free = sum(size for device, size in everyone if device == mine), free_memory(device)
        if total > free:
            raise InputError(
                f"{what} needs {total / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are available: {instead}."
            )
        return {}

    ranks.agree(check)
