"""The KV cache of one device: one tensor of keys and one of values per layer, allocated once, in blocks."""

import contextlib
import math
import mmap
from dataclasses import dataclass

import torch

from exegpt.kernels.kv_int8 import SCALE_BYTES
from exegpt.kernels.kv_layout import key_shape
from xcore.errors import InputError
from xcore.specs.model import ModelSpec, usual_kv_dtype
from xrunner.models.device import CPU, free_memory
from xrunner.models.weights import torch_dtype


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer.

    Values are [blocks, kv_heads, block_size, head_size]; keys have the device's layout, see `kernels/kv_layout.py`. In
    int8, each block also has scales, see `kernels/kv_int8.py`.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @classmethod
    def allocate(
        cls,
        spec: ModelSpec,
        layers: int,
        blocks: int,
        block_size: int,
        dtype: str,
        device: torch.device = CPU,
    ) -> "KVCache":
        """Return empty tensors for `blocks` blocks.

        Raises:
            InputError: The device has no memory for them.
        """
        need = blocks * block_size * layers * spec.kv_bytes(1, dtype)
        free = free_memory(device)
        if need > free:
            raise InputError(
                f"A KV cache of {blocks} blocks of {block_size} tokens needs {need / 2**30:.1f} GiB, and "
                f"{free / 2**30:.1f} GiB are available: use a schedule with fewer blocks."
            )
        kind, width = _stored(spec, dtype)
        shape = blocks, spec.kv_heads, block_size, width
        values = tuple(scattered_zeros(shape, kind, device) for _ in range(layers))
        return cls(tuple(scattered_zeros(key_shape(layer), kind, device) for layer in values), values)

    @classmethod
    def over(cls, memory: torch.Tensor, spec: ModelSpec, layers: int, block_size: int, dtype: str) -> "KVCache":
        """Return a cache that is a view of a memory, uint8 [bytes], which also holds other models' blocks.

        A block is contiguous: the keys and the values of its first layer, of the second, and so on, pieces of one size.
        A block's number is the number of its first piece. So the tensors are views of the same memory at different
        offsets.
        """
        kind, width = _stored(spec, dtype)
        pieces = memory.view(kind).view(-1, spec.kv_heads, block_size, width)
        values = tuple(pieces[2 * layer + 1 :] for layer in range(layers))
        keys = (pieces[2 * layer :] for layer in range(layers))
        return cls(tuple(key.view(key_shape(key)) for key in keys), values)

    @property
    def last(self) -> int:
        """The last block that all layers have: in a shared memory, later layers have fewer blocks."""
        return len(self.values[-1]) - 1

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.keys + self.values)

    def touch(self, blocks: int) -> None:
        """Write the first `blocks` blocks, so that the system maps their memory now and not during a run."""
        for tensor in self.keys + self.values:
            tensor[:blocks].zero_()


def checked_kv_dtype(kv_dtype: str | None, spec: ModelSpec, dtype: str, device: torch.device = CPU) -> str:
    """Return the dtype of keys and values of a model that runs in `dtype` on a device; None: that of activations.

    Raises:
        InputError: The model can't be run with this KV dtype on the device.
    """
    usual = usual_kv_dtype(dtype)
    if kv_dtype in (None, usual):
        return usual
    if kv_dtype != "int8":
        raise InputError(f"Keys and values can't be in {kv_dtype} in a run in {dtype}: use {usual}, or int8 on a CPU.")
    if device.type != "cpu":
        raise InputError(f"Keys and values in int8 are computed on a CPU only: use --device cpu, or {usual}.")
    if spec.encoder_layers:
        raise InputError(
            f"'{spec.name}' is an encoder-decoder, which can't run with int8 keys and values: use {usual}."
        )
    if spec.head_size % SCALE_BYTES:
        raise InputError(
            f"'{spec.name}' has heads of size {spec.head_size}, and int8 keys and values need a multiple of "
            f"{SCALE_BYTES}: use {usual}."
        )
    return kv_dtype


def _stored(spec: ModelSpec, dtype: str) -> tuple[torch.dtype, int]:
    """Return the elements in which a KV dtype is stored, and how many of them one head's key or value takes."""
    if dtype == "int8":
        return torch.int8, spec.head_size + SCALE_BYTES
    return torch_dtype(dtype), spec.head_size


def scattered_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
    """Return zeros for scattered reads: on the CPU in huge pages, if the system has them.

    A block is about as large as a small page. With small pages, address translation takes a seventh of decoding's
    attention.
    """
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    bytes_ = max(1, math.prod(shape)) * dtype.itemsize
    memory = mmap.mmap(-1, bytes_, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)[: math.prod(shape)].view(shape)
