"""Products with weights of 8 or 4 bits in groups on a CPU, compiled by numba.

Codes are widened to float32 in registers, and one group's sum is multiplied by its scale. For many rows, a group of
codes is widened once into a buffer in the first caches. Both ways compute an output by the same operations in the same
order, so that it doesn't depend on the number of rows. Vectors have 16 floats, which LLVM splits for AVX2.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from exegpt.kernels.kernel_dtypes import njit_by_dtype
from exegpt.kernels.linear_cpu import ACTIVATIONS, activate, write_row
from exegpt.kernels.llvm_vectors import FLOAT, INDEX, element_pointer, load_floats, multiply_add, splat
from exegpt.kernels.numba_jit import njit
from exegpt.kernels.numba_threads import follow_torch

_PANEL = 16
_STRIP = 4
"""Panels that a thread multiplies by one row at a time: enough independent sums."""
_ROWS = 6
_BLOCK = 96
_FEW = 6
"""Rows up to which codes are widened in registers: there is no second tile that widens them again."""
_BYTE, _WORD = ir.IntType(8), ir.IntType(32)
_FLOATS, _INT8, _INT4, _INT8_ZEROS, _INT4_ZEROS = 0, 1, 2, 3, 4
"""Kinds of weights: float32, codes of 8 and 4 bits, and such codes with zero points."""


def _emit_zeros(builder: ir.IRBuilder, pointer: ir.Value, kind: int) -> ir.Value | None:
    """Emit a panel's zero points, at a pointer to 16 bits, as a vector of words; None if this kind has none."""
    if kind not in (_INT8_ZEROS, _INT4_ZEROS):
        return None
    halves = ir.VectorType(ir.IntType(16), _PANEL)
    loaded = builder.load(builder.bitcast(pointer, halves.as_pointer()), align=2)
    return builder.sext(loaded, ir.VectorType(_WORD, _PANEL))


def _emit_floats(builder: ir.IRBuilder, pointer: ir.Value, kind: int, zeros: ir.Value | None) -> list[ir.Value]:
    """Emit the weights of a panel at a pointer: one vector of floats, or those of two inputs for 4 bits.

    Codes of 4 bits are two in a byte, the first input's in its lower half. Their floats are 16 times the codes.
    """
    if kind == _FLOATS:
        return [load_floats(builder, pointer, _PANEL)]
    narrow = ir.VectorType(_BYTE, _PANEL)
    codes = builder.load(builder.bitcast(pointer, narrow.as_pointer()), align=1)
    parts = [codes]
    if kind in (_INT4, _INT4_ZEROS):
        lower = builder.shl(codes, ir.Constant(narrow, [4] * _PANEL))
        parts = [lower, builder.and_(codes, ir.Constant(narrow, [0xF0] * _PANEL))]
    words = [builder.sext(part, ir.VectorType(_WORD, _PANEL)) for part in parts]
    words = words if zeros is None else [builder.sub(word, zeros) for word in words]
    return [builder.sitofp(word, ir.VectorType(FLOAT, _PANEL)) for word in words]


@intrinsic(prefer_literal=True)
def _tile(_, shape, kind, x, row, inputs, codes, code, stride, lines, scales, scale, zeros, zero, hop, y, place, span):  # type: ignore[no-untyped-def]
    """Add the products of a group of inputs with rows of x and panels of weights, times its scales, to y.

    Of row r and panel p, the sums over k of x[row + r·inputs + k] · w are added to 16 elements of y at
    place + span·p + 16·r. The panel's weights begin at code + stride·p, its scales at scale + hop·p, its zero points at
    zero + hop·p. `shape` is 10 · rows + panels, and `kind` a kind of weights, both compile-time constants. `lines`
    counts vectors of a panel: inputs, or pairs of inputs for 4 bits.
    """
    if not isinstance(shape, types.IntegerLiteral) or not isinstance(kind, types.IntegerLiteral):
        return None
    rows, panels = (range(count) for count in divmod(shape.literal_value, 10))
    sort, step = kind.literal_value, 2 if kind.literal_value in (_INT4, _INT4_ZEROS) else 1

    def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Sequence[ir.Value]) -> ir.Value:
        def steps(place: int, hop: ir.Value, count: range) -> list[ir.Value]:
            first = element_pointer(context, builder, sig, args, place)
            return [builder.gep(first, [builder.mul(hop, INDEX(n))]) for n in count]

        vector = ir.VectorType(FLOAT, _PANEL)
        fma = multiply_add(builder, vector)
        states, weights = steps(2, args[4], rows), steps(5, args[7], panels)
        offsets = [_emit_zeros(builder, pointer, sort) for pointer in steps(11, args[13], panels)]
        sums = [[cgutils.alloca_once(builder, vector) for _ in panels] for _ in rows]
        for own in (own for line in sums for own in line):
            builder.store(ir.Constant(vector, [0.0] * _PANEL), own)
        with cgutils.for_range(builder, args[8]) as loop:
            at, k = builder.mul(loop.index, INDEX(_PANEL)), builder.mul(loop.index, INDEX(step))
            floats = [
                _emit_floats(builder, builder.gep(pointer, [at]), sort, offset)
                for pointer, offset in zip(weights, offsets, strict=True)
            ]
            for j in range(step):
                for state, line in zip(states, sums, strict=True):
                    element = builder.load(builder.gep(state, [builder.add(k, INDEX(j))]))
                    factor = splat(builder, vector, element)
                    for own, weight in zip(line, floats, strict=True):
                        builder.store(builder.call(fma, [factor, weight[j], builder.load(own)]), own)
        factors = [load_floats(builder, pointer, _PANEL) for pointer in steps(9, args[13], panels)]
        targets = steps(14, args[16], panels)
        for r, line in enumerate(sums):
            for own, factor, target in zip(line, factors, targets, strict=True):
                pointer = builder.gep(target, [INDEX(r * _PANEL)])
                added = builder.call(fma, [factor, builder.load(own), load_floats(builder, pointer, _PANEL)])
                builder.store(added, builder.bitcast(pointer, vector.as_pointer()), align=4)
        return context.get_dummy_value()

    arguments = shape, kind, x, row, inputs, codes, code, stride, lines, scales, scale, zeros, zero, hop, y, place, span
    return types.void(*arguments), codegen


