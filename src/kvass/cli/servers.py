"""What `kvass doctor` finds at servers, a few seconds each: remote tiers of the settings, and a vLLM."""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from kvass.cli.finding import Finding, Status, guarded, within
from kvass.config import Settings
from kvass.engines.vllm.options import KNOWN_VLLM
from kvass.errors import ConfigError, CorruptObjectError, TierError
from kvass.tiers.remotes import configured
from kvass.tiers.store import Store

if TYPE_CHECKING:
    import httpx2 as httpx

    from kvass.serve.address import Address

_SECONDS = 5.0
_LOOKUPS = "vllm:external_prefix_cache_queries"
_HITS = "vllm:external_prefix_cache_hits"


def remotes(settings: Settings) -> Iterator[Finding]:
    """The remote tiers that are turned on."""
    stores = configured(settings)
    while True:
        try:
            name, store = next(stores)
        except StopIteration:
            return
        except ConfigError as error:
            yield Finding("remote", "settings", "problem", str(error), "correct the setting that it names")
            return
        late = Finding(
            "remote", name, "problem", f"does not answer within {_SECONDS:g} s",
            "see that its server runs, that it can be reached from here, and how busy it is",
        )  # fmt: skip
        yield from within(_SECONDS, guarded("remote", name, partial(_advice, name, store)), late)


def _advice(name: str, store: Store) -> Iterator[Finding]:
    try:
        store.exists(["kvass-doctor"])  # raises where it cannot be used at all
        for text, fix in store.advice():
            yield Finding("remote", name, "warning" if fix else "ok", text, fix)
    except (TierError, CorruptObjectError) as error:
        text, _, fix = str(error).partition("; ")
        yield Finding("remote", name, "problem", text, fix or "see that its server runs and can be reached")
    finally:
        store.close()


def vllm(url: str, settings: Settings) -> Iterator[Finding]:
    """A vLLM server: asked what it is, and for one token."""
    if find_spec("httpx2") is None:
        yield Finding("vllm", url, "problem", "cannot be asked", "pip install 'kvass[serve]'")
        return
    from kvass.serve.address import Address

    try:
        address = Address.of(url, settings, option="--vllm")
    except ConfigError as error:
        yield Finding("vllm", "address", "problem", str(error), "correct what the message names")
        return
    fix = "see how busy it is, and whether another program has this port"
    late = Finding("vllm", "answers", "problem", f"{address.url} does not answer within {_SECONDS:g} s", fix)
    yield from within(_SECONDS, guarded("vllm", "check", partial(_ask, address)), late)


def _ask(address: "Address") -> Iterator[Finding]:
    import httpx2 as httpx

    with address.session(_SECONDS) as client:
        try:
            healthy = client.get(address.to(b"/health"))
            if healthy.status_code != 200:
                fix = "look into its log, and restart it"
                text = f"{address.url} is not well: it answers /health with {healthy.status_code}"
                yield Finding("vllm", "answers", "problem", text, fix)
                return
            yield Finding("vllm", "answers", "ok", address.url)
            yield _version(client.get(address.to(b"/version")))
            models = client.get(address.to(b"/v1/models"))
            found = _models(models)
            yield found
            if found.status == "ok":
                yield _cached_tokens(client, address, found.text.split(", ")[0])
                yield _connector(client.get(address.to(b"/metrics")))
        except httpx.HTTPError as error:
            text = f"{address.url} does not answer: {str(error) or type(error).__name__}"
            yield Finding("vllm", "answers", "problem", text, "start it, or correct the address")


def _version(reply: "httpx.Response") -> Finding:
    version = _field(reply, "version")
    if not isinstance(version, str):
        return Finding("vllm", "version", "warning", "it does not say its version", "see that it is a vLLM")
    return Finding("vllm", "version", *vllm_version(version))


def vllm_version(version: str) -> tuple[Status, str, str | None]:
    """Status, text and what to do about a version of vLLM."""
    if version.startswith(KNOWN_VLLM):
        return "ok", f"{version}: kvass connector ok", None
    return "warning", f"{version}: not known to kvass' connector", f"use vLLM {KNOWN_VLLM}x"


def _models(reply: "httpx.Response") -> Finding:
    if reply.status_code in (401, 403):
        text = f"it refuses the key (status {reply.status_code})"
        return Finding("vllm", "models", "problem", text, "set upstream_api_key_file or upstream_api_key")
    listed = _field(reply, "data")
    names = (
        [str(one.get("id")) for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    )
    if not names:
        text = f"/v1/models names none (status {reply.status_code})"
        return Finding("vllm", "models", "problem", text, "see that it is a vLLM that serves a model")
    return Finding("vllm", "models", "ok", ", ".join(names))


def _cached_tokens(client: "httpx.Client", address: "Address", model: str) -> Finding:
    name, fix = "cached tokens", "start it with --enable-prompt-tokens-details"
    reply = client.post(
        address.to(b"/v1/completions"), json={"model": model, "prompt": "kvass", "max_tokens": 1}
    )
    usage = _field(reply, "usage")
    if reply.status_code != 200 or not isinstance(usage, dict):
        text = f"/v1/completions answers {reply.status_code}: not known whether hits are reported"
        return Finding("vllm", name, "warning", text, "look into its log")
    if not isinstance(usage.get("prompt_tokens_details"), dict):
        return Finding("vllm", name, "warning", "hits are not reported to clients", fix)
    return Finding("vllm", name, "ok", "hits are reported to clients")


def _connector(reply: "httpx.Response") -> Finding:
    """A vLLM counts lookups beyond its own cache where it has a connector, and the prompt above was one."""
    name, fix = "connector", "start it with --kv-transfer-config (KvassConnector)"
    totals: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(reply.text):
            totals[family.name] = sum(
                one.value for one in family.samples if not one.name.endswith("_created")
            )
    except ValueError:
        totals.clear()
    if _LOOKUPS not in totals:
        text = f"no vLLM's /metrics (status {reply.status_code}): not known whether there is a connector"
        return Finding("vllm", name, "warning", text, "see that it is a vLLM, with metrics")
    looked_up = totals[_LOOKUPS]
    if not looked_up:
        return Finding("vllm", name, "warning", "no KV connector: it looks nothing up outside of itself", fix)
    own = "kvass'" if any(name.startswith("vllm:kvass_") for name in totals) else "not known to be kvass'"
    text = f"{own}: {looked_up:.0f} tokens looked up, {totals.get(_HITS, 0.0):.0f} found"
    return Finding("vllm", name, "ok", text)


def _field(reply: "httpx.Response", name: str) -> Any:
    try:
        told = reply.json()
    except ValueError:
        return None
    return told.get(name) if isinstance(told, dict) else None
