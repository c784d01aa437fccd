"""Commands that serve: `kvass serve`, and `kvass key` for its tenants."""

from typing import Annotated

import typer
from rich.markup import escape

from kvass.cli.output import AsJson, Model, err, needs_http, needs_server, out, print_json
from kvass.config import Settings
from kvass.errors import ConfigError


def serve(
    context: typer.Context,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need API keys.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes any that is free.")] = 8000,
    model: Model = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    upstream: Annotated[
        str | None, typer.Option(help="A vLLM server to stand before, http://HOST:PORT, in place of a model.")
    ] = None,
) -> None:
    """Serve a model, or what an upstream answers, with an OpenAI-compatible API (docs/serving.md).

    Example: kvass serve --model smollm2-135m --port 8000

    Example: kvass serve --upstream http://127.0.0.1:8000 --port 8100
    """
    if upstream is not None:
        for name in ("model", "dtype"):
            given = context.get_parameter_source(name)
            if given is not None and given.name == "COMMANDLINE":
                raise ConfigError(f"--{name} is the upstream's matter; give --upstream or --{name}")
        _serve_upstream(host, port, upstream)
        return
    needs_server()
    from kvass.serve.listening import listen
    from kvass.serve.tenants import Tenants

    settings = Settings.load()
    tenants = Tenants.load(settings)
    listening = listen(host, port, tenants)  # before anything that takes time
    from kvass.serve.server import run

    def ready(url: str, name: str) -> None:
        out.print(f"kvass serves {escape(name)} on {url}/v1 (Ctrl-C ends it)", soft_wrap=True)

    run(settings, listening, tenants, model=model, dtype=dtype, ready=ready)


def _serve_upstream(host: str, port: int, upstream: str) -> None:
    needs_http("starlette", "uvicorn", "httpx2")
    from kvass.serve.address import Address
    from kvass.serve.listening import listen
    from kvass.serve.server import run_upstream
    from kvass.serve.tenants import Tenants

    settings = Settings.load()
    tenants = Tenants.load(settings)
    address = Address.of(upstream, settings)
    with listen(host, port, tenants) as listening:
        silent = address.check(listening)

        def ready(url: str) -> None:
            out.print(f"kvass serves {escape(address.url)} on {url}/v1 (Ctrl-C ends it)", soft_wrap=True)
            if silent is not None:
                text = f"{address} does not answer yet ({silent}); until it does, requests get a 502"
                err.print(escape(text), soft_wrap=True)

        run_upstream(settings, listening, tenants, address, ready=ready)


def key(
    tenant: Annotated[str, typer.Argument(help="Whose key it is; `operator` may read the metrics.")],
    as_json: AsJson = False,
) -> None:
    """Make an API key for a tenant: the key, shown this once, and its line for api_keys_file.

    Example: kvass key acme
    """
    from kvass.serve.tenants import check_name, new_key

    check_name(tenant)
    made, digest = new_key()
    line = f'"{tenant}" = "{digest}"'
    if as_json:
        print_json({"tenant": tenant, "key": made, "hash": digest, "line": line})
        return
    out.print(f"key, to be given to {tenant} (shown only now):\n{made}", soft_wrap=True)
    out.print(f"line for the file that api_keys_file names:\n{escape(line)}", soft_wrap=True)
