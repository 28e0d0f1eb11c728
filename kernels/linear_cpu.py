"""Products in tiles on a CPU, compiled by numba: of bfloat16 weights without instructions for them, of float32 on AVX2.

Bfloat16 weights stay in 16 bits in memory and are widened in registers, so that they are read in half of float32's
time; the arithmetic is float32's. Weights lie in panels of 16 outputs. A tile of 6 rows by one panel is accumulated in
12 registers of 8 floats, of the 16 that AVX2 has. A part of a panel stays in the first cache for all tiles of a block
of rows, and the next panel is fetched meanwhile. An output's sum doesn't depend on the number of rows.
"""

import itertools
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

from exegpt.kernels.bfloat16 import emit_rounded, rounded, widened
from exegpt.kernels.exponential import exp
from exegpt.kernels.kernel_dtypes import Values, njit_by_dtype
from exegpt.kernels.llvm_vectors import (
    FLOAT,
    INDEX,
    byte_pointer,
    element_pointer,
    fetch,
    load_floats,
    multiply_add,
    splat,
)
from exegpt.kernels.numba_jit import njit
from exegpt.kernels.numba_threads import follow_torch
from exegpt.kernels.swiglu import BEND, SLOPE

_PANEL, _LANES = 16, 8
_ROWS = 6
_BLOCK = 96
"""Rows that are multiplied by one panel after the other: they stay in the second cache."""
_DEPTH = 256
"""Inputs of a panel that are multiplied by all rows of a block before the next ones: they stay in the first cache."""
ACTIVATIONS = {None: 0, "relu": 1, "gelu_tanh": 2}
_SLOPE, _BEND = np.float32(SLOPE), np.float32(BEND)


