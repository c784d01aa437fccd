"""The command line: `kvass --help`."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvass.cache import KVCache, StoredChunk
from kvass.config import Settings
from kvass.errors import CorruptObjectError, InputError, KvassError, ModelFilesError
from kvass.keys import tenant_digest

app = typer.Typer(
    no_args_is_help=True,
    help="Keep, look at and measure the KV caches of language models.",
    pretty_exceptions_enable=False,
)
bench = typer.Typer(no_args_is_help=True, help="Measure; every figure is a ratio from one run.")
app.add_typer(bench, name="bench")

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on standard output.")]
Disk = Annotated[Path, typer.Option(help="Directory on a disk for the benchmark's files.")]
Model = Annotated[str, typer.Option(help="A bundled model, a .gguf file, or a model directory.")]


def main() -> NoReturn:
    """Run the command line; errors that a user can mend are one line, without a traceback."""
    try:
        app()
    except KvassError as error:
        err.print(f"[red]kvass: {escape(str(error))}[/red]")
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("kvass: interrupted")
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    sys.exit(0)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


@contextmanager
def _progress(label: str, total: int | None) -> Iterator[Callable[[], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as shown:
        task = shown.add_task(label, total=total)
        yield lambda: shown.advance(task)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S") if seconds else "-"


# -- looking ----------------------------------------------------------------------------------------


@app.command("ls")
def list_objects(
    limit: Annotated[int, typer.Option(min=1, help="Show at most so many objects.")] = 50,
    tier: Annotated[str | None, typer.Option(help="Only this tier (host, disk).")] = None,
    as_json: AsJson = False,
) -> None:
    """List stored objects of this tenant: address, tokens, size, tier, model.

    Example: kvass ls --tier disk --limit 10
    """
    settings = Settings.load()
    with KVCache.open(settings) as cache:
        _known_tier(cache, tier)
        shown = list(islice(_own(cache, settings, tier), limit))
    if as_json:
        _print_json([_row(stored, header) for stored, header in shown])
        return
    table = Table("address", "tier", "model", "tokens", "size", "last used")
    for stored, header in shown:
        entry = stored.entry
        span = f"{entry.position}-{entry.position + entry.length - 1}"
        table.add_row(
            f"{stored.address[:16]}…-{header.group}", stored.tier, escape(header.namespace.model), span,
            _size(entry.size), _when(entry.accessed),
        )  # fmt: skip
    out.print(table)
    if len(shown) == limit:
        out.print(f"(the first {limit}; see --limit)")


def _known_tier(cache: KVCache, tier: str | None) -> None:
    names = [one.name for one in cache.tiers]
    if tier is not None and tier not in names:
        raise InputError(f"there is no tier called {tier!r}; there are: {', '.join(names) or 'none'}")


def _own(cache: KVCache, settings: Settings, tier: str | None = None) -> Iterator[tuple[StoredChunk, Any]]:
    """Objects of the caller's tenant whose header can be read."""
    tenant = tenant_digest(settings.tenant_salt)
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
        "last_used": entry.accessed, "pinned_until": entry.pinned_until,
    }  # fmt: skip


@app.command()
def show(
    key: Annotated[str, typer.Argument(help="An address as `ls` prints it, or its beginning.")],
    as_json: AsJson = False,
) -> None:
    """Show one object: header, provenance, size per layer; its bytes are verified.

    Example: kvass show 3f9a12
    """
    settings = Settings.load()
    with KVCache.open(settings) as cache:
        stored, header = _find(cache, settings, key)
        arrays = stored.arrays()
    layers = {name: [layer.nbytes for layer in array] for name, array in arrays.items()}
    described = {
        **_row(stored, header), "header": msgspec.to_builtins(header), "verified": True,
        "bytes_per_layer": layers, "shapes": {name: list(array.shape) for name, array in arrays.items()},
    }  # fmt: skip
    if as_json:
        _print_json(described)
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
        ("codec", " > ".join(step.name for step in header.codec)),
        ("provenance", header.provenance.kind),
        ("size", f"{_size(stored.entry.size)}; per layer: {_per_layer(layers)}"),
        ("created", _when(stored.entry.created)),
        ("pinned until", _when(stored.entry.pinned_until)),
        ("verified", "every layer's digest matches"),
    ):
        table.add_row(name, escape(value))
    out.print(table)


def _per_layer(layers: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} {_size(sizes[0])}" for name, sizes in layers.items())


def _find(cache: KVCache, settings: Settings, key: str) -> tuple[StoredChunk, Any]:
    plain = key.replace("…", "")
    found: dict[str, tuple[StoredChunk, Any]] = {}
    for stored, header in _own(cache, settings):
        if plain and stored.address.startswith(plain.split("-")[0]):
            found.setdefault(stored.address, (stored, header))
        if len({address.split("-")[0] for address in found}) > 1:  # parts of one key are one thing
            raise InputError(f"{key!r} is the beginning of several addresses; give more of it")
    chosen = found.get(plain) or next(iter(found.values()), None)
    if chosen is None:
        raise InputError(f"nothing is stored under {key!r}; `kvass ls` lists what is")
    return chosen


