"""What the engine answers over loaded KV is what the model answers without: tiny models of many families."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from asking import ask, same_as_plain
from tiny import FAMILIES, WINDOW, plain, text, tiny
from transformers import DynamicCache, PreTrainedModel

from kvass.cache import KVCache
from kvass.engines.transformers import Engine, attach

CHUNK = 32
LENGTH = 150
MAIN = [
    "llama", "llama3-rope", "linear-rope", "yarn-rope", "qwen2", "qwen3", "gemma3", "mistral", "phi",
    "gpt-neox", "gpt2",
]  # fmt: skip
WINDOWED = ["gemma3", "mistral", "gemma2"]


def _other(token: int) -> int:
    return token - 1 if token > 5 else token + 1


def _branch(prompt: list[int], at: int, length: int) -> list[int]:
    """A text that shares exactly the first `at` tokens."""
    return [*prompt[:at], _other(prompt[at]), *text(length - at - 1, seed=at + 1)]


@pytest.mark.parametrize("name", MAIN)
def test_the_models_depend_on_every_token(name: str) -> None:
    # Or else the other tests would accept wrong KV: what the gate forgives must be far below this.
    model, prompt = tiny(name), text(LENGTH)
    reach = LENGTH if name != "mistral" else 2 * (WINDOW - 1)
    for at in (LENGTH - reach, LENGTH - 40):
        changed = [*prompt[:at], _other(prompt[at]), *prompt[at + 1 :]]
        apart = plain(model, prompt, 1)[1] - plain(model, changed, 1)[1]
        assert apart.abs().max() > 1e-2


@pytest.mark.parametrize("hit", [0, 16, CHUNK, 3 * CHUNK, 111, LENGTH - 1])
@pytest.mark.parametrize("name", MAIN)
def test_logits_are_those_of_a_prefill_in_one_call(name: str, hit: int, cache: KVCache) -> None:
    model, prompt = tiny(name), text(LENGTH)
    engine = Engine(model, cache, slice_tokens=24)
    if hit:
        ask(engine, prompt if hit == LENGTH - 1 else _branch(prompt, hit, LENGTH + 10), 1)
    engine.overwrite_pool(LENGTH + 24)
    asked = ask(engine, prompt)
    assert asked.usage.cached_tokens == hit
    same_as_plain(asked, model, prompt)


class _Stock:
    """transformers' own cache, made to do what the engine does: the same calls, and back to a length."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.cache = DynamicCache(config=model.config)
        for layer in self.cache.layers:
            if layer.is_sliding:
                layer.activate_past_recording()

    def back_to(self, length: int) -> None:
        self.cache.crop(length - self.cache.get_seq_length())

    def answer(self, prompt: list[int], slice_tokens: int, count: int) -> tuple[list[int], torch.Tensor]:
        chosen: list[int] = []
        rows = []
        have = self.cache.get_seq_length()
        calls = [
            prompt[at : min(at + slice_tokens, len(prompt))] for at in range(have, len(prompt), slice_tokens)
        ]
        with torch.inference_mode():
            for number, call in enumerate(calls):
                out = self.model(
                    torch.tensor([call]), past_key_values=self.cache, use_cache=True, logits_to_keep=1
                )
                if number >= (len(prompt) - have - 1) // slice_tokens:
                    rows.append(out.logits[0, -1])
                    chosen.append(int(rows[-1].argmax()))
                    if len(chosen) < count:
                        calls.append(chosen[-1:])
        return chosen, torch.stack(rows)


