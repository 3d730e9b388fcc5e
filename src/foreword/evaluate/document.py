"""What a cartridge knows: held-out questions answered from nothing, from it, and from the document in the context."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..compress.dialogue import Dialogue, Turns, common_start
from ..compress.documents import read_documents
from ..compress.self_study import SelfStudy, study
from ..compress.shards import Conversations
from ..data import load
from ..errors import ForewordError
from ..losses import keeps_logits
from ..measuring import cache_bytes
from ..model.attach import set_active
from ..model.host import host_of, host_on, host_with
from ..serve.text import end_ids
from .answers import exact, f1
from .intervals import ratio
from .likelihood import finite

HELD_OUT = 2**20  # added to the seed of self-study: other chunks, other questions


@dataclass(frozen=True)
class Question:
    """A prompt and the answer to it, as messages or as plain text.

    Attributes:
        given: whether the answer is right, to compare with, rather than what the model says with the text in view.
    """

    prompt: Turns
    answer: Turns
    given: bool


@dataclass(frozen=True)
class Arm:
    """Something to answer from.

    Attributes:
        name: for people.
        adapter: active while it answers; None for the base.
        text: token ids in the context.
    """

    name: str
    adapter: str | None = None
    text: tuple[int, ...] | None = None


def read_questions(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[Question]:
    """Questions with their answers out of a data file, in any format of prompts and completions.

    Raises `ForewordError` as `foreword.data.load` does, and for plain text.
    """
    rows = load(path, every_turn=False, chat=bool(tokenizer.chat_template))
    if "prompt" not in rows.column_names:
        raise ForewordError(f"{path} holds plain text; it should hold questions with their answers")
    return [Question(row["prompt"], row["completion"], given=True) for row in rows]


def write_questions(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, document: Sequence[int], settings: SelfStudy
) -> list[Question]:
    """Questions and answers that the model writes with chunks of the document in view.

    The chunks are drawn anew, so that none of the conversations is one of a training run with the same settings.
    """
    dialogue = Dialogue(tokenizer)
    shards = study(model, tokenizer, document, replace(settings, seed=settings.seed + HELD_OUT, top_k=1))
    conversations = Conversations(shards)
    written = [conversations.conversation(i) for i in range(settings.conversations)]
    return [
        Question(dialogue.prompt(one.question), dialogue.completion(one.answer), given=False)
        for one in written
        if one.question and one.answer
    ]


def evaluate_files(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    paths: Sequence[str | Path],
    questions: str | Path | None = None,
    held_out: int = 64,
    max_new_tokens: int = 64,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """`evaluate_document` for documents in files and the active adapter, if there is one.

    Args:
        paths: of documents, read one after the other.
        questions: a data file; None has the model write `held_out` of them.

    Raises as `read_documents`, `read_questions` and `evaluate_document`.
    """
    document = Dialogue(tokenizer).encode(read_documents(paths))
    if questions is None:
        asked = write_questions(model, tokenizer, document, SelfStudy(conversations=held_out, seed=seed))
    else:
        asked = read_questions(questions, tokenizer)
    host = host_on(model)
    names = [] if host is None or host.active is None else [host.active]
    return evaluate_document(model, tokenizer, document, asked, names, max_new_tokens=max_new_tokens)


def evaluate_document(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    document: Sequence[int],
    questions: Sequence[Question],
    adapters: Sequence[str] = ("default",),
    *,
    max_new_tokens: int = 64,
    timed: int = 3,
) -> list[dict[str, Any]]:
    """Answer questions from nothing, from each of some cartridges, and from the document in the context.

    Args:
        model: with the cartridges attached under the names `adapters`.
        document: token ids; its end is cut off where the model's context is too short.
        questions: with answers.
        max_new_tokens: of generated answers: given ones are compared with them, and decoding is timed over as many.
        timed: questions to time.

    Returns:
        A row for each arm: tokens in front of the question, log-likelihood per answer token in nats, the part of the
        gap between nothing and the document that is closed with its 95 % interval (a bootstrap over the questions),
        exact match and F1 where answers are given, median seconds to the first token with nothing cached, tokens per
        second after it, and bytes of keys and values at that time.

    Raises:
        ForewordError: there are no questions, one doesn't fit the model's context, or a log-likelihood is NaN.
    """
    if not questions:
        raise ForewordError("there are no questions to ask")
    dialogue = Dialogue(tokenizer)
    arms = [Arm("nothing"), *(Arm(name, name) for name in adapters)]
    arms.append(_document_arm(model, dialogue, document, questions, max_new_tokens))
    host = host_of(model)
    active = host.active
    ends = end_ids(model, tokenizer)
    rows, logliks = [], []
    try:
        for arm in arms:
            set_active(model, arm.adapter)
            row, of_questions = _answers(model, dialogue, arm, questions, max_new_tokens, timed, ends)
            rows.append(row)
            logliks.append(np.array(of_questions))
    finally:
        set_active(model, active)
        host.leave_if_empty()
    nothing, whole = logliks[0], logliks[-1]
    if whole.sum() != nothing.sum():
        for row, own in zip(rows, logliks, strict=True):
            row["gap closed"], row["gap low"], row["gap high"] = ratio(own - nothing, whole - nothing)
    return rows


def _document_arm(
    model: PreTrainedModel, dialogue: Dialogue, document: Sequence[int], questions: Sequence[Question], new: int
) -> Arm:
    """The document in the context, cut to what the longest question and its answer leave of it."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    longest = max(
        max(len(dialogue.ids(q.prompt, q.answer, text=[])), len(dialogue.ids(q.prompt, text=[])) + new)
        for q in questions
    )
    room = context - longest
    if room < 1:
        raise ForewordError(f"a question and its answer take {longest} tokens; the model's context is {context}")
    text = tuple(document[:room])
    cut = "" if len(text) == len(document) else f", first {len(text):,} of {len(document):,} tokens"
    return Arm(f"document{cut}", text=text)


