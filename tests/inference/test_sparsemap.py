"""SparseMAP: values, mixtures and gradients against enumeration; sparsemax where positions are independent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chain_cases import INF, build, every_backend, every_kind, labels_of, leaves_of, same, scores_of, seeded, weighted

from oracles import sparsemap as oracle
from thalweg.errors import ConfigError, InfeasibleError, ShapeError
from thalweg.inference import LinearChain, SparseTransitions
from thalweg.inference.structures.sparsemap import sparse_map, sparse_map_loss


def solved(scores, lengths=None, **options):
    """The oracle's marginals (B, T, C) and values (B,)."""
    batch, steps, size = scores["emissions"].shape
    marginals, values = torch.zeros(batch, steps, size, dtype=torch.float64), []
    for item, each in enumerate(weighted(scores, lengths)):
        found, value = oracle.solve(each, size, **options)
        marginals[item, : len(found)] = torch.as_tensor(found)
        values.append(value)
    return marginals, values


def certified(found, scores, lengths=None, slack=1e-10):
    """The mixtures are distributions over feasible labellings, have the marginals, and no labelling beats them."""
    size = scores["emissions"].shape[-1]
    for item, each in enumerate(weighted(scores, lengths)):
        rows = [labels_of(row) for row in found.structures[item]]
        mixture = {row: float(w) for row, w in zip(rows, found.weights[item].detach(), strict=True) if row}
        assert len(mixture) == sum(map(bool, rows)), "a labelling is listed twice"
        assert mixture.keys() <= dict(each).keys()
        assert min(mixture.values()) > 0
        assert list(mixture.values()) == sorted(mixture.values(), reverse=True)
        assert sum(mixture.values()) == pytest.approx(1, abs=1e-12)
        assert oracle.gap(each, size, mixture) <= slack * max(1.0, max(abs(s) for _, s in each))
        vectors = dict(zip((y for y, _ in each), oracle.onehots(each, size), strict=True))
        mean = sum(w * vectors[y] for y, w in mixture.items())
        same(found.marginals[item].flatten()[: len(mean)], torch.as_tensor(mean), atol=1e-12)
        assert not found.marginals[item].flatten()[len(mean) :].any()


@every_backend
@every_kind
@pytest.mark.parametrize("scale", [0.2, 1.0, 3.0])
def test_equals_the_brute_force_solution(kind, backend, scale):
    for steps, size in ((3, 2), (2, 3)):
        scores = {name: scale * x for name, x in scores_of(int(10 * scale), steps=steps, size=size, kind=kind).items()}
        lengths = [steps, 1, 2]
        found = sparse_map(build(scores, backend, lengths=lengths))
        marginals, values = solved(scores, lengths)
        same(found.marginals, marginals)
        same(found.value, values)
        certified(found, scores, lengths)
        assert float(found.gap.max()) < 1e-12


def test_a_broken_twin_is_noticed():
    scores = {name: 0.3 * x for name, x in scores_of(1, steps=3, size=2).items()}
    marginals, values = solved(scores, curvature=1.1)
    found = sparse_map(build(scores))
    assert float((found.marginals - marginals).abs().max()) > 1e-3
    assert float((found.value - torch.tensor(values)).abs().max()) > 1e-3
    each = weighted(scores)[0]
    assert oracle.gap(each, 2, {each[0][0]: 1.0}) > 0.1  # one labelling alone is not the answer


@pytest.mark.parametrize("scale", [0.05, 0.5, 2.0])
def test_larger_chains_are_certified_by_enumeration(scale):
    for seed in range(4):
        scores = {name: scale * x for name, x in scores_of(seed, steps=5, size=3).items()}
        lengths = [5, 3, 4]
        certified(sparse_map(build(scores, lengths=lengths)), scores, lengths)


