"""A tiny chat model in a folder: random weights, a byte-level tokenizer, a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ["<pad>", "<start>", "<end>"]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(SPECIAL + alphabet)}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<start>", eos_token="<end>", model_max_length=512
    )
    made.chat_template = TEMPLATE
    return made


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def sharp_model() -> LlamaForCausalLM:
    """The tiny model with weights that make the context matter."""
    made = model()
    torch.manual_seed(0)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return made


def save(folder: Path, *, chat: bool = True) -> Path:
    """Write the model and its tokenizer to `folder`, with or without the chat template."""
    model().save_pretrained(folder)
    made = tokenizer()
    if not chat:
        made.chat_template = None
    made.save_pretrained(folder)
    return folder


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(count: int = 24) -> list[dict]:
    """Prompt and completion rows: repeat the word after the number."""
    words = ["red", "green", "blue", "black"]
    return [{"prompt": f"{i} {words[i % 4]}:", "completion": f" {words[i % 4]}"} for i in range(count)]
