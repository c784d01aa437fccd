"""Commands that look at what is stored, and remove it: ls, show, verify, rm, stats."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Annotated, Any

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from kvass.cache import KVCache, StoredChunk
from kvass.cli.output import AsJson, Tenant, out, print_json, progress, size, when
from kvass.codecs.registry import NotDecodableError
from kvass.config import Settings
from kvass.errors import CorruptObjectError, InputError
from kvass.keys import tenant_digest
from kvass.provenance import Blended, Lossy, kind_of_class
from kvass.serve.tenants import tenant_salt

_WIDE = 130
"""Columns of a terminal that all of a listing fits into."""


def list_objects(
    limit: Annotated[int, typer.Option(min=1, help="Show at most so many objects.")] = 50,
    tier: Annotated[str | None, typer.Option(help="Only this tier (host, disk, or a remote one).")] = None,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """List stored objects of this tenant: address, tier, model, tokens, size, codec, how much
    smaller than raw, provenance.

    Example: kvass ls --tier disk --limit 10
    """
    with _opened(tenant) as (cache, salt):
        known_tier(cache, tier)
        shown = list(islice(_own(cache, salt, tier), limit))
    if as_json:
        print_json([_row(stored, header) for stored, header in shown])
        return
    wide = out.width >= _WIDE
    table = Table(box=SIMPLE_HEAD, padding=0)
    titles = ("address", "tier", "model", "tokens", "size", "codec", "ratio", "provenance")
    for title in titles if wide else (title for title in titles if title != "model"):
        table.add_column(title, no_wrap=True)
    if wide:
        table.add_column("last used", no_wrap=True)
    for stored, header in shown:
        entry = stored.entry
        span = f"{entry.position}-{entry.position + entry.length - 1}"
        table.add_row(
            f"{stored.address[:16]}…-{header.group}", stored.tier,
            *((escape(header.namespace.model),) if wide else ()), span, size(entry.size), _codec(header),
            f"{_ratio(stored, header):.2f}", kind_of_class(header.namespace.state),
            *((when(entry.accessed),) if wide else ()),
        )  # fmt: skip
    out.print(table)
    if len(shown) == limit:
        out.print(f"(the first {limit}; see --limit)")


@contextmanager
def _opened(tenant: str | None) -> Iterator[tuple[KVCache, str]]:
    """The cache, and the salt of whose objects are meant."""
    settings = Settings.load()
    salt = tenant_salt(settings, tenant)
    with KVCache.open(settings) as cache:
        yield cache, salt


def known_tier(cache: KVCache, tier: str | None) -> None:
    """Raises InputError, naming those there are, for a tier that the cache does not have."""
    names = [one.name for one in cache.tiers]
    if tier is not None and tier not in names:
        raise InputError(f"there is no tier called {tier!r}; there are: {', '.join(names) or 'none'}")


def _own(cache: KVCache, salt: str, tier: str | None = None) -> Iterator[tuple[StoredChunk, Any]]:
    """Objects of one tenant whose header can be read."""
    tenant = tenant_digest(salt)
    for stored in cache.entries():
        if tier is not None and stored.tier != tier:
            continue
        try:
            header = stored.header()
        except (CorruptObjectError, KeyError):
            continue  # `verify` reports it
        if header.namespace.tenant == tenant:
            yield stored, header


def _row(stored: StoredChunk, header: Any) -> dict[str, Any]:
    entry = stored.entry
    return {
        "address": stored.address, "tier": stored.tier, "model": header.namespace.model,
        "position": entry.position, "tokens": entry.length, "bytes": entry.size, "created": entry.created,
        "last_used": entry.accessed, "pinned_until": entry.pinned_until, "codec": _codec(header),
        "ratio": round(_ratio(stored, header), 3),
        "provenance": kind_of_class(header.namespace.state),
    }  # fmt: skip


def _codec(header: Any) -> str:
    return " > ".join(step.name for step in header.codec)


def _ratio(stored: StoredChunk, header: Any) -> float:
    """How many times smaller an object is than its KV as the engine has it."""
    group = header.namespace.spec.groups[header.group]
    raw: int = group.bytes_per_token * len(header.tokens)
    return raw / max(1, stored.entry.size)


def show(
    key: Annotated[str, typer.Argument(help="An address as `ls` prints it, or its beginning.")],
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Show one object: header, provenance, size, codec, size per layer in memory; its bytes are verified.

    Example: kvass show 3f9a12
    """
    with _opened(tenant) as (cache, salt):
        stored, header = _find(cache, salt, key)
        arrays, decodes = {}, "every layer's digest matches"
        try:
            arrays = stored.arrays()
        except NotDecodableError as error:
            decodes += f"; nothing here decodes it: {error}"
    layers = {name: [layer.nbytes for layer in array] for name, array in arrays.items()}
    described = {
        **_row(stored, header), "header": msgspec.to_builtins(header), "verified": True,
        "bytes_per_layer": layers, "shapes": {name: list(array.shape) for name, array in arrays.items()},
    }  # fmt: skip
    if as_json:
        print_json(described)
        return
    group = header.namespace.spec.groups[header.group]
    table = Table(show_header=False)
    for name, value in (
        ("address", stored.address),
        ("tier", stored.tier),
        ("model", f"{header.namespace.model} ({header.namespace.numerics})"),
        ("weights", header.namespace.weights),
        ("tokens", f"{header.position} to {header.position + len(header.tokens) - 1}"),
        ("follows", header.parent or "(the start)"),
        ("layers", f"{len(group.layers)} of kind {group.kind}, {group.kv_heads} KV heads, {group.dtype}"),
        ("codec", f"{_codec(header)}, {_ratio(stored, header):.2f} times smaller than raw"),
        ("provenance", _provenance(header)),
        ("size", f"{size(stored.entry.size)}; per layer in memory: {_per_layer(layers)}"),
        ("created", when(stored.entry.created)),
        ("pinned until", when(stored.entry.pinned_until)),
        ("verified", decodes),
    ):
        table.add_row(name, escape(value))
    out.print(table)


