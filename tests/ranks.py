"""What each of several processes does in the tests of distributed training."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def as_rank(rank: int, world: int, port: int, work: Callable[..., Any], *args: Any) -> None:
    """Run `work` as process `rank` of `world` that talk over gloo."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }
    import torch

    torch.set_num_threads(1)
    work(*args)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def train(folder: Path, method: dict[str, Any], batch: int, resume: bool = False) -> None:
    """`foreword.train` on the tiny model, under DDP where there are several processes."""
    from datasets import Dataset

    import tiny
    from foreword.space import from_dict
    from foreword.train import Training
    from foreword.train import train as run

    settings = Training(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=batch,
        learning_rate=1.0,
        warmup_steps=0,
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        resume_from_checkpoint=resume,
        trainer={"use_cpu": True, "optim": "sgd"},  # Adam turns rounding into steps
    )
    run(tiny.model(), tiny.tokenizer(), from_dict(method), Dataset.from_list(tiny.rows(32)), settings)


def train_slowly_removing(folder: Path, method: dict[str, Any], batch: int) -> None:
    """`train`, where the first process takes its time to remove a folder, and the others must not."""
    import shutil
    import time

    remove = shutil.rmtree

    def removing(path: Path, *args: Any, **kwargs: Any) -> None:
        assert os.environ["RANK"] == "0", f"another process removes {path}"
        time.sleep(1)
        remove(path, *args, **kwargs)

    shutil.rmtree = removing
    train(folder, method, batch)


def shard(folder: Path, method: dict[str, Any], batch: int) -> None:
    """Three steps of a loop on a model that FSDP2 has sharded, and the adapter saved, restored and saved again."""
    import torch
    from torch.distributed import get_rank, get_world_size

    import tiny
    from foreword.checkpoint import is_sharded, restore

    model, adapter = sharded(method)
    assert is_sharded(adapter)
    optimizer = torch.optim.SGD(adapter.trainable_parameters, lr=1.0)  # Adam turns rounding into steps
    ids = torch.randint(3, len(tiny.tokenizer()), (24, 10), generator=torch.Generator().manual_seed(0))
    for step in ids.split(batch * get_world_size()):
        own = step[get_rank() :: get_world_size()]
        model(input_ids=own, labels=own).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapter.save(folder / "trained")
    torch.distributed.barrier()
    with torch.no_grad():
        for parameter in adapter.trainable_parameters:
            parameter.zero_()
    restore(adapter, folder / "trained")
    adapter.save(folder / "restored")


def sharded(method: dict[str, Any]) -> tuple[Any, Any]:
    """The tiny model with an adapter, sharded by FSDP2."""
    from torch.distributed import init_process_group
    from torch.distributed.fsdp import fully_shard

    import foreword as fw
    import tiny
    from foreword.space import from_dict

    init_process_group("gloo")
    model = tiny.model()
    adapter = fw.attach(model, from_dict(method))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, adapter


def refuses_to_shard(method: dict[str, Any], reason: str) -> None:
    import pytest
    import torch

    import foreword as fw

    model, _ = sharded(method)
    with pytest.raises(fw.ForewordError, match=reason):
        model(input_ids=torch.arange(3, 9)[None])
