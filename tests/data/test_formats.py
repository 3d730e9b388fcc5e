"""Every shape of data is read, detected, and normalised to prompt + completion."""

import json
from pathlib import Path

import pytest

from foreword.data import FORMATS, detect, load
from foreword.errors import ForewordError


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
ARC = {"text": ["ice", "steam"], "label": ["A", "B"]}

# format, a row, its one example
CASES = {
    "messages": (
        "messages",
        {"messages": [SYSTEM, user("Hi"), assistant("Hello")]},
        {"prompt": [SYSTEM, user("Hi")], "completion": [assistant("Hello")]},
    ),
    "sharegpt": (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"prompt": [user("Hi")], "completion": [assistant("Hello")]},
    ),
    "sharegpt with a system field": (
        "sharegpt",
        {
            "system": "Be brief.",
            "conversations": [{"from": "user", "value": "a"}, {"from": "gpt", "value": "b"}],
        },
        {"prompt": [SYSTEM, user("a")], "completion": [assistant("b")]},
    ),
    "strings": (
        "prompt-completion",
        {"prompt": "2 + 2 =", "completion": " 4", "id": "x"},
        {"prompt": "2 + 2 =", "completion": " 4"},
    ),
    "empty prompt": (
        "prompt-completion",
        {"prompt": "", "completion": "a"},
        {"prompt": "", "completion": "a"},
    ),
    "alpaca": (
        "alpaca",
        {"instruction": "Translate.", "input": "chat", "output": "cat", "text": "unused"},
        {"prompt": [user("Translate.\n\nchat")], "completion": [assistant("cat")]},
    ),
    "alpaca without input": (
        "alpaca",
        {"instruction": "Say hi.", "input": "", "output": "hi"},
        {"prompt": [user("Say hi.")], "completion": [assistant("hi")]},
    ),
    "alpaca with system": (
        "alpaca",
        {"system": "Be brief.", "instruction": "Say hi.", "output": "hi"},
        {"prompt": [SYSTEM, user("Say hi.")], "completion": [assistant("hi")]},
    ),
    "question-answer": (
        "question-answer",
        {"question": "1+1?", "answer": "2"},
        {"prompt": [user("1+1?")], "completion": [assistant("2")]},
    ),
    "text": ("text", {"text": "Once upon a time."}, {"text": "Once upon a time."}),
    "label": (
        "labels",
        {"text": "so good", "label": "pos"},
        {"prompt": "so good\nLabel:", "completion": " pos", "choices": [" pos"], "answer": 0},
    ),
    "label text": (
        "labels",
        {"text": "who?", "label": "HUM", "label_text": "person"},
        {"prompt": "who?\nLabel:", "completion": " person", "choices": [" person"], "answer": 0},
    ),
    "arc": (
        "choices",
        {"question": "Cold?", "choices": ARC, "answerKey": "A"},
        {
            "prompt": "Question: Cold?\nAnswer:",
            "completion": " ice",
            "choices": [" ice", " steam"],
            "answer": 0,
        },
    ),
}


@pytest.mark.parametrize(("format", "row", "example"), CASES.values(), ids=CASES)
def test_each_format_in_each_kind_of_file(store, format, row, example):
    path = store([row])
    assert detect(row) == format
    for named in (None, format):
        [loaded] = load(path, named)
        assert {key: value for key, value in loaded.items() if key != "row"} == example


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_prompt_and_completion_as_messages(tmp_path, suffix, write):
    row = {"prompt": [SYSTEM, user("Hi")], "completion": [assistant("Hello")]}
    [example] = load(write(tmp_path / f"data{suffix}", [row]))
    assert example == row | {"row": 1}


def test_every_assistant_turn_is_an_example(jsonl):
    turns = [user("a"), assistant("b"), user("c"), assistant("d"), user("e")]
    path = jsonl({"messages": turns})
    examples = list(load(path))
    assert [example["prompt"] for example in examples] == [turns[:1], turns[:3]]
    assert [example["completion"] for example in examples] == [turns[1:2], turns[3:4]]
    [last] = load(path, every_turn=False)
    assert (last["prompt"], last["completion"]) == (turns[:3], turns[3:4])


