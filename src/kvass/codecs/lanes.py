"""Vector instructions that numba does not find by itself, put together for intrinsics.

LLVM makes them AVX-512 where it is there, and narrower or scalar instructions where not: the same bits.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

BIT, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()


def are_flat(arrays: Sequence[Any], dtypes: Sequence[Any]) -> bool:
    """Whether these numba types are contiguous arrays of one dimension and these dtypes."""
    return all(
        isinstance(array, types.Array) and (array.dtype, array.ndim, array.layout) == (dtype, 1, "C")
        for array, dtype in zip(arrays, dtypes, strict=True)
    )


def pointers(context: Any, builder: Any, kinds: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Where the elements of arrays begin."""
    return [
        context.make_array(kind)(context, builder, array).data
        for kind, array in zip(kinds, arrays, strict=True)
    ]


def splat(element: ir.Type, value: int, width: int) -> ir.Constant:
    """A vector of one constant."""
    return ir.Constant(ir.VectorType(element, width), [value] * width)


def repeated(builder: Any, value: Any, width: int) -> Any:
    """A vector of one value."""
    undefined = ir.Constant(ir.VectorType(value.type, width), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, splat(I32, 0, width))


def load(builder: Any, data: Any, index: Any, element: ir.Type, width: int) -> Any:
    """The vector of `width` elements from an index on."""
    kind = ir.PointerType(ir.VectorType(element, width))
    return builder.load(builder.bitcast(builder.gep(data, [index]), kind), align=1)


def store(builder: Any, vector: Any, data: Any, index: Any) -> None:
    """Put a vector's elements from an index on."""
    place = builder.bitcast(builder.gep(data, [index]), ir.PointerType(vector.type))
    builder.store(vector, place, align=1)


def joined(builder: Any, vectors: Sequence[Any]) -> Any:
    """Vectors of one width, a power of two in number, one after the other."""
    while len(vectors) > 1:
        width = 2 * vectors[0].type.count
        order = ir.Constant(ir.VectorType(I32, width), list(range(width)))
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [builder.shuffle_vector(one, other, order) for one, other in pairs]
    return vectors[0]


def gather(builder: Any, data: Any, indexes: Any) -> Any:
    """The 32-bit numbers at a vector of unsigned 32-bit indexes."""
    width = indexes.type.count
    many, found = ir.VectorType(I64, width), ir.VectorType(I32, width)
    base = repeated(builder, builder.ptrtoint(data, I64), width)
    places = builder.add(base, builder.shl(builder.zext(indexes, many), splat(I64, 2, width)))
    where = ir.VectorType(ir.PointerType(I32), width)
    kind = ir.FunctionType(found, [where, I32, ir.VectorType(BIT, width), found])
    call = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.gather.v{width}i32.v{width}p0")
    everywhere, nothing = splat(BIT, 1, width), ir.Constant(found, ir.Undefined)
    return builder.call(call, [builder.inttoptr(places, where), ir.Constant(I32, 4), everywhere, nothing])


def expand(builder: Any, data: Any, index: Any, mask: Any) -> Any:
    """The next 16-bit numbers from an index on, one for each element in the mask, 0 for the others."""
    width = mask.type.count
    found = ir.VectorType(I16, width)
    kind = ir.FunctionType(found, [ir.PointerType(I16), mask.type, found])
    call = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.expandload.v{width}i16")
    return builder.call(call, [builder.gep(data, [index]), mask, splat(I16, 0, width)])
