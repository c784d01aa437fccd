"""attach(model): every call of generate answers as before, and no prompt is read twice that need not be."""

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from tiny import VOCABULARY, text, tiny
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.models.llama import modeling_llama

from kvass.cache import KVCache, LoadResult
from kvass.engines.transformers import PoolCache, TorchPool, attach, detach, identify
from kvass.errors import TierUnavailableError, UnsupportedModelError
from kvass.tiers.base import Tier
from kvass.tiers.directory import DirectoryTier

LENGTH = 100
GREEDY = {"max_new_tokens": 12, "do_sample": False}
SAMPLED = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}


def ids(length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.tensor([text(length, seed)])


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny("llama")


@pytest.fixture
def hits(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each lookup found and loaded."""
    found: list[int] = []
    lookup, load = cache.lookup, cache.load

    def looked_up(*args: Any, **kwargs: Any) -> Any:
        match = lookup(*args, **kwargs)
        found.append(0)
        return match

    def loaded(*args: Any, **kwargs: Any) -> LoadResult:
        result = load(*args, **kwargs)
        found[-1] = result.tokens
        return result

    monkeypatch.setattr(cache, "lookup", looked_up)
    monkeypatch.setattr(cache, "load", loaded)
    return found


# -- as before, but quicker -------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_answers_are_the_same_and_the_second_call_loads(
    name: str, settings: dict[str, Any], cache: KVCache, hits: list[int]
) -> None:
    model = tiny(name)
    torch.manual_seed(3)
    wanted = model.generate(ids(), **settings)
    state = torch.get_rng_state()
    assert attach(model, cache) is cache
    for _ in range(3):
        torch.manual_seed(3)
        assert torch.equal(model.generate(ids(), **settings), wanted)
        assert torch.equal(torch.get_rng_state(), state)
        cache.flush()
    assert hits == [0, LENGTH - 1, LENGTH - 1]


def test_a_chat_hits_all_that_was_computed_before(
    model: PreTrainedModel, cache: KVCache, hits: list[int]
) -> None:
    alone, said, before = copy.deepcopy(model), ids(), []
    attach(model, cache)
    for turn in range(3):
        answer = model.generate(said, **GREEDY)
        assert torch.equal(answer, alone.generate(said, **GREEDY))
        cache.flush()
        before.append(answer.shape[1] - 1)
        said = torch.cat([answer, ids(20, seed=turn)], dim=1)
    assert hits == [0, *before[:-1]]


def test_an_answer_that_ends_early(model: PreTrainedModel, cache: KVCache, hits: list[int]) -> None:
    end = int(model.generate(ids(), **GREEDY)[0, LENGTH + 4])
    wanted = model.generate(ids(), **GREEDY, eos_token_id=end)
    attach(model, cache)
    for _ in range(2):
        assert torch.equal(model.generate(ids(), **GREEDY, eos_token_id=end), wanted)
        cache.flush()
    longer = torch.cat([wanted, ids(10, seed=4)], dim=1)
    detach(model)
    alone = model.generate(longer, **GREEDY)
    attach(model, cache)
    assert torch.equal(model.generate(longer, **GREEDY), alone)
    assert hits == [0, LENGTH - 1, wanted.shape[1] - 1]


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.generate(input_ids=ids(), **GREEDY),
        lambda model: model.generate(ids(), attention_mask=torch.ones(1, LENGTH), **GREEDY),
        lambda model: model.generate(ids().int(), **GREEDY),
        lambda model: model.generate(ids(), generation_config=GenerationConfig(**GREEDY)),
        lambda model: model.generate(ids(), **GREEDY, repetition_penalty=1.3, no_repeat_ngram_size=2),
        lambda model: model.generate(ids(), **GREEDY, num_beams=1, num_return_sequences=1, use_cache=True),
        lambda model: model.generate(ids(), max_length=LENGTH + 12, do_sample=False),
        lambda model: model.generate(ids(), **GREEDY, cache_implementation="hybrid"),
        lambda model: model.generate(ids(), **GREEDY, pad_token_id=0, position_ids=None),
        lambda model: model.generate(ids(), **GREEDY, eos_token_id=[3, text(9)[4]], pad_token_id=text(9)[4]),
        lambda model: torch.inference_mode()(lambda: model.generate(ids(), **GREEDY))(),
    ],
    ids=[
        "input-ids", "mask-of-ones", "int32", "config", "processors", "one-beam", "max-length", "hybrid",
        "pad-not-there", "pad-is-an-end", "inference-mode",
    ],
)  # fmt: skip
def test_calls_that_are_handled(call: Callable[[Any], Any], cache: KVCache, hits: list[int]) -> None:
    model = tiny("llama")
    wanted = call(model)
    attach(model, cache)
    for _ in range(2):
        assert torch.equal(call(model), wanted)
        cache.flush()
    assert hits == [0, LENGTH - 1]


def test_a_prompt_of_one_token(model: PreTrainedModel, cache: KVCache, hits: list[int]) -> None:
    wanted = model.generate(ids(1), **GREEDY)
    attach(model, cache)
    for _ in range(2):
        assert torch.equal(model.generate(ids(1), **GREEDY), wanted)
        cache.flush()
    assert hits == [0, 0]
    assert torch.equal(model.generate(wanted, **GREEDY)[:, : wanted.shape[1]], wanted)
    assert hits[-1] == wanted.shape[1] - 1


def test_more_tokens_than_the_pool_was_made_for(
    model: PreTrainedModel, cache: KVCache, hits: list[int]
) -> None:
    settings = {"max_length": 400, "do_sample": False}
    wanted = model.generate(ids(20), **settings)
    attach(model, cache)
    for _ in range(2):
        assert torch.equal(model.generate(ids(20), **settings), wanted)
        cache.flush()
    model.generate(wanted, max_new_tokens=1, do_sample=False)
    assert hits == [0, 19, 399]


class _Streamer(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.flatten().tolist())

    def end(self) -> None:
        self.seen.append([-1])


def test_a_streamer_sees_the_same(model: PreTrainedModel, cache: KVCache, hits: list[int]) -> None:
    wanted = _Streamer()
    model.generate(ids(), streamer=wanted, **GREEDY)
    attach(model, cache)
    for _ in range(2):
        streamer = _Streamer()
        model.generate(ids(), streamer=streamer, **GREEDY)
        assert streamer.seen == wanted.seen
        cache.flush()
    assert hits == [0, LENGTH - 1]


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_what_is_returned_besides_the_tokens(name: str, cache: KVCache, hits: list[int]) -> None:
    model = tiny(name)
    settings = {**GREEDY, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    wanted: Any = model.generate(ids(), **settings)
    attach(model, cache)
    for hit in (0, LENGTH - 1):
        out: Any = model.generate(ids(), **settings)
        assert type(out) is type(wanted)
        assert torch.equal(out.sequences, wanted.sequences)
        for one, other in zip((*out.scores, *out.logits), (*wanted.scores, *wanted.logits), strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
        assert type(out.past_key_values) is DynamicCache
        for one, other in zip(out.past_key_values.layers, wanted.past_key_values.layers, strict=True):
            assert type(one) is type(other)
            assert one.get_seq_length() == other.get_seq_length() == LENGTH + 11
            torch.testing.assert_close(one.keys, other.keys, atol=1e-4, rtol=0)
            torch.testing.assert_close(one.values, other.values, atol=1e-4, rtol=0)
        longer = torch.cat([out.sequences, ids(20, seed=4)], dim=1)
        alone = model.generate(longer, **GREEDY, past_key_values=copy.deepcopy(wanted.past_key_values))
        assert torch.equal(model.generate(longer, **GREEDY, past_key_values=out.past_key_values), alone)
        assert hits[-1] == hit
        cache.flush()
    assert len(hits) == 2


# -- as before, and without the cache ---------------------------------------------------------------


def _masked(model: Any) -> Any:
    mask = torch.ones(1, LENGTH, dtype=torch.long)
    mask[0, :7] = 0
    return model.generate(ids(), attention_mask=mask, **GREEDY)


def _padded(model: Any) -> Any:
    prompt = ids()
    prompt[0, :7] = 1
    return model.generate(prompt, pad_token_id=1, eos_token_id=2, **GREEDY)


def _padded_by_config(model: Any) -> Any:
    prompt = ids()
    prompt[0, :7] = 1
    model.generation_config.pad_token_id = 1
    try:
        return model.generate(prompt, **GREEDY)
    finally:
        model.generation_config.pad_token_id = None


def _own_cache(model: Any) -> Any:
    return model.generate(ids(), past_key_values=DynamicCache(config=model.config), **GREEDY)


def _embedded(model: Any) -> Any:
    return model.generate(inputs_embeds=model.get_input_embeddings()(ids()) * 1.1, **GREEDY)


def _autocast(model: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model.generate(ids(), **GREEDY)


def _training(model: Any) -> Any:
    model.train()
    try:
        return model.generate(ids(), **GREEDY)
    finally:
        model.eval()


def _hooked(model: Any) -> Any:
    hook = model.model.layers[1].register_forward_hook(lambda module, args, output: output * 1.01)
    try:
        return model.generate(ids(), **GREEDY)
    finally:
        hook.remove()


def _assisted(model: Any) -> Any:
    return model.generate(ids(), assistant_model=tiny("llama", seed=3), **GREEDY)


def _configured(**settings: Any) -> Callable[[Any], Any]:
    config = GenerationConfig(**{**GREEDY, **settings})
    return lambda model: model.generate(ids(), generation_config=config)


def _arguments(**settings: Any) -> Callable[[Any], Any]:
    return lambda model: model.generate(ids(), **{**GREEDY, **settings})


OTHER_CALLS: dict[str, Callable[[Any], Any]] = {
    "batch": lambda model: model.generate(ids().repeat(2, 1), **GREEDY),
    "beams": _arguments(num_beams=3),
    "beams-by-config": _configured(num_beams=3),
    "several": _arguments(num_return_sequences=2, do_sample=True),
    "masked": _masked,
    "padded": _padded,
    "padded-by-config": _padded_by_config,
    "own-cache": _own_cache,
    "embedded": _embedded,
    "autocast": _autocast,
    "training": _training,
    "hooked": _hooked,
    "assisted": _assisted,
    "no-cache": _arguments(use_cache=False),
    "no-cache-by-config": _configured(use_cache=False),
    "static": _arguments(cache_implementation="static"),
    "static-by-config": _configured(cache_implementation="static"),
    "prompt-lookup": _arguments(prompt_lookup_num_tokens=3),
    "prompt-lookup-by-config": _configured(prompt_lookup_num_tokens=3),
    "prefill-chunks": _arguments(prefill_chunk_size=32),
    "positions": _arguments(position_ids=torch.arange(5, LENGTH + 5)[None]),
    "all-logits": _arguments(logits_to_keep=0),
    "positional-config": lambda model: model.generate(ids(), GenerationConfig(**GREEDY)),
    "guided": _arguments(guidance_scale=1.5),
    "no-prompt": lambda model: model.generate(bos_token_id=7, **GREEDY),
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_other_calls_go_without_the_cache(name: str, cache: KVCache, hits: list[int]) -> None:
    call, model = OTHER_CALLS[name], tiny("llama")
    torch.manual_seed(5)
    wanted = call(model)
    attach(model, cache)
    torch.manual_seed(5)
    assert torch.equal(call(model), wanted)
    cache.flush()
    assert not hits
    assert not list(cache.entries())
    assert model.generate(ids(), **GREEDY).shape == (1, LENGTH + 12)
    assert hits == [0]


def test_an_assistant_that_is_attached(cache: KVCache, hits: list[int]) -> None:
    model, assistant = tiny("llama"), tiny("llama", seed=3)
    wanted = model.generate(ids(), assistant_model=assistant, **GREEDY)
    attach(assistant, cache)
    assert torch.equal(model.generate(ids(), assistant_model=assistant, **GREEDY), wanted)
    assert not hits


def test_hidden_states_and_attentions_of_a_whole_prompt(cache: KVCache, hits: list[int]) -> None:
    model = tiny("llama", attn_implementation="eager")
    settings = {
        **GREEDY, "return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True,
    }  # fmt: skip
    attach(model, cache)
    model.generate(ids(), **GREEDY)
    cache.flush()
    out: Any = model.generate(ids(), **settings)
    assert out.hidden_states[0][0].shape[1] == LENGTH
    assert out.attentions[0][0].shape[2] == LENGTH
    assert torch.equal(
        model.generate(ids(), **GREEDY), out.sequences
    )  # the hooks that this left are harmless
    assert hits == [0, LENGTH - 1]


@pytest.mark.parametrize("bad", [{"nonsense": 1}, {"max_new_tokens": -1}], ids=["unknown", "length"])
def test_errors_of_transformers_stay_what_they_are(
    bad: dict[str, Any], model: PreTrainedModel, cache: KVCache
) -> None:
    with pytest.raises(ValueError) as before:
        model.generate(ids(), **{**GREEDY, **bad})
    attach(model, cache)
    with pytest.raises(ValueError) as after:
        model.generate(ids(), **{**GREEDY, **bad})
    assert str(after.value) == str(before.value)
    cache.flush()
    assert not list(cache.entries())


# -- when something goes wrong ----------------------------------------------------------------------


class _Broken(RuntimeError):
    pass


class _BreakAt(StoppingCriteria):
    """Raises once the sequence has this length."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        if input_ids.shape[1] >= self.length:
            raise _Broken
        return torch.zeros(1, dtype=torch.bool)


class _BreakAtOnce(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> NoReturn:
        raise _Broken


def _assert_sound(model: PreTrainedModel, cache: KVCache, longest: int) -> None:
    """Whatever is stored now answers every prompt as the model alone does."""
    cache.flush()
    namespace = identify(model).namespace
    detach(model)
    wanted = model.generate(ids(), **GREEDY)
    sequence = torch.cat([wanted, ids(10, seed=4)], dim=1)
    assert cache.lookup(sequence[0].numpy(), namespace).length <= longest
    longer = model.generate(sequence, **GREEDY)
    attach(model, cache)
    assert torch.equal(model.generate(ids(), **GREEDY), wanted)
    assert torch.equal(model.generate(sequence, **GREEDY), longer)


def test_an_exception_between_two_tokens_leaves_the_prompt(model: PreTrainedModel, cache: KVCache) -> None:
    attach(model, cache)
    criteria = StoppingCriteriaList([_BreakAt(LENGTH + 6)])
    with pytest.raises(_Broken):
        model.generate(ids(), stopping_criteria=criteria, **GREEDY)
    cache.flush()
    assert cache.lookup(ids()[0].numpy(), identify(model).namespace).length == LENGTH
    _assert_sound(model, cache, LENGTH)


def test_an_exception_after_the_prompt(model: PreTrainedModel, cache: KVCache) -> None:
    attach(model, cache)
    with pytest.raises(_Broken):
        model.generate(ids(), logits_processor=LogitsProcessorList([_BreakAtOnce()]), **GREEDY)
    _assert_sound(model, cache, LENGTH)


@pytest.mark.parametrize("calls", [0, 1, 2, 3, 4, 16])
def test_an_exception_in_the_middle_of_a_forward(
    calls: int, cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    attach(model, cache)
    rotate, done = modeling_llama.apply_rotary_pos_emb, []

    def breaks(*given: Any) -> Any:  # just before a layer's keys go into the cache
        if len(done) == calls:
            raise KeyboardInterrupt
        done.append(1)
        return rotate(*given)

    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", breaks)
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids(), **GREEDY)
    _assert_sound(model, cache, LENGTH if calls > 2 else 0)


def _fails(*_: Any, **__: Any) -> NoReturn:
    raise TierUnavailableError("out of order")


def failing_tier() -> Tier:
    """A tier that fails in every call, but when it is closed."""
    methods: dict[str, Any] = dict.fromkeys(Tier.__abstractmethods__, _fails)
    methods.update(name="broken", durable=False, shared=False, close=lambda self: None)
    made: Tier = type("FailingTier", (Tier,), methods)()
    return made


def test_a_tier_that_always_fails(model: PreTrainedModel) -> None:
    wanted = model.generate(ids(), **GREEDY)
    with KVCache([failing_tier()], chunk_tokens=32) as cache:
        attach(model, cache)
        for _ in range(2):
            assert torch.equal(model.generate(ids(), **GREEDY), wanted)
            cache.flush()


def test_a_tier_that_fails_beside_one_that_does_not(model: PreTrainedModel, folder: Path) -> None:
    wanted = model.generate(ids(), **GREEDY)
    sound = DirectoryTier(folder / "sound", 64 << 20, name="sound")
    with KVCache([failing_tier(), sound], chunk_tokens=32) as cache:
        attach(model, cache)
        for _ in range(2):
            assert torch.equal(model.generate(ids(), **GREEDY), wanted)
            cache.flush()
        assert cache.lookup(ids()[0].numpy(), identify(model).namespace).length == LENGTH


def test_generate_goes_on_after_the_cache_was_closed(model: PreTrainedModel, cache: KVCache) -> None:
    wanted = model.generate(ids(), **GREEDY)
    with attach(model, cache):
        model.generate(ids(), **GREEDY)
    assert torch.equal(model.generate(ids(), **GREEDY), wanted)


def test_weights_that_change_are_noticed(model: PreTrainedModel, cache: KVCache, hits: list[int]) -> None:
    attach(model, cache)
    model.generate(ids(), **GREEDY)
    cache.flush()
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(-1)
    changed = model.generate(ids(), **GREEDY)
    detach(model)
    assert torch.equal(changed, model.generate(ids(), **GREEDY))
    assert hits == [0, 0]


def test_weights_that_change_while_it_answers(model: PreTrainedModel, cache: KVCache) -> None:
    class Trains(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            model.get_parameter("model.norm.weight").mul_(1.1)
            return scores

    attach(model, cache)
    model.generate(ids(), logits_processor=LogitsProcessorList([Trains()]), **GREEDY)
    cache.flush()
    assert not list(cache.entries())


# -- attaching --------------------------------------------------------------------------------------


def test_attach_twice_and_detach(
    model: PreTrainedModel, open_cache: Callable[..., KVCache], folder: Path
) -> None:
    method = model.generate
    first, second = open_cache("first"), open_cache("second")
    attach(model, first)
    assert inspect.signature(model.generate) == inspect.signature(method)
    assert model.generate.__doc__ == method.__doc__
    attach(model, second)
    model.generate(ids(), **GREEDY)
    second.flush()
    assert not list(first.entries())
    assert list(second.entries())
    detach(model)
    assert "generate" not in vars(model)
    assert model.generate == method
    detach(model)
    model.generate(ids(seed=1), **GREEDY)
    second.flush()
    assert second.lookup(ids(seed=1)[0].numpy(), identify(model).namespace).length == 0


def test_a_copy_of_the_model_is_a_model_of_its_own(
    model: PreTrainedModel, cache: KVCache, hits: list[int], tmp_path: Path
) -> None:
    wanted = model.generate(ids(), **GREEDY)
    attach(model, cache)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    model.save_pretrained(tmp_path)
    copies: list[Any] = [
        copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False),
        type(model).from_pretrained(tmp_path).eval(),
    ]  # fmt: skip
    for other in copies:
        assert other.generate.__self__ is other
        assert torch.equal(other.generate(ids(), **GREEDY), wanted)
        with torch.no_grad():
            other.lm_head.weight.mul_(-1)
        assert not torch.equal(other.generate(ids(), **GREEDY), wanted)
        attach(other, cache)
    assert not hits
    assert torch.equal(model.generate(ids(), **GREEDY), wanted)


def test_a_model_in_training_is_attached_for_later(cache: KVCache, hits: list[int]) -> None:
    model = tiny("llama", attention_dropout=0.5).train()
    torch.manual_seed(1)
    wanted = model.generate(ids(), **GREEDY)
    torch.manual_seed(1)
    attach(model, cache)
    assert torch.equal(model.generate(ids(), **GREEDY), wanted)
    assert not hits
    model.eval()
    assert not torch.equal(model.generate(ids(), **GREEDY), wanted)
    assert hits == [0]


def test_a_generate_of_the_users_own_is_refused(model: Any, cache: KVCache) -> None:
    own = model.generate
    model.generate = lambda inputs: own(inputs[:, 1:])
    with pytest.raises(UnsupportedModelError, match="generate of its own"):
        attach(model, cache)


def test_tokens_beyond_the_vocabulary_are_the_models_to_refuse(
    model: PreTrainedModel, cache: KVCache
) -> None:
    attach(model, cache)
    for bad in (VOCABULARY, 1 << 40, -1):
        prompt = ids()
        prompt[0, 50] = bad
        with pytest.raises(IndexError):
            model.generate(prompt, **GREEDY)
    cache.flush()
    assert not list(cache.entries())


def test_the_pool_cache_refuses_what_it_cannot_do(model: PreTrainedModel) -> None:
    held = PoolCache(TorchPool(identify(model).namespace.spec, 64))
    with pytest.raises(ValueError, match="a batch of 2"):
        model(ids().repeat(2, 1), past_key_values=held)
    assert held.computed == 0
    with pytest.raises(ValueError, match="minus the number"):
        held.crop(5)
    model(ids(40), past_key_values=held)
    held.crop(-10)
    assert held.computed == held.get_seq_length() == 30
    assert held.is_sliding == [False] * 3
    assert (held.get_mask_sizes(5, 0), held.get_max_length()) == ((35, 0), -1)
    held.reset()
    assert held.get_seq_length() == 0