def test_ties_of_whole_numbers():
    for seed in range(10):
        draw = seeded(seed)
        small = scores_of(steps=3, size=2)
        scores = {n: (torch.randint(-2, 3, x.shape, generator=draw) / 2).double() for n, x in small.items()}
        found = sparse_map(build(scores))
        marginals, values = solved(scores)
        same(found.marginals, marginals)
        same(found.value, values)
        certified(found, scores)


def test_one_position_is_sparsemax():
    scores = scores_of(3, batch=5, steps=1, size=4)
    found = sparse_map(build(scores)).marginals
    for item in range(5):
        row = scores["emissions"][item, 0] + scores["start"] + scores["end"]
        same(found[item, 0], torch.as_tensor(oracle.sparsemax(row.numpy())))


def test_positions_without_moves_are_sparsemaxes():
    emissions = (
        torch.randn(3, 60, 3, generator=seeded(0), dtype=torch.float64) * torch.tensor([0.1, 1, 10])[:, None, None]
    )
    found = sparse_map(LinearChain(emissions, torch.zeros(3, 3, dtype=torch.float64)))
    expected = [[oracle.sparsemax(row) for row in rows] for rows in emissions.numpy()]
    same(found.marginals, torch.as_tensor(np.array(expected)), atol=1e-10)
    assert found.weights.shape[1] <= 60 * 2 + 1


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0])
def test_gradient_without_moves_is_that_of_sparsemax(scale):
    # At scale 0 two labellings have the marginals of all: the gradient still knows every direction.
    emissions = (scale * torch.randn(2, 7, 3, generator=seeded(1), dtype=torch.float64)).requires_grad_()
    found = sparse_map(LinearChain(emissions, torch.zeros(3, 3, dtype=torch.float64)))
    weights = torch.randn(2, 7, 3, generator=seeded(2), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((found.marginals * weights).sum(), emissions)
    rows = zip(emissions.detach().numpy().reshape(-1, 3), weights.numpy().reshape(-1, 3), strict=True)
    expected = np.array([oracle.sparsemax_jacobian(row) @ weight for row, weight in rows])
    same(gradient, torch.as_tensor(expected).view(2, 7, 3))


def test_at_a_kink_the_gradient_is_that_of_the_smaller_set():
    emissions = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64, requires_grad=True)
    found = sparse_map(LinearChain(emissions, torch.zeros(2, 2, dtype=torch.float64)))
    assert found.marginals.tolist() == [[[1.0, 0.0]]]
    (gradient,) = torch.autograd.grad(found.marginals[0, 0, 0], emissions)
    assert not gradient.any()


@every_kind
def test_gradients(kind):
    scores = {name: 0.4 * x for name, x in scores_of(7, batch=2, steps=3, size=2, kind=kind).items()}
    lengths = [3, 2]
    names, inputs = zip(*leaves_of(scores).items(), strict=True)

    def marginals(*tensors):
        return sparse_map(LinearChain(**dict(zip(names, tensors, strict=True)), lengths=lengths)).marginals

    def value(*tensors):
        return sparse_map(LinearChain(**dict(zip(names, tensors, strict=True)), lengths=lengths)).value

    assert torch.autograd.gradcheck(marginals, inputs, atol=1e-6)
    assert torch.autograd.gradcheck(value, inputs, atol=1e-6)
    assert torch.autograd.gradgradcheck(value, inputs, atol=1e-6, fast_mode=True)


def test_gradient_of_a_longer_chain():
    scores = {name: 0.1 * x for name, x in scores_of(3, batch=2, steps=15, size=3).items()}
    leaves = leaves_of(scores)
    weights = torch.randn(2, 15, 3, generator=seeded(4), dtype=torch.float64)

    def value(moved):
        return float((sparse_map(build(moved, "cpu")).marginals * weights).sum())

    gradients = torch.autograd.grad((sparse_map(build(leaves, "cpu")).marginals * weights).sum(), list(leaves.values()))
    for name, gradient in zip(scores, gradients, strict=True):
        along = torch.randn(scores[name].shape, generator=seeded(5), dtype=torch.float64)
        ahead, behind = (value({**scores, name: scores[name] + step * along}) for step in (1e-8, -1e-8))
        assert (ahead - behind) / 2e-8 == pytest.approx(float((gradient * along).sum()), rel=1e-4, abs=1e-4)


