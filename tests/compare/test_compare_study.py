"""Study files: what they say, and one line for what is wrong with one."""

import re

import pytest

import foreword as fw
import tiny
from foreword.compare import READY, read_study
from foreword.compare.comparison import cells_of
from foreword.compare.study import Length
from foreword.compare.tasks import load_parts
from foreword.errors import ForewordError


def test_a_study_says_what_it_holds(study_file):
    study = read_study(study_file(seeds=[3, 5], budget={"parameters": 900}, learning_rates={"factors": [0.5, 2]}))
    assert study.name == "study"
    assert study.seeds == (3, 5)
    assert study.lengths == (Length("steps", 3),)
    assert study.parameters == 900
    assert study.sweep.factors == (0.5, 2.0)
    assert [(entry.name, entry.methods, entry.learning_rate) for entry in study.entries] == [
        ("frozen", (), None),
        ("zero", (fw.ZeroInit(length=3, layers=3),), None),
        ("prefix", (fw.PrefixTuning(length=4),), 0.02),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": None}, "study.yaml: tasks is missing; it must be a mapping of names"),
        ({"tasks": {"words": {}}}, "tasks: words: train is missing; it must be a text"),
        ({"tasks": {"words": {"train": "absent.jsonl"}}}, "tasks: words: train: there is no file .*absent.jsonl"),
        ({"tasks": {"words": {"train": "words.jsonl", "size": 3}}}, "tasks: words has no field 'size'; it has train"),
        ({"tasks": {"a/b": {}}}, "tasks: a/b: a name must be of letters"),
        ({"methods": {"zero": "zero-unit"}}, "methods: zero: there is no method 'zero-unit'; did you mean 'zero-init'"),
        ({"methods": {"zero": {"method": "zero-init", "size": 3}}}, "methods: zero: ZeroInit has no field 'size'"),
        ({"methods": {"zero": {"method": "zero-init", "length": "3"}}}, "methods: zero: ZeroInit: length must be int"),
        ({"methods": {"zero": {"method": "lora", "learning_rate": -1}}}, "zero: learning_rate is -1; it must be a pos"),
        ({"fractions": [0.5, 2]}, "fractions is .0.5, 2.; it must be a list of numbers above 0 and up to 1"),
        ({"fractions": [0.5, 0.5]}, "fractions is .0.5, 0.5.; it must be a list"),
        ({"seeds": 0}, "seeds is 0; it must be a number of seeds"),
        ({"train_for": [{"hours": 3}]}, "train_for is .*; it must be a list of {steps: n}"),
        ({"train_for": [{"steps": 3.9}]}, "train_for is .*; it must be a list of {steps: n}.*, n a positive integer"),
        ({"train_for": [{"steps": 0.5}]}, "train_for is .*; it must be a list of {steps: n}.*, n a positive integer"),
        ({"budget": 3}, "budget is 3; it must be {parameters: n}"),
        ({"budget": {"params": 3}}, "budget: parameters is missing; it must be a positive integer"),
        ({"learning_rates": {"factors": []}}, "learning_rates: factors is ..; it must be a list of positive numbers"),
        ({"methods": {"x 1": "lora", "x (1)": "ia3"}}, "methods 'x 1' and 'x .1.' would share files"),
        (
            {"tasks": {name: {"train": "words.jsonl", "test": {"dev": "test.jsonl"}} for name in ("one", "two")}},
            "two tasks have a test named dev",
        ),
        ({"learning_rates": {"task": "trec"}}, "learning_rates: task is 'trec'; it must be one of the tasks words"),
        ({"training": {"max_steps": 3}}, "training: max_steps is set by the study"),
        ({"training": {"early_stopping_patience": 3}}, "training: early_stopping_patience needs held-out rows"),
        ({"training": {"batch": 3}}, "training has no field 'batch'; it has "),
        ({"training": {"weight_decay": "much"}}, "training: weight_decay is 'much'; it must be of type float"),
        ({"training": {"trainer": {"seed": 7}}}, "training: trainer: seed is a training setting itself"),
        ({"method": "lora"}, "study.yaml has no field 'method'; it has model, tasks, methods"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_field(study_file, changes, message):
    with pytest.raises(ForewordError) as caught:
        read_study(study_file(**changes))
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_study_is_refused(tmp_path):
    with pytest.raises(ForewordError, match="there is no study absent; give a YAML file or one of zero-init, unified"):
        read_study("absent")
    (tmp_path / "broken.yaml").write_text("tasks: [")
    with pytest.raises(ForewordError, match=r"broken.yaml is not valid YAML: .*line 1"):
        read_study(tmp_path / "broken.yaml")


@pytest.mark.parametrize("name", READY)
def test_ready_studies_are_whole_and_take_ones_own_data(name, study_file):
    study = read_study(name)
    assert study.entries
    words = study_file().with_name("words.jsonl")
    own = read_study(name, model="elsewhere", train=str(words), test=str(words.with_name("test.jsonl")))
    assert own.model == "elsewhere"
    assert own.entries == study.entries
    assert [task.name for task in own.tasks] == ["words"]


def test_shares_of_the_data_are_nested_and_leave_the_held_out_rows_alone(study_file):
    (spec,) = read_study(study_file(learning_rates={})).tasks
    rows = {share: load_parts(spec, share, seed=1).train["row"] for share in (0.25, 0.5, 1.0)}
    assert [len(rows[share]) for share in rows] == [6, 12, 24]
    assert set(rows[0.25]) < set(rows[0.5]) < set(rows[1.0])
    assert set(load_parts(spec, 0.25, seed=2).train["row"]) != set(rows[0.25])
    parts = load_parts(spec)
    assert len(parts.dev) == 6
    assert not set(parts.dev["row"]) & set(rows[1.0])


def test_tests_can_be_held_out_of_one_file(study_file):
    tasks = {"words": {"train": "words.jsonl", "test_size": 8, "dev_size": 6}}
    (spec,) = read_study(study_file(tasks=tasks)).tasks
    parts = load_parts(spec)
    tested = {example["row"] for example in parts.tests["words"].examples}
    assert len(tested) == 8
    assert len(parts.train) == 44 - 8
    (spec,) = read_study(study_file(tasks=tasks, learning_rates={})).tasks
    parts = load_parts(spec)
    assert len(parts.train) == 44 - 8 - 6
    tested = {example["row"] for example in parts.tests["words"].examples}
    assert not tested & ({*parts.train["row"]} | {*parts.dev["row"]})
    tasks["words"]["test_size"] = 40
    (spec,) = read_study(study_file(tasks=tasks, learning_rates={})).tasks
    with pytest.raises(ForewordError, match=r"task words: .* has 44 rows, and 46 are held out"):
        load_parts(spec)


def test_no_turn_of_a_conversation_is_trained_on_where_another_is_held_out(study_file):
    path = study_file(tasks={"talk": {"train": "talk.jsonl", "test_size": 8, "dev_size": 6}}, learning_rates={})
    turns = [("user", "red?"), ("assistant", "yes"), ("user", "blue?"), ("assistant", "no")]
    messages = [{"role": role, "content": text} for role, text in turns]
    tiny.write_jsonl(path.with_name("talk.jsonl"), [{"messages": messages} for _ in range(30)])
    (spec,) = read_study(path).tasks
    parts = load_parts(spec)
    held_out = {example["row"] for example in parts.tests["talk"].examples} | {*parts.dev["row"]}
    assert len(parts.train) > 0
    assert not held_out & {*parts.train["row"]}


def test_conversations_are_held_out_with_all_of_their_turns(study_file):
    path = study_file(tasks={"talk": {"train": "talk.jsonl", "test_size": 20, "dev_size": 20}}, learning_rates={})
    turns = [("user", "red?"), ("assistant", "yes"), ("user", "blue?"), ("assistant", "no")]
    messages = [{"role": role, "content": text} for role, text in turns]
    tiny.write_jsonl(path.with_name("talk.jsonl"), [{"messages": messages} for _ in range(60)])
    parts = load_parts(read_study(path).tasks[0])
    tested = {example["row"] for example in parts.tests["talk"].examples}
    assert len(parts.tests["talk"].examples) == len(tested) == len({*parts.dev["row"]}) == 20
    assert len(parts.dev) == len(parts.train) == 40
    assert not tested & {*parts.dev["row"]}


@pytest.mark.parametrize(("share", "count"), [(0.07, 7), (0.55, 55), (0.555, 56), (0.001, 1), (1, 100)])
def test_shares_are_counted_as_they_are_written(study_file, share, count):
    path = study_file(tasks={"words": {"train": "hundred.jsonl", "test": "test.jsonl"}})
    tiny.write_jsonl(path.with_name("hundred.jsonl"), [{"text": f"{n}", "label": n % 2} for n in range(100)])
    assert len(load_parts(read_study(path).tasks[0], share).train) == count


@pytest.mark.parametrize(
    "changes",
    [
        {
            "tasks": {name: {"train": "words.jsonl", "test": "test.jsonl"} for name in ("a", "a.b")},
            "methods": {"c": "lora", "b.c": "prefix-tuning"},
        },
        {"train_for": [{"steps": 1234567}, {"steps": 1234568}]},
        {"fractions": [0.3333333, 0.3333334]},
    ],
    ids=["tasks and methods", "lengths", "fractions"],
)
def test_runs_that_would_share_files_are_refused(study_file, changes):
    study = read_study(study_file(**changes))
    with pytest.raises(ForewordError, match=r"two runs would share the files .*: rename a task or a method"):
        cells_of(study, study.entries, {})


def test_lengths_in_words():
    assert Length("steps", 100).words == "100 steps"
    assert Length("epochs", 2.5).words == "2.5 epochs"
    assert Length("seconds", 1e6).words == "1e+06 seconds"


def test_the_built_in_task_is_plain_text_for_a_model_without_a_chat_template(study_file):
    (spec,) = read_study(study_file(tasks={"restaurant": {"train_size": 4, "test_size": 2}})).tasks
    for templated, kind in ((True, list), (False, str)):
        parts = load_parts(spec, templated=templated)
        assert isinstance(parts.train[0]["prompt"], kind)
        assert isinstance(parts.tests["restaurant"].examples[0]["prompt"], kind)


def test_a_study_keeps_what_took_the_place_of_its_own(study_file):
    path = study_file()
    words = str(path.with_name("words.jsonl"))
    study = read_study(path, model="elsewhere", train=words, test=words)
    assert study.source.splitlines()[:3] == [
        "# --model elsewhere in place of what stands below",
        f"# --train {words} in place of what stands below",
        f"# --test {words} in place of what stands below",
    ]
    assert read_study(path).source == path.read_text()


def test_label_words_stand_in_for_labels(study_file):
    tasks = {"words": {"train": "words.jsonl", "test": "test.jsonl", "labels": {"red": "rouge", "blue": "bleu"}}}
    tasks["words"] |= {"dev_size": 6, "test_size": 9}
    (spec,) = read_study(study_file(tasks=tasks)).tasks
    parts = load_parts(spec)
    assert {*parts.train["completion"]} == {" rouge", " green", " bleu"}
    for example in parts.tests["words"].examples:
        word = {"red": " rouge", "blue": " bleu", "green": " green"}[example["prompt"].split()[1]]
        assert example["choices"][example["answer"]] == word


def test_one_training_can_be_tested_with_several_files(study_file):
    tests = {"seen": "words.jsonl", "new": "test.jsonl"}
    path = study_file(tasks={"words": {"train": "words.jsonl", "test": tests}})
    (spec,) = read_study(path).tasks
    parts = load_parts(spec)
    assert {name: test.kind for name, test in parts.tests.items()} == {"seen": "labels", "new": "labels"}
    assert len(parts.tests["new"].examples) == 16