def test_extra_keys_of_messages_are_left_out(tmp_path, write):
    rows = [{"messages": [user("a") | {"name": "Ann"}, assistant("b") | {"weight": 1, "tool_calls": None}]}]
    [example] = load(write(tmp_path / "data.parquet", rows))
    assert example["prompt"] + example["completion"] == [user("a"), assistant("b")]


def test_row_numbers_are_places_in_the_file(tmp_path, jsonl, write):
    a, b = {"prompt": "p", "completion": "two\nlines"}, {"prompt": "q", "completion": "c"}
    assert load(jsonl(a, "", b))["row"] == [1, 3]
    assert load(write(tmp_path / "data.csv", [a, b]))["row"] == [2, 4]
    assert load(write(tmp_path / "data.json", [a, b]))["row"] == [1, 2]
    assert load(write(tmp_path / "data.parquet", [a, b]))["row"] == [1, 2]


def test_unicode_line_separators_and_byte_order_marks(tmp_path, write):
    rows = [{"prompt": "a\u2028b\x85c", "completion": "é\r\n🙂"}]
    for suffix in (".jsonl", ".json", ".csv"):
        path = write(tmp_path / f"data{suffix}", rows)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        [example] = load(path)
        assert (example["prompt"], example["completion"]) == ("a\u2028b\x85c", "é\r\n🙂")
    path = tmp_path / "raw.jsonl"
    path.write_text(json.dumps(rows[0], ensure_ascii=False), encoding="utf-8")
    assert load(path)["prompt"] == ["a\u2028b\x85c"]


def test_long_csv_cells(tmp_path, write):
    text = "word " * 50_000
    assert load(write(tmp_path / "data.csv", [{"text": text}]))["text"] == [text]


# --- chat or plain ------------------------------------------------------------------------------------------


def test_plain_alpaca_and_questions(jsonl):
    [example] = load(jsonl({"instruction": "Add.", "input": "1 2", "output": "3"}), chat=False)
    assert example["prompt"] == "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n"
    assert example["completion"] == "3"
    [example] = load(jsonl({"question": "1+1?", "answer": "2"}), chat=False)
    assert (example["prompt"], example["completion"]) == ("Question: 1+1?\nAnswer:", " 2")


def test_plain_examples_as_chat(jsonl):
    [example] = load(jsonl({"prompt": "2 + 2 =", "completion": " 4"}), chat=True)
    assert (example["prompt"], example["completion"]) == ([user("2 + 2 =")], [assistant("4")])
    [example] = load(jsonl({"question": "Cold?", "choices": ARC, "answerKey": "A"}), chat=True)
    assert example["completion"] == [assistant("ice")]
    assert (example["choices"], example["answer"]) == (["ice", "steam"], 0)


def test_labels_of_the_file_are_the_choices(jsonl):
    rows = load(jsonl(*({"text": str(n), "label": label} for n, label in enumerate([1, 0, 2, 0]))))
    assert rows["choices"] == [[" 0", " 1", " 2"]] * 4
    assert rows["answer"] == [1, 0, 2, 0]


# --- choices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"choices": ["x", "y", "z"], "answer": 1}, 1),
        ({"choices": ["x", "y", "z"], "answer": "1"}, 1),
        ({"choices": ["x", "y", "z"], "answer": "C"}, 2),
        ({"choices": ["x", "y", "z"], "answer": "z"}, 2),
        ({"choices": ["B", "A"], "answer": "A"}, 1),  # a text before a letter
        ({"choices": ["2", "0", "1"], "answer": "0"}, 1),  # a text before an index
        ({"choices": ["2", "0", "1"], "answer": 0}, 0),  # but a number is an index
        (
            {"choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "1"},
            0,
        ),  # a label before an index
        ({"choices": {"text": ["x", "y"], "label": [1, 2]}, "answerKey": 2}, 1),
        ({"choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": 1}, 1),
        ({"choices": {"text": ["x", "y"]}, "answerKey": "B"}, 1),
    ],
)
def test_answers_by_label_text_letter_or_index(jsonl, fields, answer):
    [example] = load(jsonl({"question": "?"} | fields))
    assert example["answer"] == answer
    assert example["completion"] == example["choices"][answer]


