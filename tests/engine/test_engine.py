"""Engine.generate: streaming, stopping, cancelling, waiting; and never a word from another request."""

import gc
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from asking import ask, same_as_plain
from tiny import VOCABULARY, plain, text, tiny
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from kvass.cache import KVCache
from kvass.engines.transformers import (
    Engine,
    LoadedModel,
    PoolCache,
    Sampling,
    Step,
    TorchPool,
    Usage,
    encode_text,
)
from kvass.engines.transformers.pool_cache import _PoolLayer
from kvass.engines.transformers.sampling import Sampler
from kvass.engines.transformers.text import TextStream
from kvass.engines.transformers.turns import Turns
from kvass.errors import InputError

CHUNK = 32


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(0x100 + token) for token in tokens)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("llama")


@pytest.fixture
def engine(model: PreTrainedModel, cache: KVCache) -> Engine:
    return Engine(model, cache, tokenizer=Letters(), slice_tokens=24)


def steps(engine: Engine, prompt: list[int], **sampling: Any) -> list[Step]:
    return list(engine.generate(prompt, Sampling(**sampling)))


# -- what is answered -------------------------------------------------------------------------------


def test_streaming_gives_the_whole_piece_by_piece(engine: Engine) -> None:
    asked = ask(engine, text(70), 40)
    assert asked.text == Letters().decode(asked.tokens)
    assert (asked.usage.finish_reason, asked.usage.completion_tokens) == ("length", 40)
    assert asked.usage.prompt_tokens == 70
    assert asked.usage.first_token_seconds > 0


def test_usage_may_be_used_again(engine: Engine) -> None:
    usage, prompt = Usage(), text(70)
    wanted = [step.token for step in engine.generate(prompt, Sampling(max_tokens=5), usage=usage)]
    assert usage.ticket is not None
    usage.ticket.wait(30)
    for hit in (69, 69):
        again = [step.token for step in engine.generate(prompt, Sampling(max_tokens=5), usage=usage)]
        assert (again, usage.cached_tokens, usage.finish_reason) == (wanted, hit, "length")
    other = text(80, seed=9)
    found = [step.token for step in engine.generate(other, Sampling(max_tokens=5), usage=usage)]
    assert (found, usage.cached_tokens, usage.loaded_bytes) == (plain(engine.model, other, 5)[0], 0, 0)


def test_an_engine_without_a_cache(model: PreTrainedModel) -> None:
    engine = Engine(model, None)
    asked = ask(engine, text(70))
    same_as_plain(asked, model, text(70))
    assert (asked.usage.cached_tokens, asked.usage.ticket, asked.text) == (0, None, "")


def test_the_end_of_a_text_ends_the_answer(model: PreTrainedModel, cache: KVCache) -> None:
    engine = Engine(model, cache)
    tokens = ask(engine, text(70), 12).tokens
    asked = ask(engine, text(70), 12, stop_ids=(tokens[4],))
    assert asked.tokens == tokens[: tokens.index(tokens[4]) + 1]
    assert asked.usage.finish_reason == "stop"
    for ends in (tokens[4], [tokens[4], VOCABULARY - 1]):
        model.generation_config.eos_token_id = ends
        try:
            again = ask(engine, text(70), 12)
        finally:
            model.generation_config.eos_token_id = None
        assert (again.tokens, again.usage.finish_reason) == (asked.tokens, "stop")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_stop_text_ends_the_answer_before_it(size: int, engine: Engine) -> None:
    whole = ask(engine, text(70), 40).text
    stop = whole[11 : 11 + size]
    at = whole.index(stop)
    asked = ask(engine, text(70), 40, stop=("never said", stop))
    assert (asked.text, asked.usage.finish_reason) == (whole[:at], "stop")
    assert len(asked.tokens) <= at + size + 4
    assert ask(engine, text(70), 40, stop=("never said",)).text == whole


def test_stop_texts_need_a_tokenizer(model: PreTrainedModel) -> None:
    with pytest.raises(InputError, match="tokenizer"):
        Engine(model, None).generate(text(9), Sampling(stop=("x",)))


def test_equal_seeds_draw_equal_tokens(engine: Engine) -> None:
    drawn = [ask(engine, text(70), 12, temperature=1.5, seed=seed).tokens for seed in (1, 1, 2, 1)]
    assert drawn[0] == drawn[1] == drawn[3] != drawn[2]
    torch.manual_seed(0)
    free = [tuple(ask(engine, text(70), 12, temperature=1.5).tokens) for _ in range(4)]
    assert len(set(free)) == 4