def test_gradient_of_the_value_are_the_expected_parts():
    leaves = leaves_of(scores_of(5, kind="per step"))
    lengths = [4, 1, 3]
    found = sparse_map(LinearChain(**leaves, lengths=lengths))
    found.value.sum().backward()
    same(leaves["emissions"].grad, found.marginals)
    first, last = found.marginals[:, 0], found.marginals[torch.arange(3), torch.tensor(lengths) - 1]
    same(leaves["start"].grad, first.sum(0))
    same(leaves["end"].grad, last.sum(0))
    moves = leaves["transitions"].grad  # the flow from each label and to each label
    inside = torch.arange(1, 4) < torch.tensor(lengths)[:, None]
    same(moves.sum(3), found.marginals[:, :-1] * inside.unsqueeze(-1))
    same(moves.sum(2), found.marginals[:, 1:] * inside.unsqueeze(-1))


def test_weights_carry_gradients():
    leaves = leaves_of({name: 0.4 * x for name, x in scores_of(7).items()})
    found = sparse_map(LinearChain(**leaves))
    (gradient,) = torch.autograd.grad(found.weights[0, 0], leaves["emissions"])
    step = 1e-6 * gradient
    moved = sparse_map(LinearChain(**{**leaves, "emissions": leaves["emissions"] + step}))
    assert moved.structures[0, 0].equal(found.structures[0, 0])
    same((moved.weights - found.weights)[0, 0], (gradient * step).sum(), rtol=1e-4, atol=1e-12)


# Constraints and padding


@every_backend
def test_forbidden_moves_and_labels(backend):
    scores = {name: 0.5 * x for name, x in scores_of(2).items()}
    scores["transitions"][0, 1] = scores["transitions"][2, 2] = scores["start"][2] = -INF
    scores["emissions"][1, 2, 0] = -INF
    lengths = [4, 3, 2]
    certified(sparse_map(build(scores, backend, lengths=lengths)), scores, lengths)
    leaves = leaves_of(scores)
    found = sparse_map(LinearChain(**leaves, lengths=lengths))
    assert float(found.marginals[1, 2, 0].detach()) == 0
    (found.marginals.square().sum() + found.value.sum()).backward()
    for name, leaf in leaves.items():
        assert leaf.grad.isfinite().all(), name
        assert not leaf.grad[torch.isneginf(leaf)].any(), name


@every_backend
def test_an_infeasible_item_of_a_chain_that_checks_nothing(backend):
    scores = {name: 0.3 * x for name, x in scores_of(kind="per item").items()}
    rest = sparse_map(build(scores, backend))
    scores["emissions"][1, 2] = -INF
    leaves = leaves_of(scores)
    found = sparse_map(build(leaves, backend, validate_args=False))
    assert torch.isneginf(found.value).tolist() == [False, True, False]
    assert (found.structures[1] == -1).all()
    assert not found.marginals[1].any()
    same(found.marginals[::2], rest.marginals[::2])
    (found.marginals.square().sum() + found.value[::2].sum()).backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves.values())


def test_sparse_transitions_equal_dense_ones():
    scores = {name: 0.5 * x for name, x in scores_of(4).items()}
    scores["transitions"][0, 2] = scores["transitions"][1, 1] = -INF
    dense = sparse_map(build(scores))
    moves = SparseTransitions.of_dense(scores["transitions"])
    moves = moves._replace(scores=moves.scores.clone().requires_grad_())
    found = sparse_map(LinearChain(**{**scores, "transitions": moves}))
    same(found.marginals, dense.marginals)
    same(found.value, dense.value)
    assert torch.autograd.grad(found.value.sum(), moves.scores)[0].sum() == pytest.approx(9)