@intrinsic(prefer_literal=True)
def _widen(_, kind, codes, code, lines, zeros, zero, wide):  # type: ignore[no-untyped-def]
    """Write the floats of `lines` vectors of a panel's codes, less its zero points at `zero`, to `wide`."""
    if not isinstance(kind, types.IntegerLiteral):
        return None

    def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Sequence[ir.Value]) -> ir.Value:
        weights, offsets = (element_pointer(context, builder, sig, args, place) for place in (1, 4))
        target, vector = context.make_array(sig.args[6])(context, builder, args[6]).data, ir.VectorType(FLOAT, _PANEL)
        subtracted = _emit_zeros(builder, offsets, kind.literal_value)
        with cgutils.for_range(builder, args[3]) as loop:
            line = builder.gep(weights, [builder.mul(loop.index, INDEX(_PANEL))])
            floats = _emit_floats(builder, line, kind.literal_value, subtracted)
            first = builder.mul(loop.index, INDEX(_PANEL * len(floats)))
            for j, own in enumerate(floats):
                pointer = builder.gep(target, [builder.add(first, INDEX(j * _PANEL))])
                builder.store(own, builder.bitcast(pointer, vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(kind, codes, code, lines, zeros, zero, wide), codegen


@njit(error_model="numpy")
def _few(kind, x, row, rows, codes, code, stride, lines, scales, zeros, scale, hop, y, place, span):  # type: ignore[no-untyped-def]
    """Add a group's products of up to `_ROWS` rows, from element `row` of x on, and a strip of panels to y.

    Return the number of rows.
    """
    inputs, zero = x.shape[1], scale if zeros.size else 0
    if rows == 1:
        _tile(14, kind, x, row, inputs, codes, code, stride, lines, scales, scale, zeros, zero, hop, y, place, span)
        return 1
    for p in range(0, _STRIP, 2 if rows <= 3 else 1):
        of, at, to = code + p * stride, scale + p * hop, place + p * span
        zero = at if zeros.size else 0
        if rows <= 3:
            _tile(22, kind, x, row, inputs, codes, of, stride, lines, scales, at, zeros, zero, hop, y, to, span)
        elif rows < _ROWS:
            _tile(41, kind, x, row, inputs, codes, of, stride, lines, scales, at, zeros, zero, hop, y, to, span)
        else:
            _tile(61, kind, x, row, inputs, codes, of, stride, lines, scales, at, zeros, zero, hop, y, to, span)
    return 2 if rows <= 3 else 4 if rows < _ROWS else _ROWS


@njit(error_model="numpy")
def _many(x, row, rows, wide, inputs, scales, scale, zeros, y, place):  # type: ignore[no-untyped-def]
    """Add a group's products of rows, from element `row` of x on, and a panel in `wide` to y, from `place` on."""
    r, columns = 0, x.shape[1]
    while r < rows:
        at, to = row + r * columns, place + r * _PANEL
        if rows - r >= _ROWS:
            _tile(61, 0, x, at, columns, wide, 0, 0, inputs, scales, scale, zeros, 0, 0, y, to, 0)
            r += _ROWS
        elif rows - r >= 3:
            _tile(31, 0, x, at, columns, wide, 0, 0, inputs, scales, scale, zeros, 0, 0, y, to, 0)
            r += 3
        else:
            _tile(11, 0, x, at, columns, wide, 0, 0, inputs, scales, scale, zeros, 0, 0, y, to, 0)
            r += 1


@njit(error_model="numpy")
def _strip(kind, x, begin, rows, codes, scales, zeros, panel, size):  # type: ignore[no-untyped-def]
    """Return the products [STRIP, rows, 16] of rows of x and a strip of panels; `kind` is a literal."""
    inputs, step = x.shape[1], 2 if kind in (_INT4, _INT4_ZEROS) else 1
    totals = np.zeros((_STRIP, rows, _PANEL), np.float32)
    stride, hop, span = codes.shape[1] * _PANEL, scales.shape[1] * _PANEL, rows * _PANEL
    wide = np.empty(0 if rows <= _FEW else size * _PANEL, np.float32)
    for group in range(scales.shape[1]):
        start = group * size
        count = min(size, inputs - start)
        lines, row = count // step, begin * inputs + start
        code, scale = panel * stride + start // step * _PANEL, panel * hop + group * _PANEL
        if rows <= _FEW:
            done = 0
            while done < rows:
                at, left, to = row + done * inputs, rows - done, done * _PANEL
                done += _few(kind, x, at, left, codes, code, stride, lines, scales, zeros, scale, hop, totals, to, span)
            continue
        for p in range(_STRIP):
            _widen(kind, codes, code + p * stride, lines, zeros, scale + p * hop if zeros.size else 0, wide)
            _many(x, row, rows, wide, count, scales, scale + p * hop, zeros, totals, p * span)
    return totals


@njit_by_dtype(
    "void(float32[:, ::1], float32[:, ::1], int8[:, :, ::1], float32[:, :, ::1], int16[:, :, ::1], float32[::1], int64,"
    " int64, int64, boolean)"
)
def _product(out, x, codes, scales, zeros, bias, bits, size, activation, adds):  # type: ignore[no-untyped-def]
    rows, outputs = out.shape
    strips = len(codes) // _STRIP
    for item in prange(strips * (-(-rows // _BLOCK))):  # blocks outermost: threads share a block's rows
        begin, panel = item // strips * _BLOCK, item % strips * _STRIP
        count = min(_BLOCK, rows - begin)
        if bits == 8 and zeros.size:
            totals = _strip(3, x, begin, count, codes, scales, zeros, panel, size)
        elif bits == 8:
            totals = _strip(1, x, begin, count, codes, scales, zeros, panel, size)
        elif zeros.size:
            totals = _strip(4, x, begin, count, codes, scales, zeros, panel, size)
        else:
            totals = _strip(2, x, begin, count, codes, scales, zeros, panel, size)
        for p in range(min(_STRIP, -(-outputs // _PANEL) - panel)):
            first = (panel + p) * _PANEL
            for r in range(count):
                if activation or len(bias):
                    activate(totals[p, r], bias, first, activation)
                write_row(out, begin + r, first, totals[p], r, adds)


def to_strips(values: torch.Tensor) -> torch.Tensor:
    """Return [outputs, columns] as [panels, columns, 16], of whole strips: missing outputs are zeros."""
    outputs, columns = values.shape
    padded = F.pad(values, (0, 0, 0, -outputs % (_PANEL * _STRIP)))
    return padded.view(-1, _PANEL, columns).transpose(1, 2).contiguous()


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return signed codes, int8 [outputs, inputs], as int8 [panels, lines, 16]: of 4 bits two inputs in a byte."""
    if bits == 8:
        return to_strips(codes)
    panels = to_strips(F.pad(codes, (0, codes.shape[1] % 2)))
    return (panels[:, ::2] & 15) | (panels[:, 1::2] << 4)


def quantized_product(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    outputs: int,
    bits: int,
    group_size: int,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Compute activation(x · Wᵀ + bias) + residual in x's dtype, [rows, outputs], rounded once.

    W is (code - zero) · scale of the output's group of inputs. A residual may be overwritten by the result.

    Args:
        x: float32 or bfloat16 [rows, inputs].
        codes: int8, from `pack_codes`.
        scales: float32 [panels, groups, 16]; for 4 bits divided by 16.
        zeros: int16 [panels, groups, 16]; for 4 bits multiplied by 16. Empty: all are zero.
        outputs: Number of outputs; the last panels may have more.
        bits: 8 or 4.
        group_size: Inputs of a group, an even number; the last group may have fewer.
        bias: [outputs].
        activation: As in `PackedLinear`.
        residual: [rows, outputs].
    """
    follow_torch()
    states = x.float().contiguous()
    if bits == 4 and x.shape[1] % 2:
        states = F.pad(states, (0, 1))
    if residual is None:
        out = torch.empty(len(x), outputs)
    else:
        out = residual.float().contiguous()
        states = states.clone() if states.data_ptr() == out.data_ptr() else states  # tiles write while others read
    bias = torch.empty(0) if bias is None else bias.float()
    how = bits, group_size, ACTIVATIONS[activation], residual is not None
    _product(out, states, codes, scales, zeros, bias, *how)
    return out.to(x.dtype)
