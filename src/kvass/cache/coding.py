"""Which codec each tier stores, what may be stored and read of lossy state, and who decodes an object."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvass import metrics
from kvass.codecs.base import Codec, tokens_behind
from kvass.codecs.raw import Raw
from kvass.codecs.registry import LOSSY, NotDecodableError, codec_of, is_end_aware, is_lossless
from kvass.codecs.registry import codec as make_codec
from kvass.codecs.tables import Tables
from kvass.container import CodecStep, Header
from kvass.errors import ConfigError, CorruptObjectError
from kvass.keys import Namespace, lossy_namespace
from kvass.provenance import EXACT, GUARD_TOKENS, Blended, Lossy, Provenance, codec_of_class, is_blend
from kvass.quality import DEFAULT_BUDGET, Budget, Gate, Verdict
from kvass.spec import LayerGroup

RAW = "raw"
NO_GATE = Verdict(False, "this cache was opened without the folder of calibrated models", "no gate")


class Target(NamedTuple):
    """How a tier keeps a sequence: in which namespace, by which codec, and as what it says it is.

    `end_aware`: whether the codec that the namespace is named after is.
    """

    namespace: Namespace
    coder: Codec
    provenance: Provenance
    end_aware: bool = False

    def behind(self, group: LayerGroup, end: int, stop: int) -> int:
        """What a chunk up to `stop` of a sequence of `end` tokens is coded for: tokens behind it, or 0, as an
        end itself, where the codec does not care. A lossless coder says it too: some of the sequence may have
        been loaded, coded for an end that was no further on."""
        return tokens_behind(group, end, stop) if self.end_aware else 0

    def coded(self, behind: int) -> Provenance:
        """What an object says it is that was coded for so many tokens behind it."""
        if behind and isinstance(self.provenance, Lossy):
            return msgspec.structs.replace(self.provenance, behind=behind)
        return self.provenance


Decoder = Callable[[Header], Codec]
"""The codec that decodes an object with this header. Raises CorruptObjectError."""


class Recoder(NamedTuple):
    """What turns stored objects into those of another codec: how they are to be, and who decodes them.

    `end`: tokens of the sequence that they belong to; 0: not known, each is coded as an end itself.
    """

    target: Target
    decoder: Decoder
    end: int = 0


class Coding:
    """The codecs of a cache's tiers, and the gate that every use of a lossy one passes."""

    def __init__(
        self,
        names: Mapping[str, str],
        gate: Gate | None,
        budget: Budget | None,
        warn: Callable[[str, str, str], None],
    ):
        """`names`: codec by tier, raw where none is given; `gate`: without one nothing lossy is used;
        `warn(where, operation, message)`: says it once. Raises ConfigError for an unknown codec."""
        self._names = {tier: name for tier, name in names.items() if name != RAW}
        self.gate = gate
        self.budget = budget or DEFAULT_BUDGET
        self._warn = warn
        self._raw = Raw()
        self._guard = threading.Lock()
        self._coders: dict[tuple[str, str], Codec] = {}
        self._end_aware: dict[str, bool] = {}
        self._lossless = {name: is_lossless(name) for name in {RAW, *self._names.values()}}

    @property
    def plain(self) -> bool:
        """Whether every tier stores raw arrays."""
        return not self._names

    def name(self, tier: str) -> str:
        """The codec of what that tier stores."""
        return self._names.get(tier, RAW)

    def lossy(self, tier: str) -> bool:
        """Whether that tier stores by a lossy codec."""
        return not self._lossless[self.name(tier)]

    # -- who may ------------------------------------------------------------------------------------------

    def verdict(self, namespace: Namespace, codec: str, budget: Budget | None = None) -> Verdict:
        """What the gate says of a codec for that namespace's model."""
        if self.gate is None:
            return NO_GATE
        return self.gate.verdict(namespace, codec, budget or self.budget)

    def may(self, namespace: Namespace, codec: str, operation: str, budget: Budget | None = None) -> bool:
        """The same, counted and said once where it is refused."""
        return self._passes(self.verdict(namespace, codec, budget), codec, operation)

    def may_blend(
        self, namespace: Namespace, method: str, chosen: float, operation: str, budget: Budget | None = None
    ) -> bool:
        """Whether state may be used that was repaired so; counted and said once where it is refused."""
        verdict = NO_GATE
        if self.gate is not None:
            verdict = self.gate.blend(namespace, method, chosen, budget or self.budget)
        return self._passes(verdict, "reuse anywhere in a prompt", operation)

    def _passes(self, verdict: Verdict, what: str, operation: str) -> bool:
        if not verdict.allowed:
            metrics.refused.labels(operation, verdict.kind).inc()
            said = f"{what} is not used: {verdict.reason}; counted in kvass_refused_total from now on"
            self._warn(f"{what}: {verdict.kind}", operation, said)
        return verdict.allowed

    def classes(self, namespace: Namespace) -> list[Namespace]:
        """All namespaces in which lossy state of that exact one may lie."""
        if namespace.state != EXACT.kind:
            return []
        others = [name for name in self._names.values() if not self._lossless[name]]
        return [lossy_namespace(namespace, name) for name in dict.fromkeys((*LOSSY, *others))]

    def far(self, tier: str, namespace: Namespace) -> bool:
        """Whether state of that namespace may lie in a remote tier: lossy only where there are tables."""
        codec = codec_of_class(namespace.state)
        if is_blend(namespace.state):
            return not self.lossy(tier)
        if codec is None or self.name(tier) == codec:
            return True
        return self.gate is not None and self.gate.tables(namespace) is not None

    def guard(self, namespace: Namespace) -> int:
        """How many of a load's last tokens are given up where state of that namespace was coded for an end
        further on."""
        codec = codec_of_class(namespace.state)
        return GUARD_TOKENS if codec is not None and self._is_end_aware(codec) else 0

    def _is_end_aware(self, codec: str) -> bool:
        if codec not in self._end_aware:
            self._end_aware[codec] = is_end_aware(codec)
        return self._end_aware[codec]

    # -- writing ------------------------------------------------------------------------------------------

    def target(
        self,
        tier: str,
        namespace: Namespace,
        operation: str = "store",
        budget: Budget | None = None,
        made: Blended | None = None,
    ) -> Target | None:
        """How that tier keeps state of that namespace; None where it takes nothing of it.

        A lossy tier takes exact state, into the namespace of its class, and its own class; raw and lossless
        ones take all, as what it is. `made`: how blended state was made; not given, such is only moved as it
        is.
        """
        name, held = self.name(tier), codec_of_class(namespace.state)
        if is_blend(namespace.state):
            if not self._lossless[name] or namespace.layout != "canonical":
                return None
            if made and not self.may_blend(namespace, made.method, made.chosen, operation, budget):
                return None
            return Target(namespace, self._coder(name, None), made or EXACT)
        if self._lossless[name]:
            if held is None:
                return Target(namespace, self._coder(name, None), EXACT)
        elif held not in (None, name) or namespace.layout != "canonical":
            return None
        codec = name if held is None else held
        return self.lossy_target(namespace, codec, name, operation, budget)

    def lossy_target(
        self, namespace: Namespace, codec: str, stored_by: str, operation: str, budget: Budget | None
    ) -> Target | None:
        """State that `codec` has passed, stored by itself or by a lossless one; None where it is refused."""
        if not self.may(namespace, codec, operation, budget) or self.gate is None:
            return None
        tables = self.gate.tables(namespace)
        if tables is None:
            return None
        space = namespace
        if codec_of_class(namespace.state) is None:
            space = lossy_namespace(namespace, codec)
        try:
            coder = self._coder(stored_by, tables)
        except (ConfigError, CorruptObjectError) as error:  # not installed, or not for these tables
            metrics.errors.labels("cache", operation).inc()
            self._warn(codec, operation, f"{operation} by {codec}: {error}")
            return None
        provenance = Lossy(codec=codec, tables=tables.digest)
        return Target(space, coder, provenance, self._is_end_aware(codec))

    def alike(self, one: str, other: str, namespace: Namespace) -> bool:
        """Whether two tiers hold the same bytes of that namespace, as far as their settings tell."""
        return codec_of_class(namespace.state) is None and self.name(one) == self.name(other)  # also a blend

    def recoder(self, tier: str, namespace: Namespace) -> Recoder | None:
        """How objects of a namespace are brought to that tier; None where it takes none as what they are."""
        target = self.target(tier, namespace)
        if target is None or target.namespace.state != namespace.state:
            return None
        return Recoder(target, self.decoder)

    def in_place(self, name: str, header: Header) -> Target | None:
        """How an object is kept by that codec where it lies; None where that would be another class of state,
        or is refused. Raises ConfigError for an unknown codec."""
        if is_lossless(name):
            return Target(header.namespace, self._coder(name, None), header.provenance)
        if codec_of_class(header.namespace.state) != name:
            return None  # a blend too
        return self.lossy_target(header.namespace, name, name, "recode", None)

    def _coder(self, name: str, tables: Tables | None) -> Codec:
        if name == RAW:
            return self._raw
        known = self._lossless.get(name)
        if known is None:
            known = self._lossless[name] = is_lossless(name)
        if known:
            tables = None
        key = name, tables.digest if tables else ""
        found = self._coders.get(key)
        if found is None:
            found = make_codec(name, tables)
            with self._guard:
                if len(self._coders) >= _MOST:
                    self._coders.clear()
                self._coders[key] = found
        return found

    # -- reading ------------------------------------------------------------------------------------------

    def decoder(self, header: Header) -> Codec:
        """The codec that decodes an object, which its namespace must admit.

        Raises CorruptObjectError where it may not lie there or was written with other tables, and
        NotDecodableError where its codec or tables are not at hand.
        """
        chain, space, provenance = header.codec, header.namespace, header.provenance
        held = codec_of_class(space.state)
        if held is None:
            kind = Blended if is_blend(space.state) else type(EXACT)
            if not isinstance(provenance, kind):
                raise CorruptObjectError(f"object in a namespace of {space.state} is something else itself")
            coder = self._of(chain, None)
            if not coder.lossless:
                raise CorruptObjectError(f"object in a namespace of {space.state} went through a lossy codec")
            return coder
        if not isinstance(provenance, Lossy) or provenance.codec != held:
            raise CorruptObjectError(f"object in a namespace of {held!r} is something else itself")
        tables = self._tables(space, provenance.tables)
        coder = self._of(chain, tables)
        if not coder.lossless and coder.name != held:
            raise CorruptObjectError(f"object in a namespace of {held!r} went through {coder.name!r}")
        return coder

    def reader(self, budget: Budget | None) -> Decoder:
        """`decoder` for a load that allows so much: what was repaired at a higher cost is not decodable."""

        def decoder(header: Header) -> Codec:
            done, space = header.provenance, header.namespace
            if isinstance(done, Blended) and not self.may_blend(
                space, done.method, done.chosen, "load", budget
            ):
                raise NotDecodableError(
                    f"repaired by {done.method} at {done.chosen:.1%}, which is refused here"
                )
            return self.decoder(header)

        return decoder

    def _tables(self, namespace: Namespace, digest: str) -> Tables:
        """The model's tables, which must be those that an object says."""
        tables = self.gate.tables(namespace) if self.gate else None
        if self.gate and (tables is None or tables.digest != digest):
            tables = self.gate.tables(
                namespace, fresh=True
            )  # the model may have been calibrated anew just now
        if tables is None:
            raise NotDecodableError(f"there are no tables of {namespace.model}; `kvass calibrate` makes them")
        if tables.digest != digest:
            raise CorruptObjectError("object was written with other tables than the model's")
        return tables

    def _of(self, chain: Sequence[CodecStep], tables: Tables | None) -> Codec:
        name = chain[0].name
        coder = self._coders.get((name, "")) or self._coders.get((name, tables.digest if tables else ""))
        if name == RAW:
            coder = self._raw
        if coder is None or len(chain) != 1 or coder.step() != chain[0]:
            coder = codec_of(chain, tables)
            with self._guard:
                self._coders[name, "" if coder.lossless or tables is None else tables.digest] = coder
        return coder


_MOST = 256
"""Codecs with their tables that are kept at once."""


def check_order(coding: Coding, tiers: Sequence[str]) -> None:
    """Raises ConfigError where a tier would keep more than the fastest one, which it is filled from."""
    if tiers and coding.lossy(tiers[0]):
        first = coding.name(tiers[0])
        others = [tier for tier in tiers[1:] if coding.name(tier) != first]
        if others:
            raise ConfigError(
                f"the {tiers[0]} tier stores by {first!r}, so nothing else can be stored below it; change "
                f"its codec, or those of: {', '.join(others)}"
            )
