"""Levenberg-Marquardt for many small least-squares problems at once, in float64.

`torch.optim.LBFGS` and SciPy take one problem at a time, and first-order methods stop far short of the optimum here:
where two fitted prompts share one true prompt the normal matrix is almost singular.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Normal = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(theta (F', P), which problems (F',)) -> |r|^2 (F',), J'r (F', P) and J'J (F', P, P)."""

FLAT = 1e16  # a damping at which no step changes |r|^2 in float64
PATIENCE = 20  # steps that must achieve something together


@dataclass(frozen=True)
class Solution:
    """`theta` (F, P), `rss` = |r|^2 (F,), `iterations` (F,) and `converged` (F,) of F problems."""

    theta: Tensor
    rss: Tensor
    iterations: Tensor
    converged: Tensor


def damped_step(gram: Tensor, gradient: Tensor, damping: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """delta = -(J'J + damping D)^{-1} J'r with D = diag(J'J), the fall of |r|^2 that it promises, and whether the
    matrix was positive definite. The promise is that of the quadratic model |r + J delta|^2.

    A coordinate that moves nothing (a prompt behind a closed gate) has a zero in D, which is lifted to 1e-12 of the
    largest.
    """
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    lifted = damping.unsqueeze(-1) * (diagonal + 1e-12 * diagonal.amax(-1, keepdim=True))
    factor, info = torch.linalg.cholesky_ex(gram + torch.diag_embed(lifted))
    delta = -torch.cholesky_solve(gradient.unsqueeze(-1), factor).squeeze(-1)
    promise = (delta * (lifted * delta - gradient)).sum(-1)
    return delta, promise, (info == 0) & promise.isfinite()


def levenberg_marquardt(
    normal: Normal, start: Tensor, observations: int, *, max_iterations: int = 200, tolerance: float = 1e-6
) -> Solution:
    """Minimise |r|^2 of every problem from its row of `start` (F, P).

    A problem has converged when the undamped step promises to lower |r|^2 by no more than `tolerance` residual
    variances (|r|^2 / `observations`), which is `tolerance` in units of chi-squared; when the last 20 steps together
    did not lower it by more; or when no step of any length lowers it in float64. One that has done none of these
    after `max_iterations` steps is returned with `converged` False. The second test ends the searches in which two
    prompts merge, where J'J promises much that the neglected second derivatives forbid. The damping follows H. B.
    Nielsen, "Damping parameter in Marquardt's method" (1999).
    """
    theta = start.clone()
    problems = len(theta)
    rss, gradient, gram = normal(theta, torch.arange(problems))
    damping = torch.full((problems,), 1e-2, dtype=theta.dtype)
    growth = torch.full_like(damping, 2.0)
    iterations = torch.zeros(problems, dtype=torch.long)
    converged = torch.zeros(problems, dtype=torch.bool)
    active = torch.arange(problems)
    reference = torch.full_like(rss, torch.inf)
    for step in range(max_iterations):
        undamped = torch.full((len(active),), 1e-10, dtype=theta.dtype)
        _, promise, definite = damped_step(gram[active], gradient[active], undamped)
        enough = tolerance * rss[active] / observations
        done = (definite & (promise <= enough)) | (damping[active] > FLAT)
        if step % PATIENCE == 0:
            done |= reference[active] - rss[active] <= enough
            reference = rss.clone()
        converged[active[done]] = True
        active = active[~done]
        if not len(active):
            break
        iterations[active] += 1
        delta, promise, definite = damped_step(gram[active], gradient[active], damping[active])
        trial = theta[active] + torch.where(definite.unsqueeze(-1), delta, 0.0)
        trial_rss, trial_gradient, trial_gram = normal(trial, active)
        better = trial_rss < rss[active]
        gain = ((rss[active] - trial_rss) / promise)[better]
        accepted, refused = active[better], active[~better]
        theta[accepted], rss[accepted] = trial[better], trial_rss[better]
        gradient[accepted], gram[accepted] = trial_gradient[better], trial_gram[better]
        damping[accepted] = (damping[accepted] * (1 - (2 * gain - 1) ** 3).clamp(0.1, 2)).clamp(min=1e-12)
        growth[accepted] = 2.0
        damping[refused] *= growth[refused]
        growth[refused] *= 2
    return Solution(theta, rss, iterations, converged)