def test_temperature_and_cuts_mean_what_they_say() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])

    def shares(**settings: Any) -> list[float]:
        sampler = Sampler(Sampling(seed=1, **settings), torch.device("cpu"))
        drawn = np.bincount([sampler(logits) for _ in range(4000)], minlength=4) / 4000
        return [float(share) for share in drawn]

    def wanted(values: torch.Tensor) -> Any:
        return pytest.approx(values.softmax(0).tolist(), abs=0.03)

    nothing = -torch.inf
    assert shares() == [0, 0, 0, 1]
    assert shares(temperature=1e-6) == [0, 0, 0, 1]
    assert shares(temperature=1.0) == wanted(logits)
    assert shares(temperature=2.0) == wanted(logits / 2)
    assert shares(temperature=1.0, top_k=2) == wanted(torch.tensor([nothing, nothing, 2.0, 3.0]))
    assert shares(temperature=1.0, top_p=0.8) == wanted(torch.tensor([nothing, nothing, 2.0, 3.0]))
    assert shares(temperature=1.0, top_p=0.01) == [0, 0, 0, 1]
    assert shares(temperature=100.0, top_k=3, top_p=0.5)[0] == 0


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"max_tokens": -1}, "max_tokens"), ({"temperature": -0.1}, "temperature"),
        ({"temperature": 101.0}, "temperature"), ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"), ({"top_p": 1.1}, "top_p"), ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -1}, "top_k"), ({"stop": ("",)}, "stop"), ({"stop": "text"}, "stop"),
    ],
)  # fmt: skip
def test_a_parameter_out_of_range_is_named(bad: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match=f"^{name} is "):
        Sampling(**bad)


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ([], "empty|no tokens|at least"), ([VOCABULARY], "vocabulary"), ([-1], "-1"), ([[1, 2]], "flat"),
        ([1.5], "integers"), ([5] * 1024, "1024"), ([5] * 2000, "2000"),
    ],
)  # fmt: skip
def test_a_prompt_that_cannot_be_answered(prompt: Any, word: str, engine: Engine) -> None:
    with pytest.raises(InputError, match=word):
        engine.generate(prompt)


def test_an_answer_ends_where_the_model_does(model: PreTrainedModel, cache: KVCache) -> None:
    engine = Engine(model, cache)
    asked = ask(engine, text(1020), 24)
    assert (len(asked.tokens), asked.usage.finish_reason) == (4, "length")


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1])
def test_prompts_around_a_chunk(length: int, engine: Engine) -> None:
    prompt = text(length)
    for hit in (0, length - 1, length - 1):
        asked = ask(engine, prompt, 4)
        assert asked.usage.cached_tokens == hit
        same_as_plain(asked, engine.model, prompt, 4)


# -- ending early -----------------------------------------------------------------------------------


def _stored(engine: Engine, tokens: list[int]) -> int:
    assert engine.cache is not None
    engine.cache.flush()
    return engine.cache.lookup(tokens, engine.namespace).length


def test_closing_the_iterator_keeps_what_was_computed(engine: Engine) -> None:
    prompt, usage = text(70), Usage()
    wanted = plain(engine.model, prompt, 12)[0]
    answer = engine.generate(prompt, Sampling(max_tokens=12), usage=usage)
    assert [next(answer).token for _ in range(4)] == wanted[:4]
    answer.close()
    assert usage.finish_reason == "cancelled"
    assert _stored(engine, [*prompt, *wanted]) == 73
    same_as_plain(ask(engine, [*prompt, *wanted], 8), engine.model, [*prompt, *wanted], 8)


def test_an_iterator_that_was_never_begun_costs_nothing(engine: Engine) -> None:
    usage = Usage()
    engine.generate(text(70), usage=usage).close()
    assert _stored(engine, text(70)) == 0
    assert len(ask(engine, text(70), 3).tokens) == 3


