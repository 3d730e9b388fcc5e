"""Free generation: answers against references, and the option that an answer names.

The second is the protocol of "On Zero-Initialized Attention" (ICML 2025) for ARC, MMLU and TruthfulQA: the model is
shown the options, answers in its own words (sampled at temperature 0.1), and the option that its answer names counts.
Its accuracies can't be compared with those of log-likelihoods.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.conversations import message
from ..errors import ForewordError
from ..generation import Prompt, Sampling, answer
from .choices import Example, Record
from .intervals import Interval, mean, proportion

ROUGE = ("rouge1", "rouge2", "rougeL")


def score_generation(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], sampling: Sampling
) -> list[Record]:
    """Generate an answer to each prompt and compare it with the example's `references`.

    Returns:
        For each example its `row`, `prediction`, `references`, and the best over its references of `exact_match` (1
        or 0, but for space around it) and of the F-measures `rouge1`, `rouge2`, `rougeL` (rouge-score, stemmed).
    """
    overlap = _rouge()
    answers = answer(model, tokenizer, [example["prompt"] for example in examples], sampling)
    records = []
    for number, (example, text) in enumerate(zip(examples, answers, strict=True), 1):
        wanted = [reference.strip() for reference in example["references"]]
        scored = [overlap(reference, text) for reference in wanted]
        records.append(
            {
                "row": example.get("row", number),
                "prediction": text,
                "references": wanted,
                "exact_match": float(text.strip() in wanted),
                **{name: max(one[name] for one in scored) for name in ROUGE},
            }
        )
    return records


def summarise_generation(records: Sequence[Record], seed: int = 0) -> dict[str, Interval]:
    """Exact match, ROUGE, and corpus BLEU from 0 to 100 (sacrebleu, with its bootstrap's interval)."""
    exact = proportion([record["exact_match"] for record in records])
    rouge = {name: mean([record[name] for record in records], seed) for name in ROUGE}
    return {"exact_match": exact, **rouge, "bleu": _bleu(records)}


def _rouge() -> Callable[[str, str], dict[str, float]]:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ForewordError("generation is scored by rouge-score: pip install 'foreword[eval]'") from error
    scorer = RougeScorer(list(ROUGE), use_stemmer=True)
    return lambda reference, text: {name: one.fmeasure for name, one in scorer.score(reference, text).items()}


def _bleu(records: Sequence[Record]) -> Interval:
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise ForewordError("generation is scored by sacrebleu: pip install 'foreword[eval]'") from error
    deepest = max(len(record["references"]) for record in records)
    padded: list[list[Any]] = [
        [record["references"][k] if k < len(record["references"]) else None for record in records]
        for k in range(deepest)
    ]
    texts = [record["prediction"] for record in records]
    score = BLEU().corpus_score(texts, padded, n_bootstrap=500)
    return Interval(score.score, max(0.0, score._mean - score._ci), min(100.0, score._mean + score._ci))


# ---------------------------------------------------------------------------------------------------------------------
# Options


def option_prompt(example: Example, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """The question with its options as lines "- option": a message where there is a chat template, else Alpaca's form.

    The words "Question:" and "Answer:", that log-likelihood scoring puts around a question, are taken off.
    """
    question = example["prompt"]
    if not isinstance(question, str):
        question = question[-1]["content"]
    question = re.sub(r"^Question: |\nAnswer:$", "", question)
    shown = question + "".join(f"\n- {choice.strip()}" for choice in example["choices"])
    return [message("user", shown)] if tokenizer.chat_template else f"### Instruction:\n{shown}\n\n### Response:\n"


def match_option(text: str, options: Sequence[str]) -> int | None:
    """The option that `text` names: the only one that occurs in it, else the nearest by difflib's ratio.

    None, which counts as wrong, where several options occur. Case and space around options don't matter.
    """
    said = text.lower()
    spelled = [option.strip().lower() for option in options]
    named = [index for index, option in enumerate(spelled) if option and option in said]
    if named:
        return named[0] if len(named) == 1 else None
    ratios = [difflib.SequenceMatcher(None, option, said.strip()).ratio() for option in spelled]
    return ratios.index(max(ratios))


def score_options(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], sampling: Sampling
) -> list[Record]:
    """Generate an answer to each question, and match it with the options: `prediction`, `predicted`, `accuracy`."""
    prompts = [option_prompt(example, tokenizer) for example in examples]
    records = []
    for number, (example, text) in enumerate(
        zip(examples, answer(model, tokenizer, prompts, sampling), strict=True), 1
    ):
        predicted = match_option(text, example["choices"])
        records.append(
            {
                "row": example.get("row", number),
                "answer": example["answer"],
                "prediction": text,
                "predicted": predicted,
                "accuracy": float(predicted == example["answer"]),
            }
        )
    return records
