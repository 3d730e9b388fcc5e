"""`foreword.base`: names, classes, tokenizers, errors."""

import json
import shutil

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, PreTrainedTokenizerFast

from foreword.base import base
from foreword.errors import ForewordError

SIZE = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
SIZES = {
    "llama": dict(vocab_size=8, **SIZE),
    "gpt2": dict(vocab_size=8, n_embd=16, n_layer=1, n_head=2),
    "bert": dict(vocab_size=8, **SIZE),
    "t5": dict(vocab_size=8, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2),
    "bart": dict(vocab_size=8, d_model=16)
    | dict(encoder_layers=1, encoder_ffn_dim=16, encoder_attention_heads=2)
    | dict(decoder_layers=1, decoder_ffn_dim=16, decoder_attention_heads=2),
    "vit": dict(image_size=32, **SIZE),
}


def save(folder, class_name: str):
    """A tiny random model of a transformers class, saved to `folder`."""
    model_class = getattr(transformers, class_name)
    kind = model_class.config_class.model_type
    torch.manual_seed(0)
    model = model_class(AutoConfig.for_model(kind, **SIZES[kind]))
    model.save_pretrained(folder)
    return model


def save_tokenizer(folder) -> None:
    words = WordLevel({word: index for index, word in enumerate(["a", "b", "c", "<unk>"])}, unk_token="<unk>")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="<unk>").save_pretrained(folder)


@pytest.fixture
def llama(tmp_path):
    folder = tmp_path / "llama"
    model = save(folder, "LlamaForCausalLM")
    save_tokenizer(folder)
    return model, folder


def test_a_local_folder(llama):
    saved, folder = llama
    model, tokenizer = base(folder)
    assert torch.equal(model.lm_head.weight, saved.lm_head.weight)
    assert not model.training
    assert tokenizer("c").input_ids == [2]
    assert torch.equal(base(model.name_or_path)[0].lm_head.weight, saved.lm_head.weight)


def test_a_home_relative_folder(llama, monkeypatch):
    monkeypatch.setenv("HOME", str(llama[1].parent))
    assert base("~/llama")[1] is not None


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("LlamaForCausalLM", "LlamaForCausalLM"),
        ("LlamaModel", "LlamaModel"),  # a head would be random
        ("GPT2Model", "GPT2LMHeadModel"),
        ("LlamaForSequenceClassification", "LlamaForSequenceClassification"),
        ("T5ForConditionalGeneration", "T5ForConditionalGeneration"),
        ("BartModel", "BartForConditionalGeneration"),
        ("BartForCausalLM", "BartForCausalLM"),
        ("BertForMaskedLM", "BertForMaskedLM"),
        ("BertModel", "BertModel"),
        ("ViTForImageClassification", "ViTForImageClassification"),
    ],
)
def test_the_class_is_what_the_checkpoint_holds(tmp_path, saved, loaded):
    save(tmp_path, saved)
    model, tokenizer = base(tmp_path)
    assert type(model).__name__ == loaded
    assert tokenizer is None


@pytest.mark.parametrize("saved", ["BartForConditionalGeneration", "LlamaForCausalLM"])
def test_without_architectures_the_type_decides(tmp_path, saved):
    save(tmp_path, saved)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(base(tmp_path)[0]).__name__ == saved


def test_keywords_pass_through(llama):
    model, _ = base(llama[1], dtype=torch.bfloat16, attn_implementation="eager")
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"


class TestHubId:
    """A Hub id, answered from a Hub cache on this machine."""

    @pytest.fixture
    def load(self, tmp_path):
        def load(folder):
            repository = tmp_path / "hub/models--someone--tiny"
            (repository / "refs").mkdir(parents=True)
            (repository / "refs/main").write_text("0" * 40)
            shutil.copytree(folder, repository / "snapshots" / ("0" * 40))
            return base("someone/tiny", cache_dir=tmp_path / "hub", local_files_only=True)

        return load

    def test_text(self, llama, load):
        model, tokenizer = load(llama[1])
        assert torch.equal(model.lm_head.weight, llama[0].lm_head.weight)
        assert tokenizer("c").input_ids == [2]
        assert model.name_or_path == "someone/tiny"

    def test_text_without_a_tokenizer_is_an_error(self, tmp_path, load):
        save(tmp_path / "llama", "LlamaForCausalLM")
        with pytest.raises(ForewordError, match=r"^can't load someone/tiny: "):
            load(tmp_path / "llama")

    def test_images(self, tmp_path, load):
        save(tmp_path / "vit", "ViTForImageClassification")
        model, tokenizer = load(tmp_path / "vit")
        assert type(model).__name__ == "ViTForImageClassification"
        assert tokenizer is None


class TestErrors:
    """Each is one line that names the model."""

    @staticmethod
    def message(name, **keywords) -> str:
        with pytest.raises(ForewordError) as caught:
            base(name, **keywords)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    @pytest.mark.parametrize("name", ["smolm2", "someone/model"])
    def test_unknown_name_and_no_hub(self, name):
        message = self.message(name, local_files_only=True)
        assert message.startswith(f"{name} is not an embedded model (smollm2) or a local folder")

    def test_impossible_name(self):
        assert "the Hub has no such model" in self.message("no such model")

    @pytest.mark.parametrize("name", ["./nowhere", "/nowhere/model", "~/nowhere", "out/run/checkpoint-5"])
    def test_missing_folder(self, name):
        assert self.message(name) == f"there is no folder {name}"

    def test_folder_without_config(self, tmp_path):
        expected = f"{tmp_path} is not a model: it should be a folder with a config.json"
        assert self.message(tmp_path) == expected

    def test_folder_without_weights(self, llama):
        (llama[1] / "model.safetensors").unlink()
        assert self.message(llama[1]).startswith(f"can't load {llama[1]}: ")

    def test_truncated_weights(self, llama):
        weights = llama[1] / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        assert self.message(llama[1]).startswith(f"can't load {llama[1]}: ")

    def test_broken_config(self, llama):
        (llama[1] / "config.json").write_text("{")
        assert "config.json" in self.message(llama[1])

    def test_unknown_architecture(self, llama):
        (llama[1] / "config.json").write_text('{"model_type": "alpaca-9"}')
        assert "alpaca-9" in self.message(llama[1])
