"""The official client, and another library's, get what they expect."""

import math
from typing import Any

import openai
import pytest
from huggingface_hub import InferenceClient

from harness.servers import TINY_LENGTH, Server
from kvass.serve.logprobs import TokenLogprob, for_chat, for_completion

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_a_chat_is_answered(client: openai.OpenAI, server: Server) -> None:
    reply = client.chat.completions.create(model=server.model, messages=QUESTION, max_tokens=5, temperature=0)
    assert reply.object == "chat.completion" and reply.model == server.model
    (choice,) = reply.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length" and reply.usage.completion_tokens == 5
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 5


def test_a_stream_says_the_same(client: openai.OpenAI, server: Server) -> None:
    options: Any = {"model": server.model, "messages": QUESTION, "max_tokens": 9, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 9
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_cached_tokens_are_what_was_loaded(client: openai.OpenAI, server: Server) -> None:
    text = "A sentence that no other test sends. " * 20
    options: Any = {"model": server.model, "prompt": text, "max_tokens": 3, "temperature": 0}
    cold, warm = (client.completions.create(**options) for _ in range(2))
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens == warm.usage.prompt_tokens - 1
    assert warm.choices[0].text == cold.choices[0].text
    assert cold.kvass["hit_tokens"] == 0 and cold.kvass["computed_tokens"] == cold.usage.prompt_tokens
    assert warm.kvass["hit_tokens"] == warm.usage.prompt_tokens - 1
    assert warm.kvass["loaded_bytes"]["host"] > 0 and warm.kvass["saved_seconds"] >= 0


def test_text_and_ids_are_the_same_prompt(client: openai.OpenAI, server: Server, smollm2_fp32: Any) -> None:
    ids = smollm2_fp32.tokenizer("Once upon a time")["input_ids"]
    options: Any = {"model": server.model, "max_tokens": 6, "temperature": 0}
    one, other = (client.completions.create(prompt=prompt, **options) for prompt in ("Once upon a time", ids))
    assert one.choices[0].text == other.choices[0].text
    several = client.completions.create(prompt=["Once upon a time", "And then"], n=2, **options)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == one.choices[0].text
    assert several.usage.prompt_tokens == len(ids) + len(smollm2_fp32.tokenizer("And then")["input_ids"])


def test_seeds_repeat_and_differ(client: openai.OpenAI, server: Server) -> None:
    def ask(seed: int, n: int = 1) -> list[str | None]:
        reply = client.chat.completions.create(
            model=server.model, messages=QUESTION, max_tokens=12, seed=seed, n=n
        )
        return [choice.message.content for choice in reply.choices]

    assert ask(7) == ask(7) != ask(8)
    assert len(set(ask(7, n=3))) == 3 and ask(7, n=3)[0] == ask(7)[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_an_answer_before_it(client: openai.OpenAI, server: Server, stream: bool) -> None:
    options: Any = {"model": server.model, "prompt": "Tell me", "max_tokens": 30, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    stop = text[10:13]
    wanted = text[: text.index(stop)]
    if stream:
        chunks = list(client.completions.create(**options, stop=[stop], stream=True))
        found, reason = "".join(one.choices[0].text for one in chunks), chunks[-1].choices[0].finish_reason
    else:
        (choice,) = client.completions.create(**options, stop=stop).choices
        found, reason = choice.text, choice.finish_reason
    assert (found, reason) == (wanted, "stop")


@pytest.mark.parametrize("cached", ["nothing", "half", "all"])
def test_echo_and_logprobs_are_right_whatever_is_cached(
    client: openai.OpenAI, server: Server, smollm2_fp32: Any, cached: str
) -> None:
    """Logits of the cached part are not stored: they must be computed, not left out or made up."""
    text = f"With {cached} of it cached: " + "she sells sea shells, and he does not. " * 12
    options: Any = {"model": server.model, "max_tokens": 4, "temperature": 0}
    if cached != "nothing":
        seen = text if cached == "all" else text[: len(text) // 2]
        client.completions.create(prompt=seen, **options)
    reply = client.completions.create(prompt=text, echo=True, logprobs=2, **options)
    found, ids = reply.choices[0].logprobs, smollm2_fp32.tokenizer(text)["input_ids"]
    assert reply.choices[0].text.startswith(text)
    assert "".join(found.tokens) == reply.choices[0].text
    assert len(found.tokens) == len(ids) + 4 == len(found.token_logprobs)
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert all(one < 0 and math.isfinite(one) for one in found.token_logprobs[1:])
    assert [text[at : at + 3] for at in found.text_offset[1:5]] == [
        text[len("".join(found.tokens[:number])) :][:3] for number in range(1, 5)
    ]
    again = client.completions.create(
        prompt=text, echo=True, logprobs=2, extra_body={"kvass": {"load": False}}, **options
    )
    for one, other in zip(
        found.token_logprobs[1:], again.choices[0].logprobs.token_logprobs[1:], strict=True
    ):
        assert one == pytest.approx(other, abs=1e-4)
    nothing_new = client.completions.create(
        prompt=text, echo=True, logprobs=0, model=server.model, max_tokens=0
    )
    assert nothing_new.choices[0].text == text
    assert nothing_new.choices[0].logprobs.token_logprobs == pytest.approx(
        found.token_logprobs[: len(ids)], abs=1e-4
    )


def test_logprobs_of_a_chat(client: openai.OpenAI, server: Server) -> None:
    reply = client.chat.completions.create(
        model=server.model, messages=QUESTION, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    content = reply.choices[0].logprobs.content
    assert len(content) == 4
    for one in content:
        assert len(one.top_logprobs) == 3
        assert one.logprob == pytest.approx(one.top_logprobs[0].logprob)
        assert bytes(one.bytes).decode() == one.token


def test_a_part_of_a_character_has_no_bytes_and_the_likeliest_of_a_text_counts() -> None:
    """A client joins the bytes of tokens to characters: those of a replacement would be wrong ones."""
    found = [TokenLogprob(7, -0.5, [(7, -0.5), (8, -3.0)])]
    (shown,) = for_chat(found, lambda token: "\N{REPLACEMENT CHARACTER}")["content"]
    assert shown["bytes"] is None and shown["top_logprobs"][1]["bytes"] is None
    assert for_chat(found, lambda token: "é")["content"][0]["bytes"] == [0xC3, 0xA9]
    assert for_completion(found, lambda token: "?", 0, "?")["top_logprobs"] == [{"?": -0.5}]


def test_models(client: openai.OpenAI, server: Server) -> None:
    (model,) = client.models.list().data
    assert model.id == server.model and model.max_model_len == TINY_LENGTH
    assert client.models.retrieve(server.model).id == server.model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_errors_are_the_clients_own_classes(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=server.model, messages=QUESTION, temperature=9)
    assert bad.value.param == "temperature" and "less than or equal to 2" in str(bad.value)
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=server.model, prompt=[5] * TINY_LENGTH)
    assert long.value.code == "context_length_exceeded"


def test_huggingface_hub_chats_and_streams(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # it would refuse loopback too
    client = InferenceClient(base_url=server.url + "/v1", api_key="none")
    reply = client.chat.completions.create(
        messages=QUESTION, max_tokens=7, temperature=0.0, model=server.model
    )
    chunks = client.chat.completions.create(
        messages=QUESTION, max_tokens=7, temperature=0.0, model=server.model, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == reply.choices[0].message.content
    assert reply.usage.completion_tokens == 7
