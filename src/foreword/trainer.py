"""TRL's SFTTrainer for adapters: what it saves, what it computes, when it stops, and what it shows."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback
from trl import SFTTrainer

from .checkpoint import gathered, is_sharded, restore
from .errors import ForewordError
from .files import read_json, write_json
from .losses import completion_loss
from .model.adapter import Adapter


class Diverged(ForewordError):
    """A loss, or what is learned, stopped being a number."""


class AdapterTrainer(SFTTrainer):
    """SFTTrainer whose checkpoints hold the adapter instead of the model. It stops where numbers are not finite."""

    objective = staticmethod(completion_loss)

    def __init__(self, *args: Any, adapter: Adapter, **kwargs: Any) -> None:
        self.adapter = adapter
        self._recent: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # not looked at: step, loss, first token ids
        super().__init__(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = self.objective(model, inputs, num_items_in_batch)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # N counts the tokens of all, and gradients are averaged
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._recent.append((self.state.global_step + 1, loss, inputs["input_ids"][0, :16].clone()))
        if len(self._recent) == 1000:  # for those who never log
            self._look_at_losses()
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            self._look_at_losses()
        if not math.isfinite(logs.get("eval_loss", 0.0)):
            raise self._diverged(f"the held-out loss is {logs['eval_loss']} after step {self.state.global_step}")
        super().log(logs, *args, **kwargs)

    def _look_at_losses(self) -> None:
        """Raise `Diverged` for the first loss that is no number since the last look; nothing waits for one before."""
        recent, self._recent = self._recent, []
        for index, (step, loss, ids) in enumerate(recent):
            if not torch.isfinite(loss):
                batch = sum(earlier == step for earlier, _, _ in recent[: index + 1])
                tokenizer: Any = self.processing_class
                raise self._diverged(
                    f"the loss is {loss.item()} at step {step}, in batch {batch} of the step, whose first row begins "
                    f"{tokenizer.decode(ids)!r}"
                )

    def require_finite(self) -> None:
        """Raise `Diverged` for a loss since the last look, or a number of the adapter, that is not finite.

        Where the adapter is sharded (FSDP2), every process of the group has to call this.
        """
        self._look_at_losses()
        for name, tensor in self.adapter.state_dict().items():
            if not torch.isfinite(gathered(tensor)).all():
                raise self._diverged(f"{name} holds numbers that are not finite after step {self.state.global_step}")

    def _diverged(self, what: str) -> Diverged:
        return Diverged(f"{what}; lower learning_rate ({self.args.learning_rate:g})")

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if self.args.should_save or is_sharded(self.adapter):
            self.require_finite()
            self.adapter.save(str(output_dir or self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        restore(self.adapter, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        restore(self.adapter, str(self.state.best_model_checkpoint))


class Stopwatch(TrainerCallback):
    """Seconds of training, kept beside every checkpoint, so that a resumed run counts those before it."""

    FILE = "seconds.json"

    def __init__(self, checkpoint: Path | None) -> None:
        kept = None if checkpoint is None else checkpoint / self.FILE
        self.before = read_json(kept)["seconds"] if kept is not None and kept.exists() else 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.started

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            write_json(folder / self.FILE, {"seconds": self.seconds})


class LineAtCheckpoint(TrainerCallback):
    """A log line at every checkpoint, so that those of a resumed run cover the steps that an uninterrupted one's do."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log |= control.should_save

    on_epoch_end = on_step_end


class ProgressBar(TrainerCallback):
    """A bar with the loss and the time left, on a terminal only. `close` takes it away, however training ends."""

    def __init__(self) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"), TimeRemainingColumn())
        console = Console(stderr=True)
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)

    def on_train_begin(self, args, state, control, **kwargs):
        self.progress.start()
        self.task = self.progress.add_task("", total=state.max_steps, completed=state.global_step, loss="")

    def on_step_end(self, args, state, control, **kwargs):
        self.progress.update(self.task, completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            self.progress.update(self.task, loss=f"loss {logs['loss']:.3f}")

    def close(self) -> None:
        self.progress.stop()
