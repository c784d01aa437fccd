"""Sums of a matrix's rows, each by a factor of its own, as vector instructions.

float32 products and sums, none fused, one after the other: the same everywhere.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvass.codecs import lanes
from kvass.codecs.lanes import F32, I32, I64

FACTORS = 64
"""Factors that a mask tells apart."""
WIDE, NARROW = 64, 16
"""Columns that are summed up together."""


def _nonzero(context: Any, factors: Any, at: Any) -> tuple[Any, Callable[..., Any]] | None:
    """Which of the 64 float32 factors from `at` on are not zero, the first in the lowest bit."""
    if not lanes.are_flat((factors,), (types.float32,)):
        return None
    return types.uint64(factors, types.int64), _generate_nonzero


nonzero = intrinsic(_nonzero)


def _generate_nonzero(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
    array, at = arguments
    (factors,) = lanes.pointers(context, builder, signature.args[:1], [array])
    zero = ir.Constant(ir.VectorType(F32, FACTORS), [0.0] * FACTORS)
    found = builder.fcmp_unordered("!=", lanes.load(builder, factors, at, F32, FACTORS), zero)
    return builder.bitcast(found, I64)


def _adding(width: int) -> Callable[..., Any]:
    def add(
        context: Any,
        factors: Any,
        matrix: Any,
        sums: Any,
        mask: Any,
        factor: Any,
        place: Any,
        stride: Any,
        to: Any,
    ) -> tuple[Any, Callable[..., Any]] | None:
        """Add to `sums` `to` .. `to + width - 1`, for every i in the mask from the lowest on, the numbers of
        `matrix` from `place + i * stride` on, each times `factors[factor + i]`."""
        arrays = (factors, matrix, sums)
        if not lanes.are_flat(arrays, (types.float32,) * 3):
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
            return _generate_add(context, builder, signature, arguments, width)

        return types.void(*arrays, types.uint64, *[types.int64] * 4), generate

    return add


add_wide, add_narrow = intrinsic(_adding(WIDE)), intrinsic(_adding(NARROW))


def _generate_add(context: Any, builder: Any, signature: Any, arguments: Sequence[Any], width: int) -> Any:
    *arrays, mask, factor, place, stride, to = arguments
    factors, matrix, sums = lanes.pointers(context, builder, signature.args[:3], arrays)
    floats = ir.VectorType(F32, width)
    undefined = ir.Constant(floats, ir.Undefined)
    zero, one = ir.Constant(I64, 0), ir.Constant(I64, 1)
    left, total = cgutils.alloca_once_value(builder, mask), cgutils.alloca_once(builder, floats)
    builder.store(lanes.load(builder, sums, to, F32, width), total)
    test, body, end = (builder.append_basic_block(name) for name in ("test", "body", "end"))
    builder.branch(test)
    builder.position_at_end(test)
    some = builder.load(left)
    builder.cbranch(builder.icmp_unsigned("!=", some, zero), body, end)
    builder.position_at_end(body)
    i = builder.cttz(some, ir.Constant(lanes.BIT, 1))
    builder.store(builder.and_(some, builder.sub(some, one)), left)
    value = builder.load(builder.gep(factors, [builder.add(factor, i)]))
    value = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    value = builder.shuffle_vector(value, undefined, lanes.splat(I32, 0, width))
    row = lanes.load(builder, matrix, builder.add(place, builder.mul(i, stride)), F32, width)
    builder.store(builder.fadd(builder.load(total), builder.fmul(value, row)), total)
    builder.branch(test)
    builder.position_at_end(end)
    lanes.store(builder, builder.load(total), sums, to)
    return context.get_dummy_value()
