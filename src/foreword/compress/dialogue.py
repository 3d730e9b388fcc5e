"""Questions and answers as token ids, with a text in the context or without one."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ..data import to_text
from ..data.conversations import Message, message
from ..errors import ForewordError

MARK = "\N{OBJECT REPLACEMENT CHARACTER}"  # where the text goes
Turns = str | list[Message]  # plain text, or messages where the tokenizer has a chat template


class Dialogue:
    """How a model is asked, about a text in its context or about nothing that it sees.

    A text in the context is a system message; where the chat template takes none, it stands in front of the question;
    where the tokenizer has no template, so it does in plain text.

    Args:
        tokenizer: of the model.

    Attributes:
        chat: whether there is a chat template.
        head, tail: token ids around a text in the context that nobody has asked about yet.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.chat = bool(tokenizer.chat_template)
        self._system = self.chat and self._takes_system()
        before, _, after = self._context().partition(MARK)
        self.head, self.tail = self._encode(before, first=True), self._encode(after)

    def prompt(self, question: str) -> Turns:
        """A question as the model is asked it."""
        return [message("user", question)] if self.chat else f"Question: {question}\nAnswer:"

    def completion(self, answer: str) -> Turns:
        """An answer as the model gives it."""
        return [message("assistant", answer)] if self.chat else f" {answer}"

    def ids(self, prompt: Turns, completion: Turns | None = None, text: Sequence[int] | None = None) -> list[int]:
        """Token ids of a prompt, up to where the answer begins, or with the answer to its end.

        Args:
            text: token ids of a text that is in the context.
        """
        asked = prompt if text is None else self._marked(prompt)
        rendered = "".join(to_text({"prompt": asked, "completion": completion}, self.tokenizer))
        ends = completion is not None and not self.chat and self.tokenizer.eos_token_id is not None
        end = [self.tokenizer.eos_token_id] if ends else []
        if text is None:
            return self._encode(rendered, first=True) + end
        before, _, after = rendered.partition(MARK)
        return self._encode(before, first=True) + list(text) + self._encode(after) + end

    def opened(self, prompt: Turns, beginning: str, text: Sequence[int]) -> tuple[list[int], list[int]]:
        """Token ids of a prompt about a text, and of the words that the answer begins with."""
        return self.ids(prompt, text=text), self._encode(beginning if self.chat else f" {beginning}")

    def encode(self, text: str) -> list[int]:
        """Token ids of a document, which may be longer than the model's context."""
        return self._encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """What a reply says."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True)).replace(MARK, "").strip()

    def _marked(self, prompt: Turns) -> Turns:
        """The prompt with a mark where a text in the context stands."""
        if isinstance(prompt, str):
            return f"{MARK}\n\n{prompt}"
        first, *others = prompt
        role = "system" if self._system else "user"
        if first["role"] == role:
            return [message(role, f"{MARK}\n\n{first['content']}"), *others]
        return [message(role, MARK), *prompt]

    def _takes_system(self) -> bool:
        try:
            rendered, _ = to_text({"prompt": [message("system", MARK), message("user", "?")]}, self.tokenizer)
        except ForewordError:
            return False
        return MARK in rendered

    def _context(self) -> str:
        """A text in the context, and no question."""
        from jinja2 import TemplateError

        if self._system:
            try:
                turns = [message("system", MARK)]
                return str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=False))
            except TemplateError:  # it wants a question too
                pass
        rendered, _ = to_text({"prompt": self._marked(self.prompt(""))}, self.tokenizer)
        return f"{rendered.partition(MARK)[0]}{MARK}\n\n"

    def _encode(self, text: str, first: bool = False) -> list[int]:
        """Token ids; a chat template has put its special tokens in the text already."""
        return list(self.tokenizer(text, add_special_tokens=first and not self.chat, verbose=False)["input_ids"])


def common_start(sequences: Sequence[Sequence[int]]) -> int:
    """How many first tokens all of the sequences share."""
    columns = zip(*sequences, strict=False)
    return next((i for i, column in enumerate(columns) if len(set(column)) > 1), min(map(len, sequences)))


def common_end(sequences: Sequence[Sequence[int]]) -> int:
    """How many last tokens all of the sequences share."""
    return common_start([ids[::-1] for ids in sequences])