def _provenance(header: Any) -> str:
    done = header.provenance
    said = kind_of_class(header.namespace.state)
    if isinstance(done, Blended):
        said += f", by {done.method}, {done.chosen:.1%} of moved tokens computed anew"
    if isinstance(done, Lossy):
        said += f", by the tables {done.tables[:12]}"
        if done.behind:
            said += f", coded for {done.behind:,} tokens behind it"
    return said


def _per_layer(layers: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} {size(sizes[0])}" for name, sizes in layers.items()) or "-"


def _find(cache: KVCache, salt: str, key: str) -> tuple[StoredChunk, Any]:
    plain = key.replace("…", "")
    found: dict[str, tuple[StoredChunk, Any]] = {}
    for stored, header in _own(cache, salt):
        if plain and stored.address.startswith(plain.split("-")[0]):
            found.setdefault(stored.address, (stored, header))
        if len({address.split("-")[0] for address in found}) > 1:  # parts of one key are one thing
            raise InputError(f"{key!r} is the beginning of several addresses; give more of it")
    chosen = found.get(plain) or next(iter(found.values()), None)
    if chosen is None:
        raise InputError(f"nothing is stored under {key!r}; `kvass ls` lists what is")
    return chosen


def verify(as_json: AsJson = False) -> None:
    """Read every object of every tier and check its digests; bad ones are quarantined. Exit 1 if any was bad.

    Example: kvass verify --json
    """
    with KVCache.open() as cache:
        total = sum(usage.objects for usage in cache.stats().values())
        with progress("verifying", total) as advance:
            count, bad = cache.verify(lambda _: advance())
    if as_json:
        print_json({"objects": count, "bad": bad})
    else:
        out.print(f"{count} objects read, {len(bad)} bad" + ("; quarantined:" if bad else ""))
        for address in bad:
            out.print(f"  {address}")
    raise typer.Exit(1 if bad else 0)


def rm(
    keys: Annotated[list[str], typer.Argument(help="Addresses as `ls` prints them, or their beginnings.")],
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Delete objects with everything that continues them, in every tier.

    Example: kvass rm 3f9a12
    """
    with _opened(tenant) as (cache, salt):
        addresses = [_find(cache, salt, key)[0].address for key in keys]
        gone = sum(cache.remove(address) for address in addresses)
    if as_json:
        print_json({"deleted": gone})
    else:
        out.print(f"{gone} objects deleted")


def stats(as_json: AsJson = False) -> None:
    """Show the tiers: bytes, budget, objects, and why one is missing.

    Example: kvass stats
    """
    with KVCache.open() as cache:
        usages = cache.stats()
        kinds = {tier.name: (tier.durable, tier.shared) for tier in cache.tiers}
        missing = cache.unavailable
    if as_json:
        tiers = {
            name: {**usage._asdict(), "durable": kinds[name][0], "shared": kinds[name][1]}
            for name, usage in usages.items()
        }
        print_json({"tiers": tiers, "unavailable": missing})
        return
    table = Table("tier", "used", "budget", "objects", "durable", "shared")
    for name, usage in usages.items():
        durable, shared = ("yes" if flag else "no" for flag in kinds[name])
        table.add_row(name, size(usage.bytes), size(usage.budget), f"{usage.objects:,}", durable, shared)
    out.print(table)
    for name, reason in missing.items():
        out.print(f"no {name} tier: {escape(reason)}")
