"""The command line as a person uses it: each command, and each mistake in one line."""

import json
import subprocess
import sys

import pytest

import tiny
from foreword.cli import COMMANDS, main


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    data = tiny.write_jsonl(folder / "data.jsonl", tiny.rows())
    out = folder / "words"
    code = main(
        f"train {data} --model {base} --output_dir {out} --method zero-init --method.length 4 --max_steps 4 "
        "--save_strategy no --json".split()
    )
    assert code == 0
    return out


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_train_leaves_an_adapter(adapter):
    config = json.loads((adapter / "adapter.json").read_text())
    assert config["methods"][0]["method"] == "zero-init"
    assert config["methods"][0]["length"] == 4
    assert (adapter / "training.json").exists()


def test_train_prints_json(base, tmp_path, capsys):
    data = tiny.write_jsonl(tmp_path / "data.jsonl", tiny.rows())
    arguments = ["--model", base, "--output_dir", tmp_path / "out", "--max_steps", "2", "--method.length", "3"]
    code, out, _ = run(capsys, "train", data, *arguments, "--json")
    assert code == 0
    assert json.loads(out)["method"] == "prefix-tuning"


def test_a_config_file_gives_options_and_flags_win(base, tmp_path, capsys):
    data = tiny.write_jsonl(tmp_path / "data.jsonl", tiny.rows())
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {base}\noutput_dir: {tmp_path / 'out'}\nmax_steps: 2\nsave_strategy: 'no'\n"
        "method:\n  method: zero-init\n  length: 5\n  layers: [0, 2]\n"
    )
    code, _, err = run(capsys, "train", data, "--config", config, "--method.length", "6")
    assert code == 0, err
    method = json.loads((tmp_path / "out" / "adapter.json").read_text())["methods"][0]
    assert (method["method"], method["length"], method["layers"]) == ("zero-init", 6, [0, 2])


def test_a_json_list_composes_methods(base, tmp_path, capsys):
    data = tiny.write_jsonl(tmp_path / "data.jsonl", tiny.rows())
    both = json.dumps([{"method": "prefix-tuning", "length": 3}, {"method": "zero-init", "length": 2}])
    code, _, err = run(
        capsys, "train", data, "--model", base, "--output_dir", tmp_path / "out", "--max_steps", "1", "--method", both
    )
    assert code == 0, err
    assert len(json.loads((tmp_path / "out" / "adapter.json").read_text())["methods"]) == 2


def test_generate_answers_one_prompt(adapter, capsys):
    code, out, _ = run(capsys, "generate", "--adapter", adapter, "--prompt", "1 red:", "--max_new_tokens", "4")
    assert code == 0
    assert out.endswith("\n")


def test_generate_answers_a_file_in_its_order(adapter, tmp_path, capsys):
    rows = [{"prompt": f"{'x' * (i % 3)} {i}:", "id": i} for i in range(7)]
    prompts = tiny.write_jsonl(tmp_path / "prompts.jsonl", rows)
    target = tmp_path / "answers.jsonl"
    words = ["generate", "--adapter", adapter, "--input", prompts, "--max_new_tokens", "4", "--batch_size", "3"]
    code, out, _ = run(capsys, *words, "--output", target)
    assert code == 0
    assert out == ""
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["id"] for row in answers] == list(range(7))
    for row in answers:
        _, alone, _ = run(capsys, "generate", "--adapter", adapter, "--prompt", row["prompt"], "--max_new_tokens", "4")
        assert alone.strip("\n") == row["answer"]


def test_generate_reads_the_streams_that_were_asked_for(base, tmp_path, capsys):
    data = tiny.write_jsonl(tmp_path / "data.jsonl", tiny.rows())
    out = tmp_path / "streams"
    words = ["--model", base, "--output_dir", out, "--max_steps", "2", "--save_strategy", "no"]
    streams = ["--method", "parscale", "--method.streams", "[1,2]", "--method.length", "4"]
    code, _, err = run(capsys, "train", data, *words, *streams)
    assert code == 0, err
    ask = ["generate", "--adapter", out, "--prompt", "1 red:", "--max_new_tokens", "4", "--streams"]
    code, _, err = run(capsys, *ask, "1")
    assert code == 0, err
    code, _, err = run(capsys, *ask, "3")
    assert code == 2
    assert "sets of 1, 2" in err


def test_chat_reads_lines_until_they_end(adapter, capsys, monkeypatch):
    lines = iter(["1 red:", "/base", "2 blue:", "/reset", "/nonsense"])

    def next_line(prompt=""):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", next_line)
    code, out, _ = run(capsys, "chat", "--adapter", adapter, "--max_new_tokens", "3")
    assert code == 0
    assert "commands:" in out


def test_inspect_shows_the_adapter(adapter, capsys):
    code, out, _ = run(capsys, "inspect", adapter, "--json")
    assert code == 0
    shown = json.loads(out)
    assert shown["methods"][0]["method"] == "zero-init"
    assert shown["numbers"] == sum(_product(shape) for _, *shape in shown["tensors"].values())
    code, out, _ = run(capsys, "inspect", adapter)
    assert code == 0
    assert "zero-init" in out


def _product(shape: list[int]) -> int:
    return 1 if not shape else shape[0] * _product(shape[1:])


