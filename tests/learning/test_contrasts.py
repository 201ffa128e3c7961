"""Contrasts against enumeration: the most offending, drawn ones, those of a search, those of a sampler."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from oracles import chains
from oracles import losses as oracle
from thalweg.data import pad
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference import Hypotheses, LinearChain, TableModel, beam_search
from thalweg.learning.losses import hinge, nll
from thalweg.learning.losses.contrasts import from_hypotheses, from_sampler, most_offending, same_sequences, sampled

INF = math.inf
ENERGIES = torch.tensor([[0.0, 2.0, 1.0, INF], [3.0, 3.0, 3.0, 0.0], [1.0, INF, INF, INF], [5.0, 4.0, 4.0, 6.0]])
GOLD = torch.tensor([0, 3, 0, 3])


def test_the_most_offending_of_a_vector():
    found = most_offending(ENERGIES, GOLD, k=3)
    assert found.energies.tolist() == [[1, 2, INF], [3, 3, 3], [INF, INF, INF], [4, 4, 5]]
    assert found.answers.tolist() == [[2, 1, -1], [0, 1, 2], [-1, -1, -1], [1, 2, 0]]
    more = most_offending(ENERGIES, GOLD, k=6)
    assert more.energies.shape == more.answers.shape == (4, 6)
    assert (more.answers[:, 4:] == -1).all()
    assert most_offending(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)).energies.shape == (0, 1)


def test_gradients_reach_the_chosen_energies():
    energies = ENERGIES.clone().requires_grad_()
    hinge(energies.gather(1, GOLD[:, None]).squeeze(1), most_offending(energies, GOLD, k=2).energies).sum().backward()
    # Items 0 and 2 are safe: the first leads by the margin exactly, the other has nothing to fear.
    assert energies.grad.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, -1, 0, 1]]


def chain_case(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    emissions = torch.randn(3, 3, 2, dtype=dtype, generator=generator)
    moves = torch.randn(2, 2, dtype=dtype, generator=generator)
    lengths = [3, 1, 2]
    weighted = [chains.paths(i) for i in chains.items(emissions.tolist(), moves.tolist(), lengths=lengths)]
    return emissions, moves, lengths, weighted


@pytest.mark.parametrize("best", [True, False])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_most_offending_of_a_structure(k, best):
    emissions, moves, lengths, weighted = chain_case()
    chain = LinearChain(emissions, moves, lengths=lengths)
    gold = chain.mode if best else torch.tensor([[0, 1, 1], [1, 7, 7], [0, 0, 7]])
    found = most_offending(chain, gold, k)
    for b, every in enumerate(weighted):
        own = tuple(gold[b, : lengths[b]].tolist())
        expected = oracle.most_offending(every, own, k)
        answers = [tuple(y[: lengths[b]].tolist()) for y in found.answers[b] if y[0] >= 0]
        assert answers == [y for y, _ in expected]
        values = [-s for _, s in expected] + [INF] * (k - len(expected))
        assert found.energies[b].tolist() == pytest.approx(values)


def test_the_structures_energies_are_differentiable():
    emissions, moves, lengths, _ = chain_case()
    emissions.requires_grad_()
    chain = LinearChain(emissions, moves, lengths=lengths)
    found = most_offending(chain, chain.mode, 2)
    found.energies[:, 0].sum().backward()
    taken = torch.zeros_like(emissions).detach()
    for b, n in enumerate(lengths):
        for t in range(n):
            taken[b, t, found.answers[b, 0, t]] -= 1
    assert torch.equal(emissions.grad, taken)


def test_draws_follow_the_gibbs_distribution_of_wrong_answers():
    n, beta = 20_000, 0.5
    found = sampled(ENERGIES, GOLD, n, beta=beta, generator=torch.Generator().manual_seed(0))
    assert found.energies.shape == found.answers.shape == (4, n)
    for b, row in enumerate(ENERGIES.tolist()):
        wrong = [INF if y == GOLD[b] else f for y, f in enumerate(row)]
        counts = Counter(found.answers[b].tolist())
        if min(wrong) == INF:
            assert counts == {-1: n}
            assert (found.energies[b] == INF).all()
            continue
        shares = dict(enumerate(oracle.gibbs(wrong, beta)))
        assert int(GOLD[b]) not in counts
        shares = {y: p for y, p in shares.items() if p}
        assert chains.total_variation(counts, shares) < chains.variation_bound(n, len(shares))
        uneven = {y: 1 / len(shares) for y in shares}
        if b == 0:  # a wrong distribution would be seen
            assert chains.total_variation(counts, uneven) > chains.variation_bound(n, len(shares))


def test_draws_of_a_structure():
    emissions, moves, lengths, weighted = chain_case()
    chain, n = LinearChain(emissions, moves, lengths=lengths), 20_000
    gold = torch.tensor([[0, 1, 1], [1, 7, 7], [0, 0, 7]])
    found = sampled(chain, gold, n, beta=0.5, generator=torch.Generator().manual_seed(0))
    for b, every in enumerate(weighted):
        own = tuple(gold[b, : lengths[b]].tolist())
        counts = Counter(tuple(y[: lengths[b]].tolist()) for y in found.answers[b] if y[0] >= 0)
        rest = [(y, 0.5 * s) for y, s in every if y != own]
        shares = {y: math.exp(p) for y, p in chains.log_probabilities(rest).items()}
        assert chains.total_variation(counts, shares) < chains.variation_bound(sum(counts.values()), len(shares))
        right = found.answers[b, :, 0] < 0
        assert torch.equal(torch.isinf(found.energies[b]), right)
        assert 0 < right.sum() < n
        scores = dict(every)
        first = int((~right).nonzero()[0])
        label = tuple(found.answers[b, first, : lengths[b]].tolist())
        assert found.energies[b, first].item() == pytest.approx(-scores[label])


TREE = {(): {1: -0.5, 2: -1.0}, (1,): {1: -0.9, 2: -0.7}, (1, 1): {2: -0.1}}


def test_contrasts_of_a_search():
    model = TableModel([TREE, TREE, TREE], vocab_size=3, bos=0, eos=2)
    found = beam_search(model, torch.tensor([0, 1, 2]), width=3, max_length=3)
    best = found.sequences()
    assert best[0] == [[2], [1, 2], [1, 1, 2]]
    contrast = from_hypotheses(found, pad([[1], [], [0, 0, 0, 0]], end=2))
    assert torch.isinf(contrast.energies).tolist() == [[False, True, False], [True, False, False], [False] * 3]
    assert torch.equal(contrast.energies[2], -found.scores[2])
    assert contrast.answers[0].tolist() == [[2, -1, -1], [-1, -1, -1], [1, 1, 2]]
    cut = beam_search(model, torch.tensor([0]), width=3, max_length=1)  # one is cut, one is missing
    assert torch.isinf(from_hypotheses(cut, pad([[1]], end=2)).energies).tolist() == [[False, True, True]]
    none = from_hypotheses(Hypotheses.none(2, 3, torch.device("cpu")), pad([[1], [1]], end=2))
    assert (none.energies == INF).all()


def test_sequences_are_compared_whole():
    tokens = torch.tensor([[[5, 3, -1], [5, -1, -1], [5, 3, 3], [-1, -1, -1]]])
    assert same_sequences(tokens, torch.tensor([[5, 3]])).tolist() == [[True, False, False, False]]
    assert same_sequences(tokens, torch.tensor([[5, 3, -1, -1]])).tolist() == [[True, False, False, False]]


def test_a_sampler_for_continuous_answers():
    weight = torch.tensor(2.0, requires_grad=True)
    seen = []

    def energy(y):
        return weight * y.square().sum(1)

    def downhill(energy, start):
        assert not start.requires_grad
        seen.append(start)
        y = start.clone().requires_grad_()
        (slope,) = torch.autograd.grad(energy(y).sum(), y)
        return y - 0.1 * slope

    start = torch.tensor([[1.0, 0.0], [0.0, 2.0]], requires_grad=True)
    found = from_sampler(energy, start, downhill)
    assert len(seen) == 1
    torch.testing.assert_close(found.answers, 0.6 * start.detach().unsqueeze(1))
    assert not found.answers.requires_grad
    torch.testing.assert_close(found.energies, (2 * 0.36 * start.square().sum(1)).unsqueeze(1))
    found.energies.sum().backward()
    assert weight.grad.item() == pytest.approx(0.36 * 5)  # through the energy alone, not through the sampler
    assert start.grad is None


def test_e4_sampled_contrasts_estimate_the_gradient_of_nll():
    """dF(x, y) - E_P[dF]: with draws from all answers, gold put back, the mean is the sum it stands for."""
    energies = torch.tensor([[0.3, 1.0, -0.5, 0.2]], dtype=torch.float64, requires_grad=True)
    gold, n = torch.tensor([1]), 40_000
    nll(energies, gold).sum().backward()
    exact = energies.grad.clone()
    p_gold = oracle.gibbs(energies[0].tolist())[1]
    energies.grad = None
    found = sampled(energies, gold, n, generator=torch.Generator().manual_seed(0))
    # P = p(gold) at gold, else (1 - p(gold)) times what is sampled.
    ((1 - p_gold) * (energies[:, 1] - found.energies.mean(1))).sum().backward()
    assert (energies.grad - exact).abs().max() < chains.frequency_bound(n, 4)


def test_one_line_errors():
    for call, error, words in (
        (lambda: most_offending(ENERGIES, GOLD, 0), ConfigError, "`k` must be at least 1"),
        (lambda: most_offending(ENERGIES, GOLD[:2]), ShapeError, r"`energies` must be \(B, C\)"),
        (lambda: sampled(ENERGIES, GOLD, 0), ConfigError, "`n` must be at least 1"),
        (
            lambda: from_sampler(lambda y: y[:, 0], torch.zeros(2, 1), lambda e, y: y[:1]),
            ShapeError,
            "shape of `start`",
        ),
        (
            lambda: from_sampler(lambda y: y, torch.zeros(2, 1), lambda e, y: y),
            ShapeError,
            r"`energy` must give \(B,\)",
        ),
    ):
        with pytest.raises(error, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
