"""A text in the context, whatever a tokenizer's chat template takes."""

import pytest

import tiny
from foreword.compress.chunks import draw_chunks, spaced
from foreword.compress.dialogue import Dialogue, common_end, common_start

NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}" + tiny.TEMPLATE
)
WANTS_USER = (
    "{% if messages|selectattr('role', 'equalto', 'user')|list|length == 0 %}{{ raise_exception('no question') }}"
    "{% endif %}" + tiny.TEMPLATE
)


def dialogue(template: str | None) -> Dialogue:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    return Dialogue(tokenizer)


@pytest.mark.parametrize(
    ("template", "alone", "behind", "frame"),
    [
        (
            tiny.TEMPLATE,
            "<user>Who?<end><assistant>",
            "<system>TEXT<end><user>Who?<end><assistant>",
            ("<system>", "<end>"),
        ),
        (
            WANTS_USER,
            "<user>Who?<end><assistant>",
            "<system>TEXT<end><user>Who?<end><assistant>",
            ("<system>", "\n\n"),
        ),
        (NO_SYSTEM, "<user>Who?<end><assistant>", "<user>TEXT\n\nWho?<end><assistant>", ("<user>", "\n\n")),
        (None, "Question: Who?\nAnswer:", "TEXT\n\nQuestion: Who?\nAnswer:", ("", "\n\n")),
    ],
)
def test_where_the_text_stands(template, alone, behind, frame):
    talk = dialogue(template)
    prompt, text = talk.prompt("Who?"), talk.encode("TEXT")

    def read(ids: list[int]) -> str:
        return talk.tokenizer.decode(ids)

    assert read(talk.ids(prompt)) == alone
    assert read(talk.ids(prompt, text=text)) == behind
    assert (read(talk.head), read(talk.tail)) == frame
    answered = read(talk.ids(prompt, talk.completion("Ansa."), text=text))
    assert answered.startswith(behind)
    assert answered[len(behind) :].strip() == "Ansa.<end>"


def test_a_system_message_of_its_own_follows_the_text():
    talk = dialogue(tiny.TEMPLATE)
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    assert talk.tokenizer.decode(talk.ids(prompt, text=talk.encode("TEXT"))).startswith(
        "<system>TEXT\n\nBe brief.<end>"
    )


def test_an_answer_is_rendered_once_where_the_template_opens_it_with_a_thought():
    talk = dialogue(tiny.TEMPLATE.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}"))
    whole = talk.ids(talk.prompt("Who?"), talk.completion("Ansa."), text=talk.encode("TEXT"))
    assert talk.tokenizer.decode(whole) == "<system>TEXT<end><user>Who?<end><assistant>Ansa.<end>"


def test_common_ends():
    assert common_start([[1, 2, 3], [1, 2, 4], [1, 2]]) == 2
    assert common_start([[1], [2]]) == 0
    assert common_end([[5, 1, 2], [1, 2], [6, 1, 2]]) == 2


def test_chunks_are_of_the_document():
    document = list(range(100))
    chunks = draw_chunks(document, 10, 30, 5, seed="a")
    assert len({len(chunk.ids) for chunk in chunks}) == 1
    assert 10 <= len(chunks[0].ids) <= 30
    assert all(chunk.ids == document[chunk.start : chunk.start + len(chunk.ids)] for chunk in chunks)
    assert len({chunk.start for chunk in chunks}) > 1
    assert chunks == draw_chunks(document, 10, 30, 5, seed="a") != draw_chunks(document, 10, 30, 5, seed="b")
    assert draw_chunks(document[:8], 10, 30, 2, seed="a")[0].ids == document[:8]


@pytest.mark.parametrize("total", [1, 64, 65, 130, 1000])
def test_spans_reach_from_the_start_to_the_end(total):
    document = list(range(1000))
    ids = spaced(document, total)
    assert len(ids) == len(set(ids)) == total
    assert ids == sorted(ids)
    assert ids[0] == 0
    assert ids[-1] == (999 if total > 95 else total - 1)
