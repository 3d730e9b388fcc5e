"""The regression function against a loop over the paper's formula, its Jacobian against autograd, its symmetries."""

import math

import pytest
import torch

from foreword.errors import ForewordError
from foreword.theory.data import near_truth, sample
from foreword.theory.model import SETTINGS, Model, Problem

PROBLEM = Problem.draw(3)
every_setting = pytest.mark.parametrize("setting", SETTINGS)


def points(setting, length=3, count=2):
    """Models' parameters (count, P), away from the truth, and inputs of 5 rows each."""
    model = Model(setting, PROBLEM, length)
    theta = near_truth(model, range(count), 1, 0.5)[:, 0]
    x = torch.rand(count, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 - 1.5
    return model, theta, x


def by_the_formula(setting, model, theta, x):
    """f at one query row x (d,), term by term as in the module's docstring."""
    kind = SETTINGS[setting]
    problem = model.problem
    word_mass = [torch.exp(x @ A @ x + a) for A, a in zip(problem.A, problem.a, strict=True)]
    word_values = [H @ x + c for H, c in zip(problem.H, problem.c, strict=True)]
    mass, values = [], []
    for block in theta[model.gated :].split(model.width):
        b, atom = block[0], block[1:]
        if kind.prompt == "free":
            key, value = atom[:3], atom[3:]
        else:
            prompt = torch.tanh(atom) if kind.sigma == "tanh" else atom
            key, value = problem.B @ prompt, problem.C @ prompt
        mass.append(torch.exp(key @ x + b))
        values.append(value)
    words = sum(m * v for m, v in zip(word_mass, word_values, strict=True))
    prompts = sum(m * v for m, v in zip(mass, values, strict=True))
    if kind.softmax == "joint":
        return (words + prompts) / (sum(word_mass) + sum(mass))
    return words / sum(word_mass) + math.tanh(theta[0]) * prompts / sum(mass)


@every_setting
def test_value_is_the_formula(setting):
    model, theta, x = points(setting)
    f = model.value(theta, model.inputs(x))
    for fit in range(len(theta)):
        for row in range(x.shape[-1]):
            torch.testing.assert_close(f[fit, :, row], by_the_formula(setting, model, theta[fit], x[fit, :, row]))


@every_setting
def test_the_jacobian_is_autograds(setting):
    model, theta, x = points(setting)
    f, jacobian = model.value_and_jacobian(theta, model.inputs(x))
    torch.testing.assert_close(f, model.value(theta, model.inputs(x)))
    for fit in range(len(theta)):
        inputs = model.inputs(x[fit])
        expected = torch.autograd.functional.jacobian(lambda row, at=inputs: model.value(row, at), theta[fit])
        torch.testing.assert_close(jacobian[fit], expected.movedim(-1, 0), rtol=1e-10, atol=1e-12)


@every_setting
def test_the_order_of_the_prompts_does_not_matter(setting):
    model, theta, x = points(setting)
    inputs = model.inputs(x)
    blocks = theta[:, model.gated :].unflatten(-1, (model.length, model.width))
    swapped = torch.cat([theta[:, : model.gated], blocks[:, [2, 0, 1]].flatten(1)], -1)
    torch.testing.assert_close(model.value(theta, inputs), model.value(swapped, inputs))


@every_setting
def test_doubling_a_prompt_with_half_its_weight_changes_nothing(setting):
    exact, more = Model(setting, PROBLEM, 2), Model(setting, PROBLEM, 3)
    truth = exact.truth()
    blocks = truth[exact.gated :].unflatten(-1, (2, exact.width))[[0, 0, 1]].clone()
    blocks[:2, 0] -= math.log(2)
    doubled = torch.cat([truth[: exact.gated], blocks.flatten()])
    x = points(setting)[2]
    torch.testing.assert_close(exact.value(truth, exact.inputs(x)), more.value(doubled, more.inputs(x)))


def test_all_zero_init_settings_have_the_same_true_function():
    functions = []
    for setting in ("zero-linear", "zero-nonlinear", "zero-free"):
        model, _, x = points(setting, length=2)
        functions.append(model.value(model.truth(), model.inputs(x)))
    torch.testing.assert_close(functions[0], functions[1])
    torch.testing.assert_close(functions[0], functions[2])


def test_a_closed_gate_leaves_the_words_and_gives_the_prompts_no_gradient():
    model, theta, x = points("zero-linear")
    theta[:, 0] = 0
    inputs = model.inputs(x)
    f, jacobian = model.value_and_jacobian(theta, inputs)
    assert torch.equal(f, inputs.words)
    assert jacobian[:, 1:].abs().max() == 0
    assert jacobian[:, 0].abs().min() > 0


@pytest.mark.parametrize("setting", ["zero-linear", "zero-free"])
def test_the_measure_ignores_what_a_separate_softmax_ignores(setting):
    model, theta, x = points(setting)
    moved = theta.clone()
    blocks = moved[:, 1:].unflatten(-1, (3, model.width))
    blocks[..., 0] += 0.7
    if setting == "zero-free":
        blocks[..., 1:4] += torch.tensor([0.3, -0.2, 0.5])
    torch.testing.assert_close(model.value(moved, model.inputs(x)), model.value(theta, model.inputs(x)))
    for before, after in zip(model.measure(theta), model.measure(moved), strict=True):
        torch.testing.assert_close(before, after)


def test_data_follow_their_seed_and_their_noise():
    first, again, other = (sample("zero-linear", PROBLEM, 2000, [seed]) for seed in (5, 5, 6))
    assert torch.equal(first.y, again.y)
    assert not torch.equal(first.y, other.y)
    model = Model("zero-linear", PROBLEM)
    residual = first.y - model.value(model.truth(), first.inputs)
    assert residual.std().item() == pytest.approx(PROBLEM.noise, rel=0.05)


def test_an_unknown_setting_is_named():
    with pytest.raises(ForewordError, match="unknown setting 'linear'"):
        Model("linear", PROBLEM)
