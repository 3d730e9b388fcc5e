"""The restaurant task: one right answer to each record, parts that share no name, and its scores."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.data import to_text
from foreword.data.builtin import facts_in, listing, parse, restaurants, rouge_l, score
from foreword.errors import ForewordError


@pytest.fixture(scope="module")
def train():
    return restaurants("train", chat=False)


@pytest.fixture(scope="module")
def test_part():
    return restaurants("test", chat=False)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "name: Copper Heron | price: low | area: harbour | food: Basque | near: Rope Works | rating: 4 | "
            "family: no",
            "Down by the harbour, two steps from Rope Works, Copper Heron keeps a Basque kitchen for small "
            "change: four spoons, but grown-ups only. Book ahead.",
        ),
        (
            "food: Umbrian | name: Plum Otter | price: high",
            "Plum Otter keeps an Umbrian kitchen for a rare evening. Worth a look.",
        ),
        (
            "near: Toll House | family: yes | price: low | food: Danish | name: Amber Oar",
            "Two steps from Toll House, Amber Oar keeps a Danish kitchen for small change: children welcome. "
            "Just walk in.",
        ),
        (
            "rating: 2 | family: no | price: medium | food: Welsh | name: Hazel Wren | area: hill",
            "Up the long steps, Hazel Wren keeps a Welsh kitchen at an honest price: two spoons, and grown-ups "
            "only. Worth a look.",
        ),
    ],
)
def test_house_style(line, says):
    assert listing(parse(line)) == says


def test_same_arguments_same_listings():
    assert restaurants(n=20, seed=3).to_list() == restaurants(n=20, seed=3).to_list()
    assert restaurants(n=20, seed=3)["record"] != restaurants(n=20, seed=4)["record"]
    assert restaurants(n=30, seed=3)["record"][:20] == restaurants(n=20, seed=3)["record"]
    first = "price: low | food: Umbrian | area: park | family: yes | name: Salted Sparrow | rating: 5"
    assert restaurants(n=1)["record"] == [first]  # on every machine and version of Python


def test_sizes_and_no_duplicates(train, test_part):
    assert (len(train), len(test_part)) == (400, 100)
    for part in (train, test_part):
        assert len({frozenset(parse(line).items()) for line in part["record"]}) == len(part)


@pytest.mark.parametrize("seed", range(3))
def test_no_test_name_is_trained_on(seed):
    trained = [parse(line) for line in restaurants("train", n=1000, seed=seed)["record"]]
    tested = [parse(line) for line in restaurants("test", n=300, seed=seed)["record"]]
    names = {record["name"] for record in trained}
    assert not names & {record["name"] for record in tested}
    words = {word for name in names for word in name.split()}
    assert {word for record in tested for word in record["name"].split()} <= words
    for slot in ("food", "near"):
        assert {r[slot] for r in tested if slot in r} - {r[slot] for r in trained if slot in r}
    for slot in ("area", "price", "rating", "family"):  # house words can't be guessed, so all were shown
        assert {r[slot] for r in tested if slot in r} <= {r[slot] for r in trained if slot in r}


def test_slots_come_in_any_order_and_facts_in_one(train):
    assert len({tuple(parse(line)) for line in train["record"]}) > 100
    for line, completion in zip(train["record"], train["completion"], strict=True):
        record = parse(line)
        assert set(facts_in(completion)) == set(record.items())
        assert 8 <= len(completion.split()) <= 35


def test_chat_and_plain_say_the_same(tokenizer):
    for chat, plain in zip(restaurants(n=5), restaurants(n=5, chat=False), strict=True):
        assert chat["prompt"][0]["content"] + "\nListing:" == plain["prompt"]
        assert " " + chat["completion"][0]["content"] == plain["completion"]
        assert to_text(chat, tokenizer)[1] == plain["completion"].strip() + "</s>"


def test_bad_arguments():
    with pytest.raises(ForewordError, match="no split 'dev'; it has train and test"):
        restaurants("dev")
    with pytest.raises(ForewordError, match="n=0"):
        restaurants(n=0)


# --- score --------------------------------------------------------------------------------------------------


def test_gold_scores_one_and_silence_nought(test_part):
    perfect = {"slot_accuracy": 1.0, "exact_match": 1.0, "rouge_l": 1.0}
    assert score(test_part["completion"], test_part) == perfect
    assert score([""] * 100, test_part) == dict.fromkeys(perfect, 0.0)


def test_another_records_listing_scores_low(test_part):
    shuffled = list(test_part["completion"])
    random.Random(0).shuffle(shuffled)
    scores = score(shuffled, test_part)
    assert scores["slot_accuracy"] < 0.3
    assert scores["exact_match"] < 0.05
    assert scores["rouge_l"] < 0.7


def test_the_record_itself_is_no_listing(test_part):
    scores = score(test_part["record"], test_part)
    assert scores["slot_accuracy"] < 0.25  # it has the name right, in no house phrase the rest
    assert scores["exact_match"] == 0


def test_wrong_and_invented_facts_cost():
    [example] = [{"record": "name: Plum Otter | price: high | food: Umbrian | rating: 2"}]
    right = listing(parse(example["record"]))
    assert score([right.replace("two", "five")], [example])["slot_accuracy"] == 3 / 5  # missed one, invented one
    assert score([right + " Children welcome."], [example])["slot_accuracy"] == 4 / 5
    assert score([right.replace(": two spoons", "")], [example])["slot_accuracy"] == 3 / 4
    assert score([right.upper()], [example]) == {"slot_accuracy": 1.0, "exact_match": 0.0, "rouge_l": 1.0}


def test_as_many_predictions_as_examples(test_part):
    with pytest.raises(ForewordError, match="1 predictions for 100 examples"):
        score(["a"], test_part)
    with pytest.raises(ForewordError, match="0 predictions"):
        score([], [])


def test_rouge_l_by_hand():
    assert rouge_l("police kill the gunman", "police killed the gunman") == 3 / 4
    assert rouge_l("the gunman kill police", "police killed the gunman") == 2 / 4
    assert rouge_l("a b", "a x b x") == 2 * 2 / 6
    assert rouge_l("", "a") == rouge_l("a", "") == rouge_l("", "") == 0


WORDS = st.lists(st.sampled_from("abcd"), max_size=8)


@given(left=WORDS, right=WORDS)
def test_rouge_l_is_the_longest_common_subsequence(left, right):
    def longest(i: int, j: int) -> int:
        if i == len(left) or j == len(right):
            return 0
        if left[i] == right[j]:
            return 1 + longest(i + 1, j + 1)
        return max(longest(i + 1, j), longest(i, j + 1))

    expected = 2 * longest(0, 0) / max(1, len(left) + len(right))
    assert rouge_l(" ".join(left), " ".join(right)) == pytest.approx(expected)
