"""What is wrong with a data file is said in one line, with the file, the row and the field."""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreword.data import load
from foreword.errors import ForewordError

GOOD = {"prompt": "p", "completion": "c"}
USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def refusal(path: Path, **options) -> str:
    with pytest.raises(ForewordError) as error:
        load(path, **options)
    message = str(error.value)
    assert "\n" not in message
    return message


ROWS = {  # what stands in line 2 of a file whose line 1 is GOOD, and what the error says of it
    "no completion": ({"prompt": "p"}, "field 'completion' is missing, which prompt-completion needs"),
    "null completion": ({"prompt": "p", "completion": None}, "field 'completion' is missing"),
    "empty completion": ({"prompt": "p", "completion": ""}, "field 'completion' is empty"),
    "blank completion": ({"prompt": "p", "completion": " \n"}, "field 'completion' is empty"),
    "wrong type": ({"prompt": "p", "completion": 4}, "field 'completion' is 4 (int); it must be a string"),
    "wrong prompt": ({"prompt": 1.5, "completion": "c"}, "field 'prompt' is 1.5 (float)"),
    "another format": ({"instruction": "i", "output": "o"}, "the row fits alpaca; a file holds one format"),
    "half messages": ({"prompt": [USER], "completion": "c"}, "field 'prompt' is [{"),
    "mixed": ({"prompt": [USER], "completion": [ASSISTANT]}, "as in line 1"),
    "user completes": ({"prompt": [USER], "completion": [USER]}, "may hold assistant messages only"),
    "no object": ([1, 2], "the row is [1, 2] (list); it must be an object"),
    "null": (None, "the row is missing"),
    "surrogate": (
        {"prompt": "p", "completion": "\ud800"},
        "field 'completion' holds half of a surrogate pair",
    ),
    "cut short": ('{"prompt": "p", "comp', "not valid JSON: Unterminated string"),
    "two values": ("{} {}", "not valid JSON: Extra data at column 4"),
    "deep": ("[" * 100_000, "not readable JSON"),
    "long number": ('{"prompt": ' + "1" * 5000 + "}", "not readable JSON"),
}


@pytest.mark.parametrize(("row", "says"), ROWS.values(), ids=ROWS)
def test_a_bad_row_is_named(jsonl, row, says):
    message = refusal(jsonl(GOOD, row if isinstance(row, str) else json.dumps(row)))
    assert "data.jsonl, line 2: " in message
    assert says in message


CONVERSATIONS = {
    "unknown role": ([{"role": "narrator", "content": "x"}], "message 1 in 'messages': 'role' is 'narrator'"),
    "no role": ([USER, {"content": "x"}], "message 2 in 'messages': 'role' is missing"),
    "no content": ([{"role": "user"}], "message 1 in 'messages': 'content' is missing"),
    "parts": ([{"role": "user", "content": ["x"]}], "'content' is ['x'] (list)"),
    "empty answer": ([USER, ASSISTANT | {"content": ""}], "message 2 in 'messages': 'content' is empty"),
    "tool calls": ([USER, ASSISTANT | {"tool_calls": [{"id": 1}]}], "'tool_calls' can't be trained on"),
    "no object": (["hi"], "message 1 in 'messages' is 'hi' (str)"),
    "no messages": ([], "field 'messages' is [] (list); it must be a list of messages"),
    "a string": ("hi", "field 'messages' is 'hi' (str)"),
    "no answer": ([USER], "no assistant turn to learn from"),
    "answer first": ([ASSISTANT, USER], "begins with an assistant turn"),
}


@pytest.mark.parametrize(("turns", "says"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_a_bad_conversation_is_named(jsonl, turns, says):
    message = refusal(jsonl({"messages": [USER, ASSISTANT]}, {"messages": turns}))
    assert "data.jsonl, line 2: " in message
    assert says in message


def test_unknown_sharegpt_speaker(jsonl):
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "narrator", "value": "b"}]}
    assert "line 1: message 2 in 'conversations': 'from' is 'narrator'" in refusal(jsonl(row))


