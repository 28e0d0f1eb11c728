"""Products of bfloat16 in the tiles of Intel's AMX, compiled by numba.

AMX multiplies tiles of 16 rows by 32 inputs with tiles of 32 inputs by 16 outputs, and adds float32 sums. Weights lie
in panels of 32 outputs. Two tiles of rows are multiplied by the two tiles of a panel's outputs at a time, and meanwhile
the next panel is fetched from memory: a few dozen rows take the time of reading the weights once. An output's sum
doesn't depend on the number of rows.
"""

import functools
from collections.abc import Sequence

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from exegpt.kernels.bfloat16 import rounded, widened
from exegpt.kernels.exponential import exp
from exegpt.kernels.kernel_dtypes import Values, njit_by_dtype
from exegpt.kernels.linear_cpu import activate
from exegpt.kernels.llvm_vectors import INDEX, byte_pointer, element_pointer, fetch, load_floats
from exegpt.kernels.numba_jit import njit
from exegpt.kernels.numba_threads import follow_torch

_TILE = 16
"""Rows, and outputs, of a tile."""
_DEPTH = 32
"""Inputs of a tile."""
_PANEL = 2 * _TILE
_LINES = _PANEL * _DEPTH * 2 // 64
"""Lines of the cache that a panel has for `_DEPTH` inputs."""
_BLOCK_BYTES = 2**17
"""Bytes of panels that are multiplied by all rows before the next ones: they stay in the second cache."""
_PAST_BYTES = 2**20
"""Size in bytes from which a result is written past the caches: it is too large to stay in them until it is read."""
SWIGLU = 3
"""The activation, beside those of `linear_cpu`, that halves the outputs: silu(gate) · up."""
_BYTE, _WORD = ir.IntType(8), ir.IntType(32)


@functools.cache
def has_amx() -> bool:
    """Return whether this CPU has AMX, and torch, numba and the operating system let it be used."""
    if not getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)():
        return False
    config, host = vars(numba.config), llvm.get_host_cpu_features()
    if config["CPU_NAME"] or config["CPU_FEATURES"] or not config["ENABLE_AVX"]:  # kernels are for another CPU
        return False
    return all(host.get(name, False) for name in ("amx-bf16", "avx512bf16")) and bool(torch.cpu._init_amx())


