"""Every script in examples/ runs on its tiny model, learns something, and leaves an adapter that loads."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import foreword as fw

EXAMPLES = Path(__file__).parents[1] / "examples"
TRAINING = ["trainer", "sft", "dpo", "grpo", "accelerate_loop"]


@pytest.fixture
def example(monkeypatch):
    """Imports a script of examples/, and the model that it uses."""
    monkeypatch.syspath_prepend(EXAMPLES)
    sys.modules.pop("tiny", None)  # the tests have one too
    yield importlib.import_module
    for name in [*TRAINING, "text_pipeline", "tiny"]:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", TRAINING)
def test_training(name, example, tmp_path):
    history = example(name).main(["--steps", "3", "--output", str(tmp_path / name)])
    assert len(history) == 3
    if name != "grpo":
        assert history[-1] < history[0]
    model, _ = example("tiny").base("tiny")
    adapter = fw.load(model, tmp_path / name)
    assert adapter.num_trainable > 0


def test_pipeline(example):
    answers = example("text_pipeline").main([])
    assert answers.keys() == {"support", "billing", "None"}
    assert len(set(answers.values())) > 1


def test_accelerate_launch(tmp_path):
    """Two processes, one adapter, written once and whole."""
    script = [str(EXAMPLES / "accelerate_loop.py"), "--steps", "2", "--output", str(tmp_path / "out")]
    launch = [
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
    ]
    done = subprocess.run([sys.executable, "-m", *launch, *script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("loss") == 1
    assert json.loads((tmp_path / "out" / "adapter.json").read_text())["methods"][0]["length"] == 8


def test_the_readme_names_every_script():
    text = (EXAMPLES / "README.md").read_text()
    assert all(f"`{path.name}`" in text for path in EXAMPLES.glob("*.py") if path.name != "tiny.py")
