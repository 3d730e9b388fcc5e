"""Self-study: the frozen model asks and answers questions about chunks of a document, and is its own teacher.

A shard is a batch of conversations about chunks of one length: the model, with a chunk in its context, writes a
question of one line to one of the seed prompts; with the chunk in its context again, it answers; the teacher is what
the model says there at every token of both. Shard i depends on the document, the model, the settings and i only, and
is kept in the cache folder under a hash of those: asking for more conversations, or compressing to another length,
reuses it.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache import cache_root
from ..errors import ForewordError
from ..files import write_json
from ..model.weights import parameters_of
from ..serve.jobs import Decoding
from ..space import require_positive
from .chunks import Chunk, draw_chunks
from .dialogue import Dialogue, common_end
from .seeds import SEEDS
from .shards import Conversation, write_shard
from .teacher import top_logprobs
from .writing import Writer, base_only

FORMAT = 1  # raise it when a shard of the same settings would be another


@dataclass(frozen=True)
class SelfStudy:
    """How to write conversations about a document.

    Args:
        conversations: how many, rounded up to whole shards.
        shortest_chunk: tokens of the document that a conversation is about, at least.
        longest_chunk: at most; drawn for each shard.
        question_tokens: longest question.
        answer_tokens: longest answer.
        temperature: of both; 0 takes the likeliest tokens.
        top_k: how many log-probabilities of the teacher to keep at each token.
        batch_size: conversations of a shard, written at a time.
        seed: of chunks, seed prompts and sampling.
    """

    conversations: int = 512
    shortest_chunk: int = 256
    longest_chunk: int = 1024
    question_tokens: int = 64
    answer_tokens: int = 192
    temperature: float = 0.7
    top_k: int = 20
    batch_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("conversations", "shortest_chunk", "question_tokens", "answer_tokens", "top_k", "batch_size")
        require_positive(self, *counts)
        if self.longest_chunk < self.shortest_chunk:
            raise ForewordError(f"longest_chunk ({self.longest_chunk}) is below shortest_chunk ({self.shortest_chunk})")
        if self.temperature < 0:
            raise ForewordError(f"temperature must be at least 0, not {self.temperature}")

    def longest(self, document: int) -> int:
        """Tokens of a chunk, question and answer together, for a document of that many."""
        return min(self.longest_chunk, document) + self.question_tokens + self.answer_tokens


def study(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, document: Sequence[int], settings: SelfStudy
) -> list[Path]:
    """The shards of a document's self-study, those written that are not in the cache yet.

    A process that is killed loses the shard that it was writing.

    Args:
        model, tokenizer: the base; adapters on it are not read.
        document: token ids, of any length.
        settings: how many conversations, and what they are like.

    Raises:
        ForewordError: a chunk, a question and an answer don't fit the model's context together.
    """
    dialogue = Dialogue(tokenizer)
    longest = settings.longest(len(document)) + longest_request(dialogue)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and longest > context:
        raise ForewordError(
            f"a chunk of {settings.longest_chunk} tokens with its question and answer needs {longest}, more than the "
            f"model's context of {context}: lower longest_chunk, question_tokens or answer_tokens"
        )
    folder = cache_root() / "self-study" / fingerprint(model, tokenizer, document, settings)
    shards = [folder / f"shard-{i:05}.safetensors" for i in range(-(-settings.conversations // settings.batch_size))]
    if all(shard.exists() for shard in shards):
        return shards
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"), base_only(model):
        write_json(folder / "study.json", asdict(settings) | {"model": model.config.name_or_path})
        missing = [(number, shard) for number, shard in enumerate(shards) if not shard.exists()]
        with Writer(model, tokenizer, settings.batch_size, longest) as writer:
            for number, shard in _progress(missing, "Self-study"):
                write_shard(shard, converse(model, dialogue, writer, document, settings, number))
    return shards


def converse(
    model: PreTrainedModel,
    dialogue: Dialogue,
    writer: Writer,
    document: Sequence[int],
    settings: SelfStudy,
    number: int,
) -> list[Conversation]:
    """The conversations of shard `number`."""
    name = f"{settings.seed}-{number}"
    chunks = draw_chunks(
        document, settings.shortest_chunk, settings.longest_chunk, settings.batch_size, seed=f"chunks-{name}"
    )
    generator = random.Random(f"seeds-{name}")
    kinds = [list(SEEDS)[(number * settings.batch_size + i) % len(SEEDS)] for i in range(len(chunks))]
    seeds = [generator.choice(SEEDS[kind]) for kind in kinds]
    first = generator.getrandbits(48)

    def replies(prompts: Sequence[list[int]], tokens: int, seed: int) -> list[list[int]]:
        return writer.replies(prompts, Decoding(max_tokens=tokens, temperature=settings.temperature, seed=seed))

    opened = [
        dialogue.opened(dialogue.prompt(request), beginning, chunk.ids)
        for (request, beginning), chunk in zip(seeds, chunks, strict=True)
    ]
    rest = replies([prompt + beginning for prompt, beginning in opened], settings.question_tokens, first)
    questions = [
        dialogue.decode(beginning + ids).split("\n")[0] for (_, beginning), ids in zip(opened, rest, strict=True)
    ]
    prompts = [dialogue.ids(dialogue.prompt(one), text=chunk.ids) for one, chunk in zip(questions, chunks, strict=True)]
    answers = map(dialogue.decode, replies(prompts, settings.answer_tokens, first + len(chunks)))
    return taught(model, dialogue, list(zip(kinds, questions, answers, chunks, strict=True)), settings.top_k)


def taught(
    model: PreTrainedModel, dialogue: Dialogue, written: Sequence[tuple[str, str, str, Chunk]], top_k: int
) -> list[Conversation]:
    """Conversations with the teacher's distributions, of (kind, question, answer, chunk).

    What the student learns is every token behind the first that both sequences, with and without the chunk, end in.
    """
    turns = [(dialogue.prompt(question), dialogue.completion(answer)) for _, question, answer, _ in written]
    alone = [dialogue.ids(*pair) for pair in turns]
    behind = [dialogue.ids(*pair, chunk.ids) for pair, (*_, chunk) in zip(turns, written, strict=True)]
    learned = [common_end(pair) - 1 for pair in zip(alone, behind, strict=True)]
    distributions = top_logprobs(model, behind, learned, top_k)
    return [
        Conversation(kind, question, answer, chunk.start, len(chunk.ids), ids, *teacher)
        for (kind, question, answer, chunk), ids, teacher in zip(written, alone, distributions, strict=True)
    ]


def longest_request(dialogue: Dialogue) -> int:
    """Tokens of the longest seed prompt, with those of the chat template."""
    opened = [
        dialogue.opened(dialogue.prompt(request), beginning, []) for one in SEEDS.values() for request, beginning in one
    ]
    return max(len(prompt + beginning) for prompt, beginning in opened)


def fingerprint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, document: Sequence[int], settings: SelfStudy
) -> str:
    """A hash of everything that a shard depends on but its number."""
    digest = hashlib.sha256()
    fields = {name: value for name, value in asdict(settings).items() if name != "conversations"}
    told = [FORMAT, fields, SEEDS, tokenizer.chat_template, str(model.dtype), list(document)]
    digest.update(json.dumps(told, sort_keys=True).encode())
    for name, parameter in parameters_of(model).items():
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 64)][:64].double().cpu()
        digest.update(f"{name} {list(parameter.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:24]


def _progress(items: Sequence, description: str):
    console = Console(stderr=True)
    return track(items, description, console=console, transient=True, disable=not console.is_terminal)