def to_panels(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [outputs, inputs] as [panels, inputs, 16]; missing outputs of the last panel are zeros."""
    outputs, inputs = weight.shape
    padded = F.pad(weight, (0, 0, 0, -outputs % _PANEL))
    return padded.view(-1, _PANEL, inputs).transpose(1, 2).contiguous()


def panel_product(
    x: torch.Tensor, panels: Values, outputs: int, bias: Values, activation: int, residual: torch.Tensor | None
) -> torch.Tensor:
    """Compute activation(x · Wᵀ + bias) + residual in x's dtype, [rows, outputs], rounded once; see `PackedLinear`.

    `bias` may be empty. A residual is overwritten by the result.
    """
    follow_torch()
    states = x.float().contiguous()
    if residual is None:
        out = torch.empty(x.shape[0], outputs, dtype=x.dtype)
    else:
        out = residual.to(x.dtype).contiguous()
        states = states.clone() if states.data_ptr() == out.data_ptr() else states  # tiles write while others read
    _product(out, states, panels, bias, activation, residual is not None)
    return out


@intrinsic(prefer_literal=True)
def _tile(_, rows, x, x_start, inputs, depth, panels, start, ahead, step, sums, sums_start):  # type: ignore[no-untyped-def]
    """Add Σ_k x[x_start + r·inputs + k] · panels[start + 16·k + n], for k < depth, to sums[sums_start + 16·r + n].

    Starts count elements. Meanwhile fetch `step` bytes for each k from byte `ahead` of the panels on. `rows` is a
    compile-time constant, x and `sums` are float32, `panels` too or bfloat16.
    """
    if not isinstance(rows, types.IntegerLiteral):
        return None
    tall = rows.literal_value

    def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Sequence[ir.Value]) -> ir.Value:
        vector, halves = ir.VectorType(FLOAT, _LANES), range(0, _PANEL, _LANES)
        states, weights, target = (element_pointer(context, builder, sig, args, place) for place in (1, 5, 9))
        coming = byte_pointer(context, builder, sig, args, 5, args[7])
        fma, zero = multiply_add(builder, vector), ir.Constant(vector, [0.0] * _LANES)
        totals = [[cgutils.alloca_once_value(builder, zero) for _ in halves] for _ in range(tall)]
        places = [
            builder.bitcast(builder.gep(target, [INDEX(place * _LANES)]), vector.as_pointer())
            for place in range(tall * len(halves))
        ]
        for total, place in zip(itertools.chain(*totals), places, strict=True):
            builder.store(builder.load(place, align=4), total)
        lines = [builder.gep(states, [builder.mul(args[3], INDEX(r))]) for r in range(tall)]
        with cgutils.for_range(builder, args[4]) as loop:
            fetch(builder, builder.gep(coming, [builder.mul(loop.index, args[8])]))
            at = builder.gep(weights, [builder.mul(loop.index, INDEX(_PANEL))])
            loaded = [load_floats(builder, builder.gep(at, [INDEX(half)]), _LANES) for half in halves]
            for line, row in zip(lines, totals, strict=True):
                factor = splat(builder, vector, builder.load(builder.gep(line, [loop.index])))
                for weight, total in zip(loaded, row, strict=True):
                    builder.store(builder.call(fma, [factor, weight, builder.load(total)]), total)
        for total, place in zip(itertools.chain(*totals), places, strict=True):
            builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    return types.void(rows, x, x_start, inputs, depth, panels, start, ahead, step, sums, sums_start), codegen


@njit(error_model="numpy")
def _multiply(rows, x, at, inputs, depth, panels, start, ahead, step, sums, to):  # type: ignore[no-untyped-def]
    """Add products of 1 to `_ROWS` rows of x, from element `at` on, and a part of a panel to the sums from `to` on."""
    if rows == 6:
        _tile(6, x, at, inputs, depth, panels, start, ahead, step, sums, to)
    elif rows == 5:
        _tile(5, x, at, inputs, depth, panels, start, ahead, step, sums, to)
    elif rows == 4:
        _tile(4, x, at, inputs, depth, panels, start, ahead, step, sums, to)
    elif rows == 3:
        _tile(3, x, at, inputs, depth, panels, start, ahead, step, sums, to)
    elif rows == 2:
        _tile(2, x, at, inputs, depth, panels, start, ahead, step, sums, to)
    else:
        _tile(1, x, at, inputs, depth, panels, start, ahead, step, sums, to)


@intrinsic(prefer_literal=True)
def _round(_, adds, sums, row, out, start):  # type: ignore[no-untyped-def]
    """Write the 16 sums from element `row` on to out[start:] in its dtype; if `adds`, a literal, plus what it holds."""
    if not isinstance(adds, types.IntegerLiteral):
        return None

    def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Sequence[ir.Value]) -> ir.Value:
        sums, target = (element_pointer(context, builder, sig, args, place) for place in (1, 3))
        for half in range(0, _PANEL, _LANES):
            y = load_floats(builder, builder.gep(sums, [INDEX(half)]), _LANES)
            pointer = builder.gep(target, [INDEX(half)])
            if adds.literal_value:
                y = builder.fadd(y, load_floats(builder, pointer, _LANES))
            element = pointer.type.pointee
            line = builder.bitcast(pointer, ir.VectorType(element, _LANES).as_pointer())
            own = element == FLOAT
            builder.store(y if own else emit_rounded(builder, y, _LANES), line, align=4 if own else 2)
        return context.get_dummy_value()

    return types.void(adds, sums, row, out, start), codegen


@njit(error_model="numpy")
def activate(sums, bias, first, activation):  # type: ignore[no-untyped-def]
    """Add the bias to a row's sums, and apply the activation, in place."""
    for n in range(min(_PANEL, len(bias) - first)):
        sums[n] += widened(bias[first + n])
    if activation == 1:
        for n in range(_PANEL):
            sums[n] = np.float32(0) if sums[n] < 0 else sums[n]
    elif activation == 2:
        for n in range(_PANEL):
            y = sums[n]
            sums[n] = y / (np.float32(1) + exp(-_SLOPE * (y + _BEND * y * y * y)))


@njit(error_model="numpy")
def write_row(out, row, first, sums, r, adds):  # type: ignore[no-untyped-def]
    """Write row r of the sums to out[row, first:], if `adds`, plus what it holds."""
    outputs = out.shape[1]
    if first + _PANEL > outputs:
        for n in range(outputs - first):
            y = sums[r, n] + widened(out[row, first + n]) if adds else sums[r, n]
            out[row, first + n] = rounded(y, out)
    elif adds:
        _round(1, sums, r * _PANEL, out, row * outputs + first)
    else:
        _round(0, sums, r * _PANEL, out, row * outputs + first)


@njit_by_dtype("void(real[:, ::1], float32[:, ::1], real[:, :, ::1], real[::1], int64, boolean)")
def _product(out, x, panels, bias, activation, adds):  # type: ignore[no-untyped-def]
    rows, count, inputs = len(x), len(panels), x.shape[1]
    line = panels.itemsize * _PANEL
    for item in prange(count * (-(-rows // _BLOCK))):  # blocks outermost: threads share a block's panels
        begin, panel = item // count * _BLOCK, item % count
        block_rows = min(_BLOCK, rows - begin)
        tiles = -(-block_rows // _ROWS)
        sums = np.zeros((block_rows, _PANEL), np.float32)
        # The next panel comes from memory while this one is multiplied by the rows: a part of it with each tile.
        step, ahead = line // tiles, (panel + 1) % count * inputs * line
        for first in range(0, inputs, _DEPTH):
            depth, start, row = min(_DEPTH, inputs - first), (panel * inputs + first) * _PANEL, 0
            for left in range(tiles, 0, -1):  # rows are dealt evenly: short tiles don't fill the pipelines
                tall, at = -(-(block_rows - row) // left), (begin + row) * inputs + first
                _multiply(tall, x, at, inputs, depth, panels, start, ahead, step, sums, row * _PANEL)
                row += tall
                ahead += step * depth
        for r in range(block_rows):
            if activation or len(bias):
                activate(sums[r], bias, panel * _PANEL, activation)
            write_row(out, begin + r, panel * _PANEL, sums, r, adds)