def test_padding_is_inert():
    scores, lengths = {name: 0.5 * x for name, x in scores_of(6, kind="per step").items()}, [2, 4, 1]
    clean = sparse_map(build(scores, lengths=lengths))
    for item, length in enumerate(lengths):
        scores["emissions"][item, length:] = float("nan")
        scores["transitions"][item, max(length - 1, 0) :] = float("nan")
    leaves = leaves_of(scores)
    before = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    found = sparse_map(LinearChain(**leaves, lengths=lengths))
    same(found.marginals, clean.marginals)
    assert found.structures.equal(clean.structures)
    (found.marginals.square().sum() + found.value.sum()).backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves.values())
    assert not leaves["emissions"].grad[2, 1:].any()
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.detach(), before[name], rtol=0, atol=0, equal_nan=True)


def test_batch_equals_loop_and_items_drop_out():
    scores = scores_of(8, batch=6, kind="per item")
    scores["emissions"] *= torch.tensor([0.01, 10, 0.1, 1, 0.3, 100.0])[:, None, None]
    together = sparse_map(build(scores))
    for item in range(6):
        one = {n: x[item : item + 1] if n in ("emissions", "transitions") else x for n, x in scores.items()}
        alone = sparse_map(build(one))
        same(together.marginals[item : item + 1], alone.marginals)
        same(together.value[item : item + 1], alone.value)


# Sizes and types


def test_degenerate_sizes():
    one = sparse_map(LinearChain(torch.randn(2, 5, 1), torch.zeros(1, 1), lengths=[5, 3]))
    assert one.marginals.sum((1, 2)).tolist() == [5, 3]
    assert one.weights.tolist() == [[1], [1]]
    empty = sparse_map(LinearChain(torch.zeros(0, 4, 3, requires_grad=True), torch.zeros(3, 3)))
    assert empty.marginals.shape == (0, 4, 3)
    assert empty.structures.shape[::2] == (0, 4)
    assert empty.value.shape == (0,)
    single = sparse_map(LinearChain(torch.zeros(1, 1, 1, requires_grad=True), torch.zeros(1, 1)))
    (gradient,) = torch.autograd.grad(single.marginals.sum() + single.value.sum(), single.marginals)
    assert float(gradient) == 1


@pytest.mark.parametrize("scale", [1e3, 1e6, 1e9])
def test_large_scores_give_the_mode(scale):
    scores = {name: scale * x for name, x in scores_of(9).items()}
    chain = build(scores)
    found = sparse_map(chain)
    assert found.structures.equal(chain.mode.unsqueeze(1))
    assert found.weights.tolist() == [[1]] * 3
    same(found.value, chain.max_score - 2)


def test_a_large_penalty_costs_no_digits():
    scores = {name: 0.5 * x for name, x in scores_of(2).items()}
    scores["transitions"][0, 1] = scores["transitions"][2, 2] = -INF
    hard = sparse_map(build(scores))
    scores["transitions"][0, 1] = scores["transitions"][2, 2] = -1e9
    same(sparse_map(build(scores)).marginals, hard.marginals, atol=1e-12)


def test_types():
    scores = {name: 0.5 * x for name, x in scores_of(3, dtype=torch.float32).items()}
    single = sparse_map(build(scores))
    double = sparse_map(build({name: x.double() for name, x in scores.items()}))
    assert single.marginals.dtype == single.weights.dtype == single.value.dtype == torch.float32
    same(single.marginals, double.marginals, atol=1e-7)
    assert single.structures.equal(double.structures)
    half = {name: x.bfloat16() for name, x in leaves_of(scores).items()}
    found = sparse_map(LinearChain(**half))
    assert found.marginals.dtype == torch.float32
    assert found.marginals.sum().item() == pytest.approx(12)


