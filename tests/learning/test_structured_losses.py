"""Losses of structures against enumeration of every labelling: values, gradients, lengths, constraints, corners."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

from contracts.segmentations import Segmentations
from oracles import chains
from oracles import losses as oracle
from thalweg.errors import ConfigError, InfeasibleError, ShapeError
from thalweg.inference import LinearChain
from thalweg.learning import losses
from thalweg.learning.losses import structured as structured_losses

INF = math.inf
LENGTHS = torch.tensor([4, 1, 3, 2])
B, T, C = 4, 4, 3


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Case:
    """Scores of a ragged batch, gold labels, and every labelling of each item."""

    def __init__(self, *, constrained=False, seed=0):
        self.scores = [2 * draw(B, T, C, seed=seed), draw(C, C, seed=1), draw(C, seed=2), draw(C, seed=3)]
        self.gold = torch.randint(C, (B, T), generator=torch.Generator().manual_seed(4))
        if constrained:
            self.scores[1][0, 2] = self.scores[1][1, 1] = -INF
            self.scores[0][2, 0, 0] = -INF
            self.gold = torch.tensor([[0, 1, 2, 0], [2, 0, 0, 0], [2, 0, 1, 0], [2, 1, 0, 0]])
        self.costs = 2 * draw(B, T, C, seed=5).abs()
        emissions, moves, start, end = (x.tolist() for x in self.scores)
        self.weighted = [chains.paths(i) for i in chains.items(emissions, moves, start, end, LENGTHS.tolist())]
        self.labels = [tuple(g[:n]) for g, n in zip(self.gold.tolist(), LENGTHS.tolist(), strict=True)]

    def chain(self, scores=None, **more):
        emissions, moves, start, end = scores or self.scores
        return LinearChain(emissions, moves, start=start, end=end, lengths=LENGTHS, **more)

    def hamming(self, b):
        return lambda y: float(sum(i != j for i, j in zip(y, self.labels[b], strict=True)))

    def given(self, b):
        rows = self.costs[b].tolist()
        own = sum(rows[t][label] for t, label in enumerate(self.labels[b]))
        return lambda y: sum(rows[t][label] for t, label in enumerate(y)) - own

    def free(self, b):
        return lambda y: 0.0


# Ours on (chain, gold, case) and the oracle's on (weighted list, gold labels, case, item).
LOSSES = {
    "nll": (lambda p, y, c: losses.nll(p, y), lambda w, y, c, b: oracle.structure_soft(w, y, c.free(b))),
    "nll, beta 2": (
        lambda p, y, c: losses.nll(p, y, 2.0),
        lambda w, y, c, b: oracle.structure_soft(w, y, c.free(b), 2.0),
    ),
    "perceptron": (lambda p, y, c: losses.perceptron(p, y), lambda w, y, c, b: oracle.structure_hinge(w, y, c.free(b))),
    "hinge": (
        lambda p, y, c: losses.structured_hinge(p, y),
        lambda w, y, c, b: oracle.structure_hinge(w, y, c.hamming(b)),
    ),
    "hinge, weight 0.3": (
        lambda p, y, c: losses.structured_hinge(p, y, 0.3),
        lambda w, y, c, b: oracle.structure_hinge(w, y, lambda z: 0.3 * c.hamming(b)(z)),
    ),
    "hinge, costs": (
        lambda p, y, c: losses.structured_hinge(p, y, c.costs),
        lambda w, y, c, b: oracle.structure_hinge(w, y, c.given(b)),
    ),
    "softmax margin": (
        lambda p, y, c: losses.softmax_margin(p, y),
        lambda w, y, c, b: oracle.structure_soft(w, y, c.hamming(b)),
    ),
    "softmax margin, costs, beta 0.5": (
        lambda p, y, c: losses.softmax_margin(p, y, c.costs, 0.5),
        lambda w, y, c, b: oracle.structure_soft(w, y, c.given(b), 0.5),
    ),
    "fenchel young": (
        lambda p, y, c: losses.fenchel_young(p, y),
        lambda w, y, c, b: oracle.structure_soft(w, y, c.free(b)),
    ),
    "risk": (
        lambda p, y, c: structured_losses.risk(p, y),
        lambda w, y, c, b: oracle.structure_risk(w, c.hamming(b)),
    ),
    "risk, costs, beta 3": (
        lambda p, y, c: structured_losses.risk(p, y, c.costs, 3.0),
        lambda w, y, c, b: oracle.structure_risk(w, c.given(b), 3.0),
    ),
}


def close(found, expected, **tolerance):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.detach().double(), expected, **(tolerance or {"rtol": 1e-9, "atol": 1e-9}))


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_equals_enumeration(name, constrained):
    case = Case(constrained=constrained)
    ours, theirs = LOSSES[name]
    expected = [theirs(w, y, case, b) for b, (w, y) in enumerate(zip(case.weighted, case.labels, strict=True))]
    found = ours(case.chain(), case.gold, case)
    assert found.shape == (B,)
    close(found, expected)
    # Padding may hold anything.
    noise = [x.clone() for x in case.scores]
    outside = torch.arange(T) >= LENGTHS[:, None]
    noise[0][outside] = math.nan
    case.costs[outside] = math.nan
    close(ours(case.chain(noise), case.gold.masked_fill(outside, -1), case), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name):
    case = Case()
    leaves = [x.clone().requires_grad_() for x in case.scores]
    assert gradcheck(lambda *scores: LOSSES[name][0](case.chain(list(scores)), case.gold, case), leaves)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_under_constraints(name):
    case = Case(constrained=True)
    leaves = [x.clone().requires_grad_() for x in case.scores]
    LOSSES[name][0](case.chain(leaves), case.gold, case).sum().backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all()
        assert (leaf.grad[torch.isinf(leaf.detach())] == 0).all()
    outside = torch.arange(T) >= LENGTHS[:, None]
    assert (leaves[0].grad[outside] == 0).all()


def test_the_gradient_is_parts_less_gold():
    """Marginals less gold for nll, the most offending labelling's parts less gold for the hinge."""
    case = Case()
    for loss, cost in (("nll", case.free), ("softmax margin", case.hamming)):
        emissions = case.scores[0].clone().requires_grad_()
        LOSSES[loss][0](case.chain([emissions, *case.scores[1:]]), case.gold, case).sum().backward()
        for b, weighted in enumerate(case.weighted):
            shifted = [(y, s + cost(b)(y)) for y, s in weighted]
            expected = torch.zeros(T, C, dtype=torch.float64)
            for (t, label), p in chains.marginals(shifted, chains.labels_at).items():
                expected[t, label] += p
            for t, label in enumerate(case.labels[b]):
                expected[t, label] -= 1
            close(emissions.grad[b], expected)
    emissions = case.scores[0].clone().requires_grad_()
    losses.structured_hinge(case.chain([emissions, *case.scores[1:]]), case.gold).sum().backward()
    for b, weighted in enumerate(case.weighted):
        worst = max(weighted, key=lambda pair: pair[1] + case.hamming(b)(pair[0]))[0]
        expected = torch.zeros(T, C, dtype=torch.float64)
        for t, (i, j) in enumerate(zip(worst, case.labels[b], strict=True)):
            expected[t, i] += 1
            expected[t, j] -= 1
        close(emissions.grad[b], expected)


