"""Train an adapter on a frozen model: TRL's SFTTrainer, saving adapters only."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
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

from .checkpoint import SUMMARY, is_sharded, sizes_of
from .errors import ForewordError
from .files import write_json
from .frozen import FrozenLayers
from .generation import takes_special_tokens
from .model.adapter import Adapter
from .model.attach import attach, detach, set_active
from .model.host import host_on
from .space import Method, own_rate, resolve_each
from .trainer import AdapterTrainer, LineAtCheckpoint, ProgressBar, Stopwatch

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

LEAST = 4096  # token ids of examples that a method may start from
LOSS = {"loss_type": "nll", "label_smoothing_factor": 0, "router_aux_loss_coef": 0}  # of SFTConfig: what the loss is


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
        max_length: longest example in tokens; longer ones lose their end, and are left out where that is all of their
            completion.
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
        trainer: any other field of TRL's SFTConfig by its name, but for those of other losses.
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

    def __post_init__(self) -> None:
        check_trainer_settings(self.trainer)

    def sft_config(self, learning_rate: float, has_eval: bool) -> SFTConfig:
        """TRL's configuration. Raises `ForewordError` for values that it does not take."""
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
        except (TypeError, ValueError) as error:
            raise ForewordError(f"training settings: {' '.join(str(error).split())}") from error


def check_trainer_settings(trainer: Mapping[str, Any], place: str = "trainer") -> None:
    """Raise `ForewordError`, which names the `place`, where `Training.trainer` can't be `trainer`.

    It holds fields of TRL's SFTConfig, but for those that `Training` has itself and those of losses that are not
    implemented here.
    """
    if not isinstance(trainer, Mapping):
        raise ForewordError(f"{place} is {trainer!r}; it must be a mapping of fields of TRL's SFTConfig")
    own, others = ({one.name for one in fields(config)} for config in (Training, SFTConfig))
    for name, value in trainer.items():
        if name in own:
            raise ForewordError(f"{place}: {name} is a training setting itself; give it there")
        if name not in others:
            raise ForewordError(f"{place}: TRL's SFTConfig has no field {name!r}")
        if name in LOSS and value != LOSS[name]:
            raise ForewordError(f"{place}: {name} can only be {LOSS[name]!r}: the loss is the plain cross-entropy")


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
            `resume_from_checkpoint` is off, no example has anything to learn within max_length, or the loss or the
            adapter stops being finite (`Diverged`). The model is then as it was before.
    """
    if model.config.is_encoder_decoder or not model.can_generate():
        raise ForewordError(f"training needs a causal language model; {type(model).__name__} is not one")
    if settings.early_stopping_patience is not None and eval_data is None:
        raise ForewordError("early_stopping_patience needs held-out data: give eval_data or eval_size")
    methods = resolve_each(method)
    ids = _init_ids(data, tokenizer, methods) if init_ids is None else init_ids
    host, training = host_on(model), model.training
    active = None if host is None else host.active
    adapter = attach(model, methods, name, init_ids=ids, seed=settings.seed)
    try:
        return _trained(adapter, tokenizer, data, settings, eval_data, make_trainer or AdapterTrainer)
    except Exception:
        detach(model, name)
        set_active(model, active)
        model.train(training)
        raise


def _trained(
    adapter: Adapter,
    tokenizer: PreTrainedTokenizerBase,
    data: Dataset,
    settings: Training,
    eval_data: Dataset | None,
    make_trainer: Callable[..., AdapterTrainer],
) -> TrainResult:
    """Train an adapter that is attached, and save it."""
    model = adapter.model
    rate = settings.learning_rate if settings.learning_rate is not None else own_rate(adapter.methods)
    arguments = settings.sft_config(rate, has_eval=eval_data is not None)
    with arguments.main_process_first(local=False):  # what it removes, the others don't find
        checkpoint = _checkpoint_to_resume(settings)
    frozen = FrozenLayers(adapter, int(settings.cache_frozen * 2**30)) if settings.cache_frozen else None
    stopwatch, bar = Stopwatch(checkpoint), ProgressBar()
    callbacks: list[TrainerCallback] = [bar, stopwatch, LineAtCheckpoint()]
    if settings.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(settings.early_stopping_patience))
    with _quiet_datasets():
        trainer = make_trainer(
            adapter=adapter,
            model=model,
            args=arguments,
            train_dataset=data,
            eval_dataset=eval_data,
            processing_class=tokenizer,
            callbacks=callbacks,
        )
    examples = {
        "train": _count("training", data, trainer.train_dataset, arguments),
        "eval": 0 if eval_data is None else _count("held-out", eval_data, trainer.eval_dataset, arguments),
    }
    trainer.remove_callback(PrinterCallback if arguments.disable_tqdm else ProgressCallback)
    with closing(bar), nullcontext() if frozen is None else frozen.remember():
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    seconds = stopwatch.seconds
    trainer.require_finite()
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
            "examples": examples,
            "steps": trainer.state.global_step,
            "seconds": round(seconds, 1),
            "history": history,
        }
        write_json(Path(settings.output_dir) / SUMMARY, summary)
    return TrainResult(adapter, Path(settings.output_dir), history, seconds)


def _count(kind: str, given: Dataset, used: Any, arguments: SFTConfig) -> int:
    """How many of the examples `given` are `used`: TRL drops those whose completion begins behind max_length.

    Raises `ForewordError` where none is left.
    """
    if arguments.packing:
        return len(given)
    dropped, longest = len(given) - len(used), arguments.max_length
    if not len(used):
        raise ForewordError(f"the prompt of every {kind} example fills max_length ({longest} tokens); give more")
    if dropped:
        filled = f"their prompt fills max_length ({longest} tokens)"
        logger.warning("%d of %d %s examples are left out: %s", dropped, len(given), kind, filled)
    return len(used)


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


def _init_ids(data: Dataset, tokenizer: PreTrainedTokenizerBase, methods: Sequence[Method]) -> torch.Tensor:
    """Token ids (tokens,) of training examples, one after the other and again, for methods that start from text."""
    from .data import to_text

    tokens = max([LEAST, *map(_start_tokens, methods)])
    ids: list[int] = []
    for example in data:
        special = not ids and takes_special_tokens(example.get("prompt", ""))
        ids += tokenizer("".join(to_text(example, tokenizer)), add_special_tokens=special)["input_ids"]
        if len(ids) >= tokens:
            break
    return torch.tensor(ids * (tokens // len(ids) + 1))[:tokens]


def _start_tokens(method: Method) -> int:
    """How many tokens of text a method starts from: its length, for each parallel stream."""
    largest = {"length": 0, "streams": 1}
    for name, size in sizes_of(method):
        largest[name] = max(size, largest.get(name, 0))
    return largest["length"] * largest["streams"]
