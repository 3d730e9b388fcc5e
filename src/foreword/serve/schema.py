"""The bodies of requests: OpenAI's fields, with their limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_PROMPTS = 32
MAX_CHOICES = 8
MAX_TOP = 20


def _whole(text: str) -> str:
    """JSON can hold halves of characters, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is half a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_whole)]
Name = Annotated[Text, Field(min_length=1, max_length=200)]
Stop = Annotated[list[Annotated[Text, Field(max_length=200)]], Field(max_length=4)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class Body(BaseModel):
    """Fields that OpenAI has and that change nothing here (`user`, `metadata`, …) are let pass."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False


class Completing(Body):
    """What the two completion routes have in common.

    `model` names the base or an adapter. `ignore_eos` is vLLM's: go on to `max_tokens`. `streams` is P for an adapter
    of parallel streams (parscale), one of those that it has a set for; its largest by default.
    """

    model: Name
    max_tokens: int | None = Field(None, ge=1, le=2**20)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Text | Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    streams: int | None = Field(None, ge=1, le=1024)
    frequency_penalty: float | None = Field(None, ge=0, le=0)
    presence_penalty: float | None = Field(None, ge=0, le=0)
    logit_bias: dict[str, float] | None = Field(None, max_length=0)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class Completion(Completing):
    """POST /v1/completions."""

    prompt: Text | TokenIds | Annotated[list[Text] | list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1)]

    def plain(self) -> dict[str, str]:
        """For a chat template. OpenAI's newer "developer" is what templates know as "system"."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ResponseFormat(Body):
    type: Literal["text"]


class ChatCompletion(Completing):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**20)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = Field(None, max_length=0)


class LoadAdapter(Body):
    """POST /v1/load_lora_adapter (vLLM's name and fields) and POST /v1/adapters.

    `lora_path` is a folder inside of the server's adapters folder; by default the one called `lora_name`.
    """

    model_config = ConfigDict(extra="forbid")

    lora_name: Name
    lora_path: Text | None = Field(None, min_length=1, max_length=500)


class UnloadAdapter(Body):
    """POST /v1/unload_lora_adapter."""

    model_config = ConfigDict(extra="forbid")

    lora_name: Name