@app.command()
def verify(as_json: AsJson = False) -> None:
    """Read every object of every tier and check its digests; bad ones are quarantined. Exit 1 if any was bad.

    Example: kvass verify --json
    """
    with KVCache.open() as cache:
        total = sum(usage.objects for usage in cache.stats().values())
        with _progress("verifying", total) as advance:
            count, bad = cache.verify(lambda _: advance())
    if as_json:
        _print_json({"objects": count, "bad": bad})
    else:
        out.print(f"{count} objects read, {len(bad)} bad" + ("; quarantined:" if bad else ""))
        for address in bad:
            out.print(f"  {address}")
    raise typer.Exit(1 if bad else 0)


@app.command()
def rm(
    keys: Annotated[list[str], typer.Argument(help="Addresses as `ls` prints them, or their beginnings.")],
    as_json: AsJson = False,
) -> None:
    """Delete objects with everything that continues them, in every tier.

    Example: kvass rm 3f9a12
    """
    settings = Settings.load()
    with KVCache.open(settings) as cache:
        addresses = [_find(cache, settings, key)[0].address for key in keys]
        gone = sum(cache.remove(address) for address in addresses)
    if as_json:
        _print_json({"deleted": gone})
    else:
        out.print(f"{gone} objects deleted")


@app.command()
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
        _print_json({"tiers": tiers, "unavailable": missing})
        return
    table = Table("tier", "used", "budget", "objects", "durable", "shared")
    for name, usage in usages.items():
        durable, shared = ("yes" if flag else "no" for flag in kinds[name])
        table.add_row(name, _size(usage.bytes), _size(usage.budget), f"{usage.objects:,}", durable, shared)
    out.print(table)
    for name, reason in missing.items():
        out.print(f"no {name} tier: {escape(reason)}")