CHOICES = {
    "index too high": (
        {"choices": ["x", "y"], "answer": 2},
        "field 'answer' is 2 (int); it must be a number below 2",
    ),
    "negative index": ({"choices": ["x", "y"], "answer": -1}, "field 'answer' is -1 (int)"),
    "fraction": ({"choices": ["x", "y"], "answer": 1.0}, "field 'answer' is 1.0 (float)"),
    "truth": ({"choices": ["x", "y"], "answer": True}, "field 'answer' is True (bool)"),
    "unknown letter": ({"choices": ["x", "y"], "answer": "C"}, "field 'answer' is 'C' (str)"),
    "ambiguous text": ({"choices": ["x", "x"], "answer": "x"}, "field 'answer' is 'x' (str)"),
    "one choice": ({"choices": ["x"], "answer": 0}, "field 'choices' must be a list of two or more choices"),
    "no list": ({"choices": "x|y", "answer": 0}, "field 'choices' must be a list of two or more choices"),
    "a number": ({"choices": ["x", 2], "answer": 0}, "choice 2 in 'choices' is 2 (int); it must be a string"),
    "blank right one": ({"choices": ["x", ""], "answer": 1}, "the right choice is empty"),
    "labels short": (
        {"choices": {"text": ["x", "y"], "label": ["A"]}, "answer": "A"},
        "'label' in field 'choices'",
    ),
    "two truths": ({"mc1_targets": {"choices": ["x", "y"], "labels": [1, 1]}}, "a 1 for one choice"),
    "no truth": ({"mc1_targets": {"choices": ["x", "y"]}}, "a 1 for one choice"),
    "no relation": ({"premise": "p", "choice1": "x", "choice2": "y", "label": 0}, "beside 'premise'"),
}


@pytest.mark.parametrize(("fields", "says"), CHOICES.values(), ids=CHOICES)
def test_a_bad_choice_is_named(jsonl, fields, says):
    message = refusal(jsonl({"question": "?"} | fields))
    assert "data.jsonl, line 1: " in message
    assert says in message


def test_first_row_without_a_completion(jsonl):
    assert "line 1: field 'completion' is missing" in refusal(jsonl({"prompt": "p"}, GOOD))
    assert "data.jsonl: the columns ['prompt'] fit no format; prompt-completion lacks 'completion'" in refusal(
        jsonl({"prompt": "p"})
    )


def test_the_place_is_right_in_every_kind_of_file(tmp_path, write):
    rows = [{"prompt": "two\nlines", "completion": "c"}, {"prompt": "p", "completion": " "}]
    places = {"jsonl": "line 2", "json": "item 2", "csv": "line 4", "parquet": "row 2"}
    for suffix, place in places.items():
        message = refusal(write(tmp_path / f"data.{suffix}", rows))
        assert message == f"{tmp_path}/data.{suffix}, {place}: field 'completion' is empty"


def test_conversations_need_a_template(jsonl):
    for row in ({"messages": [USER, ASSISTANT]}, {"prompt": [USER], "completion": [ASSISTANT]}):
        assert "line 1: the row is a conversation" in refusal(jsonl(row), chat=False)


def test_unknown_named_format(jsonl):
    message = refusal(jsonl(GOOD), format="alpacca")
    assert message.startswith("unknown data format 'alpacca'; it must be one of messages, sharegpt,")


def test_named_format_that_does_not_fit(jsonl):
    message = refusal(jsonl(GOOD), format="alpaca")
    assert "line 1: field 'instruction', 'output' is missing, which alpaca needs" in message


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.jsonl", b"", "empty.jsonl holds no rows"),
        ("blank.jsonl", b"\n \n", "blank.jsonl holds no rows"),
        ("empty.json", b"", "empty.json: not valid JSON"),
        ("empty.json", b"[]", "empty.json holds no rows"),
        ("empty.csv", b"", "empty.csv holds no rows"),
        ("header.csv", b"prompt,completion\n", "header.csv holds no rows"),
        ("empty.parquet", b"", "empty.parquet is not a readable Parquet file"),
        ("cut.parquet", b"PAR1\x00\x00PAR1", "cut.parquet is not a readable Parquet file"),
        (
            "data.txt",
            b"hi",
            "data.txt has an unknown extension; data files end in .jsonl, .json, .csv, .parquet",
        ),
        ("data", b"hi", "data has an unknown extension"),
        ("latin.jsonl", b'{"text": "a"}\n{"text": "\xe9"}', "latin.jsonl, line 2: not UTF-8 text"),
        (
            "bad.json",
            b'[\n{"text": "a"},\n{"text" "b"}]',
            "bad.json: not valid JSON: Expecting ':' delimiter at line 3",
        ),
        (
            "lines.json",
            b'{"text": "a"}\n{"text": "b"}',
            "at line 2, column 1; one object a line makes a .jsonl file",
        ),
        ("number.json", b"3", "number.json is 3 (int); it must be a list of objects"),
        (
            "object.json",
            b'{"text": "a"}',
            "object.json is an object with the fields ['text']; it must hold one list",
        ),
        ("two.json", b'{"a": [], "b": []}', "it must hold one list of rows"),
        (
            "short.csv",
            b"prompt,completion\np,c\np\n",
            "short.csv, line 3: has 1 cells, but the header names 2",
        ),
        ("long.csv", b"prompt,completion\np,c,x\n", "long.csv, line 2: has 3 cells"),
        ("twice.csv", b"prompt,prompt\np,c\n", "twice.csv, line 1: a column name occurs twice"),
        (
            "quote.csv",
            b'prompt,completion\np,"c\n',
            "quote.csv, line 2: not valid CSV: unexpected end of data",
        ),
        ("cell.csv", b'messages\n"[{"\n', "cell.csv, line 2: field 'messages': not valid JSON"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    message = refusal(path)
    assert message.startswith(str(tmp_path))
    assert says in message


def test_a_missing_file(tmp_path):
    assert refusal(tmp_path / "none.jsonl") == f"{tmp_path}/none.jsonl does not exist"


# --- splits -------------------------------------------------------------------------------------------------


def test_split_of_a_folder(tmp_path, write):
    for name in ("train", "test"):
        write(tmp_path / f"{name}.json", [{"text": name}])
    assert load(tmp_path, split="test")["text"] == ["test"]
    assert "0 files for split 'dev'; it has test.json, train.json" in refusal(tmp_path, split="dev")
    assert "0 files for split None" in refusal(tmp_path)
    write(tmp_path / "test.csv", [{"text": "again"}])
    assert "2 files for split 'test'" in refusal(tmp_path, split="test")


def test_empty_folder(tmp_path):
    assert refusal(tmp_path).endswith("is a folder without .jsonl, .json, .csv, .parquet files")


def test_split_of_a_json_object(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"version": 1, "train": [{"text": "a"}], "test": [{"text": "b"}]}))
    assert load(path, split="test")["text"] == ["b"]
    assert "it must hold a list named 'dev'" in refusal(path, split="dev")
    path.write_text(json.dumps({"version": 1, "rows": [{"text": "a"}]}))
    assert load(path)["text"] == ["a"]