@pytest.mark.parametrize("layer", [0, 1])
def test_cancelling_in_the_middle_of_a_slice(
    layer: int, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second slice, before one of its layers: what was whole is kept, nothing of the rest."""
    prompt, usage, cancelled = text(100), Usage(), threading.Event()
    update, calls = _PoolLayer.update, []

    def counted(self: Any, keys: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._place[1] == layer:
            calls.append(keys.shape[2])
            if len(calls) == 2:
                cancelled.set()
        return update(self, keys, *args, **kwargs)

    monkeypatch.setattr(_PoolLayer, "update", counted)
    assert not list(engine.generate(prompt, usage=usage, cancelled=cancelled))
    assert (calls, usage.finish_reason, usage.completion_tokens) == ([24, 24], "cancelled", 0)
    assert _stored(engine, prompt) == 24
    asked = ask(engine, prompt, 6)
    assert asked.usage.cached_tokens == 24
    same_as_plain(asked, engine.model, prompt, 6)


def test_cancelling_while_it_answers(engine: Engine) -> None:
    prompt, usage, cancelled = text(70), Usage(), threading.Event()
    seen = []
    for step in engine.generate(prompt, Sampling(max_tokens=30), usage=usage, cancelled=cancelled):
        seen.append(step.token)
        if len(seen) == 5:
            cancelled.set()
    assert (len(seen), usage.finish_reason) == (5, "cancelled")
    assert _stored(engine, [*prompt, *seen]) == 74
    assert ask(engine, [*prompt, *seen], 3).usage.cached_tokens == 74


def test_cancelled_before_it_began(engine: Engine) -> None:
    usage, cancelled = Usage(), threading.Event()
    cancelled.set()
    assert not list(engine.generate(text(70), usage=usage, cancelled=cancelled))
    assert (usage.finish_reason, _stored(engine, text(70))) == ("cancelled", 0)


@pytest.mark.parametrize("calls", [1, 4, 7, 11])
def test_a_forward_that_fails_between_two_layers(
    calls: int, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some layers then hold more tokens than others: only what all of them hold was computed.
    prompt, rotate, done = text(70), modeling_llama.apply_rotary_pos_emb, []
    ask(engine, text(90, seed=5), 3)
    engine.overwrite_pool(100)

    def breaks(*given: Any) -> Any:  # just before a layer's keys go into the cache
        if len(done) == calls:
            raise KeyboardInterrupt
        done.append(1)
        return rotate(*given)

    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", breaks)
        with pytest.raises(KeyboardInterrupt):
            list(engine.generate(prompt))
    assert _stored(engine, prompt) == min(70, calls // 3 * 24)
    same_as_plain(ask(engine, prompt, 6), engine.model, prompt, 6)


# -- one pool for all -------------------------------------------------------------------------------


def test_the_pool_is_used_again_and_keeps_nothing(model: PreTrainedModel, cache: KVCache) -> None:
    engine = Engine(model, cache, slice_tokens=24)
    pools = set()
    for number, length in enumerate((300, 20, 150, 300, 64, 33, 299)):
        prompt = text(length, seed=number % 4)
        for byte in (0xFF, 0x3C):
            pool = engine._host.borrow(engine.namespace.spec, 320)
            pool.fill(byte)
            pools.add(id(pool))
            engine._host.give_back(pool)
            same_as_plain(ask(engine, prompt, 5), model, prompt, 5)
    assert len(pools) == 1


def test_a_pool_that_has_to_grow_keeps_what_it_holds(model: PreTrainedModel) -> None:
    engine = Engine(model, None)
    held = PoolCache(TorchPool(engine.namespace.spec, 10))
    prompt = text(50)
    with torch.inference_mode():
        logits = [model(torch.tensor([[token]]), past_key_values=held).logits[0, -1] for token in prompt]
    assert held.pool.capacity >= 50
    assert (logits[-1] - plain(model, prompt, 1)[1][0]).abs().max() <= 1e-4


def test_modes_of_the_caller_do_not_reach_the_model(model: PreTrainedModel, cache: KVCache) -> None:
    engine = Engine(model, cache)
    wanted = plain(model, text(70), 6)[0]
    with torch.inference_mode():
        assert ask(engine, text(70), 6).tokens == wanted
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ask(engine, text(70), 6).tokens == wanted
    engine.overwrite_pool(100)
    assert ask(engine, text(70), 6).tokens == wanted


# -- waiting in line --------------------------------------------------------------------------------


def test_threads_are_served_one_after_another(engine: Engine) -> None:
    prompts = [text(60 + 10 * number, seed=number) for number in range(6)]
    order: list[int] = []
    answers: dict[int, list[int]] = {}

    def run(number: int) -> None:
        for step in engine.generate(prompts[number], Sampling(max_tokens=8)):
            order.append(number)
            answers.setdefault(number, []).append(step.token)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(answers) == list(range(6))
    for number, prompt in enumerate(prompts):
        assert answers[number] == plain(engine.model, prompt, 8)[0]
    assert [one for at, one in enumerate(order) if not at or order[at - 1] != one] == list(
        dict.fromkeys(order)
    )


def test_who_is_abandoned_does_not_block_the_next(engine: Engine) -> None:
    engine._turns = Turns(patience=0.1)
    prompt, other = text(70), text(80, seed=3)
    begun = engine.generate(prompt, Sampling(max_tokens=8))
    first = [next(begun).token for _ in range(3)]
    answers: list[list[int]] = []
    thread = threading.Thread(target=lambda: answers.append(ask(engine, other, 8).tokens))
    thread.start()
    thread.join(60)
    assert answers == [plain(engine.model, other, 8)[0]]
    rest = [step.token for step in begun]  # takes its turn again, with all that it had
    assert first + rest == plain(engine.model, prompt, 8)[0]


def test_a_consumer_that_is_only_slow_keeps_its_turn(engine: Engine) -> None:
    engine._turns = Turns(patience=30)
    began: list[float] = []
    slow = engine.generate(text(70), Sampling(max_tokens=4))
    next(slow)

    def run() -> None:
        began.extend(time.monotonic() for _ in engine.generate(text(80), Sampling(max_tokens=1)))

    thread = threading.Thread(target=run)
    thread.start()
    for _ in slow:
        time.sleep(0.05)
    over = time.monotonic()
    thread.join(60)
    assert began[0] >= over - 0.05


@pytest.mark.alone
def test_two_answers_in_one_thread_take_turns(engine: Engine) -> None:
    prompts = [text(70), text(80, seed=3)]
    began = time.monotonic()
    both = zip(*(engine.generate(prompt, Sampling(max_tokens=6)) for prompt in prompts), strict=True)
    answers = [[step.token for step in answer] for answer in zip(*both, strict=True)]
    assert answers == [plain(engine.model, prompt, 6)[0] for prompt in prompts]
    assert time.monotonic() - began < 4


def test_who_waits_can_be_cancelled(engine: Engine) -> None:
    holder, usage, cancelled = engine.generate(text(70)), Usage(), threading.Event()
    next(holder)
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.extend(engine.generate(text(80), usage=usage, cancelled=cancelled))
    )
    thread.start()
    cancelled.set()
    thread.join(60)
    assert (answers, usage.finish_reason, thread.is_alive()) == ([], "cancelled", False)
    assert len(list(holder)) == 255


@pytest.mark.alone
def test_an_iterator_that_is_dropped_gives_its_turn_back(engine: Engine) -> None:
    answer: Iterator[Step] | None = engine.generate(text(70))
    assert answer is not None
    next(answer)
    answer = None
    gc.collect()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(ask(engine, text(70), 3).tokens))
    began = time.monotonic()
    thread.start()
    thread.join(60)
    assert len(found) == 3
    assert time.monotonic() - began < 4


def test_turns_are_taken_in_order() -> None:
    turns, never, order = Turns(patience=30), threading.Event(), []
    assert turns.take("first", never)

    def run(name: str) -> None:
        assert turns.take(name, never)
        order.append(name)
        turns.leave(name)

    threads = [threading.Thread(target=run, args=(str(number),)) for number in range(5)]
    for thread in threads:
        thread.start()
        while len(turns._waiting) < len([one for one in threads if one.ident is not None]):
            time.sleep(0.001)
    turns.leave("nobody")
    turns.leave("first")
    for thread in threads:
        thread.join(30)
    assert order == ["0", "1", "2", "3", "4"]


# -- text -------------------------------------------------------------------------------------------


def _stream(tokenizer: Any, tokens: list[int], stop: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    stream = TextStream(tokenizer, stop)
    pieces = []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    assert stream.text == "".join(pieces)
    return stream.text, pieces


class Bytes:
    """One byte a token; `joined` writes a run of bytes that is not whole as so many unknown characters."""

    def __init__(self, joined: bool = False):
        self.joined = joined

    def decode(self, tokens: list[int], **_: Any) -> str:
        raw = bytes(tokens)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(raw) if self.joined else raw.decode(errors="replace")


STRANGE = "naïve 😀👩‍👩‍👧 ½ 日本語 and\nthe end 🏴\u200d☠️" * 3


@pytest.mark.parametrize("joined", [False, True])
def test_characters_of_several_tokens_come_whole(joined: bool) -> None:
    whole, pieces = _stream(Bytes(joined), list(STRANGE.encode()))
    assert whole == STRANGE
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    if not joined:
        assert len([piece for piece in pieces if piece]) == len(STRANGE)


def test_bytes_that_never_become_a_character_come_in_the_end() -> None:
    whole, pieces = _stream(Bytes(), [*b"ab", 0xF0, 0x9F])
    assert (whole, pieces[:4]) == ("ab\N{REPLACEMENT CHARACTER}", ["a", "b", "", ""])
    assert _stream(Bytes(), [0xFF, *b"ab"])[0] == "\N{REPLACEMENT CHARACTER}ab"


@pytest.mark.parametrize(
    ("said", "stop", "wanted"),
    [
        ("one two three", ("two",), "one "), ("one two three", ("xyz", "three"), "one two "),
        ("one STO STOP it", ("STOP",), "one STO "), ("aaab", ("aab",), "a"), ("one ST", ("STOP",), "one ST"),
        ("x😀y", ("😀",), "x"), ("ababac", ("abac", "zz"), "ab"), ("stop", ("stop",), ""),
        ("one\n\nUser: two", ("\nUser:", "\n\nUser"), "one"), ("abc", ("c", "bc"), "a"),
    ],
)  # fmt: skip
def test_nothing_of_a_stop_text_is_handed_out(said: str, stop: tuple[str, ...], wanted: str) -> None:
    whole, pieces = _stream(Bytes(), list(said.encode()), stop)
    assert whole == wanted
    for at in range(len(pieces)):
        assert wanted.startswith("".join(pieces[:at]))


def test_every_cut_of_a_text_into_tokens_streams_the_same() -> None:
    class Spans:
        """Any bytes as one token."""

        def __init__(self, spans: list[bytes]):
            self.spans = spans

        def decode(self, tokens: list[int], **_: Any) -> str:
            return b"".join(self.spans[token] for token in tokens).decode(errors="replace")

    raw, random = STRANGE.encode(), np.random.default_rng(0)
    for _ in range(40):
        cuts = [0, *sorted(random.choice(len(raw) - 1, 30, replace=False) + 1), len(raw)]
        spans = [raw[one:other] for one, other in pairwise(cuts)]
        assert _stream(Spans(spans), list(range(len(spans))))[0] == STRANGE


class Spaced:
    """Writes a space before each word but the first, as tokenizers made by SentencePiece do."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return " ".join(f"w{token}" for token in tokens if token)


def test_a_tokenizer_that_drops_the_first_space() -> None:
    tokens = list(range(1, 100))
    whole, pieces = _stream(Spaced(), tokens)
    assert whole == Spaced().decode(tokens)
    assert pieces[50] == " w51"
    special = [0] * 40 + [1, 2] + [0] * 40 + [3]
    assert _stream(Spaced(), special)[0] == "w1 w2 w3"


@pytest.mark.model
def test_real_tokenizers_stream_what_they_decode(smollm2_fp32: LoadedModel, gemma3_fp32: LoadedModel) -> None:
    for loaded in (smollm2_fp32, gemma3_fp32):
        for said in (STRANGE, "  def f(x):\n\treturn  x  # ?!  ", "Hello , world ! It 's 3.14 ..."):
            tokens = encode_text(loaded, said)
            wanted = loaded.tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            assert _stream(loaded.tokenizer, tokens)[0] == wanted


@pytest.mark.model
def test_a_stop_text_with_a_real_tokenizer(smollm2_fp32: LoadedModel, cache: KVCache) -> None:
    engine = Engine(smollm2_fp32.model, cache, tokenizer=smollm2_fp32.tokenizer)
    prompt = encode_text(smollm2_fp32, "One, two, three, four,")
    whole = ask(engine, prompt, 16)
    assert whole.text == smollm2_fp32.tokenizer.decode(whole.tokens)
    stop = whole.text[7:13]
    asked = ask(engine, prompt, 16, stop=(stop,))
    assert asked.usage.cached_tokens == len(prompt) - 1
    assert (asked.text, asked.usage.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
