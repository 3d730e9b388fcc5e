"""Train an adapter on a frozen model: TRL's SFTTrainer, saving adapters only."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)
from trl import SFTConfig

from .checkpoint import is_sharded
from .errors import ForewordError
from .files import write_json
from .frozen import FrozenLayers
from .model.adapter import Adapter
from .model.attach import attach
from .space import Method, own_rate
from .trainer import AdapterTrainer, ProgressBar, Stopwatch

if TYPE_CHECKING:
    from datasets import Dataset

SUMMARY = "training.json"


@dataclass
class Training:
    """How to train. The names and meanings are those of transformers' TrainingArguments.

    Args:
        output_dir: folder of the adapter; checkpoints go to its subfolder `checkpoints`.
        learning_rate: None takes the method's own default, of several that compose the lowest.
        num_train_epochs: passes over the training data.
        max_steps: optimizer steps; overrides num_train_epochs when positive.
        per_device_train_batch_size: rows of a step on one device.
        per_device_eval_batch_size: rows of an evaluation batch.
        gradient_accumulation_steps: batches whose gradients add up to one step.
        lr_scheduler_type: "cosine", "linear", "constant", …
        warmup_steps: steps over which the rate rises; below 1, their fraction of all steps.
        weight_decay: of AdamW.
        max_grad_norm: gradients are clipped to this norm.
        max_length: longest example in tokens; longer ones lose their end.
        gradient_checkpointing: recompute activations in the backward pass.
        seed: of initialisation and data order.
        logging_steps: steps between two log lines.
        eval_strategy: "epoch", "steps" or "no".
        eval_steps: steps between two evaluations, for eval_strategy "steps".
        save_strategy: "epoch", "steps" or "no".
        save_steps: steps between two checkpoints, for save_strategy "steps".
        save_total_limit: how many checkpoints to keep.
        early_stopping_patience: stop after this many evaluations without a lower loss, and keep the best; None never.
        report_to: "tensorboard", "wandb", … or "none".
        resume_from_checkpoint: go on from the last whole checkpoint in output_dir.
        group_by_length: batches of similar length, which need less padding.
        cache_frozen: GiB of memory for what enters the lowest layer that the method changes, which is the same in every
            epoch, so that the layers below run once for each example; 0 recomputes it.
        trainer: any other field of TRL's SFTConfig by its name.
    """

    output_dir: str
    learning_rate: float | None = None
    num_train_epochs: float = 3.0
    max_steps: int = -1
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 16
    gradient_accumulation_steps: int = 1
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.05
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    max_length: int = 1024
    gradient_checkpointing: bool = False
    seed: int = 0
    logging_steps: int = 5
    eval_strategy: str = "epoch"
    eval_steps: int | None = None
    save_strategy: str = "epoch"
    save_steps: int = 100
    save_total_limit: int = 2
    early_stopping_patience: int | None = None
    report_to: str = "none"
    resume_from_checkpoint: bool = False
    group_by_length: bool = False
    cache_frozen: float = 0.0
    trainer: dict[str, Any] = field(default_factory=dict)

    def sft_config(self, learning_rate: float, has_eval: bool) -> SFTConfig:
        """TRL's configuration. Raises `ForewordError` for a field that it does not know."""
        own = {"early_stopping_patience", "resume_from_checkpoint", "cache_frozen", "trainer"}
        given = {name: value for name, value in asdict(self).items() if name not in own}
        group, recompute = given.pop("group_by_length"), given.pop("gradient_checkpointing")
        stops_early = self.early_stopping_patience is not None
        settings = {
            **given,
            "output_dir": str(checkpoints_of(self.output_dir)),
            "learning_rate": learning_rate,
            "eval_strategy": self.eval_strategy if has_eval else "no",
            "load_best_model_at_end": stops_early,
            "metric_for_best_model": "eval_loss" if stops_early else None,
            "activation_checkpointing": recompute,
            "activation_checkpointing_kwargs": {"use_reentrant": False},
            "train_sampling_strategy": "group_by_length" if group else "random",
            "bf16": False,  # the base's own dtype is the compute dtype; adapters stay in fp32
            "prediction_loss_only": True,
            "dataloader_pin_memory": torch.cuda.is_available(),
            "logging_nan_inf_filter": False,
            **self.trainer,
        }
        try:
            return SFTConfig(**settings)
        except TypeError as error:
            raise ForewordError(f"trainer: {str(error).split('__init__() ')[-1]}") from error
        except ValueError as error:
            raise ForewordError(f"training settings: {' '.join(str(error).split())}") from error