def test_a_file_without_splits(store):
    assert "has no split 'test'; name a folder" in refusal(store([GOOD]), split="test")


# --- properties ---------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)  # any but surrogates
SPOKEN = TEXT.filter(str.strip)
fuzzing = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzzing
@given(rows=st.lists(st.fixed_dictionaries({"prompt": TEXT, "completion": SPOKEN}), min_size=1, max_size=5))
def test_strings_come_back_from_every_kind_of_file(tmp_path, rows, write):
    for suffix in ("jsonl", "json", "csv", "parquet"):
        loaded = load(write(tmp_path / f"data.{suffix}", rows)).remove_columns("row")
        assert loaded.to_list() == rows


@fuzzing
@given(turns=st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), SPOKEN), max_size=6))
def test_no_assistant_turn_is_lost(tmp_path, turns, write):
    messages = [{"role": role, "content": content} for role, content in [("user", "hi"), *turns, ("assistant", "bye")]]
    examples = load(write(tmp_path / "data.jsonl", [{"messages": messages}]))
    answers = [turn for example in examples for turn in example["completion"]]
    assert answers == [turn for turn in messages if turn["role"] == "assistant"]
    for example in examples:
        seen = example["prompt"] + example["completion"]
        assert seen == messages[: len(seen)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "text"]), inner),
    max_leaves=6,
)
FIELDS = sorted({"prompt", "completion", "messages", "question", "choices", "answer", "text", "label", "premise"})


def read_or_refused(path: Path) -> Dataset | None:
    try:
        return load(path)
    except ForewordError as error:
        message = str(error)
    assert str(path) in message
    assert "\n" not in message
    return None


@fuzzing
@given(rows=st.lists(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), max_size=3))
def test_any_json_is_read_or_refused(tmp_path, rows, write):
    path = write(tmp_path / "data.jsonl", rows)
    dataset = read_or_refused(path)
    if dataset is not None:
        assert set(dataset["row"]) == set(range(1, len(rows) + 1))


@fuzzing
@given(data=st.binary(max_size=80), suffix=st.sampled_from(["jsonl", "json", "csv", "parquet"]))
def test_any_bytes_are_read_or_refused(tmp_path, data, suffix):
    path = tmp_path / f"data.{suffix}"
    path.write_bytes(data)
    read_or_refused(path)


@fuzzing
@given(cut=st.integers(0, 2000), noise=st.binary(min_size=1, max_size=8))
def test_damaged_parquet_is_read_or_refused(tmp_path, cut, noise, write):
    path = write(tmp_path / "data.parquet", [GOOD])
    data = bytearray(path.read_bytes())
    at = cut % len(data)
    data[at : at + len(noise)] = noise
    path.write_bytes(data)
    read_or_refused(path)
