"""bfloat16 in kernels that numba compiles: it has no such type, so an array of it comes as uint16.

A bfloat16 is the upper half of a float32. Kernels widen what they read and round what they write; all arithmetic is in
float32. Each function takes float32 arrays and values too, and leaves them as they are, so that one kernel serves both.
"""

from collections.abc import Sequence

from llvmlite import ir
from numba import types
from numba.core.base import BaseContext
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from exegpt.kernels.numba_jit import njit

_WORD, _HALF, _FLOAT = ir.IntType(32), ir.IntType(16), ir.FloatType()


def _like(kind: ir.Type, lanes: int) -> ir.Type:
    return ir.VectorType(kind, lanes) if lanes else kind


def emit_widened(builder: ir.IRBuilder, x: ir.Value, lanes: int = 0) -> ir.Value:
    """Emit LLVM code that widens an integer of 16 bits to a float, or a vector of `lanes` of them."""
    word = _like(_WORD, lanes)
    shift = ir.Constant(word, [16] * lanes if lanes else 16)
    return builder.bitcast(builder.shl(builder.zext(x, word), shift), _like(_FLOAT, lanes))


def emit_rounded(builder: ir.IRBuilder, x: ir.Value, lanes: int = 0) -> ir.Value:
    """Emit LLVM code that rounds a float, or a vector of `lanes` of them, to integers of 16 bits."""
    word = _like(_WORD, lanes)

    def number(value: int) -> ir.Constant:
        return ir.Constant(word, [value] * lanes if lanes else value)

    bits = builder.bitcast(x, word)
    odd = builder.and_(builder.lshr(bits, number(16)), number(1))
    to_even = builder.add(bits, builder.add(odd, number(0x7FFF)))
    nan = builder.icmp_signed(">", builder.and_(bits, number(0x7FFFFFFF)), number(0x7F800000))
    kept = builder.select(nan, number(0x7FC00000), to_even)
    return builder.trunc(builder.lshr(kept, number(16)), _like(_HALF, lanes))


@intrinsic
def _widened(_, x):  # type: ignore[no-untyped-def]
    def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Sequence[ir.Value]) -> ir.Value:
        return args[0] if sig.args[0] == types.float32 else emit_widened(builder, args[0])

    return types.float32(x), codegen


@intrinsic
def _rounded(_, value, target):  # type: ignore[no-untyped-def]
    def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Sequence[ir.Value]) -> ir.Value:
        return args[0] if sig.return_type == types.float32 else emit_rounded(builder, args[0])

    return target.dtype(types.float32, target), codegen


@njit
def widened(x):  # type: ignore[no-untyped-def]
    """Return an array's element as float32."""
    return _widened(x)


@njit
def rounded(value, target):  # type: ignore[no-untyped-def]
    """Return a float32 as an element of the array `target`: to the nearest bfloat16, of two equally near the even."""
    return _rounded(value, target)
