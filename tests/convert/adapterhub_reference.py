"""Makes adapters and logits with AdapterHub's `adapters`; run by an interpreter that has it, apart from the tests.

    python adapterhub_reference.py FOLDER

writes FOLDER/<architecture>/base (a model) and FOLDER/<architecture>/<kind> (an adapter, with `logits.pt` of the ids
in FOLDER/ids.pt).
"""

from __future__ import annotations

import sys
from pathlib import Path

import adapters
import torch
import transformers as hf
from adapters import LoRAConfig, ParBnConfig, PrefixTuningConfig, SeqBnConfig, UniPELTConfig
from adapters.configuration import DoubleSeqBnConfig, MAMConfig

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
BART = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}

MODELS = {  # eager attention: with sdpa their causal masks ignore prefix keys
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES)),
    "roberta": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**SIZES | {"pad_token_id": 1})),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation="eager")),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, attn_implementation="eager")),
}
KINDS = {
    "prefix": lambda: PrefixTuningConfig(prefix_length=4, bottleneck_size=6),
    "prefix-flat": lambda: PrefixTuningConfig(prefix_length=4, flat=True),
    "par-bn": lambda: ParBnConfig(reduction_factor=4),
    "seq-bn": lambda: SeqBnConfig(reduction_factor=4),
    "double-seq-bn": lambda: DoubleSeqBnConfig(reduction_factor=4, non_linearity="relu"),
    "double-seq-bn-swish": lambda: DoubleSeqBnConfig(reduction_factor=4),
    "seq-bn-scaled": lambda: SeqBnConfig(reduction_factor=4, scaling="learned", leave_out=[0]),
    "mam": lambda: MAMConfig(PrefixTuningConfig(prefix_length=4, bottleneck_size=6), ParBnConfig(reduction_factor=4)),
    "unipelt": lambda: UniPELTConfig(
        LoRAConfig(r=3, alpha=2, use_gating=True),
        PrefixTuningConfig(prefix_length=4, bottleneck_size=6, use_gating=True),
        SeqBnConfig(reduction_factor=4, use_gating=True),
    ),
    "prompt": lambda: adapters.PromptTuningConfig(prompt_length=4),
}
LACKING = {("llama", "prompt"), ("gpt2", "prompt"), ("bart", "prompt"), ("t5", "prompt")}  # refused by `adapters`


@torch.no_grad()
def main(folder: Path) -> None:
    torch.manual_seed(0)
    ids = torch.randint(3, 64, (3, 7))
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(ids, folder / "ids.pt")
    for architecture, make in MODELS.items():
        torch.manual_seed(0)
        model = make().eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
        base = folder / architecture / "base"
        model.save_pretrained(base)
        for kind, config in KINDS.items():
            if (architecture, kind) in LACKING:
                continue
            adapted = type(model).from_pretrained(base, attn_implementation="eager")
            adapters.init(adapted)
            adapted.add_adapter("mine", config=config())
            adapted.set_active_adapters("mine")
            adapted.eval()
            own = [p for name, p in adapted.named_parameters() if "mine" in name or "prefix" in name]
            for parameter in own:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
            inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
            mask = torch.ones_like(ids)
            logits = adapted(input_ids=ids, attention_mask=mask, **inputs).logits
            adapted.save_adapter(str(folder / architecture / kind), "mine")
            torch.save(logits, folder / architecture / kind / "logits.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
