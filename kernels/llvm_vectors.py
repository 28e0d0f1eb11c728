"""LLVM's vectors in kernels whose accumulators must stay in registers, which loops over arrays don't achieve."""

from collections.abc import Sequence

from llvmlite import ir
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.typing.templates import Signature

from exegpt.kernels.bfloat16 import emit_widened

FLOAT, INDEX = ir.FloatType(), ir.IntType(64)
_BYTE = ir.IntType(8)


def splat(builder: ir.IRBuilder, vector: ir.VectorType, value: ir.Value) -> ir.Value:
    """Return a vector whose lanes all hold `value`."""
    undefined = ir.Constant(vector, ir.Undefined)
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(builder.insert_element(undefined, value, ir.IntType(32)(0)), undefined, lanes)


def load_floats(builder: ir.IRBuilder, pointer: ir.Value, count: int) -> ir.Value:
    """Return a vector of `count` floats, from a pointer to floats, or to bfloat16 or int8, widened in registers."""
    element = pointer.type.pointee
    line = builder.bitcast(pointer, ir.VectorType(element, count).as_pointer())
    if element == FLOAT:
        return builder.load(line, align=4)
    if element == _BYTE:
        return builder.sitofp(builder.load(line, align=1), ir.VectorType(FLOAT, count))
    return emit_widened(builder, builder.load(line, align=2), count)


def item_bytes(pointer: ir.Value) -> int:
    """Return the size of a pointer's element: of floats, of bfloat16 or of int8."""
    element = pointer.type.pointee
    return 4 if element == FLOAT else int(element.width) // 8


def has_evens_and_odds(pointer: ir.Value, count: int) -> bool:
    """Return whether `load_evens_and_odds` takes `count` of a pointer's elements: if they are pairs of bfloat16."""
    return item_bytes(pointer) == 2 and count % 2 == 0


def load_evens_and_odds(builder: ir.IRBuilder, pointer: ir.Value, count: int) -> ir.Value:
    """Return a vector of `count` floats from a pointer to bfloat16: those with even places, then those with odd ones.

    Each is widened by one instruction, where the order of memory takes two.
    """
    half, word = count // 2, ir.IntType(32)
    pairs = ir.VectorType(word, half)
    line = builder.load(builder.bitcast(pointer, pairs.as_pointer()), align=2)
    evens = builder.shl(line, ir.Constant(pairs, [16] * half))
    odds = builder.and_(line, ir.Constant(pairs, [0xFFFF0000] * half))
    places = ir.Constant(ir.VectorType(word, count), list(range(count)))
    return builder.bitcast(builder.shuffle_vector(evens, odds, places), ir.VectorType(FLOAT, count))


def multiply_add(builder: ir.IRBuilder, vector: ir.VectorType) -> ir.Function:
    """Return LLVM's function (a, b, c) → a · b + c of vectors of floats."""
    kind = ir.FunctionType(vector, [vector] * 3)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{vector.count}f32")


def element_pointer(
    context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Sequence[ir.Value], place: int
) -> ir.Value:
    """Return a pointer into an intrinsic's array argument, at the index that the next argument holds."""
    array = context.make_array(sig.args[place])(context, builder, args[place])
    return builder.gep(array.data, [args[place + 1]])


def byte_pointer(
    context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Sequence[ir.Value], place: int, offset: ir.Value
) -> ir.Value:
    """Return a pointer to byte `offset` of an intrinsic's array argument."""
    array = context.make_array(sig.args[place])(context, builder, args[place])
    return builder.gep(builder.bitcast(array.data, _BYTE.as_pointer()), [offset])


def fetch(builder: ir.IRBuilder, pointer: ir.Value) -> None:
    """Fetch a byte's line into the second cache, for a read that comes later: the first can wait for few at a time."""
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, second_cache, data = number(0), number(2), number(1)
    builder.call(function, [pointer, read, second_cache, data])
