"""Tokens to text as they come: whole characters only, and nothing of what might be a stop string."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .jobs import Token

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer decodes the first bytes of a character to


@dataclass(frozen=True)
class Piece:
    """Text that has become certain, and the tokens that came since the last piece.

    Attributes:
        text: may be empty.
        tokens: at least one.
        finish: "stop" or "length" on the last piece.
    """

    text: str
    tokens: list[Token]
    finish: str | None = None


class Detokenizer:
    """Text of a growing answer.

    Args:
        tokenizer: decodes ids.
        stop: strings before which the answer ends.

    Attributes:
        stopped: a stop string has come.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = [string for string in stop if string]
        self._ids: list[int] = []
        self._context = 0  # ids before this one are left out when later ones are decoded
        self._read = 0  # ids before this one are in the text
        self._held = ""  # text that may begin a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain now, since the last call."""
        self._ids.append(token)
        return self._emit(self._new_text(final=False), final=False)

    def end(self) -> str:
        """The text that was held back."""
        return self._emit(self._new_text(final=True), final=True)

    def _new_text(self, final: bool) -> str:
        """What the ids since the last call add; a tokenizer may join words only when it sees the ids before."""
        before = self._decode(self._ids[self._context : self._read])
        now = self._decode(self._ids[self._context :])
        if not final and (now.endswith(INCOMPLETE) or len(now) <= len(before)):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _emit(self, text: str, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        self._held = ""
        found = [at for string in self._stop if (at := text.find(string)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        if final:
            return text
        keep = max((_overlap(text, string) for string in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


async def pieces(
    tokens: AsyncGenerator[Token, None], tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()
) -> AsyncGenerator[Piece, None]:
    """An answer as text. A stop string ends it, and the tokens behind are cancelled."""
    detokenizer = Detokenizer(tokenizer, stop)
    since: list[Token] = []
    async with aclosing(tokens):
        async for token in tokens:
            since.append(token)
            text = detokenizer.push(token.id)
            if token.finish is not None:
                text += detokenizer.end()
            finish = "stop" if detokenizer.stopped else token.finish
            if text or finish is not None:
                yield Piece(text, since, finish)
                since = []
            if finish is not None:
                return


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that begins `string`, without being all of it."""
    longest = min(len(text), len(string) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(string[:length])), 0)


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end an answer: the generation config's, and the tokenizer's."""
    configured = model.generation_config.eos_token_id
    listed = configured if isinstance(configured, (list, tuple)) else [configured]
    return frozenset(token for token in (*listed, tokenizer.eos_token_id) if token is not None and token >= 0)