@pytest.mark.parametrize("hit", [16, CHUNK, 111, LENGTH - 1])
@pytest.mark.parametrize("name", MAIN)
def test_logits_are_bit_for_bit_those_of_a_cache_that_stayed_in_memory(
    name: str, hit: int, cache: KVCache
) -> None:
    model, prompt = tiny(name), text(LENGTH)
    first = prompt if hit == LENGTH - 1 else _branch(prompt, hit, LENGTH + 10)
    engine, stock = Engine(model, cache, slice_tokens=24), _Stock(model)
    was = ask(engine, first, 5)
    tokens, logits = stock.answer(first, 24, 5)
    assert was.tokens == tokens
    assert torch.equal(was.logits, logits)
    engine.overwrite_pool(LENGTH + 24)
    stock.back_to(hit)
    asked = ask(engine, prompt, 12)
    tokens, logits = stock.answer(prompt, 24, 12)
    assert asked.usage.cached_tokens == hit
    assert asked.tokens == tokens
    assert torch.equal(asked.logits, logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_reduced_precision_is_kept_bit_for_bit(name: str, dtype: torch.dtype, cache: KVCache) -> None:
    model, prompt = tiny(name).to(dtype), text(LENGTH)
    engine, stock = Engine(model, cache, slice_tokens=24), _Stock(model)
    ask(engine, prompt, 1)
    stock.answer(prompt, 24, 1)
    stock.back_to(LENGTH - 1)
    asked = ask(engine, prompt, 12)
    tokens, logits = stock.answer(prompt, 24, 12)
    assert (asked.usage.cached_tokens, asked.tokens) == (LENGTH - 1, tokens)
    assert torch.equal(asked.logits, logits)


@pytest.mark.parametrize("name", WINDOWED)
def test_hits_around_the_window(name: str, cache: KVCache) -> None:
    model, prompt = tiny(name), text(LENGTH)
    engine = Engine(model, cache, slice_tokens=None)
    ask(engine, prompt, 1)
    edges = [WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1]
    for hit in [1, *edges, *(CHUNK + edge - 1 for edge in edges), 2 * CHUNK, 4 * CHUNK]:
        branch = _branch(prompt, hit, hit + 9)
        engine.overwrite_pool(LENGTH)
        asked = ask(engine, branch, 4)
        assert asked.usage.cached_tokens == hit
        same_as_plain(asked, model, branch, 4)


@pytest.mark.parametrize("name", ["llama", "qwen2", *WINDOWED])
def test_a_branch_in_the_middle_of_what_was_itself_loaded(name: str, cache: KVCache) -> None:
    # The second request loads only what its windows see, and stores; the third needs what it did not load.
    model, prompt = tiny(name), text(300)
    engine = Engine(model, cache, slice_tokens=64)
    ask(engine, prompt, 1)
    longer = [*prompt, *text(40, seed=9)]
    for asked_for in (longer, _branch(prompt, 170, 200), _branch(longer, 60, 90), _branch(longer, 310, 330)):
        engine.overwrite_pool(400)
        asked = ask(engine, asked_for, 6)
        assert asked.usage.cached_tokens in (len(prompt), 170, 60, 310)
        same_as_plain(asked, model, asked_for, 6)


def test_only_what_a_window_still_sees_is_read(cache: KVCache) -> None:
    model, prompt = tiny("gemma3"), text(10 * CHUNK)
    engine = Engine(model, cache)
    ask(engine, prompt, 1)
    full, sliding = engine.namespace.spec.groups
    for hit in (10 * CHUNK - 1, 9 * CHUNK, 5 * CHUNK + 3, CHUNK):
        asked = ask(engine, _branch(prompt, hit, hit + 8) if hit != 10 * CHUNK - 1 else prompt, 1)
        chunks = -(-hit // CHUNK)
        seen = chunks - max(0, hit - WINDOW + 1) // CHUNK
        wanted = chunks * CHUNK * full.bytes_per_token + seen * CHUNK * sliding.bytes_per_token
        assert asked.usage.cached_tokens == hit
        assert asked.usage.loaded_bytes == asked.usage.verified_bytes == wanted


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_each_turn_of_a_chat_hits_all_that_was_computed_before(name: str, cache: KVCache) -> None:
    model, said = tiny(name), text(70)
    engine = Engine(model, cache, slice_tokens=48)
    before = 0
    for turn in range(4):
        engine.overwrite_pool(400)
        asked = ask(engine, said, 20)
        assert asked.usage.cached_tokens == before
        same_as_plain(asked, model, said, 20)
        before = len(said) + 19  # the last token of an answer was chosen, but never computed
        said = [*said, *asked.tokens, *text(30 + turn, seed=turn)]


def test_sequences_that_share_a_prefix(cache: KVCache) -> None:
    model, shared = tiny("qwen3"), text(100)
    engine = Engine(model, cache)
    for number in range(5):
        prompt = [*shared, 10 + number, *text(20, seed=number)]
        asked = ask(engine, prompt, 4)
        assert asked.usage.cached_tokens == (100 if number else 0)
        same_as_plain(asked, model, prompt, 4)
    for number in range(5):
        prompt = [*shared, 10 + number, *text(20, seed=number)]
        assert ask(engine, prompt, 4).usage.cached_tokens == 120


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_a_faster_tier_that_was_lost_is_not_refilled_with_what_was_never_loaded(
    name: str, open_cache: Callable[..., KVCache]
) -> None:
    # After a restart of the machine the host tier is empty. A hit from the SSD reads, of layers with a
    # window, its end only; what the request then stores must not stand for the rest.
    model, prompt = tiny(name), text(300)
    with open_cache("host", "disk") as both:
        ask(Engine(model, both), prompt, 1)
        both.flush()
    cache = open_cache("fresh", "disk")
    engine = Engine(model, cache)
    engine.overwrite_pool(400)
    longer = [*prompt, *text(20, seed=3)]
    asked = ask(engine, longer, 4)
    assert asked.usage.cached_tokens == 300
    same_as_plain(asked, model, longer, 4)
    for at in (40, 100, 170, 250):
        cache.flush()
        branch = _branch(prompt, at, at + 20)
        engine.overwrite_pool(400)
        asked = ask(engine, branch, 4)
        assert asked.usage.cached_tokens == at
        same_as_plain(asked, model, branch, 4)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_damaged_objects_are_computed_anew(name: str, cache: KVCache, folder: Path) -> None:
    model, prompt = tiny(name), text(200)
    engine = Engine(model, cache)
    groups = len(engine.namespace.spec.groups)
    for damaged in ((3, 0), (5, groups - 1)):
        ask(engine, prompt, 1)
        chunk, group = damaged
        for stored in cache.entries():
            if stored.entry.position == chunk * CHUNK and stored.address.endswith(f"-{group}-0"):
                (path,) = folder.rglob(f"*{stored.address}*")
                raw = bytearray(path.read_bytes())
                raw[-1] ^= 1
                path.write_bytes(raw)
        engine.overwrite_pool(300)
        asked = ask(engine, prompt, 6)
        assert asked.usage.cached_tokens == chunk * CHUNK
        same_as_plain(asked, model, prompt, 6)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(attention: str, cache: KVCache) -> None:
    for name in ("llama", "gemma3"):
        model, prompt = tiny(name, attn_implementation=attention), text(LENGTH)
        assert model.config._attn_implementation == attention
        engine = Engine(model, cache)
        ask(engine, prompt, 1)
        asked = ask(engine, prompt, 6)
        assert asked.usage.cached_tokens == LENGTH - 1
        same_as_plain(asked, model, prompt, 6)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(MAIN)))
def test_other_families(name: str, cache: KVCache) -> None:
    model, prompt = tiny(name), text(LENGTH)
    engine = Engine(model, cache, slice_tokens=40)
    ask(engine, _branch(prompt, 77, LENGTH), 1)
    engine.overwrite_pool(LENGTH)
    asked = ask(engine, prompt, 6)
    assert asked.usage.cached_tokens == 77
    same_as_plain(asked, model, prompt, 6)
    ids = torch.tensor([prompt])
    wanted = model.generate(ids, max_new_tokens=6, do_sample=False)
    attach(model, cache)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), wanted)
