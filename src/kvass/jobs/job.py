"""One job: a prompt to be read by who holds the model, so that who does not finds its KV stored."""

from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvass.chunks import Tokens, as_tokens
from kvass.errors import InputError
from kvass.keys import Namespace, lossy_namespace


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt, and under whose name and by which means it is to be read.

    `model`: see `model_digest`. `tenant` and `public`: digests of salts, as in a namespace; the salts stay
    with who asks. `tokens`: ids as little-endian int32. `max_fraction`: the share of moved passages that may
    be computed anew, 0 where nothing is to be moved. `budget`: the fields of `kvass.quality.Budget`; None
    stands for the worker's settings.
    """

    model: str
    tenant: str
    public: tuple[str, ...]
    tokens: bytes
    max_fraction: float
    budget: tuple[float, ...] | None

    @classmethod
    def of(
        cls,
        namespace: Namespace,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        *,
        public: tuple[str, ...] = (),
        max_fraction: float = 0.0,
        budget: tuple[float, ...] | None = None,
    ) -> Self:
        """The job of a prompt in the namespace of who asks. Raises InputError for unusable tokens."""
        return cls(
            model=model_digest(namespace), tenant=namespace.tenant, public=public,
            tokens=as_tokens(tokens).tobytes(), max_fraction=float(max_fraction),
            budget=None if budget is None else tuple(map(float, budget)),
        )  # fmt: skip

    def prompt(self) -> Tokens:
        """The token ids, int32 `[n]`. Raises InputError where the bytes are none."""
        if len(self.tokens) % 4:
            raise InputError(f"{len(self.tokens)} bytes are no whole number of int32 token ids")
        return as_tokens(np.frombuffer(self.tokens, "<i4"))


def model_digest(namespace: Namespace) -> str:
    """What a job and the workers that may do it have in common, in hex: weights, configuration, adapter, and
    spec without RoPE. Not tenant, numerics or layout: a worker serves all tenants, and engines of other
    numerics."""
    return msgspec.structs.replace(lossy_namespace(namespace, "any"), tenant="").root().hex()


def encode(job: Job) -> tuple[str, bytes]:
    """A job's id, equal for equal jobs, and its bytes."""
    raw = msgspec.msgpack.encode(job)
    return _digest(raw), raw


def decode(name: str, raw: bytes) -> Job | None:
    """The job of that id; None for bytes that are not its own."""
    try:
        return msgspec.msgpack.decode(raw, type=Job) if _digest(raw) == name else None
    except (msgspec.MsgspecError, TypeError, ValueError):
        return None


def _digest(raw: bytes) -> str:
    return blake3(raw, derive_key_context="kvass job v1").hexdigest()
