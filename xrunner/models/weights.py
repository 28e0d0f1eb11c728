"""Sources of a model's tensors: safetensors files, or a random generator of the same shapes."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from exegpt.kernels.linear import can_tile
from exegpt.kernels.quantized_weight import LONGEST_GROUP, QuantizedWeight, rounded_to_nearest
from xcore.document import check_file, read_json
from xcore.errors import InputError, refusing
from xcore.specs.model import WEIGHT_BITS, ModelSpec
from xcore.specs.quantization import PackedFormat
from xrunner.models.device import CPU
from xrunner.models.packed_weights import PARTS, read_packed

if TYPE_CHECKING:
    from safetensors import safe_open

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes in which models run."""
QUANTIZED = {"int4": torch.bfloat16, "w8a16": torch.bfloat16, "w4a32": torch.float32, "w8a32": torch.float32}
"""Dtypes of models whose weights stay in 4 or 8 bits → the dtype of their activations."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of that name, of activations.

    Raises:
        InputError: Models don't run in it.
    """
    if name not in DTYPES | QUANTIZED:
        raise InputError(f"Models can't run in dtype '{name}' here: use {' or '.join(DTYPES)}.")
    return (DTYPES | QUANTIZED)[name]


def weight_bits(dtype: str) -> int | None:
    """Return the bits of a dtype's quantised weights; None: weights are floats."""
    return WEIGHT_BITS.get(dtype)


def products_text(dtype: str, on_cpu: bool) -> tuple[str, ...]:
    """Return a sentence on how products read weights in this dtype, if it isn't the usual way."""
    kind = torch_dtype(dtype)
    if dtype in QUANTIZED:
        return (f"products: weights stay in {weight_bits(dtype)} bits, and are dequantised where they are multiplied",)
    if not on_cpu or kind != torch.bfloat16 or not can_tile(kind):
        return ()
    return ("products: bf16 weights are widened in registers, since this CPU has no bf16 products",)


Matrix = torch.Tensor | QuantizedWeight


class Weights(Protocol):
    """A source of tensors by name, on a device."""

    device: torch.device

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor of that name, which must have that shape."""

    def matrix(self, name: str, shape: tuple[int, ...]) -> Matrix:
        """Return the matrix of that name, [outputs, inputs], quantised if this source holds it so."""

    def __contains__(self, name: str) -> bool:
        """Return whether there is such a tensor."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    name: str
    dtype: str | None
    """As safetensors names it: F32, BF16, F8_E4M3, …; None: the file is not on this machine."""
    file: Path


