"""Tiny random models of many architectures, each with what makes it hard."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf
from transformers import PreTrainedModel

VOCABULARY = 64
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attention_dropout": 0.0,  # the checks compare training runs
    **SPECIAL,
}
MHA = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "eos_token_id": None,
    "decoder_start_token_id": 1,
}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "bos_token_id": 1,
    **SEQ2SEQ,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    **SPECIAL,
}
BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
GEMMA3 = {
    "head_dim": 8,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

ZOO: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**COMMON)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**COMMON, sliding_window=None)),
    "mistral-window": lambda: hf.MistralForCausalLM(hf.MistralConfig(**COMMON, sliding_window=6)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**COMMON, head_dim=8)),
    "qwen3-wide-heads": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**COMMON, head_dim=16)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**COMMON, head_dim=8, sliding_window=6)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**COMMON, **GEMMA3)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**COMMON)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
    "gptj": lambda: hf.GPTJForCausalLM(hf.GPTJConfig(**GPT2, rotary_dim=4)),
    "codegen": lambda: hf.CodeGenForCausalLM(hf.CodeGenConfig(**GPT2, rotary_dim=4)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**MHA)),
    "opt": lambda: hf.OPTForCausalLM(hf.OPTConfig(**MHA, dropout=0.0, ffn_dim=48, word_embed_proj_dim=32)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**COMMON, **EXPERTS)),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**COMMON, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
    "gpt_oss": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**COMMON, **EXPERTS, head_dim=8, sliding_window=6)),
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**{**COMMON, **MLA})),
    "qwen3_next": lambda: hf.Qwen3NextForCausalLM(
        hf.Qwen3NextConfig(
            **COMMON, **HYBRID, head_dim=8, layer_types=["linear_attention", "full_attention", "full_attention"]
        )
    ),
    "lfm2": lambda: hf.Lfm2ForCausalLM(
        hf.Lfm2Config(**COMMON, layer_types=["conv", "full_attention", "full_attention"])
    ),
    "jamba": lambda: hf.JambaForCausalLM(
        hf.JambaConfig(**COMMON, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, num_experts=2)
    ),
    "falcon_h1": lambda: hf.FalconH1ForCausalLM(hf.FalconH1Config(**COMMON, **MAMBA)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, **SEQ2SEQ)
    ),
    "t5-wide-heads": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(d_model=32, d_kv=12, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, **SEQ2SEQ)
    ),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART)),
    "whisper": lambda: hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(**BART, num_mel_bins=8, max_source_positions=12, max_target_positions=64)
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**MHA, **BERT_DROPOUT)),
    "roberta": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**{**MHA, "pad_token_id": 1}, **BERT_DROPOUT)),
}

UNREACHABLE: dict[str, Callable[[], PreTrainedModel]] = {
    "falcon-mqa": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    ),
    "falcon-gqa": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_kv_heads=2,
            new_decoder_architecture=True,
        )
    ),
    "bloom": lambda: hf.BloomForCausalLM(
        hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, **SPECIAL)
    ),
}


def make(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of that name, with the same random weights every time, in evaluation mode."""
    torch.manual_seed(0)
    model = {**ZOO, **UNREACHABLE}[name]()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)  # HF's 0.02 makes every attention nearly uniform
    if model.can_generate():
        model.generation_config.eos_token_id = None  # every generation has the length that was asked for
        model.generation_config.forced_eos_token_id = None
    return model.to(dtype).eval()