def test_copa_reads_as_one_sentence(jsonl):
    row = {"premise": "It rained.", "choice1": "She got wet.", "choice2": "He sang.", "question": "effect"}
    [example] = load(jsonl(row | {"label": 0}))
    assert example["prompt"] + example["completion"] == "It rained so she got wet."
    [example] = load(jsonl(row | {"label": 1, "question": "cause"}))
    assert example["prompt"] + example["completion"] == "It rained because he sang."


def test_a_blank_wrong_choice_is_only_easy(jsonl):
    [example] = load(jsonl({"question": "?", "choices": ["x", ""], "answer": 0}))
    assert example["choices"] == [" x", " "]


# --- detection ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "format"),
    [
        (["id", "messages", "prompt", "completion"], "messages"),
        (["prompt", "messages"], "messages"),
        (["text", "instruction", "input", "output"], "alpaca"),
        (["question", "choices", "answer"], "choices"),
        (["question", "answer"], "question-answer"),
        (["label", "text", "fine"], "labels"),
        (["text", "meta"], "text"),
    ],
)
def test_the_most_telling_columns_win(columns, format):
    assert detect(columns) == format


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (["prompt"], "prompt-completion lacks 'completion'"),
        (["instruction", "input"], "alpaca lacks 'output'"),
        (["mr", "refs"], "['mr', 'refs'] fit no format; prompt-completion lacks 'completion', 'prompt'"),
        ([], "the columns [] fit no format"),
    ],
)
def test_undetected_columns_name_the_nearest_format(columns, says):
    with pytest.raises(ForewordError, match="fit no format") as error:
        detect(columns)
    assert says in str(error.value)


def test_every_format_is_reachable_by_detection():
    for name, format in FORMATS.items():
        assert {detect(fields) for fields in format.variants} == {name}


REAL = {
    "arc_easy/train.jsonl": ("choices", 2251),
    "arc_challenge/test.jsonl": ("choices", 1172),
    "openbookqa/test.jsonl": ("choices", 500),
    "copa_small/train_subset.jsonl": ("choices", 135),
    "hellaswag_small/train_subset.jsonl": ("choices", 100),
    "truthfulqa_mc/mc.jsonl": ("choices", 817),
    "lm_eval_tasks/arc_easy_test.jsonl": ("choices", 2376),
    "lm_eval_tasks/openbookqa_test.jsonl": ("choices", 500),
    "lm_eval_tasks/hellaswag_small.jsonl": ("choices", 100),
    "sst2/dev.jsonl": ("labels", 872),
    "trec/test.jsonl": ("labels", 500),
    "sms_spam/all.jsonl": ("labels", 5574),
    "gsm8k/test.jsonl": ("question-answer", 1319),
    "instruct_1100/instruction-data.json": ("alpaca", 1100),
}


@pytest.mark.parametrize(("file", "format", "size"), [(f, *known) for f, known in REAL.items()], ids=REAL)
def test_real_files(real_data: Path, file: str, format: str, size: int):
    dataset = load(real_data / file)
    assert len(dataset) == size
    assert dataset[0] == load(real_data / file, format)[0]
    if format in ("choices", "labels"):
        for example in dataset:
            assert example["completion"] == example["choices"][example["answer"]]


def test_both_spellings_of_a_benchmark_agree(real_data: Path):
    for plain, lm_eval in (
        ("arc_challenge/test.jsonl", "lm_eval_tasks/arc_challenge_test.jsonl"),
        ("openbookqa/test.jsonl", "lm_eval_tasks/openbookqa_test.jsonl"),
        ("hellaswag_small/train_subset.jsonl", "lm_eval_tasks/hellaswag_small.jsonl"),
    ):
        assert load(real_data / plain).to_list() == load(real_data / lm_eval).to_list()
