"""From a document to a cartridge that answers, in one command that can be killed."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import foreword as fw
import tiny
import zoo
from foreword.cli import main
from foreword.compress import Compression, Dialogue, compress, init_ids
from foreword.compress.chunks import spaced
from foreword.train import last_checkpoint

SETTINGS = Compression(
    length=24,
    conversations=8,
    shortest_chunk=30,
    longest_chunk=60,
    question_tokens=8,
    answer_tokens=12,
    batch_size=4,
    per_device_train_batch_size=4,
    num_train_epochs=6,
    learning_rate=0.05,
    save_steps=2,
    logging_steps=1,
)
FLAGS = "--conversations 4 --shortest_chunk 30 --longest_chunk 60 --question_tokens 8 --answer_tokens 12 --batch_size 4"


def test_training_lowers_the_loss_and_the_cartridge_comes_back(cache, text, tmp_path):
    model, tokenizer = tiny.sharp_model(), tiny.tokenizer()
    result = compress(model, tokenizer, text, replace(SETTINGS, num_train_epochs=20), tmp_path / "out")
    losses = [line["loss"] for line in result.history if "loss" in line]
    assert losses[-1] < losses[0] - 0.1
    assert {parameter.dtype for parameter in result.adapter.trainable_parameters} == {torch.float32}
    ids = torch.tensor([[5, 6, 7]])
    other = tiny.sharp_model()
    fw.load(other, tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(other(ids).logits, model(ids).logits)
    told = json.loads((tmp_path / "out" / "training.json").read_text())
    assert told["messages"] is True
    assert told["document"]["tokens"] == len(Dialogue(tokenizer).encode(text))


def test_the_same_command_again_loads_it(cache, text, tmp_path):
    first = compress(tiny.model(), tiny.tokenizer(), text, SETTINGS, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.suffix != ".lock"}
    second = compress(tiny.model(), tiny.tokenizer(), text, SETTINGS, tmp_path)
    assert all(path.stat().st_mtime_ns == time_ for path, time_ in before.items())
    assert second.history == first.history
    assert repr(second.adapter) == repr(first.adapter)


@pytest.mark.parametrize("change", ["text", "length", "learning_rate"])
def test_another_run_in_the_folder_is_refused(change, cache, text, tmp_path):
    compress(tiny.model(), tiny.tokenizer(), text, SETTINGS, tmp_path)
    settings = SETTINGS if change == "text" else replace(SETTINGS, **{change: 30})
    named = {"text": "sha256", "length": r"length \(24, not 30\)", "learning_rate": r"learning_rate \(0.05, not 30\)"}
    with pytest.raises(fw.ForewordError, match=rf"another {named[change]}"):
        compress(tiny.model(), tiny.tokenizer(), text + " The end." * (change == "text"), settings, tmp_path)


RUN = """
    import sys
    sys.path[:0] = {paths!r}
    import torch, tiny
    from dataclasses import replace
    from test_compress import SETTINGS
    from foreword.compress import compress
    torch.set_num_threads(1)
    compress(tiny.model(), tiny.tokenizer(), {text!r}, replace(SETTINGS, num_train_epochs=20), sys.argv[1])
"""


def test_killed_training_ends_as_it_would_have(cache, text, tmp_path):
    here = Path(__file__).parent
    code = textwrap.dedent(RUN.format(paths=[str(here), str(here.parent)], text=text))

    def run(folder) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-c", code, str(folder)], env=os.environ, stderr=subprocess.DEVNULL)

    assert run(tmp_path / "whole").wait() == 0
    process = run(tmp_path / "killed")
    while not list((tmp_path / "killed").glob("checkpoints/checkpoint-8/trainer_state.json")):
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "training.json").exists()
    assert last_checkpoint(tmp_path / "killed") is not None
    assert run(tmp_path / "killed").wait() == 0
    whole, killed = (fw.load(tiny.model(), tmp_path / name).state_dict() for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


def test_where_a_cartridge_starts(cache, text):
    model, tokenizer = tiny.model(), tiny.tokenizer()
    dialogue = Dialogue(tokenizer)
    document = dialogue.encode(text)
    total = 24 - len(dialogue.head) - len(dialogue.tail)

    def middle(**changes) -> list[int]:
        ids = init_ids(model, dialogue, document, replace(SETTINGS, **changes))
        assert len(ids) == 24
        assert ids[: len(dialogue.head)] == dialogue.head
        assert ids[-len(dialogue.tail) :] == dialogue.tail
        return ids[len(dialogue.head) : -len(dialogue.tail)]

    assert middle() == document[:total]
    assert middle(init="spaced") == spaced(document, total)
    summary = middle(init="summary")
    assert summary != middle(init="spaced")
    assert summary == middle(init="summary")


def test_a_document_longer_than_the_context(cache, text, tmp_path):
    model = tiny.model()
    model.config.max_position_embeddings = 400
    long = " ".join(text.replace("ship", name) for name in ("ship", "raft", "tug", "yacht"))
    result = compress(model, tiny.tokenizer(), long, SETTINGS, tmp_path)
    assert json.loads((tmp_path / "training.json").read_text())["document"]["tokens"] > 4 * 400
    assert result.adapter.num_stored == fw.Cartridge(24).count(result.adapter.host.layout).stored


@pytest.mark.parametrize(
    ("length", "message"),
    [(2000, "the document has .* tokens .* give a smaller length"), (5, "no room for the prompt")],
)
def test_a_length_that_does_not_suit_the_document(length, message, cache, text, tmp_path):
    with pytest.raises(fw.ForewordError, match=message):
        compress(tiny.model(), tiny.tokenizer(), text, replace(SETTINGS, length=length), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not cache.exists()


def test_a_model_that_no_text_can_precede(cache, text, tmp_path):
    with pytest.raises(fw.ForewordError, match="causal decoder"):
        compress(zoo.make("t5"), tiny.tokenizer(), text, SETTINGS, tmp_path / "out")


def run(capsys, *words) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_line(base, cache, text, tmp_path, capsys):
    for name, cut in (("a.txt", text[:200]), ("b.md", text[200:])):
        (tmp_path / name).write_text(cut)
    folder, files = tmp_path / "out", [tmp_path / "a.txt", tmp_path / "b.md"]
    words = ["--model", base, "--length", "24", "--output", folder, *FLAGS.split()]
    code, out, err = run(capsys, "compress", *files, *words, "--json")
    assert code == 0, err
    assert json.loads(out)["method"] == "cartridge"
    code, out, err = run(capsys, "generate", "--adapter", folder, "--prompt", "Where?", "--max_new_tokens", "3")
    assert code == 0, err
    code, _, err = run(capsys, "compress", tmp_path / "none.txt", *words)
    assert code == 2
    assert err == f"foreword: error: {tmp_path / 'none.txt'} does not exist\n"


def test_joined_on_the_command_line(base, cache, text, tmp_path, capsys):
    (tmp_path / "a.txt").write_text(text)
    for name, length in (("one", "24"), ("two", "30")):
        words = ["--model", base, "--length", length, "--output", tmp_path / name, *FLAGS.split()]
        assert run(capsys, "compress", tmp_path / "a.txt", *words)[0] == 0
    code, out, err = run(capsys, "join", tmp_path / "one", tmp_path / "two", "--output", tmp_path / "both")
    assert code == 0, err
    adapter = fw.load(fw.base(base)[0], out.strip())
    assert [method.length for method in adapter.methods] == [24, 30]
