"""Pairs of key channels put on their grid, rotated and rounded to bfloat16, as vector instructions.

float32 products and sums, none fused, so the same everywhere.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvass.codecs import lanes
from kvass.codecs.lanes import F32, I16, I32, splat

WIDTH = 32


def _turn(
    context: Any,
    levels: Any,
    grid: Any,
    rows: Any,
    out: Any,
    level: Any,
    zero: Any,
    scale: Any,
    row: Any,
    to: Any,
    half: Any,
) -> tuple[Any, Callable[..., Any]] | None:
    """Fill `out` `to` .. `to` + 31 and the same behind `half`.

    Levels, float32 or uint8, stand from `level` on, zeros and scales in `grid` from `zero` and `scale`, those
    of the second ones `half` behind; cosines in `rows` from `row` on, and sines `half` behind them.
    """
    dtype = getattr(levels, "dtype", None)
    arrays = (levels, grid, rows, out)
    if dtype not in (types.float32, types.uint8) or not lanes.are_flat(
        arrays, (dtype, types.float32, types.float32, types.uint16)
    ):
        return None
    return types.void(*arrays, *[types.int64] * 6), _generate


turn = intrinsic(_turn)


def _generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
    *arrays, level, zero, scale, row, to, half = arguments
    levels, grid, rows, out = lanes.pointers(context, builder, signature.args[:4], arrays)
    floats = ir.VectorType(F32, WIDTH)

    def behind(index: Any) -> Any:
        return builder.add(index, half)

    def value(level: Any, zero: Any, scale: Any) -> Any:
        if signature.args[0].dtype == types.float32:
            wide = lanes.load(builder, levels, level, F32, WIDTH)
        else:
            wide = builder.uitofp(lanes.load(builder, levels, level, lanes.I8, WIDTH), floats)
        steps = builder.fmul(wide, lanes.load(builder, grid, scale, F32, WIDTH))
        return builder.fadd(lanes.load(builder, grid, zero, F32, WIDTH), steps)

    low, high = value(level, zero, scale), value(behind(level), behind(zero), behind(scale))
    cos = lanes.load(builder, rows, row, F32, WIDTH)
    sin = lanes.load(builder, rows, behind(row), F32, WIDTH)
    first = builder.fsub(builder.fmul(low, cos), builder.fmul(high, sin))
    second = builder.fadd(builder.fmul(high, cos), builder.fmul(low, sin))
    lanes.store(builder, _rounded(builder, first), out, to)
    lanes.store(builder, _rounded(builder, second), out, behind(to))
    return context.get_dummy_value()


def _rounded(builder: Any, value: Any) -> Any:
    """bfloat16 of finite numbers, to nearest, ties to even."""
    bits = builder.bitcast(value, ir.VectorType(I32, WIDTH))
    half = splat(I32, 16, WIDTH)
    odd = builder.and_(builder.lshr(bits, half), splat(I32, 1, WIDTH))
    bits = builder.add(builder.add(bits, splat(I32, 0x7FFF, WIDTH)), odd)
    return builder.trunc(builder.lshr(bits, half), ir.VectorType(I16, WIDTH))