# Stopping early, wrong arguments


def test_the_gap_bounds_what_is_lacking():
    scores = {name: 0.2 * x for name, x in scores_of(4).items()}
    best = sparse_map(build(scores))
    gaps = []
    for steps in (1, 2, 4, 8):
        early = sparse_map(build(scores), max_steps=steps)
        assert (best.value - early.value <= early.gap + 1e-12).all()
        distance = (early.marginals - best.marginals).square().sum((1, 2)).sqrt()
        assert (distance <= (2 * early.gap).sqrt() + 1e-9).all()
        gaps.append(float(early.gap.max()))
    assert gaps[0] > 0.1
    loose = sparse_map(build(scores), tol=0.05)
    assert float(loose.gap.max()) <= 0.05
    assert float(loose.gap.max()) > 1e-6  # it stopped before the end


def test_wrong_arguments():
    scores = scores_of()
    scores["emissions"][1, 2] = -INF
    with pytest.raises(InfeasibleError, match="batch item 1 "):
        sparse_map(build(scores))
    chain = build(scores_of())
    with pytest.raises(ConfigError, match="max_steps"):
        sparse_map(chain, max_steps=0)
    with pytest.raises(ConfigError, match="tol"):
        sparse_map(chain, tol=-1.0)
    with pytest.raises(ShapeError, match="LinearChain"):
        sparse_map(scores["emissions"])  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"\(B, T\)"):
        sparse_map_loss(chain, torch.zeros(2, 3, 4, dtype=torch.long))


# The loss


def test_loss_is_positive_and_its_gradient_the_difference_of_parts():
    leaves = leaves_of({name: 0.5 * x for name, x in scores_of(3).items()})
    gold, lengths = torch.tensor([[0, 1, 2, 0], [1, 1, -1, -1], [2, 0, 1, 9]]), [4, 2, 3]
    chain = LinearChain(**leaves, lengths=lengths)
    loss = sparse_map_loss(chain, gold)
    found = sparse_map(chain)
    same(loss, found.value + torch.tensor(lengths) / 2 - chain.score(gold.clamp(0, 2)))
    assert (loss > 0).all()
    (gradient,) = torch.autograd.grad(loss.sum(), leaves["emissions"])
    inside = torch.arange(4) < torch.tensor(lengths)[:, None]
    same(gradient, found.marginals - torch.nn.functional.one_hot(gold.clamp(0, 2), 3) * inside.unsqueeze(-1))


def test_loss_gradcheck():
    scores = {name: 0.5 * x for name, x in scores_of(3, batch=2, steps=3, size=2).items()}
    names, inputs = zip(*leaves_of(scores).items(), strict=True)
    gold = torch.tensor([[0, 1, 1], [1, 1, 0]])
    assert torch.autograd.gradcheck(
        lambda *xs: sparse_map_loss(LinearChain(**dict(zip(names, xs, strict=True))), gold), inputs, atol=1e-6
    )


def test_loss_is_zero_with_a_margin():
    gold = torch.tensor([[0, 1, 2, 0]])
    margin = torch.nn.functional.one_hot(gold, 3).double()
    for scale, zero in ((1.0, True), (3.0, True), (0.9, False)):
        emissions = (scale * margin).requires_grad_()
        loss = sparse_map_loss(LinearChain(emissions, torch.zeros(3, 3, dtype=torch.float64)), gold)
        (gradient,) = torch.autograd.grad(loss.sum(), emissions)
        assert (float(loss.detach()) < 1e-15) == zero
        assert bool((gradient.abs() < 1e-12).all()) == zero


def test_loss_of_forbidden_labels():
    transitions = torch.tensor([[0.0, -INF], [0.0, 0.0]])
    loss = sparse_map_loss(LinearChain(torch.zeros(1, 2, 2), transitions), torch.tensor([[0, 1]]))
    assert loss.tolist() == [INF]
