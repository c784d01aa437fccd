"""The model as requests use it: its identity, its forward calls, and memory for their KV."""

import inspect
import logging
import threading
from typing import Any

import msgspec
import torch
from transformers import PreTrainedModel

from kvass.cache import KVCache, Pace
from kvass.chunks import Tokens
from kvass.codecs.registry import is_lossless
from kvass.config import Settings
from kvass.engines.transformers.identity import Identity, identify
from kvass.engines.transformers.layers import kv_spec
from kvass.engines.transformers.load import LoadedModel, shared_with
from kvass.engines.transformers.movable import refuse_unmovable
from kvass.engines.transformers.pool_cache import PoolCache, TorchPool
from kvass.engines.transformers.sampling import Sampling
from kvass.errors import UnsupportedModelError
from kvass.keys import Namespace
from kvass.models.shared import shared_namespace
from kvass.quality import BLENDS_FILE, calibrated_folder
from kvass.spec import KVSpec

log = logging.getLogger("kvass.engines")

_POOL_STEP = 1024


def kept_under(loaded: LoadedModel, settings: Settings, tenant_salt: str = "") -> Namespace | None:
    """The name under which KV of a loaded model is kept, for `Engine(shared=...)`; None: the engine's own.

    The one that engines share, where the operator declared their numerics equal. Else, where the settings
    allow approximate state, a tier stores it or repair was certified, one by the model's files, without
    numerics (`Engine` puts its own in): certificates are bound to the files. Raises ModelFilesError where
    these cannot be read, ConfigError for a codec that there is not.
    """
    shared = shared_with(loaded, settings, tenant_salt)
    codecs = (settings.host_codec, settings.disk_codec, settings.remote_codec)
    asked = settings.allow_lossy or settings.reuse != "prefix" or not all(map(is_lossless, codecs))
    if shared is not None or not (asked or (settings.models_path / "calibrated").exists()):
        return shared
    named = shared_namespace(
        loaded.directory, kv_spec(loaded.model), "", models_path=settings.models_path, tenant_salt=tenant_salt
    )
    if not asked and not (calibrated_folder(settings.models_path, named) / BLENDS_FILE).exists():
        return None
    return msgspec.structs.replace(named, numerics="")


class Host:
    """One model, one cache. Requests share it; how they take turns is their driver's matter."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache | None,
        tokenizer: Any,
        tenant_salt: str,
        epoch: str,
        slice_tokens: int | None,
        spare_pools: int,
        shared: Namespace | None,
    ):
        """Raises UnsupportedModelError for a model that kvass does not handle yet."""
        self.model = model
        self.cache = cache
        self.tokenizer = tokenizer
        self.pace, self.loads = Pace(), Pace()
        self._slice_tokens = slice_tokens
        self._tenant_salt = tenant_salt
        self._epoch = epoch
        self._identity = identify(model, tenant_salt=tenant_salt, epoch=epoch)
        self._own = self._identity.namespace
        if shared is not None and not shared.numerics:
            shared = msgspec.structs.replace(shared, numerics=self._own.numerics)
        self._shared = shared
        self._warned_of = ""
        self._movable: bool | None = None
        self._spare: list[TorchPool] = []
        self._spare_pools = spare_pools
        self._guard = threading.RLock()  # giving back may happen in the garbage collector
        keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._last_only: dict[str, int] = {"logits_to_keep": 1} if keeps else {}
        self.max_tokens: int | None = getattr(model.config, "max_position_embeddings", None)

    @property
    def identity(self) -> Identity:
        """The model's identity in its present state; looked at anew each time, cheap if nothing changed."""
        self._identity = identify(
            self.model, tenant_salt=self._tenant_salt, epoch=self._epoch, known=self._identity
        )
        if self._shared is not None and self._identity.namespace == self._own:
            return self._identity._replace(namespace=self._shared)
        return self._identity

    def identified(self) -> Identity | None:
        """None where the model is in a state that has no name, such as with hooks: then nothing is reused."""
        try:
            return self.identity
        except UnsupportedModelError as error:
            if str(error) != self._warned_of:
                self._warned_of = str(error)
                log.warning("kvass: requests go without the cache: %s", error)
            return None

    def movable(self) -> bool:
        """Whether the model's KV can be moved to other positions and computed in part; tried once."""
        if self._movable is None:
            try:
                refuse_unmovable(self.model, kv_spec(self.model))
                self._movable = True
            except (UnsupportedModelError, TypeError, ValueError, RuntimeError, AttributeError) as error:
                log.warning("kvass: nothing is reused anywhere in a prompt: %s", error)
                self._movable = False
        return self._movable

    def room(self, tokens: Tokens, wanted: int) -> int:
        """How many tokens an answer may have at most."""
        return wanted if self.max_tokens is None else min(wanted, self.max_tokens - tokens.size)

    def slice_at(self, start: int, size: int) -> int:
        """Tokens of the slice of a prompt of `size` tokens that begins at `start`."""
        return self._slice_tokens or size - start

    def forward(self, tokens: list[int], held: PoolCache, *, every: bool = False) -> torch.Tensor:
        """Logits `[n, vocabulary]` of the last of the tokens, or of `every` one."""
        # whatever the consumer of an answer is in the middle of, the model computes as it is named
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            out = self.model(
                input_ids=torch.tensor([tokens], dtype=torch.long),
                past_key_values=held,
                use_cache=True,
                **({} if every else self._last_only),
            )
        logits: torch.Tensor = out.logits[0]
        return logits

    def stop_ids(self, sampling: Sampling) -> set[int]:
        """Tokens after which an answer ends."""
        ends = self.model.generation_config.eos_token_id if self.model.generation_config else None
        own = ends if isinstance(ends, list) else [] if ends is None else [ends]
        return {*own, *sampling.stop_ids}

    def borrow(self, spec: KVSpec, capacity: int) -> TorchPool:
        """A pool of an earlier request, if one is large enough: fresh memory costs a page fault each 4 kB."""
        with self._guard:
            fit = [pool for pool in self._spare if pool.spec == spec and pool.capacity >= capacity]
            if fit:
                self._spare.remove(fit[-1])
                return fit[-1]
        return TorchPool(spec, -(-capacity // _POOL_STEP) * _POOL_STEP)

    def give_back(self, pool: TorchPool) -> None:
        """Keep the memory for a later request."""
        with self._guard:
            same = [spare for spare in self._spare if spare.spec == pool.spec]
            self._spare = sorted([*same, pool], key=lambda one: one.capacity)[-self._spare_pools :]
