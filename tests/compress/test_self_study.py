"""Self-study: what is kept is what the teacher says, and nothing is written twice."""

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
from foreword.compress import Dialogue, SelfStudy, study
from foreword.compress.shards import Conversations, collate, read_shard
from foreword.losses import IGNORED, distillation_loss

SETTINGS = SelfStudy(
    conversations=6, shortest_chunk=30, longest_chunk=60, question_tokens=8, answer_tokens=12, top_k=5, batch_size=3
)


@pytest.fixture
def parts(cache, text):
    tokenizer = tiny.tokenizer()
    return tiny.model(), tokenizer, Dialogue(tokenizer).encode(text)


def test_a_conversation_has_the_teachers_distributions(parts):
    """By a forward of its own, with the chunk in a system message."""
    model, tokenizer, document = parts
    dialogue = Dialogue(tokenizer)
    conversations = [one for shard in study(*parts, SETTINGS) for one in read_shard(shard)]
    assert len(conversations) == 6
    assert len({one.kind for one in conversations}) == 5
    for one in conversations:
        chunk = document[one.start : one.start + one.length]
        turns = dialogue.prompt(one.question), dialogue.completion(one.answer)
        assert one.ids == dialogue.ids(*turns)
        whole = dialogue.ids(*turns, chunk)
        n = len(one.teacher_ids)
        assert whole[-n:] == one.ids[-n:]
        assert n == len(one.ids) - 1  # without a system message of its own, all of it but the first token
        with torch.no_grad():
            logprobs = model(torch.tensor([whole])).logits[0, -n - 1 : -1].log_softmax(-1)
        torch.testing.assert_close(
            one.teacher_logprobs, logprobs.gather(1, one.teacher_ids.long()), atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(one.teacher_logprobs, logprobs.topk(5).values, atol=1e-5, rtol=1e-5)


def test_the_model_is_as_it_was(parts):
    model, _, _ = parts
    study(*parts, SETTINGS)
    assert not hasattr(model, "foreword")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_active_adapter_is_not_read(parts, monkeypatch, tmp_path):
    plain = [read_shard(shard)[0] for shard in study(*parts, SETTINGS)]
    monkeypatch.setenv("FOREWORD_CACHE", str(tmp_path / "other"))
    fw.attach(parts[0], fw.PrefixTuning(length=4))
    again = [read_shard(shard)[0] for shard in study(*parts, SETTINGS)]
    assert [one.question for one in plain] == [one.question for one in again]
    assert fw.adapters(parts[0]) == ["default"]
    assert parts[0].foreword.active == "default"


def test_what_is_in_the_cache_is_not_written_again(parts):
    shards = study(*parts, SETTINGS)
    times = [shard.stat().st_mtime_ns for shard in shards]
    more = study(*parts, replace(SETTINGS, conversations=7))
    assert more[:2] == shards
    assert len(more) == 3
    assert [shard.stat().st_mtime_ns for shard in more[:2]] == times


@pytest.mark.parametrize("change", ["document", "model", "seed", "top_k"])
def test_another_study_has_another_folder(parts, change):
    model, tokenizer, document = parts
    settings = SETTINGS
    before = study(model, tokenizer, document, settings)[0].parent
    if change == "document":
        document = document[:-1]
    elif change == "model":
        with torch.no_grad():
            model.model.norm.weight[0] += 1
    else:
        settings = replace(settings, **{change: 4})
    assert study(model, tokenizer, document, settings)[0].parent != before


def test_a_damaged_shard_is_named(parts):
    shard = study(*parts, SETTINGS)[1]
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(fw.ForewordError, match=r"shard-00001.safetensors is damaged.*delete it"):
        read_shard(shard)


RUN = """
    import sys
    sys.path[:0] = {paths!r}
    import torch, tiny
    from dataclasses import replace
    from test_self_study import SETTINGS
    from foreword.compress import Dialogue, study
    torch.set_num_threads(1)
    tokenizer = tiny.tokenizer()
    study(tiny.model(), tokenizer, Dialogue(tokenizer).encode({text!r}), replace(SETTINGS, conversations=90))
"""


def test_a_killed_study_goes_on(cache, text):
    here = Path(__file__).parent
    code = textwrap.dedent(RUN.format(paths=[str(here), str(here.parent)], text=text))
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"FOREWORD_CACHE": str(cache)})
    while len(list(cache.glob("self-study/*/*.safetensors"))) < 3:
        assert process.poll() is None, "the study ended before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = {shard: shard.read_bytes() for shard in cache.glob("self-study/*/*.safetensors")}
    assert 3 <= len(done) < 30
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"FOREWORD_CACHE": str(cache)}).returncode == 0
    shards = sorted(cache.glob("self-study/*/*.safetensors"))
    assert len(shards) == 30
    assert all(shard.read_bytes() == data for shard, data in done.items())
    assert sum(len(read_shard(shard)) for shard in shards) == 90


def test_a_chunk_that_does_not_fit_is_refused(parts):
    parts[0].config.max_position_embeddings = 128
    with pytest.raises(fw.ForewordError, match="context of 128: lower longest_chunk"):
        study(*parts, SETTINGS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conversations": 0}, "conversations must be a positive integer"),
        ({"longest_chunk": 20}, r"longest_chunk \(20\) is below shortest_chunk \(30\)"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
    ],
)
def test_wrong_settings_are_one_line(change, message):
    with pytest.raises(fw.ForewordError, match=message):
        replace(SETTINGS, **change)


def test_the_loss_is_the_truncated_cross_entropy(parts):
    """−Σ_j p_T(j) log p_S(j) over the kept tokens, each conversation by itself, averaged over all learned tokens."""
    model, tokenizer, _ = parts
    conversations = Conversations(study(*parts, SETTINGS))
    batch = collate([conversations[i] for i in range(4)], tokenizer.pad_token_id)
    total, count = 0.0, 0
    for one in (conversations.conversation(i) for i in range(4)):
        n = len(one.teacher_ids)
        student = model(torch.tensor([one.ids])).logits[0, -n - 1 : -1].log_softmax(-1)
        for row in range(n):
            for j, logprob in zip(one.teacher_ids[row].tolist(), one.teacher_logprobs[row].tolist(), strict=True):
                total -= torch.tensor(logprob).exp().item() * student[row, j].item()
        count += n
    assert (batch["labels"] != IGNORED).sum() == count
    loss, _ = distillation_loss(model, batch)
    assert loss.item() == pytest.approx(total / count, rel=1e-5)
    half, _ = distillation_loss(model, batch, torch.tensor(2 * count))
    assert half.item() == pytest.approx(total / count / 2, rel=1e-5)


def test_the_loss_is_least_at_the_teacher(parts):
    """Its gradient is zero where the student says what the teacher says, if all tokens are kept."""
    model, tokenizer, _ = parts
    ids = torch.randint(3, 200, (1, 9))
    with torch.no_grad():
        values, tokens = model(ids).logits[0, :-1].log_softmax(-1).topk(len(tokenizer))
    batch = {"input_ids": ids, "labels": ids, "teacher_ids": tokens, "teacher_logprobs": values}
    loss, _ = distillation_loss(model, batch)
    loss.backward()
    assert max(parameter.grad.abs().max() for parameter in model.parameters()) < 1e-6