def to_amx_panels(weight: torch.Tensor, gated: bool = False) -> torch.Tensor:
    """Return a weight [outputs, inputs] as [panels, inputs / 32, 2 tiles, 16 pairs of inputs, 16 outputs · 2].

    Missing outputs of the last panel are zeros. The inputs are a multiple of 32. `gated`: the first half of the outputs
    gates the second half; a panel has 16 outputs of each.
    """
    outputs, inputs = weight.shape
    if gated:
        weight = weight.view(2, -1, _TILE, inputs).transpose(0, 1).reshape(outputs, inputs)
    padded = F.pad(weight, (0, 0, 0, -outputs % _PANEL))
    tiles = padded.view(-1, 2, _TILE, inputs // _DEPTH, _TILE, 2)  # panel, tile, output, depth, pair, input
    return tiles.permute(0, 3, 1, 4, 2, 5).contiguous().view(-1, inputs // _DEPTH, 2, _TILE, _PANEL)


def _call(builder: ir.IRBuilder, name: str, *arguments: ir.Value) -> None:
    """Call one of LLVM's functions for AMX."""
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)


@intrinsic
def _configure(_):  # type: ignore[no-untyped-def]
    """Give this thread eight tiles of 16 lines of 64 bytes."""

    def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Sequence[ir.Value]) -> ir.Value:
        palette, tiles = [1, *[0] * 15], 8
        columns = [byte for _ in range(tiles) for byte in (64, 0)] + [0] * (32 - 2 * tiles)  # 16 bits each
        lines = [_TILE] * tiles + [0] * (16 - tiles)
        content = ir.Constant(ir.ArrayType(_BYTE, 64), [*palette, *columns, *lines])
        place = cgutils.alloca_once_value(builder, content)
        _call(builder, "ldtilecfg", builder.bitcast(place, _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _release(_):  # type: ignore[no-untyped-def]
    """Release this thread's tiles, which context switches would save, and make its writes visible to other threads."""

    def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Sequence[ir.Value]) -> ir.Value:
        _call(builder, "sse.sfence")
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic(prefer_literal=True)
def _block(_, tall, upper, upper_at, lower, lower_at, inputs, panels, start, ahead, lines, sums):  # type: ignore[no-untyped-def]
    """Compute the sums of 16 rows and 32 outputs, or of 32 rows if `tall`, a literal, is 2.

    The first 16 rows are upper[upper_at + r · inputs:], the others lower[lower_at + r · inputs:], the weights
    panels[start:]; starts count elements. Meanwhile fetch `lines` lines of the cache for each 32 inputs, from byte
    `ahead` of the panels on.
    """
    if not isinstance(tall, types.IntegerLiteral):
        return None
    halves = range(tall.literal_value)

    def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Sequence[ir.Value]) -> ir.Value:
        def bytes_of(pointer: ir.Value) -> ir.Value:
            return builder.bitcast(pointer, _BYTE.as_pointer())

        sources = [bytes_of(element_pointer(context, builder, sig, args, place)) for place in (1, 3)]
        weights = bytes_of(element_pointer(context, builder, sig, args, 6))
        coming = byte_pointer(context, builder, sig, args, 6, args[8])
        totals, rows, columns = (0, 1, 2, 3), (4, 5), (6, 7)  # numbers of tiles
        for half in halves:
            for column in range(2):
                _call(builder, "tilezero", _BYTE(totals[2 * half + column]))
        with cgutils.for_range(builder, builder.udiv(args[5], INDEX(_DEPTH))) as loop:
            with cgutils.for_range(builder, args[9]) as line:
                number = builder.add(builder.mul(loop.index, args[9]), line.index)
                fetch(builder, builder.gep(coming, [builder.mul(number, INDEX(64))]))
            at = builder.gep(weights, [builder.mul(loop.index, INDEX(_LINES * 64))])
            for column in range(2):
                tile = builder.gep(at, [INDEX(column * _TILE * 64)])
                _call(builder, "tileloadd64", _BYTE(columns[column]), tile, INDEX(64))
            for half in halves:
                source = builder.gep(sources[half], [builder.mul(loop.index, INDEX(64))])
                _call(builder, "tileloadd64", _BYTE(rows[half]), source, builder.mul(args[5], INDEX(2)))
                for column in range(2):
                    total = _BYTE(totals[2 * half + column])
                    _call(builder, "tdpbf16ps", total, _BYTE(rows[half]), _BYTE(columns[column]))
        array = context.make_array(sig.args[10])(context, builder, args[10])
        target = bytes_of(array.data)
        for half in halves:
            for column in range(2):
                place = builder.gep(target, [INDEX((half * _TILE * _PANEL + column * _TILE) * 4)])
                _call(builder, "tilestored64", _BYTE(totals[2 * half + column]), place, INDEX(_PANEL * 4))
        return context.get_dummy_value()

    arguments = tall, upper, upper_at, lower, lower_at, inputs, panels, start, ahead, lines, sums
    return types.void(*arguments), codegen


_PLAIN, _ADDED, _PAST = range(3)
"""How sums are written: as they are, added to what is there, or past the caches."""


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat."""

    def _to_string(self) -> str:
        return "bfloat"


_NARROW = ir.VectorType(_BFloat(), _PANEL)


@intrinsic(prefer_literal=True)
def _write_rows(_, writes, sums, count, out, start, stride):  # type: ignore[no-untyped-def]
    """Round the 32 sums of each of `count` rows to out[start + r · stride:], as the literal `writes` says."""
    if not isinstance(writes, types.IntegerLiteral):
        return None

    def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Sequence[ir.Value]) -> ir.Value:
        values = context.make_array(sig.args[1])(context, builder, args[1]).data
        target = element_pointer(context, builder, sig, args, 3)
        integers = ir.VectorType(target.type.pointee, _PANEL)
        with cgutils.for_range(builder, args[2]) as loop:
            y = load_floats(builder, builder.gep(values, [builder.mul(loop.index, INDEX(_PANEL))]), _PANEL)
            pointer = builder.gep(target, [builder.mul(loop.index, args[5])])
            if writes.literal_value == _ADDED:
                y = builder.fadd(y, load_floats(builder, pointer, _PANEL))
            line = builder.bitcast(pointer, integers.as_pointer())
            past = writes.literal_value == _PAST
            stored = builder.store(
                builder.bitcast(builder.fptrunc(y, _NARROW), integers), line, align=64 if past else 2
            )
            if past:
                stored.set_metadata("nontemporal", builder.module.add_metadata([_WORD(1)]))
        return context.get_dummy_value()

    return types.void(writes, sums, count, out, start, stride), codegen


@njit(error_model="numpy")
def _finish(out, row, panel, sums, count, bias, activation, adds):  # type: ignore[no-untyped-def]
    """Finish `count` rows of a panel's sums, and write them to out[row:], if `adds`, plus what it holds."""
    outputs, first = out.shape[1], panel * _PANEL
    if activation or len(bias):
        for r in range(count):
            for half in range(0, _PANEL, _TILE):
                activate(sums[r, half : half + _TILE], bias, first + half, activation)
    if first + _PANEL > outputs:
        for r in range(count):
            for n in range(outputs - first):
                y = sums[r, n] + widened(out[row + r, first + n]) if adds else sums[r, n]
                out[row + r, first + n] = rounded(y, out)
    elif adds:
        _write_rows(_ADDED, sums, count, out, row * outputs + first, outputs)
    elif out.size * 2 > _PAST_BYTES and outputs % _PANEL == 0:
        _write_rows(_PAST, sums, count, out, row * outputs + first, outputs)
    else:
        _write_rows(_PLAIN, sums, count, out, row * outputs + first, outputs)


