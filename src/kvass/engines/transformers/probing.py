"""What calibration looks at inside of a model: its queries, and how its predictions depend on K and V."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from kvass.engines.transformers.load import LoadedModel
from kvass.errors import UnsupportedModelError
from kvass.runner import KV
from kvass.spec import KVSpec

Floats = npt.NDArray[np.float32]


class Gradient(NamedTuple):
    """Of one layer group: d log p / dK (after RoPE) and d log p / dV, `[layers, tokens, kv_heads, dim]`."""

    k: Floats
    v: Floats


class Probing:
    """Looks into one model, in float32 on the CPU."""

    def __init__(self, loaded: LoadedModel, spec: KVSpec):
        """Raises UnsupportedModelError for a model whose attention is not built as Llama's or Gemma's."""
        self._model: Any = loaded.model
        self._spec = spec
        self._layers: list[Any] = list(getattr(getattr(self._model, "model", None), "layers", []))
        if not self._layers or not all(
            hasattr(getattr(layer, "self_attn", None), "q_proj") for layer in self._layers
        ):
            raise UnsupportedModelError(f"{loaded.name} has no layers with self_attn.q_proj: not yet")
        for parameter in self._model.parameters():
            parameter.requires_grad_(False)

    def queries(self, kv: KV, tokens: Sequence[int]) -> list[Floats]:
        """Queries before RoPE of tokens that follow on `kv`, by layer group
        `[layers, n, kv_heads, queries per kv head, head_dim]`: query . key is the logit of attention."""
        seen: dict[int, torch.Tensor] = {}
        hooks = []
        for number, layer in enumerate(self._layers):
            attention = layer.self_attn
            # Where queries are normalised, that is what meets the keys.
            source = getattr(attention, "q_norm", None) or attention.q_proj

            def keep(module: Any, given: Any, result: torch.Tensor, number: int = number) -> None:
                seen[number] = result.detach()[0]

            hooks.append(source.register_forward_hook(keep))
        try:
            with torch.inference_mode():
                self._logits(self._cache(kv, leaves=False)[0], tokens)
        finally:
            for hook in hooks:
                hook.remove()
        found = []
        for group in self._spec.groups:
            rows = []
            for number in group.layers:
                flat = seen[number]
                if flat.shape[0] != len(tokens):  # Gemma normalises heads first, tokens second
                    flat = flat.transpose(0, 1)
                scale = float(self._layers[number].self_attn.scaling)
                shape = (len(tokens), group.kv_heads, -1, group.head_dim)
                rows.append((flat * scale).reshape(shape).numpy())
            found.append(np.stack(rows).astype(np.float32))
        return found

    def gradients(self, kv: KV, tokens: Sequence[int], passes: int, seed: int) -> Iterator[list[Gradient]]:
        """Of `passes` continuations that the model itself draws, token by token of `tokens`: the gradients of
        their log-probability. Their mean square is the Fisher information of K and V."""
        draw = torch.Generator().manual_seed(seed)
        for _ in range(passes):
            cache, leaves = self._cache(kv, leaves=True)
            log = torch.log_softmax(self._logits(cache, tokens).float(), -1)
            drawn = torch.multinomial(log.detach().exp(), 1, generator=draw)
            found = torch.autograd.grad(log.gather(1, drawn).sum(), leaves)
            yield self._by_group([one[0].transpose(0, 1).numpy() for one in found])

    def _by_group(self, found: list[Floats]) -> list[Gradient]:
        return [
            Gradient(
                np.stack([found[2 * number] for number in group.layers]),
                np.stack([found[2 * number + 1] for number in group.layers]),
            )
            for group in self._spec.groups
        ]

    def _logits(self, cache: DynamicCache, tokens: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([list(tokens)])
        logits: torch.Tensor = self._model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0]
        return logits

    def _cache(self, kv: KV, *, leaves: bool) -> tuple[DynamicCache, list[torch.Tensor]]:
        """A cache over `kv`, all of it in every layer; and its tensors, keys and values in turn."""
        place = self._spec.places
        cache, made = DynamicCache(), []
        for layer in range(len(self._layers)):
            number, at = place[layer]
            pair = []
            for name in ("k", "v"):
                array = np.ascontiguousarray(kv[number][name][at].astype(np.float32).swapaxes(0, 1))[None]
                pair.append(torch.from_numpy(array).requires_grad_(leaves))
            made += pair
            cache.update(pair[0], pair[1], layer)
        return cache, made
