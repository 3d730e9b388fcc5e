"""The batched Levenberg-Marquardt estimator."""

import pytest
import torch

from foreword.theory import fit as fitting
from foreword.theory.data import at_random, near_truth, noise_free, sample
from foreword.theory.fit import fit, normal_equations
from foreword.theory.lm import levenberg_marquardt
from foreword.theory.losses import matched_distance, voronoi
from foreword.theory.model import DTYPE, SETTINGS, Model, Problem
from foreword.theory.surfaces import HeldGate, SplitPrompt

PROBLEM = Problem.draw(0)
identifiable = [name for name in SETTINGS if name != "zero-free"]


@pytest.mark.parametrize("setting", identifiable)
def test_planted_parameters_are_recovered_without_noise(setting):
    model = Model(setting, PROBLEM)
    found = fit(model, noise_free(setting, PROBLEM, 512), near_truth(model, [1], 3), tolerance=1e-9)
    assert found.converged.all()
    assert found.rss.item() < 1e-24
    weights, atoms = model.measure(found.theta)
    true_weights, true_atoms = model.measure(model.truth())
    assert voronoi(weights, atoms, true_weights, true_atoms).total.item() < 1e-8
    assert matched_distance(atoms, true_atoms).item() < 1e-8
    torch.testing.assert_close(model.gate(found.theta)[0], model.gate(model.truth()))


@pytest.mark.parametrize("setting", identifiable)
def test_planted_parameters_are_recovered_at_large_n(setting):
    model = Model(setting, PROBLEM)
    data = sample(setting, PROBLEM, 20_000, [1, 2])
    found = fit(model, data, near_truth(model, [1, 2], 2))
    _, atoms = model.measure(found.theta)
    assert found.converged.all()
    assert matched_distance(atoms, model.measure(model.truth())[1]).max().item() < 0.06
    assert (model.gate(found.theta) - model.gate(model.truth())).abs().max().item() < 0.04
    assert (found.rss / data.observations / PROBLEM.noise**2 - 1).abs().max().item() < 0.03


def test_a_batch_is_its_single_fits_and_a_slice_of_rows_changes_nothing(monkeypatch):
    model = Model("zero-linear", PROBLEM, 3)
    data = sample("zero-linear", PROBLEM, 300, [1, 2, 3])
    starts = near_truth(model, [1, 2, 3], 2)
    together = fit(model, data, starts)
    monkeypatch.setattr(fitting, "SLICE_NUMBERS", 700)
    for index in range(3):
        alone = sample("zero-linear", PROBLEM, 300, [index + 1])
        single = fit(model, alone, starts[index : index + 1])
        torch.testing.assert_close(single.start_rss[0], together.start_rss[index], rtol=1e-6, atol=0)


def test_normal_equations_are_those_of_the_residuals():
    model = Model("random-init", PROBLEM)
    data = sample("random-init", PROBLEM, 50, [1, 2])
    theta = near_truth(model, [1, 2, 3], 1)[:, 0]
    dataset = torch.tensor([0, 1, 0])
    rss, gradient, gram = normal_equations(model, data, dataset, theta)
    for index in range(3):
        f, jacobian = model.value_and_jacobian(theta[index], data.inputs.part(dataset[index], slice(None)))
        residual, jacobian = (f - data.y[dataset[index]]).flatten(), jacobian.flatten(1)
        torch.testing.assert_close(rss[index], residual @ residual)
        torch.testing.assert_close(gradient[index], jacobian @ residual)
        torch.testing.assert_close(gram[index], jacobian @ jacobian.T)


def test_the_estimate_is_the_best_start_and_beats_the_truth():
    model = Model("zero-linear", PROBLEM, 3)
    data = sample("zero-linear", PROBLEM, 200, range(6))
    found = fit(model, data, near_truth(model, range(6), 4))
    assert torch.equal(found.rss, found.start_rss.amin(-1))
    exact = model.true()
    truth = (exact.value(exact.truth(), data.inputs) - data.y).square().sum((-2, -1))
    assert (found.rss < truth).all()


def test_linear_least_squares_takes_one_damped_descent():
    g = torch.Generator().manual_seed(0)
    matrix = torch.randn(4, 30, 3, generator=g, dtype=DTYPE)
    target = torch.randn(4, 30, generator=g, dtype=DTYPE)

    def normal(theta, which):
        residual = (matrix[which] @ theta.unsqueeze(-1)).squeeze(-1) - target[which]
        gradient = (matrix[which].mT @ residual.unsqueeze(-1)).squeeze(-1)
        return residual.square().sum(-1), gradient, matrix[which].mT @ matrix[which]

    found = levenberg_marquardt(normal, torch.zeros(4, 3, dtype=DTYPE), 30, tolerance=1e-12)
    expected = torch.linalg.lstsq(matrix, target.unsqueeze(-1)).solution.squeeze(-1)
    assert found.converged.all()
    torch.testing.assert_close(found.theta, expected, rtol=1e-5, atol=1e-6)


def test_a_search_cut_short_says_so():
    model = Model("zero-linear", PROBLEM, 3)
    data = sample("zero-linear", PROBLEM, 200, [1])
    found = fit(model, data, near_truth(model, [1], 2), max_iterations=2)
    assert not found.start_converged.any()
    assert (found.iterations == 2).all()


def test_a_closed_gate_moves_first():
    model = Model("zero-linear", PROBLEM)
    data = sample("zero-linear", PROBLEM, 500, [1])
    start = at_random(model, [1], 1, gate=0.0)
    step = fit(model, data, start, max_iterations=1)
    torch.testing.assert_close(step.theta[0, 1:], start[0, 0, 1:])
    assert step.theta[0, 0] != 0


def check_slope(surface, phi):
    which = torch.arange(len(phi))
    _, slope = surface(phi, which)
    for index in range(len(phi)):

        def theta(row, at=index):
            return surface(row.unsqueeze(0), which[at : at + 1])[0][0]

        torch.testing.assert_close(slope[index], torch.autograd.functional.jacobian(theta, phi[index]))


@pytest.mark.parametrize("setting", ["zero-linear", "random-init-free"])
def test_surfaces_have_their_slopes(setting):
    model = Model(setting, PROBLEM, 3)
    width = model.width - 1
    delta = torch.tensor([0.2, 0.7], dtype=DTYPE)
    inner = near_truth(model.true(), [1, 2], 1)[:, 0]
    w = torch.randn(2, width, generator=torch.Generator().manual_seed(1), dtype=DTYPE)
    split = SplitPrompt(model, delta, range(width))
    check_slope(split, torch.cat([inner, w], -1))
    theta, _ = split(torch.cat([inner, w], -1), torch.arange(2))
    atoms = model.atoms(theta)
    torch.testing.assert_close((atoms[:, 0, 1:] - atoms[:, 1, 1:]).norm(dim=-1), delta)
    torch.testing.assert_close(atoms[:, :2, 0].logsumexp(-1), model.true().atoms(inner)[:, 0, 0])
    torch.testing.assert_close(atoms[:, :2, 1:].mean(1), model.true().atoms(inner)[:, 0, 1:])


def test_a_held_gate_is_held():
    model = Model("zero-linear", PROBLEM)
    surface = HeldGate(model, torch.tensor([0.3, -0.4], dtype=DTYPE))
    phi = near_truth(model, [1, 2], 1)[:, 0, 1:]
    check_slope(surface, phi)
    theta, _ = surface(phi, torch.arange(2))
    assert theta[:, 0].tolist() == [0.3, -0.4]
    assert torch.equal(theta[:, 1:], phi)
