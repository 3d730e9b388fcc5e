"""The model of an example: the one named by --model, or a random llama of a few thousand numbers that reads bytes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

import foreword as fw

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def arguments(argv: Sequence[str] | None, output: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny", help='"tiny", "smollm2", a Hub id or a local folder')
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--output", default=f"out/{output}")
    return parser.parse_args(argv)


def base(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return fw.base(name) if name != "tiny" else (_model(), _tokenizer())


def _tokenizer() -> PreTrainedTokenizerFast:
    tokens = ["<pad>", "<start>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<start>", "eos_token": "<end>"}
    made = PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=256, **special)
    made.chat_template = TEMPLATE
    return made


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(_tokenizer()), **sizes, **heads, **special)).eval()