def test_methods_lists_the_registry(capsys):
    import foreword as fw

    code, out, _ = run(capsys, "methods", "--json")
    assert code == 0
    assert {row["method"] for row in json.loads(out)} == set(fw.methods())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert f"foreword {command}" in capsys.readouterr().out.split("Example", 1)[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "no command 'trian'"),
        (["train", "DATA", "--output_dir", "OUT", "--method", "zero-int"], "did you mean 'zero-init'"),
        (["train", "DATA", "--output_dir", "OUT", "--method.lenth", "3"], "lenth"),
        (["train", "DATA", "--output_dir", "OUT", "--method.length", "many"], "length"),
        (["train", "DATA", "--output_dir", "OUT", "--method.length", "0"], "length must be a positive integer"),
        (["train", "DATA", "--output_dir", "OUT", "--method", "[{"], "not valid"),
        (["train", "DATA", "--output_dir", "OUT", "--method", '[{"method": "lora2"}]'], "no method 'lora2'"),
        (["train", "DATA", "--output_dir", "OUT", "--no_such_flag", "3"], "no_such_flag"),
        (["train", "DATA"], "output_dir"),
        (["train", "MISSING.jsonl", "--output_dir", "OUT"], "MISSING.jsonl does not exist"),
        (["train", "EMPTY", "--output_dir", "OUT"], "no rows"),
        (["train", "HALF", "--output_dir", "OUT"], "line 2"),
        (["train", "CHAT", "--output_dir", "OUT", "--model", "PLAIN"], "chat template"),
        (["train", "DATA", "--output_dir", "OUT", "--config", "MISSING.yaml"], "MISSING.yaml"),
        (["train", "DATA", "--output_dir", "OUT", "--model", "/no/such/folder"], "/no/such/folder"),
        (["generate", "--model", "BASE"], "either --prompt"),
        (["generate", "--model", "BASE", "--prompt", "x", "--adapter", "/no/such/adapter"], "/no/such/adapter"),
        (["generate", "--model", "BASE", "--input", "NOPROMPT"], "no prompt"),
        (["inspect", "/no/such/adapter"], "/no/such/adapter"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, message, base, tmp_path, capsys):
    files = {
        "DATA": tiny.write_jsonl(tmp_path / "data.jsonl", tiny.rows()),
        "EMPTY": tiny.write_jsonl(tmp_path / "empty.jsonl", []),
        "HALF": tiny.write_jsonl(tmp_path / "half.jsonl", [*tiny.rows(1), {"prompt": "no completion"}]),
        "CHAT": tiny.write_jsonl(
            tmp_path / "chat.jsonl",
            [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 12,
        ),
        "NOPROMPT": tiny.write_jsonl(tmp_path / "noprompt.jsonl", [{"question": "?"}]),
        "OUT": tmp_path / "out",
        "BASE": base,
    }
    if "PLAIN" in words:
        files["PLAIN"] = tiny.save(tmp_path / "plain", chat=False)
    given = [str(files.get(word, word)) for word in words]
    if words[0] == "train" and "--model" not in words:
        given += ["--model", str(base)]
    capsys.readouterr()  # of making the files
    code, out, err = run(capsys, *given)
    assert code == 2, err
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_adapter_for_another_base_is_refused(adapter, tmp_path, capsys):
    import zoo

    zoo.make("gpt2").save_pretrained(tmp_path / "gpt2")
    tiny.tokenizer().save_pretrained(tmp_path / "gpt2")
    code, _, err = run(capsys, "generate", "--model", tmp_path / "gpt2", "--adapter", adapter, "--prompt", "x")
    assert code == 2
    assert "llama" in err
    assert "gpt2" in err


def test_debug_shows_the_traceback(capsys):
    from foreword import ForewordError

    with pytest.raises(ForewordError):
        main(["inspect", "/no/such/adapter", "--debug"])


def test_an_unforeseen_failure_is_exit_code_1(adapter, capsys, monkeypatch):
    def broken(*args):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("foreword.checkpoint.read", broken)
    code, _, err = run(capsys, "inspect", adapter)
    assert code == 1
    assert "RuntimeError: two lines" in err


def test_the_module_is_the_command_line():
    out = subprocess.run(
        [sys.executable, "-m", "foreword", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert all(command in out for command in COMMANDS)


def test_methods_counts_on_a_model_and_meets_a_budget(base, capsys):
    code, out, err = run(capsys, "methods", "--model", base, "--json")
    assert code == 0, err
    rows = {row["method"]: row for row in json.loads(out)}
    assert rows["prefix-tuning"]["trainable"] == rows["prefix-tuning"]["by formula"]
    assert rows["bitfit"]["note"]
    code, out, err = run(capsys, "methods", "--model", base, "--budget", "3000", "--json")
    assert code == 0, err
    rows = {row["method"]: row for row in json.loads(out)}
    assert 2500 < rows["lora"]["trainable"] <= 3000
    code, out, _ = run(capsys, "methods", "--model", base)
    assert code == 0
    assert "bitfit: bitfit has nothing to train" in out


@pytest.mark.parametrize("experiment", ["rates", "profile", "gates"])
def test_theory_runs_a_small_experiment(experiment, tmp_path, capsys):
    words = ["theory", experiment, "--setting", "zero-linear", "--n", "100,200", "--replicates", "2", "--workers", "1"]
    code, out, err = run(capsys, *words, "--plot", "false", "--output", tmp_path / "out", "--json")
    assert code == 0, err
    assert json.loads(out)["slopes"] is not None
    assert (tmp_path / "out" / f"{experiment}.json").exists()


def test_theory_refuses_an_unknown_setting(tmp_path, capsys):
    code, _, err = run(capsys, "theory", "rates", "--setting", "no-such", "--output", tmp_path / "out")
    assert code == 2
    assert "no-such" in err