@njit(fastmath=True, error_model="numpy")
def _gate(out, row, panel, sums, count):  # type: ignore[no-untyped-def]
    """Write SwiGLU of `count` rows of a panel's gates and of what they gate to out[row:]."""
    first = panel * _TILE
    for r in range(count):
        for n in range(_TILE):
            gate = sums[r, n]
            out[row + r, first + n] = rounded(gate / (np.float32(1) + exp(-gate)) * sums[r, _TILE + n], out)


@njit
def _last_rows(x):  # type: ignore[no-untyped-def]
    """Return the rows after the last full tile, then arbitrary ones: a tile."""
    tile = np.empty((_TILE, x.shape[1]), x.dtype)
    start = len(x) // _TILE * _TILE
    tile[: len(x) - start] = x[start:]
    return tile


@njit_by_dtype("void(real[:, ::1], real[:, ::1], real[:, :, :, :, ::1], real[::1], int64, boolean, int64)")
def _product(out, x, panels, bias, activation, adds, shares):  # type: ignore[no-untyped-def]
    rows, inputs = x.shape
    count, full = len(panels), rows // _TILE * _TILE
    panel_bytes = inputs * _PANEL * 2
    most = max(1, _BLOCK_BYTES // panel_bytes)
    for share in prange(shares):
        tail, sums = _last_rows(x), np.empty((2 * _TILE, _PANEL), np.float32)
        _configure()
        begin, end = share * count // shares, (share + 1) * count // shares
        for first in range(begin, end, most):
            last = min(end, first + most)
            for row in range(0, rows, 2 * _TILE):
                high = min(rows - row, 2 * _TILE)
                upper, upper_at = (x, row * inputs) if row + _TILE <= full else (tail, 0)
                lower, lower_at = (x, (row + _TILE) * inputs) if row + 2 * _TILE <= full else (tail, 0)
                lines = _LINES if row == 0 else 0
                for panel in range(first, last):
                    start, ahead = panel * inputs * _PANEL, min(panel + 1, count - 1) * panel_bytes
                    if high > _TILE:
                        _block(2, upper, upper_at, lower, lower_at, inputs, panels, start, ahead, lines, sums)
                    else:
                        _block(1, upper, upper_at, lower, lower_at, inputs, panels, start, ahead, lines, sums)
                    if activation == SWIGLU:
                        _gate(out, row, panel, sums, high)
                    else:
                        _finish(out, row, panel, sums, high, bias, activation, adds)
        _release()


def amx_product(
    x: torch.Tensor, panels: Values, outputs: int, bias: Values, activation: int, residual: torch.Tensor | None
) -> torch.Tensor:
    """Compute activation(x · Wᵀ + bias) + residual in bfloat16, [rows, outputs], rounded once; see `PackedLinear`.

    `bias` may be empty. A residual is overwritten by the result. With `SWIGLU`, there is neither.
    """
    follow_torch()
    x = x.contiguous()
    if residual is None:
        out = torch.empty(x.shape[0], outputs, dtype=x.dtype)
    else:
        out = residual.contiguous()
        x = x.clone() if x.data_ptr() == out.data_ptr() else x  # tiles write while others read
    _product(out, x, panels, bias, activation, residual is not None, torch.get_num_threads())
    return out
