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
from kvass.codecs.lanes import F32, I64

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
    row = lanes.load(builder, matrix, builder.add(place, builder.mul(i, stride)), F32, width)
    product = builder.fmul(lanes.repeated(builder, value, width), row)
    builder.store(builder.fadd(builder.load(total), product), total)
    builder.branch(test)
    builder.position_at_end(end)
    lanes.store(builder, builder.load(total), sums, to)
    return context.get_dummy_value()


def _adding_pair(width: int) -> Callable[..., Any]:
    def add_pair(
        context: Any,
        factors: Any,
        matrix: Any,
        sums: Any,
        count: Any,
        factor: Any,
        pitch: Any,
        place: Any,
        stride: Any,
        to: Any,
        step: Any,
    ) -> tuple[Any, Callable[..., Any]] | None:
        """Add to `sums` `to` .. `to + width - 1`, for every i below `count` in turn, the numbers of `matrix`
        from `place + i * stride` on, each times `factors[factor + i]`; and the same `step` further on in
        sums, of factors `pitch` further on."""
        arrays = (factors, matrix, sums)
        if not lanes.are_flat(arrays, (types.float32,) * 3):
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
            return _generate_pair(context, builder, signature, arguments, width)

        return types.void(*arrays, *[types.int64] * 7), generate

    return add_pair


add_pair_wide, add_pair_narrow = intrinsic(_adding_pair(WIDE)), intrinsic(_adding_pair(NARROW))


def _generate_pair(context: Any, builder: Any, signature: Any, arguments: Sequence[Any], width: int) -> Any:
    *arrays, count, factor, pitch, place, stride, to, step = arguments
    factors, matrix, sums = lanes.pointers(context, builder, signature.args[:3], arrays)
    begins, ends = (factor, builder.add(factor, pitch)), (to, builder.add(to, step))
    totals = [cgutils.alloca_once(builder, ir.VectorType(F32, width)) for _ in ends]
    for total, end in zip(totals, ends, strict=True):
        builder.store(lanes.load(builder, sums, end, F32, width), total)
    with cgutils.for_range(builder, count) as loop:
        i = loop.index
        row = lanes.load(builder, matrix, builder.add(place, builder.mul(i, stride)), F32, width)
        for total, begin in zip(totals, begins, strict=True):
            value = builder.load(builder.gep(factors, [builder.add(begin, i)]))
            product = builder.fmul(lanes.repeated(builder, value, width), row)
            builder.store(builder.fadd(builder.load(total), product), total)
    for total, end in zip(totals, ends, strict=True):
        lanes.store(builder, builder.load(total), sums, end)
    return context.get_dummy_value()


def _turn(
    context: Any, x: Any, cos: Any, sin: Any, out: Any, at: Any, half: Any, place: Any
) -> tuple[Any, Callable[..., Any]] | None:
    """Turn `NARROW` pairs of `x`, from `at` and from `at + half` on, by cosines and sines from `place` on,
    into the same places of `out`."""
    arrays = (x, cos, sin, out)
    if not lanes.are_flat(arrays, (types.float32,) * 4):
        return None
    return types.void(*arrays, *[types.int64] * 3), _generate_turn


turn = intrinsic(_turn)


def _generate_turn(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
    *arrays, at, half, place = arguments
    x, cos, sin, out = lanes.pointers(context, builder, signature.args[:4], arrays)
    further = builder.add(at, half)
    low, high = (lanes.load(builder, x, where, F32, NARROW) for where in (at, further))
    c, s = (lanes.load(builder, part, place, F32, NARROW) for part in (cos, sin))
    lanes.store(builder, builder.fsub(builder.fmul(low, c), builder.fmul(high, s)), out, at)
    lanes.store(builder, builder.fadd(builder.fmul(high, c), builder.fmul(low, s)), out, further)
    return context.get_dummy_value()
