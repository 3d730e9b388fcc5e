"""What an adapter does inside: how far its gates are open, and how much attention goes to its prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..attention.masks import token_mask
from ..attention.merge import Scoring, attend, causal_mask
from ..attention.readers import Plan
from ..data import to_text
from ..generation import Prompt
from ..model.adapter import Adapter
from ..model.host import host_on
from ..model.layout import Site

Heads = dict[str, list[float]]  # label of a site → a number for each query head


def gates(adapter: Adapter) -> Heads:
    """tanh(g) of each gated head, by site; empty for methods without gates a head."""
    found: Heads = {}
    for part in adapter.parts:
        for place, module in part.modules.items():
            gate = getattr(getattr(module, "combine", None), "gate", None)
            if isinstance(gate, nn.Parameter):
                found[place.label] = gate.detach().tanh().tolist()
    return found


@torch.no_grad()
def prefix_mass(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> Heads:
    """λ, the share of attention that goes to prefixes in the tokens' softmax, by site and query head.

        λ = Σ_{j in prefix} exp s_j / Σ_{j in prefix and tokens} exp s_j = σ(lse_p − lse_x)

    The mean over the tokens of `prompts`, each read on its own with the adapter that is active on `model`. Sites whose
    prefixes have a softmax of their own, or that have none, are left out.
    """
    with _weighing(model) as masses:
        for prompt in prompts:
            text, _ = to_text({"prompt": prompt}, tokenizer)
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=isinstance(prompt, str))["input_ids"]
            model(input_ids=ids.to(model.device), use_cache=False)
    return {label: torch.cat(parts, 1).mean(1).tolist() for label, parts in masses.items()}  # (H, ΣT) → (H,)


@contextmanager
def _weighing(model: PreTrainedModel) -> Iterator[dict[str, list[Tensor]]]:
    """Within the block, keep λ (H, T) of every attention call, by site."""
    masses: dict[str, list[Tensor]] = {}
    host = host_on(model)
    handles = []
    for site in [] if host is None else host.layout.sites:

        def weigh(module: nn.Module, args: tuple, kwargs: dict[str, Any], site: Site = site) -> Any:
            plan = kwargs.get("foreword")
            if not isinstance(plan, Plan):
                return None
            return args, {**kwargs, "foreword": _Scales(plan, masses.setdefault(site.label, []))}

        handles.append(site.module.register_forward_pre_hook(weigh, with_kwargs=True))
    try:
        yield masses
    finally:
        for handle in handles:
            handle.remove()
        for label in [label for label, parts in masses.items() if not parts]:
            del masses[label]


@dataclass
class _Scales:
    """Rides on the keyword `foreword` in a plan's place: weighs the prefixes in the softmax, then the plan reads."""

    plan: Plan
    kept: list[Tensor] = field(default_factory=list)

    def read(
        self, original: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ):
        slot = getattr(module, "foreword", None)
        reads = None if slot is None else slot.reads(self.plan)
        if reads is not None and reads.joins_softmax:
            scaling = kwargs.get("scaling")
            scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, kwargs.get("softcap"))
            tokens, causal = token_mask(module, query, key, mask, kwargs)
            if causal:
                tokens = causal_mask(query.shape[2], key.shape[2], query.device)
            _, lse, _ = attend(query, key, value, scoring, tokens, sinks=kwargs.get("s_aux"))  # (B, H, T)
            prefix = torch.full_like(lse, -torch.inf)
            for reader in reads.readers(self.plan):
                if reader.prefix.joins_softmax:
                    rows = slice(None) if reader.rows is None else reader.rows  # parallel streams have a prefix each
                    own = scoring.scores(query[rows], reader.key).logsumexp(-1)
                    prefix[rows] = torch.logaddexp(prefix[rows], own)
            self.kept.append(torch.sigmoid(prefix - lse).mean(0))
        return self.plan.read(original, module, query, key, value, mask, **kwargs)