@dataclass(frozen=True)
class TrainResult:
    """What a training run leaves behind.

    Attributes:
        adapter: the trained adapter, attached and active.
        output_dir: its folder.
        history: log lines of the trainer: step, loss, eval_loss, learning_rate.
        seconds: wall time of the training loop, of a resumed run also before its checkpoint.
    """

    adapter: Adapter
    output_dir: Path
    history: list[dict[str, float]]
    seconds: float


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    method: Method | str | Sequence[Method | str],
    data: Dataset,
    settings: Training,
    *,
    eval_data: Dataset | None = None,
    name: str = "default",
    init_ids: Sequence[int] | None = None,
    make_trainer: Callable[..., AdapterTrainer] | None = None,
) -> TrainResult:
    """Attach an adapter, train it on completions only, and save it to `settings.output_dir`.

    Args:
        model, tokenizer: the base, as `foreword.base` loads it. No parameter of it changes.
        method: a method, its registry name, or several that compose.
        data: examples as `foreword.data.load` gives them: prompt and completion, or text.
        settings: see `Training`.
        eval_data: held-out examples of the same shape.
        name: of the adapter on the model.
        init_ids: token ids for methods that start from text; those of the first examples by default.
        make_trainer: for another loss or other examples; `AdapterTrainer` by default.

    Raises:
        ForewordError: the model is no causal language model, there is an unfinished run in output_dir and
            `resume_from_checkpoint` is off, or the loss stops being a number.
    """
    if model.config.is_encoder_decoder or not model.can_generate():
        raise ForewordError(f"training needs a causal language model; {type(model).__name__} is not one")
    if settings.early_stopping_patience is not None and eval_data is None:
        raise ForewordError("early_stopping_patience needs held-out data: give eval_data or eval_size")
    checkpoint = _checkpoint_to_resume(settings)
    ids = _init_ids(data, tokenizer) if init_ids is None else init_ids
    adapter = attach(model, method, name, init_ids=ids, seed=settings.seed)
    frozen = FrozenLayers(adapter, int(settings.cache_frozen * 2**30)) if settings.cache_frozen else None
    rate = settings.learning_rate if settings.learning_rate is not None else own_rate(adapter.methods)
    stopwatch = Stopwatch(checkpoint)
    callbacks: list[TrainerCallback] = [ProgressBar(), stopwatch]
    if settings.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(settings.early_stopping_patience))
    arguments = settings.sft_config(rate, has_eval=eval_data is not None)
    with _quiet_datasets():
        trainer = (make_trainer or AdapterTrainer)(
            adapter=adapter,
            model=model,
            args=arguments,
            train_dataset=data,
            eval_dataset=eval_data,
            processing_class=tokenizer,
            callbacks=callbacks,
        )
    trainer.remove_callback(PrinterCallback if arguments.disable_tqdm else ProgressCallback)
    with nullcontext() if frozen is None else frozen.remember():
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    seconds = stopwatch.seconds
    model.eval()
    history = trainer.state.log_history
    if trainer.is_world_process_zero() or is_sharded(adapter):
        adapter.save(settings.output_dir)
    if trainer.is_world_process_zero():
        summary = {
            "methods": [one.to_dict() for one in adapter.methods],
            "messages": isinstance(data[0].get("prompt"), list),
            "trainable": adapter.num_trainable,
            "stored": adapter.num_stored,
            "settings": asdict(settings) | {"learning_rate": rate},
            "examples": {"train": len(data), "eval": 0 if eval_data is None else len(eval_data)},
            "steps": trainer.state.global_step,
            "seconds": round(seconds, 1),
            "history": history,
        }
        write_json(Path(settings.output_dir) / SUMMARY, summary)
    return TrainResult(adapter, Path(settings.output_dir), history, seconds)


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Without the datasets library's progress bars, where stderr is no terminal."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def checkpoints_of(output_dir: str | Path) -> Path:
    """The folder of the checkpoints of a run."""
    return Path(output_dir) / "checkpoints"


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest whole checkpoint of a run. One that was cut off while being written is removed.

    The trainer writes `trainer_state.json` last, so a checkpoint is whole when that file is.
    """
    found = sorted(checkpoints_of(output_dir).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    for path in reversed(found):
        try:
            json.loads((path / "trainer_state.json").read_text())
            return path
        except (OSError, ValueError):
            shutil.rmtree(path)
    return None


def _checkpoint_to_resume(settings: Training) -> Path | None:
    if settings.resume_from_checkpoint:
        return last_checkpoint(settings.output_dir)
    if any(checkpoints_of(settings.output_dir).glob("checkpoint-*")):
        if not (Path(settings.output_dir) / SUMMARY).exists():
            raise ForewordError(
                f"{settings.output_dir} holds an unfinished run: set resume_from_checkpoint to go on, or choose "
                "another folder"
            )
        shutil.rmtree(checkpoints_of(settings.output_dir))
        (Path(settings.output_dir) / SUMMARY).unlink()
    return None


def _init_ids(data: Dataset, tokenizer: PreTrainedTokenizerBase, tokens: int = 4096) -> torch.Tensor:
    """Token ids (tokens,) of training examples, one after the other and again, for methods that start from text."""
    from .data import to_text

    ids: list[int] = []
    for example in data:
        ids += tokenizer("".join(to_text(example, tokenizer)), add_special_tokens=not ids)["input_ids"]
        if len(ids) >= tokens:
            break
    return torch.tensor(ids * (tokens // len(ids) + 1))[:tokens]