@torch.no_grad()
def _answers(
    model: PreTrainedModel,
    dialogue: Dialogue,
    arm: Arm,
    questions: Sequence[Question],
    new: int,
    timed: int,
    ends: frozenset[int],
) -> tuple[dict[str, Any], list[float]]:
    """The row of one arm, and the log-likelihood of the answer to each question."""
    prompts = [dialogue.ids(question.prompt, text=arm.text) for question in questions]
    wholes = [dialogue.ids(question.prompt, question.answer, text=arm.text) for question in questions]
    shared = max(0, common_start([*prompts, *wholes]) - 1)  # one token is left to say what comes next
    cache = _prefilled(model, prompts[0][:shared])
    logliks, tokens, said = [], 0, []
    asked = list(enumerate(zip(questions, prompts, wholes, strict=True), 1))
    for number, (question, prompt, whole) in _progress(asked, arm.name):
        answer = len(whole) - common_start([prompt, whole])
        score = _loglikelihood(model, whole[shared:], answer, copy.deepcopy(cache))
        logliks.append(finite(score, f"the answer to question {number} from {arm.name}"))
        tokens += answer
        if question.given:
            ids, _, _ = greedy(model, prompt[shared:], copy.deepcopy(cache), new, ends)
            right = question.answer if isinstance(question.answer, str) else question.answer[-1]["content"]
            said.append((dialogue.decode(ids), right))
    times = []
    for prompt in prompts[:timed]:
        fresh = DynamicCache(config=model.config)
        _, first, rest = greedy(model, prompt, fresh, new, frozenset())
        times.append((first, rest, cache_bytes(fresh)))
    stored = 0 if arm.adapter is None else host_with(model, arm.adapter).require(arm.adapter).num_stored
    row = {
        "context": arm.name,
        "tokens": _entries(model, arm),
        "loglik/token": sum(logliks) / tokens,
        "gap closed": None,
        "gap low": None,
        "gap high": None,
        "exact": statistics.mean(exact(*pair) for pair in said) if said else None,
        "f1": statistics.mean(f1(*pair) for pair in said) if said else None,
        "first token s": statistics.median(first for first, _, _ in times),
        "tokens/s": statistics.median((new - 1) / rest for _, rest, _ in times),
        "KV bytes": round(statistics.median(size for *_, size in times)) + stored * model.dtype.itemsize,
    }
    return row, logliks


def _entries(model: PreTrainedModel, arm: Arm) -> int:
    """Tokens that stand in front of the question: of the text, or of the cartridge."""
    if arm.adapter is None:
        return len(arm.text or ())
    return sum(getattr(method, "length", 0) for method in host_with(model, arm.adapter).require(arm.adapter).methods)


def _prefilled(model: PreTrainedModel, ids: Sequence[int]) -> Cache:
    """The KV cache of a text that all prompts begin with."""
    cache = DynamicCache(config=model.config)
    if ids:
        model(input_ids=_row(model, ids), cache=cache, use_cache=True, **_last(model))
    return cache


def _loglikelihood(model: PreTrainedModel, ids: Sequence[int], answer: int, cache: Cache) -> float:
    """Σ log p of the last `answer` tokens, after what is in the cache."""
    row = _row(model, ids)
    logits = model(input_ids=row[:, :-1], cache=cache, use_cache=True, **_last(model, answer)).logits
    logprobs = logits[0, -answer:].float().log_softmax(-1)
    return logprobs.gather(1, row[0, -answer:, None]).sum().item()


def greedy(
    model: PreTrainedModel, ids: Sequence[int], cache: Cache, new: int, ends: frozenset[int]
) -> tuple[list[int], float, float]:
    """The likeliest continuation, after what is in the cache, up to `new` tokens or one of `ends`.

    Returns:
        its token ids, seconds to the first of them, and seconds from there to the last.
    """
    started = time.perf_counter()
    row, said, first = _row(model, ids), [], 0.0
    while True:
        logits = model(input_ids=row, cache=cache, use_cache=True, **_last(model)).logits
        said.append(int(logits[0, -1].argmax()))
        first = first or time.perf_counter() - started
        if said[-1] in ends or len(said) == new:
            break
        row = _row(model, said[-1:])
    return [token for token in said if token not in ends], first, time.perf_counter() - started - first


def _row(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)], device=model.device)


def _last(model: PreTrainedModel, columns: int = 1) -> dict[str, int]:
    """The argument for logits of the last columns alone, where the model has it."""
    return {"logits_to_keep": columns} if keeps_logits(model) else {}


def _progress(items: Sequence[Any], description: str):
    console = Console(stderr=True)
    return track(items, description, console=console, transient=True, disable=not console.is_terminal)