class SafetensorsWeights:
    """Tensors of a model directory, read one by one from `model.safetensors` or the shards that its index names."""

    def __init__(
        self,
        directory: str | Path,
        dtype: torch.dtype,
        device: torch.device = CPU,
        format: PackedFormat | None = None,
    ):
        self.directory = Path(directory)
        self.format = format
        self.dtype = dtype
        self.device = device
        self._files: dict[str, safe_open] = {}
        self._where = self._index()

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor in this source's dtype on its device.

        Raises:
            InputError: The file or tensor is missing, torn or misshapen; the message names it.
        """
        tensor = self.as_stored(name)
        if tuple(tensor.shape) != shape:
            path = self.directory / self._where[name]
            raise InputError(
                f"Tensor '{name}' in '{path}' has shape {list(tensor.shape)}, but its config.json needs {list(shape)}."
            )
        return tensor.to(self.device, self.dtype)

    def matrix(self, name: str, shape: tuple[int, ...]) -> Matrix:
        """Return a matrix in this source's dtype, or with its codes if the files hold them.

        Raises:
            InputError: As `get`.
        """
        base = name.removesuffix("weight")
        if self.format is None or base + PARTS[self.format.method][0] not in self:
            return self.get(name, shape)

        def read(end: str) -> torch.Tensor | None:
            return self.as_stored(base + end) if base + end in self else None

        return read_packed(read, self.format, shape, name)

    def as_stored(self, name: str) -> torch.Tensor:
        """Return the tensor in its file's dtype.

        Raises:
            InputError: The file or tensor is missing or torn; the message names it.
        """
        if name not in self._where:
            raise InputError(f"The weights in '{self.directory}' lack the tensor '{name}'.")
        path = self.directory / self._where[name]
        with refusing(f"Tensor '{name}' can't be read from '{path}'"):
            tensor: torch.Tensor = self._open(path).get_tensor(name)
        return tensor

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def stored(self) -> Iterator[StoredTensor]:
        """Yield every tensor of every file, from the index and the files' headers.

        The machine of a stage may have only the files with that stage's layers.

        Raises:
            InputError: A file is torn, or has a tensor that the index doesn't name there.
        """
        for file in sorted(set(self._where.values())):
            path = self.directory / file
            if not path.is_file():
                yield from (StoredTensor(name, None, path) for name, where in self._where.items() if where == file)
                continue
            opened = self._open(path)
            for name in opened.keys():  # noqa: SIM118 (no dict: it can't be iterated)
                if self._where.get(name) != file:
                    where = f"in '{self._where[name]}'" if name in self._where else "in no file"
                    raise InputError(
                        f"Tensor '{name}' is in '{path}', but the index has it {where}: write the index again."
                    )
                yield StoredTensor(name, opened.get_slice(name).get_dtype(), path)

    def _index(self) -> dict[str, str]:
        index, single = (self.directory / name for name in ("model.safetensors.index.json", "model.safetensors"))
        if not index.is_file():
            return dict.fromkeys(self._open(single).keys(), single.name)
        try:
            where: dict[str, str] = read_json(index)["weight_map"]
            plain = all(isinstance(file, str) and Path(file).name == file for file in where.values())
        except (KeyError, TypeError, AttributeError):
            raise InputError(f"'{index}' is not an index of safetensors files: it needs a weight_map.") from None
        if not plain:
            raise InputError(f"'{index}' names files outside of its directory: only plain file names are allowed.")
        if single.is_file() and single.name not in where.values():
            raise InputError(
                f"'{self.directory}' has both '{single.name}' and '{index.name}': remove the outdated one."
            )
        return where

    def _open(self, path: Path) -> "safe_open":
        from safetensors import safe_open

        if path.name not in self._files:
            with refusing(f"'{path}' is not a whole safetensors file"):
                check_file(path, "weights file")
                self._files[path.name] = safe_open(path, framework="pt")
        return self._files[path.name]


class RandomWeights:
    """Tensors drawn at random, scaled so that every layer changes its input and greedy output doesn't degenerate."""

    def __init__(self, dtype: torch.dtype, seed: int = 0, device: torch.device = CPU, bits: int | None = None):
        self.dtype = dtype
        self.bits = bits
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Draw a tensor of this shape.

        Norms are one and biases small. Matrices keep their input's scale; the embeddings give it 1 and the head 3.
        """
        if len(shape) == 1:
            if name.endswith("bias"):
                drawn = torch.randn(shape, generator=self._generator, device=self.device)
                return (drawn * 0.02).to(self.dtype)
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        # A head times a normalised state gives logits of deviation 3. A tied one serves as embedding as well.
        deviation = 3.0 / math.sqrt(shape[-1]) if name.endswith(_HEADS) else 1 / math.sqrt(_inputs(name, shape))
        drawn = torch.empty(shape, device=self.device).normal_(0, deviation, generator=self._generator)
        return drawn.to(self.dtype)

    def matrix(self, name: str, shape: tuple[int, ...]) -> Matrix:
        """Draw a matrix, and round it if this source has bits: the output head stays as it is, as in most files."""
        drawn = self.get(name, shape)
        if self.bits is None or name.endswith(_HEADS):
            return drawn
        return rounded_to_nearest(drawn, self.bits, min(LONGEST_GROUP, shape[1] + shape[1] % 2))

    def __contains__(self, name: str) -> bool:
        return False  # tensors are drawn by `get`


def stored_name(weights: Weights, prefix: str, name: str) -> str:
    """Return a tensor's full name, or the one without the prefix, as in the first checkpoints of GPT-2 and OPT."""
    short = name.removeprefix(prefix)
    return name if name in weights or short not in weights else short


def read(weights: Weights, prefix: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor by its `stored_name`."""
    return weights.get(stored_name(weights, prefix, name), shape)


def output_head(spec: ModelSpec, weights: Weights, embedding: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the head's matrix in floats, [vocab, hidden].

    A tied head is the embedding, unless the files hold a separate head, which transformers uses too.
    """
    if spec.tied_embeddings and "lm_head.weight" not in weights:
        return embedding()
    return weights.get("lm_head.weight", (spec.vocab, spec.hidden))


def output_matrix(spec: ModelSpec, weights: Weights, embedding: Callable[[], torch.Tensor]) -> Matrix:
    """Return the head's matrix as `output_head`, quantised if the files hold it so."""
    quantised = any(f"lm_head.{ends[0]}" in weights for ends in PARTS.values())
    if spec.tied_embeddings and not quantised:
        return output_head(spec, weights, embedding)
    return weights.matrix("lm_head.weight", (spec.vocab, spec.hidden))


_HEADS = ("lm_head.weight", "wte.weight", "decoder.embed_tokens.weight")
_EMBEDDINGS = ("shared.weight", "embed_tokens.weight", "embed_positions.weight", "wpe.weight")


def _inputs(name: str, shape: tuple[int, ...]) -> int:
    """Return the number of inputs that a matrix sums over.

    The number is 1 for an embedding. GPT-2 stores its matrices [inputs, outputs].
    """
    if name.endswith(_EMBEDDINGS):
        return 1
    return shape[0] if ".c_" in name else shape[1]
