"""Train a cartridge: the model behind it learns to say what it said with the document's text in its context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..losses import distillation_loss
from ..methods import Cartridge
from ..train import Training, TrainResult, train
from ..trainer import AdapterTrainer
from .shards import Conversations, collate

UNTOUCHED = {"remove_unused_columns": False, "dataset_kwargs": {"skip_prepare_dataset": True}}  # rows of a dataset


class DistillationTrainer(AdapterTrainer):
    """A trainer of conversations, for which the rows of its dataset are numbers."""

    objective = staticmethod(distillation_loss)

    def __init__(self, *args: Any, conversations: Conversations, **kwargs: Any) -> None:
        self._conversations = conversations
        super().__init__(*args, data_collator=self._collate, **kwargs)

    def _collate(self, rows: Sequence[dict[str, int]]) -> dict[str, Tensor]:
        return collate([self._conversations[row["number"]] for row in rows], self.processing_class.pad_token_id or 0)


def distill(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    method: Cartridge,
    init_ids: Sequence[int],
    shards: Sequence[Path],
    settings: Training,
    name: str = "default",
) -> TrainResult:
    """Attach a cartridge that starts as the text `init_ids`, train it on `shards`, and save it.

    Raises as `foreword.train.train`.
    """
    from datasets import Dataset

    conversations = Conversations(shards)
    numbers = Dataset.from_dict({"number": range(len(conversations))})
    settings = replace(settings, trainer=UNTOUCHED | settings.trainer)
    make_trainer = partial(DistillationTrainer, conversations=conversations)
    return train(model, tokenizer, method, numbers, settings, name=name, init_ids=init_ids, make_trainer=make_trainer)