def test_the_oracle_can_disagree():
    case = Case()
    for b, weighted in enumerate(case.weighted):
        # A twin that charges the right labels and not the wrong ones.
        twin = oracle.structure_hinge(weighted, case.labels[b], lambda y, b=b: LENGTHS[b].item() - case.hamming(b)(y))
        if abs(twin - losses.structured_hinge(case.chain(), case.gold)[b].item()) > 1e-3:
            return
    pytest.fail("the twin agrees everywhere")


def test_corners_are_strict():
    """Where gold leads by exactly its cost, or ties with the mode, the loss and its gradient are zero."""
    for lead, expected in ((0.5, [-1.0, 1.0]), (1.0, [0.0, 0.0]), (1.5, [0.0, 0.0])):
        emissions = torch.tensor([[[lead, 0.0]]], dtype=torch.float64, requires_grad=True)
        chain = LinearChain(emissions, torch.zeros(2, 2, dtype=torch.float64))
        found = losses.structured_hinge(chain, torch.tensor([[0]]))
        found.sum().backward()
        assert found.item() == max(0.0, 1 - lead)
        assert emissions.grad[0, 0].tolist() == expected
    for gold in (0, 1):  # a tie: whichever is the mode
        emissions = torch.zeros(1, 1, 2, dtype=torch.float64, requires_grad=True)
        chain = LinearChain(emissions, torch.zeros(2, 2, dtype=torch.float64))
        losses.perceptron(chain, torch.tensor([[gold]])).sum().backward()
        assert not emissions.grad.any()


def test_sparsemap_loss_through_fenchel_young():
    case = Case()
    found = losses.fenchel_young(case.chain(), case.gold, "sparsemap")
    # Its conjugate lies between the mode's score and that less half the length.
    perceptron = losses.perceptron(case.chain(), case.gold)
    assert (found >= 0).all()
    assert (found >= perceptron - 1e-9).all()
    assert (found <= perceptron + 0.5 * LENGTHS).all()
    emissions = case.scores[0].clone().requires_grad_()
    assert gradcheck(
        lambda e: losses.fenchel_young(case.chain([e, *case.scores[1:]]), case.gold, "sparsemap"), (emissions,)
    )
    with pytest.raises(ConfigError, match="did you mean `sparsemap`"):
        losses.fenchel_young(case.chain(), case.gold, "sparsemp")


