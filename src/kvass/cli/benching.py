"""Commands that measure: kvass bench."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from string import ascii_lowercase
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kvass.cli.output import (
    AsJson,
    Model,
    err,
    needs_server,
    needs_transformers,
    out,
    print_json,
    progress,
    progress_to,
)
from kvass.cli.quality import plotted
from kvass.config import Settings
from kvass.errors import InputError

app = typer.Typer(no_args_is_help=True, help="Measure; every figure is a ratio from one run.")

Disk = Annotated[Path, typer.Option(help="Directory on a disk for the benchmark's files.")]


def _report(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
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


@app.command("store")
def bench_store(
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved rounds.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="I/O threads, on both sides.")] = 2,
    disk: Disk = Path(".bench"),
    as_json: AsJson = False,
) -> None:
    """Load and store chunks: against read and write plus one digest pass, torch and safetensors.

    Example: kvass bench store --rounds 5
    """
    needs_transformers()
    from kvass.bench import store

    with progress("store", 26 * rounds) as advance:
        found = store.run(disk, rounds=rounds, threads=threads, progress=advance)
    _report(found, as_json)


@app.command("index")
def bench_index(
    objects: Annotated[int, typer.Option(min=500, help="Objects in the index.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved rounds.")] = 100,
    disk: Disk = Path(".bench"),
    as_json: AsJson = False,
) -> None:
    """Look a 128k-token prompt up among a million objects: against raw reads of the index's library.

    Example: kvass bench index --objects 100000
    """
    from kvass.bench import index

    with progress("index", objects // 2500 + 1) as advance:
        found = index.run(disk, objects=objects, rounds=rounds, progress=advance)
    _report(found, as_json)


@app.command("overhead")
def bench_overhead(
    pairs: Annotated[int, typer.Option(min=2, help="Interleaved pairs for each length.")] = 20,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "512,2048,7168",
    model: Model = "smollm2-135m",
    disk: Disk = Path(".bench"),
    as_json: AsJson = False,
) -> None:
    """What storing costs when nothing is ever reused; about half an hour on two cores.

    Example: kvass bench overhead --pairs 5 --lengths 512,2048
    """
    needs_transformers()
    wanted = _lengths(lengths)
    from kvass.bench import overhead

    with progress("overhead", 3 * pairs * len(wanted)) as advance:
        found = overhead.run(
            disk, Settings.load().models_path, model=model, lengths=wanted, pairs=pairs, progress=advance
        )
    _report(found, as_json)


@app.command("ttft")
def bench_ttft(
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds for each length.")] = 3,
    lengths: Annotated[str, typer.Option(help="Context lengths in tokens.")] = "512,1024,2048,4096,7168",
    model: Model = "smollm2-135m",
    disk: Disk = Path(".bench"),
    as_json: AsJson = False,
) -> None:
    """Time to first token by context length: plain, cold, host, disk; where loading begins to win.

    Example: kvass bench ttft --rounds 1 --lengths 512,2048
    """
    needs_transformers()
    wanted = _lengths(lengths)
    from kvass.bench import ttft

    with progress("ttft", len(wanted) + 5) as advance:
        found = ttft.run(
            disk, Settings.load().models_path, model=model, lengths=wanted, rounds=rounds, progress=advance
        )
    _report(found, as_json)


@app.command("serve")
def bench_serve(
    pairs: Annotated[int, typer.Option(min=2, help="Interleaved pairs of requests for each figure.")] = 20,
    turns: Annotated[int, typer.Option(min=4, help="Turns of the chat.")] = 20,
    clients: Annotated[int, typer.Option(min=2, help="Clients that ask about one document at once.")] = 16,
    model: Model = "smollm2-135m",
    disk: Disk = Path(".bench"),
    as_json: AsJson = False,
) -> None:
    """What the server costs and saves, through HTTP: documents, chats, many clients, tenants, warming.

    Example: kvass bench serve --pairs 3 --turns 5
    """
    needs_server()
    from kvass.bench import serve

    found = serve.run(
        disk, Settings.load().models_path, model=model, pairs=pairs, turns=turns, clients=clients,
        progress=err.print,
    )  # fmt: skip
    _report(found, as_json)


@app.command("remote")
def bench_remote(
    stores: Annotated[str, typer.Option(help="Which, with commas between.")] = "redis,s3,mooncake",
    chunks: Annotated[int, typer.Option(min=1, help="Objects of 5.9 MB that are read.")] = 20,
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved rounds.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="Threads that read, on both sides.")] = 4,
    disk: Disk = Path(".bench"),
    as_json: AsJson = False,
) -> None:
    """Read through remote tiers, verified: against a plain client's GET of the same bytes. Starts servers.

    Example: kvass bench remote --stores redis --rounds 5
    """
    from kvass.bench import remote

    wanted = stores.split(",")
    _known_stores(wanted, stores)
    with progress("remote", 2 * rounds * len(wanted)) as advance:
        found = remote.run(
            disk, stores=wanted, chunks=chunks, rounds=rounds, threads=threads, progress=advance
        )
    _report(found, as_json)


@app.command("vllm")
def bench_vllm(
    rounds: Annotated[
        int, typer.Option(min=1, help="Prefixes of 5,120 tokens, cold and then from each tier.")
    ] = 5,
    pairs: Annotated[int, typer.Option(min=0, help="Pairs of 16 prompts that nobody sees again.")] = 10,
    stores: Annotated[str, typer.Option(help="Remote tiers, with commas between.")] = "redis,s3",
    peer: Annotated[
        str | None,
        typer.Option(
            help="Compare with this instead (lmcache): --rounds requests of each side, from memory and from "
            "a disk. Its first use installs 5 GB."
        ),
    ] = None,
    model: Model = "smollm2-135m",
    disk: Disk = Path(".bench"),
    as_json: AsJson = False,
) -> None:
    """Time to first token in a real vLLM, cold and from each tier, and what storing costs. Starts servers.

    Example: kvass bench vllm --rounds 2 --pairs 2 --stores redis
    """
    needs_transformers()
    if peer is not None:
        _report(_against(peer, rounds, model, disk), as_json)
        return
    from kvass.bench import vllm

    wanted = tuple(one for one in stores.split(",") if one)
    _known_stores(wanted, stores)
    found = vllm.run(
        disk, Settings.load().models_path, model=model, rounds=rounds, pairs=pairs, stores=wanted,
        progress=err.print,
    )  # fmt: skip
    _report(found, as_json)


@app.command("blend")
def bench_blend(
    model: Model = "smollm2-135m",
    prompts: Annotated[int, typer.Option(min=2, help="Prompts of six segments.")] = 100,
    rounds: Annotated[int, typer.Option(min=0, help="Interleaved rounds of what is timed.")] = 5,
    vllm_rounds: Annotated[
        int, typer.Option("--vllm-rounds", min=0, help="Rounds in a real vLLM with a worker; 0: not.")
    ] = 3,
    disk: Disk = Path(".bench"),
    as_json: AsJson = False,
) -> None:
    """Segments that were read elsewhere, repaired by each selector, against full prefill; 40 minutes.

    Example: kvass bench blend --prompts 4 --rounds 3
    """
    needs_transformers()
    if vllm_rounds and find_spec("vllm") is None:  # said now, not after all the rest
        raise InputError("--vllm-rounds needs vLLM, which is not installed; give 0, or install it")
    from kvass.bench import blend

    settings = Settings.load()
    with progress_to("blend") as told:
        found = blend.run(
            disk, settings.models_path, model=model, prompts=prompts, rounds=rounds,
            vllm_rounds=vllm_rounds, progress=told,
        )  # fmt: skip
    _report(found, as_json)


@app.command("codec")
def bench_codec(
    plot: Annotated[
        Path | None, typer.Option(help="Write the picture to this PNG file (needs kvass\\[plot]).")
    ] = None,
    texts: Annotated[int, typer.Option(min=1, help="Held texts to measure on, at most.")] = 99,
    contexts: Annotated[int, typer.Option(min=0, help="Contexts with planted facts.")] = 30,
    levels: Annotated[
        str, typer.Option(help="Codecs of kvass to measure, with commas between.")
    ] = "lossless,int8,kivi4,kivi2,q1,q2,q3,q4",
    rounds: Annotated[int, typer.Option(min=0, help="Interleaved rounds of speeds; 0: none.")] = 5,
    model: Model = "smollm2-135m",
    disk: Disk = Path(".bench"),
    as_json: AsJson = False,
) -> None:
    """Bits, KL and facts kept of all codecs beside published schemes, and their speed; about an hour.

    Example: kvass bench codec --texts 2 --contexts 3 --rounds 3
    """
    needs_transformers()
    from kvass.bench import codec, codec_plot
    from kvass.calibrate.picture import check_plottable

    if plot is not None:
        check_plottable(plot, "--plot")
    with progress_to("codec") as told:
        found = codec.run(
            disk, Settings.load().models_path, model=model, texts=texts, contexts=contexts,
            codecs=[one for one in levels.split(",") if one], rounds=rounds, progress=told,
        )  # fmt: skip
    if plot is not None:
        codec_plot.write_png(
            plot, found.ours, found.baselines, f"{found.report['model']}: what codecs store and cost"
        )
    if as_json:
        print_json(found.report)
        return
    shown = [*found.ours, *codec_plot.on_the_line(found.baselines)]
    out.print(
        f"{escape(found.report['model'])}: kvass' codecs, and the baselines that no other baseline beats"
    )
    for mark, one in zip(cycle(ascii_lowercase), shown, strict=False):
        out.print(f"{mark} {one.codec}: {one.bits:.2f} bits, KL {one.kl_mean:.2g}", markup=False)
    for line in plotted(shown):
        out.print(line, markup=False, soft_wrap=True)
    _report({name: one for name, one in found.report.items() if name not in ("codecs", "baselines")}, False)


def _against(peer: str, rounds: int, model: str, disk: Path) -> dict[str, Any]:
    from kvass.bench.peer_environment import known_peer

    known_peer(peer)
    from kvass.bench.peer import run

    return run(disk, Settings.load().models_path, peer=peer, model=model, rounds=rounds, progress=err.print)


def _known_stores(wanted: Sequence[str], text: str) -> None:
    from kvass.bench.servers import SERVERS

    if not set(wanted) <= SERVERS.keys():
        raise InputError(f"--stores is {text!r}; it must be of {', '.join(SERVERS)}, with commas between")


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
