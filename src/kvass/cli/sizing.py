"""kvass size: how many bytes the KV of so many tokens takes, as the formula with the numbers put in."""

from typing import Annotated, Any, get_args

import typer

from kvass.cli.output import AsJson, needs_transformers, out, print_json
from kvass.cli.output import size as readable
from kvass.config import Settings
from kvass.errors import InputError
from kvass.spec import DTypeName, KVSpec, LayerGroup, numpy_dtype


def size(
    tokens: Annotated[int, typer.Option(help="Tokens of the text.")],
    model: Annotated[
        str | None, typer.Argument(help="A bundled model, a .gguf file, or a model directory.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Instead of a model: its layers,")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="its KV heads,")] = None,
    head_dim: Annotated[int | None, typer.Option(help="and the dim of a head.")] = None,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(get_args(DTypeName))}.")] = "bfloat16",
    as_json: AsJson = False,
) -> None:
    """Say how much KV a text takes, by layer group; no weights are read.

    Example: kvass size smollm2-135m --tokens 8000

    Example: kvass size --layers 80 --kv-heads 8 --head-dim 128 --dtype float16 --tokens 100000
    """
    _at_least_one("--tokens", tokens)
    if dtype not in get_args(DTypeName):
        raise InputError(f"--dtype is {dtype!r}; it must be one of {', '.join(get_args(DTypeName))}")
    numbers = {"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim}
    spec = _of_numbers(numbers, dtype) if model is None else _of_model(model, numbers, dtype)
    groups = [_described(group, tokens) for group in spec.groups]
    total = spec.bytes_per_token * tokens
    if as_json:
        print_json(
            {
                "tokens": tokens,
                "dtype": dtype,
                "bytes_per_token": spec.bytes_per_token,
                "bytes": total,
                "groups": groups,
            }
        )
        return
    for group, described in zip(spec.groups, groups, strict=True):
        line = f"{described['formula']} = {described['bytes']:,} bytes ({readable(described['bytes'])})"
        out.print(line, soft_wrap=True)
        if group.window is not None:
            seen = tokens - group.first_needed(tokens)
            out.print(
                f"  sliding window of {group.window}: all of it is stored; a hit at the end needs the last "
                f"{seen:,} tokens, {described['bytes_seen']:,} bytes ({readable(described['bytes_seen'])})",
                soft_wrap=True,
            )
    if len(groups) > 1:
        out.print(f"together {total:,} bytes ({readable(total)})")
    out.print(f"a token: {spec.bytes_per_token:,} bytes")


def _described(group: LayerGroup, tokens: int) -> dict[str, Any]:
    heads = (
        f"2 x {len(group.layers)} layers x {group.kv_heads} KV heads x {group.head_dim} head dim"
        if group.head_dim == group.v_head_dim
        else f"{len(group.layers)} layers x {group.kv_heads} KV heads x "
        f"({group.head_dim} + {group.v_head_dim}) head dims of K and V"
    )
    width = numpy_dtype(group.dtype).itemsize
    return {
        "kind": group.kind,
        "layers": len(group.layers),
        "kv_heads": group.kv_heads,
        "head_dim": group.head_dim,
        "v_head_dim": group.v_head_dim,
        "window": group.window,
        "bytes_per_token": group.bytes_per_token,
        "bytes": group.bytes_per_token * tokens,
        "bytes_seen": group.bytes_per_token * (tokens - group.first_needed(tokens)),
        "formula": f"{heads} x {width} bytes ({group.dtype}) x {tokens:,} tokens",
    }


def _of_numbers(numbers: dict[str, int | None], dtype: str) -> KVSpec:
    if all(value is None for value in numbers.values()):
        raise InputError(f"give a MODEL, or {', '.join(numbers)}")
    given = {}
    for name, value in numbers.items():
        if value is None:
            raise InputError(f"{name} is missing; without a MODEL, {', '.join(numbers)} are needed")
        given[name] = _at_least_one(name, value)
    dim = given["--head-dim"]
    group = LayerGroup(
        kind="attention", layers=tuple(range(given["--layers"])), kv_heads=given["--kv-heads"],
        head_dim=dim, v_head_dim=dim, dtype=dtype,
    )  # fmt: skip
    return KVSpec(groups=(group,))


def _of_model(model: str, numbers: dict[str, int | None], dtype: str) -> KVSpec:
    named = [name for name, value in numbers.items() if value is not None]
    if named:
        raise InputError(f"{named[0]} stands instead of a MODEL, not beside one")
    needs_transformers()
    from kvass.engines.transformers.shapes import spec_of_config

    return spec_of_config(model, dtype, Settings.load().models_path)


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise InputError(f"{name} is {value}; it must be 1 or more")
    return value
