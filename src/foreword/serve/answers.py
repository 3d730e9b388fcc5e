"""Answers in OpenAI's two shapes: messages of a chat, and texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from .jobs import Token
from .text import Piece


class Form(ABC):
    """A shape of answers.

    Args:
        tokenizer: decodes the tokens of log-probabilities one by one.
    """

    prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    @abstractmethod
    def choice(self, index: int, answer: Sequence[Piece]) -> dict[str, Any]:
        """A whole answer."""

    @abstractmethod
    def delta(self, index: int, piece: Piece, offset: int) -> dict[str, Any]:
        """What a piece adds to a streamed answer, behind `offset` characters."""

    def opening(self, choices: int) -> list[dict[str, Any]]:
        """What is streamed before the first piece."""
        return []

    def _text_of(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


class ChatForm(Form):
    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, answer: Sequence[Piece]) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(piece.text for piece in answer)}
        tokens = [token for piece in answer for token in piece.tokens]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": answer[-1].finish,
        }

    def delta(self, index: int, piece: Piece, offset: int) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": piece.text},
            "logprobs": self._logprobs(piece.tokens),
            "finish_reason": piece.finish,
        }

    def opening(self, choices: int) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": ""}
        return [{"index": i, "delta": role, "logprobs": None, "finish_reason": None} for i in range(choices)]

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if tokens[0].logprob is None:
            return None
        content = [
            self._entry(token.id, token.logprob) | {"top_logprobs": [self._entry(*other) for other in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text_of(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class TextForm(Form):
    prefix = "cmpl"
    object = chunk_object = "text_completion"

    def choice(self, index: int, answer: Sequence[Piece]) -> dict[str, Any]:
        whole = Piece(
            "".join(piece.text for piece in answer),
            [token for piece in answer for token in piece.tokens],
            answer[-1].finish,
        )
        return self.delta(index, whole, 0)

    def delta(self, index: int, piece: Piece, offset: int) -> dict[str, Any]:
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece.tokens, offset),
            "finish_reason": piece.finish,
        }

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
        if tokens[0].logprob is None:
            return None
        texts = [self._text_of(token.id) for token in tokens]
        offsets = [offset + sum(map(len, texts[:count])) for count in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self._text_of(i): logprob for i, logprob in token.top} for token in tokens],
            "text_offset": offsets,
        }
