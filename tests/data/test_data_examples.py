"""Held-out rows, rendered text, and where TRL puts the loss."""

import copy

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.data import load, split, to_text
from foreword.errors import ForewordError


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


# --- split --------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    turns=st.lists(st.integers(1, 3), min_size=2, max_size=20),
    held=st.integers(1, 19),
    seed=st.integers(0, 9),
)
def test_conversations_are_never_torn(turns, held, seed):
    rows = [row for row, count in enumerate(turns, start=1) for _ in range(count)]
    dataset = Dataset.from_dict({"text": [str(n) for n in range(len(rows))], "row": rows})
    held = min(held, len(turns) - 1)
    train, evaluation = split(dataset, held, seed)
    assert len(set(evaluation["row"])) == held
    assert not set(train["row"]) & set(evaluation["row"])
    assert sorted([*train["text"], *evaluation["text"]], key=int) == dataset["text"]


def test_fraction_count_and_seed():
    dataset = Dataset.from_dict({"text": [str(n) for n in range(50)]})
    assert [len(part) for part in split(dataset, 0.1)] == [45, 5]
    assert [len(part) for part in split(dataset, 7)] == [43, 7]
    assert [len(part) for part in split(dataset, 0.001)] == [49, 1]
    first, again, other = (split(dataset, 10, seed)[1]["text"] for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("size", [0, -1, 1.0, 2.5, 5, 6, 0.99, float("nan")])
def test_neither_part_may_be_empty(size):
    dataset = Dataset.from_dict({"text": list("abcde")})
    with pytest.raises(ForewordError, match=r"can't hold out .* of 5 rows"):
        split(dataset, size)


# --- to_text ------------------------------------------------------------------------------------------------


def test_strings_stay_as_they_are(tokenizer):
    assert to_text({"prompt": "a ", "completion": "b"}, tokenizer) == ("a ", "b")
    assert to_text({"text": "a b"}, tokenizer) == ("", "a b")
    assert to_text({"prompt": "a"}, tokenizer) == ("a", "")


def test_messages_go_through_the_template(tokenizer):
    example = {"prompt": [user("a"), assistant("b"), user("c")], "completion": [assistant("d")]}
    opened = "<user>a</s><assistant>b</s><user>c</s><assistant>"
    assert to_text(example, tokenizer) == (opened, "d</s>")
    assert to_text({"prompt": example["prompt"]}, tokenizer) == (opened, "")


def test_what_a_template_opens_an_answer_with_and_does_not_keep_is_left_out(tokenizer):
    thinking = copy.copy(tokenizer)
    thinking.chat_template = tokenizer.chat_template.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}")
    example = {"prompt": [user("a")], "completion": [assistant("b")]}
    assert to_text(example, thinking) == ("<user>a</s><assistant>", "b</s>")
    assert to_text({"prompt": example["prompt"]}, thinking) == ("<user>a</s><assistant><think>", "")


def test_messages_without_a_template(tokenizer):
    bare = copy.copy(tokenizer)
    bare.chat_template = None
    bare.name_or_path = "gpt-mini"
    with pytest.raises(ForewordError, match=r"field 'prompt' holds messages, but gpt-mini has no chat template; use"):
        to_text({"prompt": [user("a")], "completion": [assistant("b")]}, bare)


def test_a_template_that_refuses(tokenizer):
    prompt = [user("a"), {"role": "tool", "content": "b"}]
    with pytest.raises(ForewordError, match="refuses messages with the roles user, tool: no tools here"):
        to_text({"prompt": prompt}, tokenizer)


# --- TRL ----------------------------------------------------------------------------------------------------

CONVERSATION = {"messages": [user("a"), assistant("first"), user("b"), assistant("second")]}
LOSS = {  # what is in the file, and the text that the loss is on
    "messages": (CONVERSATION, ["first</s>", "second</s>"]),
    "strings": ({"prompt": "2 + 2 =", "completion": " 4"}, [" 4</s>"]),
    "no prompt": ({"prompt": "", "completion": "a"}, ["a</s>"]),
    "alpaca": ({"instruction": "i", "input": "n", "output": "out"}, ["out</s>"]),
    "choices": ({"question": "q", "choices": ["x", "y"], "answer": 1}, [" y</s>"]),
    "labels": ({"text": "t", "label": 1}, [" 1</s>"]),
    "text": ({"text": "all of it"}, ["all of it</s>"]),
}


@pytest.mark.parametrize(("row", "texts"), LOSS.values(), ids=LOSS)
def test_trl_puts_the_loss_on_completions_only(tmp_path, tokenizer, row, texts, write):
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    trainer = SFTTrainer(
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **shape)),
        args=SFTConfig(str(tmp_path / "out"), report_to=[], use_cpu=True, bf16=False, max_steps=1, disable_tqdm=True),
        train_dataset=load(write(tmp_path / "data.jsonl", [row])),
        processing_class=tokenizer,
    )
    batch = next(iter(trainer.get_train_dataloader()))  # the extra columns (row, choices, answer) don't disturb it
    learned = sorted(tokenizer.decode(labels[labels != -100]) for labels in batch["labels"])
    assert learned == texts
