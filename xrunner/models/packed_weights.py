"""Weights of 4 or 8 bits as the files of GPTQ, AWQ and compressed-tensors hold them."""

from collections.abc import Callable

import torch

from exegpt.kernels.quantized_weight import QuantizedWeight
from xcore.errors import InputError
from xcore.specs.quantization import PackedFormat

Read = Callable[[str], torch.Tensor | None]
"""Returns a matrix's tensor by the end of its name, as it is stored; None if the files lack it."""

PARTS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
}
"""Method → ends of the names of a matrix's tensors; the first has the codes."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)
"""Dtypes of words and of indices; a smaller one has lost codes."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of eight neighbouring outputs in AWQ's layout."""


def unpacked(words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Return the codes in words of 32 bits, int32 [rows, columns]: those of a word follow each other along `axis`."""
    shifts, mask = torch.arange(0, 32, bits, dtype=torch.int32), 2**bits - 1
    shifts = shifts.view(-1, 1) if axis == 0 else shifts
    codes: torch.Tensor = (words.unsqueeze(axis + 1) >> shifts) & mask
    return codes.flatten(axis, axis + 1)


def packed(codes: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Return the words of `unpacked` codes: int32 [rows, columns], as many along `axis` as fill words."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int64)
    grouped = codes.long().unflatten(axis, (-1, 32 // bits))
    words = (grouped << (shifts.view(-1, 1) if axis == 0 else shifts)).sum(axis + 1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def read_packed(read: Read, format: PackedFormat, shape: tuple[int, ...], name: str) -> QuantizedWeight:
    """Return a matrix of a checkpoint, [outputs, inputs]; `name` is for messages.

    Raises:
        InputError: A tensor is missing or misshapen, or groups can't be multiplied.
    """
    half, parts = 2 ** (format.bits - 1), {end: read(end) for end in PARTS[format.method]}
    size = format.group_size or shape[1]
    groups = -(-shape[1] // size)

    def part(end: str, *expected: int, among: tuple[torch.dtype, ...] = _INTEGERS) -> torch.Tensor:
        tensor = parts[end]
        if tensor is None:
            raise InputError(f"The quantised matrix '{name}' has no tensor '{end}': write the checkpoint again.")
        if tuple(tensor.shape) != expected:
            raise InputError(
                f"Tensor '{end}' of the quantised matrix '{name}' has shape {list(tensor.shape)}, but its config.json "
                f"needs {list(expected)}."
            )
        if tensor.dtype not in (_FLOATS if end.endswith(("scale", "scales")) else among):
            raise InputError(
                f"Tensor '{end}' of the quantised matrix '{name}' has the dtype {tensor.dtype}: write the checkpoint "
                "again."
            )
        return tensor

    per_word, (outputs, inputs) = 32 // format.bits, shape
    if format.method == "compressed-tensors":
        words = part("weight_packed", outputs, -(-inputs // per_word))
        codes, scales = unpacked(words, format.bits, 1)[:, :inputs], part("weight_scale", outputs, groups)
        zeros, places = parts["weight_zero_point"], "weight_g_idx"
        if zeros is not None and zeros.dtype == torch.int32:
            words = part("weight_zero_point", -(-outputs // per_word), groups)
            zeros = unpacked(words, format.bits, 0)[:outputs] - half
        elif zeros is not None:
            zeros = part("weight_zero_point", outputs, groups, among=(torch.int8, *_INTEGERS))
    else:
        rows = inputs // per_word if format.method == "gptq" else inputs
        columns = outputs if format.method == "gptq" else outputs // per_word
        words, stored = part("qweight", rows, columns), part("qzeros", groups, outputs // per_word)
        codes, zeros = (
            unpacked(words, format.bits, 0 if format.method == "gptq" else 1),
            unpacked(stored, format.bits, 1),
        )
        if format.method == "awq":
            codes, zeros = (c.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1) for c in (codes, zeros))
        zeros = ((zeros + format.zero_offset) & (2**format.bits - 1)).t() - half
        codes, scales, places = codes.t(), part("scales", groups, outputs).t(), "g_idx"
    order = None if parts.get(places) is None else _order(part(places, inputs), size, name)
    codes = (codes - half).to(torch.int8)
    return QuantizedWeight(
        codes=(codes if order is None else codes[:, order]).contiguous(),
        scales=scales.float().contiguous(),
        zeros=zeros.to(torch.int16).contiguous() if zeros is not None and zeros.any() else None,
        bits=format.bits,
        group_size=size + size % 2,
        order=order,
    )


def _order(index: torch.Tensor, size: int, name: str) -> torch.Tensor | None:
    """Return the inputs in an order in which each group's are neighbours, given each input's group; None: as they are.

    Raises:
        InputError: A group but the last has another number of inputs than `size`.
    """
    expected = torch.arange(len(index)) // size
    if torch.equal(index.long(), expected):
        return None
    order = index.long().argsort(stable=True)
    if not torch.equal(index.long()[order], expected):
        raise InputError(f"The groups of the quantised matrix '{name}' don't have {size} inputs each (g_idx).")
    return order
