"""What changes between a client and an upstream: salt and permissions go in, what was reused comes out."""

import json
from typing import Any

from blake3 import blake3
from pydantic import ValidationError

from kvass.provenance import APPROXIMATE_SALT
from kvass.serve.errors import ApiError
from kvass.serve.schemas import ReuseOptions

_SALT = "kvass upstream cache salt v1"

_LINE_BYTES = 1 << 20
"""A line of a stream that is longer goes on as it comes, without `kvass` in it."""


def rewrite(body: bytes, content_type: str, salt: str) -> tuple[bytes, bool]:
    """A request's body as the upstream gets it, and whether it asks about one prompt.

    With a `salt` every JSON object gets a `cache_salt`: a digest of it, and of the client's own. The field
    `kvass` is taken out; what it forbids, and what it says of reuse, goes into `kv_transfer_params.kvass`,
    where the connector reads it. Where it asks for reuse anywhere, the salt is marked. A body in which
    nothing changes keeps its bytes. Raises ApiError where a salt cannot be put in.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        if salt and _says_json(content_type):
            raise ApiError(400, "the body: is not JSON") from error
        return body, True
    if not isinstance(asked, dict):
        if salt:
            raise ApiError(400, "the body: must be a JSON object")
        return body, True
    changed = "kvass" in asked or bool(salt)
    anywhere = _permit(asked, asked.pop("kvass", None))
    if salt:
        asked["cache_salt"] = _mixed(salt, asked.get("cache_salt"))
    if anywhere:
        asked["cache_salt"] = _text(asked.get("cache_salt")) + APPROXIMATE_SALT
    one_prompt = _is_one_prompt(asked)
    if not changed:
        return body, one_prompt
    try:
        return json.dumps(asked).encode(), one_prompt
    except RecursionError as error:
        raise ApiError(400, "the body: is nested too deeply") from error


def _says_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return not kind or kind.endswith(("/json", "+json"))


def _permit(asked: dict[str, Any], given: Any) -> bool:
    """Whether reuse anywhere is asked for. A permission is given by nobody's forbidding it: what the client's
    own parameters forbid stays so."""
    try:
        options = ReuseOptions.model_validate({} if given is None else given)
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(["kvass", *map(str, first["loc"])])
        raise ApiError(
            400, f"{param}: {first['msg']}; there are load, keep, reuse, max_fraction and budget", param=param
        ) from error
    said: dict[str, Any] = {
        name: False for name, may in (("load", options.load), ("store", options.keep)) if not may
    }
    said |= options.model_dump(include={"reuse", "max_fraction", "budget"}, exclude_none=True)
    if not said.get("budget"):
        said.pop("budget", None)
    anywhere = options.reuse == "anywhere"
    if not said:
        return anywhere
    param = "kv_transfer_params"
    params = asked.get(param)
    params = {} if params is None else params
    own = params.get("kvass", {}) if isinstance(params, dict) else None
    if not isinstance(own, dict):
        raise ApiError(400, f"{param}: must be an object, and so must its field kvass", param=param)
    asked[param] = {**params, "kvass": {**own, **said}}
    return anywhere


def _mixed(salt: str, own: Any) -> str:
    key = blake3(salt.encode(), derive_key_context=_SALT).digest()
    return blake3(_text(own).encode("utf-8", "surrogatepass"), key=key).hexdigest()


def _text(own: Any) -> str:
    if own is not None and not isinstance(own, str):
        raise ApiError(400, "cache_salt: must be a string", param="cache_salt")
    return own or ""


def _is_one_prompt(asked: dict[str, Any]) -> bool:
    prompt = asked.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return not several and "prompt_embeds" not in asked


# -- answers ------------------------------------------------------------------------------------------


def annotated(raw: bytes, *, one_prompt: bool, last: bool = False) -> bytes:
    """An answer's JSON with `kvass` before its end; its bytes where it has no usage. `last`: only where
    it is the chunk of a stream without a choice, which comes last."""
    if b'"usage"' not in raw:
        return raw
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    if not isinstance(answer, dict) or "kvass" in answer or (last and answer.get("choices") != []):
        return raw
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return raw
    end = raw.rindex(b"}")
    told = json.dumps(report(usage, one_prompt=one_prompt), separators=(",", ":")).encode()
    return raw[:end] + b',"kvass":' + told + raw[end:]


def report(usage: dict[str, Any], *, one_prompt: bool) -> dict[str, Any]:
    """What was reused, as the upstream counts; null is what it does not say. Of several prompts vLLM tells
    the cached tokens of one only."""
    prompt, details = usage.get("prompt_tokens"), usage.get("prompt_tokens_details")
    hit = details.get("cached_tokens") if isinstance(details, dict) and one_prompt else None
    computed = None
    if type(prompt) is int and type(hit) is int and 0 <= hit <= prompt:
        computed = prompt - hit
    return {
        "hit_tokens": None if computed is None else hit,
        "computed_tokens": computed,
        "loaded_bytes": None,
        "load_seconds": None,
        "saved_seconds": None,
    }


class Lines:
    """Server-sent events on their way: passed on in whole lines, the usage's with `kvass` in it."""

    def __init__(self, *, one_prompt: bool):
        self.done = False  # whether the stream said that it is over
        self._one_prompt = one_prompt
        self._rest = bytearray()
        self._cut = False  # a line too long is being passed on

    def feed(self, piece: bytes) -> bytes:
        """What may go on once this has come: up to the last end of a line."""
        self._rest += piece
        end = self._rest.rfind(b"\n") + 1
        if not end and len(self._rest) > _LINE_BYTES:
            end, self._cut = len(self._rest), True
            return self._take(end)
        whole = self._take(end)
        if not whole:
            return whole
        lines = whole.split(b"\n")
        first = lines[0] if self._cut else self._line(lines[0])
        self._cut = False
        return b"\n".join([first, *map(self._line, lines[1:])])

    def finish(self) -> bytes:
        """A last line without an end."""
        return self._line(self._take(len(self._rest)))

    def _take(self, end: int) -> bytes:
        taken = bytes(self._rest[:end])
        del self._rest[:end]
        return taken

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(b"data:"):
            return line
        if line[5:].strip() == b"[DONE]":
            self.done = True
        return b"data:" + annotated(line[5:], one_prompt=self._one_prompt, last=True)
