"""Prompts as experts: the regression function of one attention head, in every form that the theory compares.

One query row x in R^d attends to N frozen words and to L prompts. A word j has the score x'A_j x + a_j and the value
h_j(x) = H_j x + c_j; a prompt l has the score s_l(x) = k_l'x + b_l and the value v_l. With one softmax over all of them
("random-init", the usual prefix) or with the prompts' own softmax behind a gate ("zero-init")

    joint       f(x) = [ sum_j e^{x'A_j x + a_j} h_j(x) + sum_l e^{s_l(x)} v_l ] / [ D_f(x) + D_p(x) ]
    separate    f(x) =   sum_j e^{x'A_j x + a_j} h_j(x) / D_f(x)  +  tanh(alpha) sum_l e^{s_l(x)} v_l / D_p(x)

    D_f(x) = sum_j e^{x'A_j x + a_j}        D_p(x) = sum_l e^{s_l(x)}

and with keys and values that share one prompt or not

    shared      k_l = B sigma(p_l),  v_l = C sigma(p_l)       sigma = identity ("linear") or tanh ("non-linear")
    free        k_l and v_l are parameters of their own

Both are linear in u_l = (b_l, sigma(p_l)) or u_l = (b_l, k_l, v_l), which is how they are computed:

    s_l(x) = z(x)'u_l,  v_l = G u_l       shared: z = (1, B'x), G = [0 C]       free: z = (1, x, 0), G = [0 0 I]

Source: "On Zero-Initialized Attention: Optimal Prompt and Gating Factor Estimation" (ICML 2025), sections 4 and 5;
the free form is the one of "Revisiting Prefix-tuning: Statistical Benefits of Reparameterization among Prompts" (ICLR
2025).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import ForewordError

DTYPE = torch.float64


@dataclass(frozen=True)
class Setting:
    """One way of writing the prompts into the head: which softmax, shared or free key and value, which sigma."""

    softmax: Literal["joint", "separate"]
    prompt: Literal["shared", "free"]
    sigma: Literal["identity", "tanh"] = "identity"


SETTINGS: dict[str, Setting] = {
    "random-init": Setting("joint", "shared"),
    "random-init-nonlinear": Setting("joint", "shared", "tanh"),
    "random-init-free": Setting("joint", "free"),
    "zero-linear": Setting("separate", "shared"),
    "zero-nonlinear": Setting("separate", "shared", "tanh"),
    "zero-free": Setting("separate", "free"),
}


@dataclass(frozen=True)
class Problem:
    """The frozen head and the true prompts, the same function of x in the linear, non-linear and free settings.

    Fields: `A` (N, d, d), `a` (N,), `H` (N, q, d), `c` (N, q): the frozen words. `B` (d, m), `C` (q, m): the frozen
    key and value maps, both injective. `prompts` (L, m): sigma(p*). `bias` (L,): b*, with sum_l e^{b*_l} = 1. `gate`:
    tanh(alpha*). `noise`: standard deviation of each output. `radius`: x is uniform on [-radius, radius]^d.
    """

    A: Tensor
    a: Tensor
    H: Tensor
    c: Tensor
    B: Tensor
    C: Tensor
    prompts: Tensor
    bias: Tensor
    gate: float = 0.7
    noise: float = 0.1
    radius: float = 1.5

    @classmethod
    def draw(cls, seed: int = 0, *, gate: float = 0.7, noise: float = 0.1) -> "Problem":
        """The problem of the experiments: d = 3, m = q = 2, N = 2 frozen words and L = 2 prompts.

        The prompts are well apart and inside tanh's range; everything frozen is drawn from `seed`, the key and value
        maps with orthogonal columns of norm 1.5 and 1, so that both are injective and well conditioned.
        """
        g = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=DTYPE)

        key_map, _ = torch.linalg.qr(normal(3, 2))
        value_map, _ = torch.linalg.qr(normal(2, 2))
        return cls(
            A=0.3 * normal(2, 3, 3),
            a=0.5 * normal(2),
            H=0.5 * normal(2, 2, 3),
            c=0.5 * normal(2, 2),
            B=1.5 * key_map,
            C=value_map,
            prompts=torch.tensor([[0.8, -0.3], [-0.5, 0.6]], dtype=DTYPE),
            bias=torch.tensor([0.55, 0.45], dtype=DTYPE).log(),
            gate=gate,
            noise=noise,
        )


@dataclass(frozen=True)
class Inputs:
    """n query rows as the model reads them, without anything that a parameter could change.

    `z` (..., E, n): the features that score a prompt. `words` (..., q, n): the softmax-weighted mean of the words'
    values. `log_mass` (..., n): log D_f.
    """

    z: Tensor
    words: Tensor
    log_mass: Tensor

    def part(self, fits: Tensor, rows: slice) -> "Inputs":
        """The rows `rows` of the data sets `fits` (F,): z becomes (F, E, rows)."""
        return Inputs(self.z[fits, :, rows], self.words[fits, :, rows], self.log_mass[fits, rows])


class Model:
    """f(x; theta) with its analytic Jacobian, for one setting and a number of fitted prompts.

    theta (..., P) is the float64 row [alpha, b_1, atom_1, .., b_L, atom_L], without alpha where the softmax is joint.
    An atom is p_l (m numbers) in the shared settings and (k_l, v_l) (d + q numbers) in the free ones. Raises
    `ForewordError` for a setting that is not in `SETTINGS`.
    """

    def __init__(self, setting: str, problem: Problem, length: int = 2) -> None:
        if setting not in SETTINGS:
            raise ForewordError(f"unknown setting {setting!r}: one of {', '.join(SETTINGS)}")
        self.name = setting
        self.setting = SETTINGS[setting]
        self.problem = problem
        self.length = length
        self.gated = int(self.setting.softmax == "separate")
        d, q = len(problem.B), len(problem.C)
        if self.setting.prompt == "shared":
            self.value_map = torch.cat([torch.zeros(q, 1, dtype=DTYPE), problem.C], 1)  # G, (q, E)
        else:
            self.value_map = torch.cat([torch.zeros(q, 1 + d, dtype=DTYPE), torch.eye(q, dtype=DTYPE)], 1)
        self.width = self.value_map.shape[1]  # E = 1 + the size of an atom
        self.parameters = self.gated + length * self.width

    def true(self) -> "Model":
        """The model of the same setting with as many prompts as the problem has."""
        return Model(self.name, self.problem, len(self.problem.bias))

    def truth(self) -> Tensor:
        """theta* (P*,), for the model with as many prompts as the problem has."""
        problem = self.problem
        if self.setting.prompt == "free":
            atoms = torch.cat([problem.prompts @ problem.B.T, problem.prompts @ problem.C.T], -1)
        else:
            atoms = problem.prompts.atanh() if self.setting.sigma == "tanh" else problem.prompts
        return self.pack(torch.tensor(math.atanh(problem.gate), dtype=DTYPE), problem.bias, atoms)

    def pack(self, alpha: Tensor, b: Tensor, atoms: Tensor) -> Tensor:
        """theta (..., P) from alpha (...,), which a joint softmax ignores, b (..., L) and the atoms (..., L, E - 1)."""
        prompts = torch.cat([b.unsqueeze(-1), atoms], -1).flatten(-2)
        return torch.cat([alpha.unsqueeze(-1), prompts], -1) if self.gated else prompts

    def gate(self, theta: Tensor) -> Tensor:
        """tanh(alpha) (...,); one where the softmax is joint."""
        return theta[..., 0].tanh() if self.gated else torch.ones(theta.shape[:-1], dtype=DTYPE)

    def atoms(self, theta: Tensor) -> Tensor:
        """u_l = (b_l, sigma(p_l)) or (b_l, k_l, v_l), shape (..., L, E)."""
        raw = theta[..., self.gated :].unflatten(-1, (self.length, self.width))
        if self.setting.sigma == "identity":
            return raw
        return torch.cat([raw[..., :1], raw[..., 1:].tanh()], -1)

    def measure(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The mixing measure sum_l w_l delta_{atom_l} of theta (..., P): w (..., L) and located atoms (..., L, E - 1).

        A located atom is sigma(p_l) or (k_l, v_l). A separate softmax does not change with a number added to every
        b_l, so its weights are normalised to sum to one, nor with a vector added to every free k_l, so the weighted
        mean of those is moved to zero. In a joint softmax w_l = e^{b_l}.
        """
        atoms = self.atoms(theta)
        b, located = atoms[..., 0], atoms[..., 1:]
        if not self.gated:
            return b.exp(), located
        weights = b.softmax(-1)
        if self.setting.prompt == "free":
            keys, values = located.tensor_split([len(self.problem.B)], -1)
            located = torch.cat([keys - weights.unsqueeze(-2) @ keys, values], -1)
        return weights, located

    def inputs(self, x: Tensor) -> Inputs:
        """What the query rows `x` (..., d, n) are to this model."""
        problem = self.problem
        scores = torch.einsum("...in,jik,...kn->...jn", x, problem.A, x) + problem.a[:, None]  # (..., N, n)
        values = torch.einsum("jqd,...dn->...jqn", problem.H, x) + problem.c[:, :, None]  # (..., N, q, n)
        words = torch.einsum("...jn,...jqn->...qn", scores.softmax(-2), values)
        ones = torch.ones_like(x[..., :1, :])
        if self.setting.prompt == "shared":
            z = torch.cat([ones, problem.B.T @ x], -2)
        else:
            z = torch.cat([ones, x, torch.zeros_like(words)], -2)
        return Inputs(z, words, scores.logsumexp(-2))

    def value(self, theta: Tensor, inputs: Inputs) -> Tensor:
        """f(x; theta) (..., q, n) for theta (..., P) and n rows; leading dimensions broadcast."""
        return self._attend(theta, inputs)[-1]

    def _attend(self, theta: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Prompt weights pi (..., L, n), v_l - m (..., L, q, n), the mean m (..., q, n) and f (..., q, n).

        m is what the softmax averages to: f itself where it is joint, the prompts' branch where it is separate.
        """
        atoms = self.atoms(theta)
        scores = atoms @ inputs.z  # (..., L, n)
        values = atoms @ self.value_map.T  # (..., L, q)
        if self.gated:
            weights = scores.softmax(-2)
            mean = values.mT @ weights
            f = inputs.words + self.gate(theta)[..., None, None] * mean
        else:
            total = torch.logaddexp(scores.logsumexp(-2), inputs.log_mass)
            weights = (scores - total.unsqueeze(-2)).exp()
            f = mean = values.mT @ weights + (inputs.log_mass - total).exp().unsqueeze(-2) * inputs.words
        return weights, values.unsqueeze(-1) - mean.unsqueeze(-3), mean, f

    def value_and_jacobian(self, theta: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """f (..., q, n) and its Jacobian df/dtheta (..., P, q, n).

        With t = 1 (joint) or tanh(alpha) (separate), and m = f (joint) or the prompts' branch (separate),

            df/du_l = t pi_l [(v_l - m) z' + G]        df/dalpha = (1 - t^2) m

        and for sigma = tanh the chain rule du/dp = 1 - u^2.
        """
        weights, offset, mean, f = self._attend(theta, inputs)
        gate = self.gate(theta)[..., None, None]
        jacobian = f.new_empty(*f.shape[:-2], self.parameters, *f.shape[-2:])
        if self.gated:
            jacobian[..., 0, :, :] = (1 - gate**2) * mean
        weights = (gate * weights).unsqueeze(-2)  # (..., L, 1, n)
        by_atom = jacobian[..., self.gated :, :, :].unflatten(-3, (self.length, self.width))  # (..., L, E, q, n)
        torch.mul((weights * offset).unsqueeze(-3), inputs.z[..., None, :, None, :], out=by_atom)
        by_atom += weights.unsqueeze(-3) * self.value_map.T[..., None]
        if self.setting.sigma == "tanh":
            by_atom[..., 1:, :, :] *= (1 - self.atoms(theta)[..., 1:] ** 2)[..., None, None]
        return f, jacobian
