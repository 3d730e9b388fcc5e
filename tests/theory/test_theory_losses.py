"""The Voronoi losses against their definition, written as loops over cells."""

import itertools

import pytest
import torch

from foreword.theory.losses import matched_distance, voronoi


def drawn(fitted, true, seed):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.rand(fitted, generator=g, dtype=torch.float64),
        torch.randn(fitted, 2, generator=g, dtype=torch.float64),
        torch.rand(true, generator=g, dtype=torch.float64),
        torch.randn(true, 2, generator=g, dtype=torch.float64),
    )


def by_definition(weights, atoms, true_weights, true_atoms):
    """(weights, single, doubled, empty) of one measure, cell by cell."""
    cells = [[] for _ in true_weights]
    for i, atom in enumerate(atoms):
        distances = [torch.linalg.norm(atom - true).item() for true in true_atoms]
        cells[distances.index(min(distances))].append(i)
    total, single, doubled = 0.0, 0.0, 0.0
    for cell, weight, true in zip(cells, true_weights, true_atoms, strict=True):
        total += abs(sum(weights[i].item() for i in cell) - weight.item())
        for i in cell:
            distance = torch.linalg.norm(atoms[i] - true).item()
            if len(cell) == 1:
                single += weights[i].item() * distance
            else:
                doubled += weights[i].item() * distance**2
    return total, single, doubled, sum(not cell for cell in cells)


@pytest.mark.parametrize("fitted", [2, 3, 5])
def test_voronoi_is_its_definition(fitted):
    for seed in range(20):
        measures = drawn(fitted, 2, seed)
        loss = voronoi(*measures)
        parts = (loss.weights, loss.single, loss.doubled, loss.empty)
        assert [part.item() for part in parts] == pytest.approx(by_definition(*measures))
        assert loss.total.item() == pytest.approx(sum(by_definition(*measures)[:3]))


def test_batches_are_single_measures():
    batch = [drawn(3, 2, 0)[2:], *[drawn(3, 2, seed)[:2] for seed in range(4)]]
    weights, atoms = (torch.stack([measure[part] for measure in batch[1:]]) for part in (0, 1))
    loss = voronoi(weights, atoms, *batch[0])
    for index in range(4):
        alone = voronoi(weights[index], atoms[index], *batch[0])
        assert loss.total[index] == alone.total


def test_losses_do_not_depend_on_the_order_of_the_fitted_atoms():
    weights, atoms, true_weights, true_atoms = drawn(3, 2, 1)
    for order in itertools.permutations(range(3)):
        order = list(order)
        again = voronoi(weights[order], atoms[order], true_weights, true_atoms)
        torch.testing.assert_close(again.total, voronoi(weights, atoms, true_weights, true_atoms).total)
        torch.testing.assert_close(matched_distance(atoms[order], true_atoms), matched_distance(atoms, true_atoms))


def test_the_truth_costs_nothing_even_when_an_atom_is_split():
    weights, atoms, *_ = drawn(2, 2, 2)
    assert voronoi(weights, atoms, weights, atoms).total == 0
    halves = torch.tensor([weights[0] / 2, weights[0] / 2, weights[1]])
    assert voronoi(halves, atoms[[0, 0, 1]], weights, atoms).total.item() == pytest.approx(0, abs=1e-15)


def test_an_atom_without_a_neighbour_costs_its_weight():
    true_atoms = torch.tensor([[0.0, 0.0], [9.0, 9.0]], dtype=torch.float64)
    weights = torch.tensor([0.4, 0.6], dtype=torch.float64)
    loss = voronoi(weights, true_atoms[[0, 0]], weights, true_atoms)
    assert loss.empty == 1
    assert loss.weights.item() == pytest.approx(0.6 + 0.6)


def test_matched_distance_takes_the_best_assignment():
    true_atoms = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    atoms = torch.tensor([[1.0, 0.3], [5.0, 5.0], [0.0, -0.4]], dtype=torch.float64)
    assert matched_distance(atoms, true_atoms).item() == pytest.approx(0.5)