def test_a_vector_is_a_chain_of_length_one():
    energies = draw(5, 4)
    gold = torch.tensor([0, 1, 2, 3, 0])
    costs = draw(5, 4, seed=9).abs()
    chain = LinearChain(-energies.unsqueeze(1), torch.zeros(4, 4, dtype=torch.float64))
    labels = gold.unsqueeze(1)
    close(losses.nll(chain, labels, 0.7), losses.nll(energies, gold, 0.7))
    close(losses.perceptron(chain, labels), losses.perceptron(energies, gold))
    close(losses.structured_hinge(chain, labels, costs[:, None]), losses.structured_hinge(energies, gold, costs))
    close(losses.softmax_margin(chain, labels, costs[:, None]), losses.softmax_margin(energies, gold, costs))
    close(losses.fenchel_young(chain, labels, "sparsemap"), losses.fenchel_young(energies, gold, "sparsemax"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smaller_types(dtype):
    case = Case()
    for name in ("nll", "hinge", "softmax margin", "risk"):
        small = LOSSES[name][0](case.chain([x.to(dtype) for x in case.scores]), case.gold, case)
        rounded = LOSSES[name][0](case.chain([x.to(dtype).double() for x in case.scores]), case.gold, case)
        close(small, rounded, rtol=1e-4, atol=1e-4)


def test_edge_sizes():
    none = LinearChain(torch.zeros(0, 2, 3), torch.zeros(3, 3))
    gold = torch.zeros(0, 2, dtype=torch.long)
    for loss in (losses.nll, losses.perceptron, losses.structured_hinge, losses.softmax_margin, structured_losses.risk):
        assert loss(none, gold).shape == (0,)
    one = LinearChain(torch.zeros(1, 1, 1), torch.zeros(1, 1))
    for loss in (losses.nll, losses.perceptron, losses.structured_hinge, losses.softmax_margin, structured_losses.risk):
        assert loss(one, torch.zeros(1, 1, dtype=torch.long)).item() == 0


def test_infeasible_items_are_named():
    chain = LinearChain(torch.full((2, 1, 2), -INF), torch.zeros(2, 2))
    with pytest.raises(InfeasibleError, match="batch item 0, 1"):
        losses.structured_hinge(chain, torch.zeros(2, 1, dtype=torch.long))


def test_another_structure_needs_no_more_than_the_contract():
    scores, lengths = draw(3, 4, 2), torch.tensor([4, 2, 3])
    structure = Segmentations(scores, lengths)
    gold = torch.tensor([[1, 0, 2, 1], [0, 2, -1, -1], [1, 1, 1, -1]])
    found = {
        "hinge": losses.structured_hinge(structure, gold),
        "soft": losses.softmax_margin(structure, gold),
        "risk": structured_losses.risk(structure, gold),
    }

    def cuts(length):
        smaller = [(rest, last) for last in (1, 2) if last <= length for rest in cuts(length - last)]
        return [(*rest, (length - 1, last)) for rest, last in smaller] if length else [()]

    for b, length in enumerate(lengths.tolist()):
        own = tuple((t, size) for t, size in enumerate(gold[b].tolist()) if size > 0)
        weighted = [(y, sum(scores[b, t, size - 1].item() for t, size in y)) for y in cuts(length)]

        def cost(y, own=own):
            return float(len(set(y) - set(own)))

        assert found["hinge"][b].item() == pytest.approx(oracle.structure_hinge(weighted, own, cost))
        assert found["soft"][b].item() == pytest.approx(oracle.structure_soft(weighted, own, cost))
        assert found["risk"][b].item() == pytest.approx(oracle.structure_risk(weighted, cost))
    assert losses.nll(structure, gold, 2.0).isfinite().all()
    with pytest.raises(ConfigError, match="is for a LinearChain, got Segmentations"):
        losses.fenchel_young(structure, gold, "sparsemap")


def test_one_line_errors():
    case = Case()
    for call, error, words in (
        (
            lambda: losses.structured_hinge(case.chain(), case.gold, case.costs[:2]),
            ShapeError,
            "as the scores of the parts",
        ),
        (lambda: losses.structured_hinge(case.chain(), case.gold, -1.0), ConfigError, "`cost` must be 0 or more"),
        (lambda: losses.softmax_margin(case.chain(), case.gold, beta=0.0), ConfigError, "`beta` must be above 0"),
        (lambda: losses.structured_hinge(case.chain(), case.gold[:, :2]), ShapeError, "labels must be integers"),
        (lambda: structured_losses.risk(case.chain(), case.gold, case.costs[:2]), ShapeError, "as the marginals"),
    ):
        with pytest.raises(error, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
