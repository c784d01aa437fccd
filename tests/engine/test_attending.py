"""Attention of scattered rows, block by block, against SDPA with the same mask."""

import numpy as np
import pytest
import torch

from engine.tiny import tiny
from kvass.engines.transformers.attending import _BLOCK, Sight, attending, weights
from kvass.errors import UnsupportedModelError


def drawn(seed: int, count: int, size: int) -> np.ndarray:
    """So many places of a prompt, the last of them its end."""
    draw = np.random.default_rng(seed)
    return np.sort(np.append(draw.permutation(size - 1)[: count - 1], size - 1))


def plain(query, key, value, mask, scaling):
    return torch.nn.functional.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, scale=scaling, enable_gqa=True
    )[0].transpose(0, 1)


@pytest.mark.parametrize("count", [1, 2, _BLOCK - 1, _BLOCK, _BLOCK + 1, 3 * _BLOCK + 7])
@pytest.mark.parametrize("window", [None, 1, 40, 5000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (3, 1)])
def test_rows_attend_as_sdpa_has_it(count, window, heads, kv_heads):
    torch.manual_seed(count)
    rows = drawn(count, count, 400)
    key, value = torch.randn(kv_heads, 400, 16), torch.randn(kv_heads, 400, 24)
    query = torch.randn(heads, count, 16)
    sight = Sight(rows, np.arange(400), window)
    found = sight.attend(query, key, value, 0.3)
    assert (found - plain(query, key, value, sight.mask, 0.3)).abs().max() < 1e-5
    held = query.bfloat16(), key.bfloat16(), value.bfloat16()
    apart = sight.attend(*held, 0.3).float() - plain(*(one.float() for one in held), sight.mask, 0.3)
    assert apart.square().mean().sqrt() < 0.01


def test_the_mask_is_causal_and_windowed():
    rows, keys = np.array([2, 5, 9]), np.array([0, 1, 2, 5, 8, 9])
    assert Sight(rows, keys, None).mask[0, 0].int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1],
    ]
    assert Sight(rows, keys, 2).mask[0, 0].int().tolist() == [
        [0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 1],
    ]


def test_weights_are_what_attention_mixes_by():
    torch.manual_seed(0)
    rows = drawn(3, 12, 90)
    key, query = torch.randn(2, 90, 16), torch.randn(6, 12, 16)
    for window in (None, 20):
        mask = Sight(rows, np.arange(90), window).mask
        found = weights(query, key, 0.3, mask[0, 0])
        mixed = plain(query, key, torch.eye(90).expand(2, 90, 90), mask, 0.3)
        assert (found - mixed.mean(0)).abs().max() < 1e-5


def test_what_is_added_to_softmax_attention_is_refused_by_name():
    model = tiny("gemma2")
    sight = Sight(np.arange(4), np.arange(4), None)
    with (
        torch.inference_mode(),
        attending(model, dict.fromkeys(range(3), sight), None),
        pytest.raises(UnsupportedModelError, match="softcap"),
    ):
        model(torch.arange(4)[None], attention_mask=sight.mask)
    assert model.config._attn_implementation != "kvass_rows"


def test_another_threads_call_is_not_touched():
    """The name of the attention is the model's, for all threads; the sights are of one."""
    model = tiny("llama")
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        before = model(ids).logits
        model.config._attn_implementation = "kvass_rows"
        found = model(ids, attention_mask=torch.ones(9, 9, dtype=torch.bool).tril()[None, None]).logits
    assert (before - found).abs().max() < 1e-4
