"""Distances between a fitted and the true mixing measure of prompts.

A measure is G = sum_i w_i delta_{a_i}: weights w (..., L) and atoms a (..., L, A), where an atom is p, sigma(p) or
(k, v); see `Model.measure`.
"""

from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor


@dataclass(frozen=True)
class Voronoi:
    """The parts of a Voronoi loss, each (...,), and their sum.

    `weights` = sum_l |sum_{i in V_l} w_i - w*_l|
    `single`  = sum_{|V_l| = 1} w_i |a_i - a*_l|, the error of prompts that one fitted atom hits
    `doubled` = sum_{|V_l| > 1} sum_{i in V_l} w_i |a_i - a*_l|^2, the squared error of prompts that several hit
    `empty`   = the number of true atoms that no fitted atom is nearest to
    """

    weights: Tensor
    single: Tensor
    doubled: Tensor
    empty: Tensor

    @property
    def total(self) -> Tensor:
        return self.weights + self.single + self.doubled


def voronoi(weights: Tensor, atoms: Tensor, true_weights: Tensor, true_atoms: Tensor) -> Voronoi:
    """The Voronoi loss of the fitted measure (..., L'), (..., L', A) against the true one (L,), (L, A).

    The cell V_l holds the fitted atoms that are nearer to a*_l than to any other true atom. With alpha* the loss of
    the paper is

        D1 = |alpha - alpha*| + weights + single + doubled          (D2: the same with atoms sigma(p))

    Source: "On Zero-Initialized Attention" (ICML 2025), before theorems 4.2 and 5.2.
    """
    distance = (atoms.unsqueeze(-2) - true_atoms).norm(dim=-1)  # (..., L', L)
    nearest, cell = distance.min(-1)  # (..., L')
    member = cell.unsqueeze(-1) == torch.arange(len(true_weights))  # (..., L', L)
    size = member.sum(-2)  # (..., L)
    mass = (weights.unsqueeze(-1) * member).sum(-2)  # (..., L)
    alone = size.gather(-1, cell) == 1  # (..., L')
    return Voronoi(
        weights=(mass - true_weights).abs().sum(-1),
        single=(weights * nearest * alone).sum(-1),
        doubled=(weights * nearest**2 * ~alone).sum(-1),
        empty=(size == 0).sum(-1),
    )


def matched_distance(atoms: Tensor, true_atoms: Tensor) -> Tensor:
    """The plain parameter error (...,): sqrt(sum_l |a_{m(l)} - a*_l|^2) for the best matching m of fitted atoms.

    `atoms` (..., L', A) with L' >= L; surplus fitted atoms cost nothing.
    """
    squared = (atoms.unsqueeze(-2) - true_atoms).square().sum(-1)  # (..., L', L)
    true = torch.arange(len(true_atoms))
    matchings = [squared[..., list(m), true].sum(-1) for m in permutations(range(atoms.shape[-2]), len(true))]
    return torch.stack(matchings).amin(0).sqrt()
