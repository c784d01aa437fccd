"""Requests as OpenAI defines them, as far as they are understood here; other fields are ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvass.serve.segments import Segmented

Stop = Annotated[str, Field(min_length=1, max_length=256)]  # looked for after every token
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class KvassOptions(BaseModel):
    """What a client may ask of the cache."""

    model_config = ConfigDict(strict=True, extra="forbid")

    load: bool = True
    keep: bool = True


class Budget(BaseModel):
    """What lossy state may cost: mean KL per token in nats, and share of facts lost; else the settings'."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    kl: Annotated[float, Field(ge=0)] | None = None
    facts_lost: Annotated[float, Field(ge=0, le=1)] | None = None


class ReuseOptions(KvassOptions):
    """`reuse`: `prefix`, or `anywhere` in the prompt; else as `reuse` is set. `max_fraction`: how much of it
    may be computed anew."""

    budget: Budget = Budget()
    reuse: Literal["prefix", "anywhere"] | None = None
    max_fraction: Annotated[float, Field(gt=0, le=1)] | None = None


class LossyOptions(ReuseOptions):
    """`lossy`: whether state of lossy codecs may be used; else as `allow_lossy` is set."""

    lossy: bool | None = None


class CompletionOptions(LossyOptions):
    """`special_tokens`: in the prompt, texts of special tokens stand for these."""

    special_tokens: bool = False


class StreamOptions(_Strict):
    """`include_usage`: a last chunk holds the usage."""

    include_usage: bool = False


class _Request(_Strict):
    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    kvass: LossyOptions = LossyOptions()

    def stops(self) -> tuple[str, ...]:
        """The texts before which an answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Part(_Strict):
    """A piece of a message. Only text is understood. `segment`: it may be reused as a whole where it stands
    in other prompts too; a name for it, or true."""

    type: Literal["text", "input_text"]
    text: str
    segment: Annotated[str, Field(max_length=64)] | bool | None = None

    @property
    def name(self) -> str | None:
        """Of the segment that it is; empty where it has none, None where it is no segment."""
        return self.segment if isinstance(self.segment, str) else "" if self.segment else None


class Message(BaseModel):
    """One message of a chat. What else it holds is the template's matter."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        for part in value if isinstance(value, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in ("text", "input_text"):
                raise ValueError(f"parts of type {kind!r} are not supported yet; only text is")
        return value

    def for_template(self) -> dict[str, Any]:
        """The message as a template expects it: text for its content."""
        content = self.content
        if isinstance(content, list):
            content = Segmented.of([(part.text, part.name) for part in content])
        role = "system" if self.role == "developer" else self.role
        return {**(self.model_extra or {}), "role": role, "content": content or ""}


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None


class CompletionRequest(_Request):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=64)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=64)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    kvass: CompletionOptions = CompletionOptions()
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
