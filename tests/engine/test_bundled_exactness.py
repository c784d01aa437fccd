"""What the engine answers over loaded KV is what the model answers without: the bundled models, in fp32."""

import pytest
from asking import FP32_GATE, ask
from tiny import plain

from kvass.cache import KVCache
from kvass.engines.transformers import Engine, LoadedModel, encode_text

pytestmark = pytest.mark.model

CHUNK = 32
COUNT = 24
STORY = (
    "The lighthouse at the end of the pier had been dark for eleven years when Mara came back to the "
    "island. She had left in the winter of the great storm, with two suitcases and a letter that she "
    "never opened, and she returned in the summer of 2019 with three children, a dog called Admiral, and "
    "a plan. The harbour master, who had known her father, gave her the key without a word. Inside, the "
    "stairs were sound, but the lamp was gone: somebody had unscrewed the great lens and carried it off "
    "in pieces. 'It is 1,437 steps from here to the bakery,' said her eldest, who counted everything, "
    "'and 212 from the bakery to the school.' Mara wrote both numbers on the wall. In the following weeks "
    "they found the lens, piece by piece: one segment served as a window in the boat shed, another as a "
    "birdbath, and the third lay in the vestry of the church, wrapped in a flag. Nobody would say who had "
    "put it there. On the last evening of August"
)


@pytest.fixture(params=["smollm2", "gemma3"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    found: LoadedModel = request.getfixturevalue(f"{request.param}_fp32")
    return found


def test_hits_of_every_length(loaded: LoadedModel, cache: KVCache) -> None:
    prompt = encode_text(loaded, STORY)
    model, engine = loaded.model, Engine(loaded.model, cache, tokenizer=loaded.tokenizer, slice_tokens=128)
    tokens, logits = plain(model, prompt, COUNT)
    for hit in (0, 16, CHUNK, 5 * CHUNK, len(prompt) - 1):
        if hit == len(prompt) - 1:
            ask(engine, prompt, 1)
        elif hit:
            ask(engine, [*prompt[:hit], *encode_text(loaded, f" {hit} is another story.")], 1)
        engine.overwrite_pool(len(prompt) + COUNT)
        asked = ask(engine, prompt, COUNT)
        assert asked.usage.cached_tokens == hit
        assert asked.tokens == tokens
        assert (asked.logits - logits).abs().max() <= FP32_GATE
        assert asked.text == loaded.tokenizer.decode(tokens, skip_special_tokens=True)
        cache.forget(prompt, engine.namespace)


def test_a_second_turn(loaded: LoadedModel, cache: KVCache) -> None:
    first = encode_text(loaded, STORY[:400])
    engine = Engine(loaded.model, cache, tokenizer=loaded.tokenizer)
    answer = ask(engine, first, 8).tokens
    second = [*first, *answer, *encode_text(loaded, " The dog, however,")[-4:]]
    asked = ask(engine, second, 8)
    assert asked.usage.cached_tokens == len(first) + 7
    tokens, logits = plain(loaded.model, second, 8)
    assert asked.tokens == tokens
    assert (asked.logits - logits).abs().max() <= FP32_GATE