@app.command()
def explain(
    prompt: Annotated[str | None, typer.Argument(help="The prompt's text; - reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    model: Model = "smollm2-135m",
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16 or float32, as the prompt was run.")
    ] = "bfloat16",
    chat: Annotated[bool, typer.Option(help="Put the text into the model's chat template.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say how much of a prompt is stored, and which token first differs from what is, with both texts.

    Example: kvass explain --chat --file prompt.txt
    """
    from kvass.engines.transformers import encode_chat, encode_text, identify, load_model

    settings = Settings.load()
    text = _prompt(prompt, file)
    loaded = load_model(model, dtype=dtype, models_path=settings.models_path)  # type: ignore[arg-type]
    tokens = encode_chat(loaded, [{"role": "user", "content": text}]) if chat else encode_text(loaded, text)
    namespace = identify(loaded.model, tenant_salt=settings.tenant_salt).namespace
    with KVCache.open(settings) as cache:
        found = cache.explain(tokens, namespace)
    difference = None
    if found.difference is not None:
        difference = {
            "position": found.difference.position,
            "prompt": loaded.tokenizer.decode(found.difference.prompt),
            "stored": loaded.tokenizer.decode(found.difference.stored),
            "prompt_tokens": found.difference.prompt,
            "stored_tokens": found.difference.stored,
        }
    if as_json:
        _print_json(
            {
                "tokens": found.tokens,
                "hit_tokens": found.hit,
                "reason": found.reason,
                "difference": difference,
            }
        )
        return
    out.print(f"{found.hit} of {found.tokens} tokens are stored: {found.reason}")
    if difference is not None:
        out.print(f"  prompt: {escape(repr(difference['prompt']))}")
        out.print(f"  stored: {escape(repr(difference['stored']))}")


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise InputError("give either the prompt's text or --file")
    try:
        if file is not None:
            return file.read_text()
        return sys.stdin.read() if prompt == "-" else str(prompt)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the prompt: {error}") from error


# -- trying -----------------------------------------------------------------------------------------


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Where the report and the files go.")] = Path(".demo"),
    as_json: AsJson = False,
) -> None:
    """Let a small model read real code once and ask about it, here and in a new process.

    Example: kvass demo --dir .demo
    """
    _needs_transformers()
    from kvass.bench import demo as scenario

    began = time.monotonic()
    report = scenario.run(
        folder,
        Settings.load().models_path,
        lambda text: err.print(f"{time.monotonic() - began:5.0f} s  {text}"),
    )
    if as_json:
        _print_json(report)
    else:
        _demo_table(report, folder)
    if not report["identical"]:
        raise KvassError("answers with kvass differ from those without; please report this")


def _demo_table(report: dict[str, Any], folder: Path) -> None:
    plain, loaded = report["ttft_seconds"]["plain"], report["bytes_loaded"]
    table = Table("", "time to first token", "speed-up", "tokens from cache", "bytes loaded")
    table.add_row("plain engine", f"{plain:.2f} s", "1.0x", "0", "0")
    cold = report["ttft_seconds"]["cold"]
    table.add_row("kvass, cold", f"{cold:.2f} s", f"{plain / cold:.1f}x", "0", "0")
    for side, label in (("host", "kvass, host tier"), ("disk", "kvass, SSD tier, new process")):
        table.add_row(
            label, f"{report['ttft_seconds'][side]:.2f} s", f"[bold]{report[f'speedup_{side}']:.1f}x[/bold]",
            f"{report['hit_tokens'][side][0]:,}", _size(loaded[side][0]),
        )  # fmt: skip
    out.print(
        f"\n{report['model']} has read {report['context_tokens']:,} tokens of Python's standard library."
    )
    out.print(table)
    for question, answer in zip(report["questions"], report["answers"], strict=True):
        out.print(f"Q: {escape(question['text'])}\nA: {escape(answer.strip())} …")
    same = "bitwise the same" if report["identical"] else "NOT the same"
    agree = sum(report["same_answer_as_one_shot"])
    out.print(
        f"\nLogits and tokens are {same} as with the cache kept in memory; "
        f"{agree} of {len(report['questions'])} answers equal one-shot prefill's in bf16."
    )
    out.print(f"Report: {folder / 'report.json'}")


@app.command()
def conformance(
    target: Annotated[str, typer.Argument(help="package.module:Class, a Tier or a Codec.")],
) -> None:
    """Run the conformance suite against a tier or codec of your own.

    Example: kvass conformance kvass.codecs.raw:Raw
    """
    try:
        from kvass.testing.run import run_conformance
    except ImportError as error:
        raise ModelFilesError(
            f"the suites need pytest and hypothesis: pip install 'kvass[test]' ({error})"
        ) from error
    raise typer.Exit(run_conformance(target))


def _needs_transformers() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None or find_spec("transformers") is None:
        raise ModelFilesError("this needs the transformers engine: pip install 'kvass[transformers]'")


# -- measuring --------------------------------------------------------------------------------------


def _report(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(found)
        return
    table = Table("figure", "value")
    for name, value in found.items():
        if name not in ("machine", "bench", "seconds", "by_length"):
            table.add_row(name, escape(json.dumps(value) if isinstance(value, dict | list) else str(value)))
    out.print(table)
    for row in found.get("seconds", ()):
        out.print(row)
    for length, row in found.get("by_length", {}).items():
        out.print(f"{length} tokens: {json.dumps(row)}")
    out.print(f"on {json.dumps(found['machine'])}")


@bench.command("store")
def bench_store(
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved rounds.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="I/O threads, on both sides.")] = 2,
    disk: Disk = Path(".bench"),
    as_json: AsJson = False,
) -> None:
    """Load and store chunks: against read and write plus one digest pass, torch and safetensors."""
    _needs_transformers()
    from kvass.bench import store

    with _progress("store", 26 * rounds) as advance:
        found = store.run(disk, rounds=rounds, threads=threads, progress=advance)
    _report(found, as_json)


@bench.command("index")
def bench_index(
    objects: Annotated[int, typer.Option(min=500, help="Objects in the index.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved rounds.")] = 100,
    disk: Disk = Path(".bench"),
    as_json: AsJson = False,
) -> None:
    """Look a 128k-token prompt up among a million objects: against raw reads of the index's library."""
    from kvass.bench import index

    with _progress("index", objects // 2500 + 1) as advance:
        found = index.run(disk, objects=objects, rounds=rounds, progress=advance)
    _report(found, as_json)


@bench.command("overhead")
def bench_overhead(
    pairs: Annotated[int, typer.Option(min=2, help="Interleaved pairs for each length.")] = 20,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "512,2048,7168",
    model: Model = "smollm2-135m",
    disk: Disk = Path(".bench"),
    as_json: AsJson = False,
) -> None:
    """What storing costs when nothing is ever reused; about half an hour on two cores."""
    _needs_transformers()
    from kvass.bench import overhead

    wanted = _lengths(lengths)
    with _progress("overhead", 3 * pairs * len(wanted)) as advance:
        found = overhead.run(
            disk, Settings.load().models_path, model=model, lengths=wanted, pairs=pairs, progress=advance
        )
    _report(found, as_json)


@bench.command("ttft")
def bench_ttft(
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds for each length.")] = 3,
    lengths: Annotated[str, typer.Option(help="Context lengths in tokens.")] = "512,1024,2048,4096,7168",
    model: Model = "smollm2-135m",
    disk: Disk = Path(".bench"),
    as_json: AsJson = False,
) -> None:
    """Time to first token by context length: plain, cold, host, disk; where loading begins to win."""
    _needs_transformers()
    from kvass.bench import ttft

    wanted = _lengths(lengths)
    with _progress("ttft", len(wanted) + 5) as advance:
        found = ttft.run(
            disk, Settings.load().models_path, model=model, lengths=wanted, rounds=rounds, progress=advance
        )
    _report(found, as_json)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(one) for one in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise InputError(
            f"--lengths is {text!r}; it must be whole numbers with commas between, such as 512,2048"
        )
    return found
