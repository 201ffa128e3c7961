"""Edge marginals and derivatives of linear chains, edge sizes, ties, number types and extreme scores."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from chain_cases import (
    BACKENDS,
    INF,
    build,
    dense,
    every_backend,
    every_kind,
    labels_of,
    leaves_of,
    rounding,
    same,
    scores_of,
    seeded,
    weighted,
)
from torch import Tensor
from torch.autograd import gradcheck

from oracles import chains as oracle
from thalweg.inference import LinearChain, SparseTransitions

# Derivatives


@every_backend
@every_kind
def test_edge_marginals_and_the_gradients_of_all_scores(kind, backend):
    scores, lengths = scores_of(20, kind=kind), [4, 1, 3]
    scores["transitions"][..., 1, 0] = scores["end"][2] = -INF
    leaves = leaves_of(scores)
    p = build(leaves, backend, lengths=lengths)
    every = weighted(scores, lengths)
    expected = dense(every, 3, 3, 3, parts=oracle.moves_at)
    same(p.edge_marginals, expected)
    same(build(scores, backend, lengths=lengths).edge_marginals, expected)
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, device=p.lengths.device)
    _, moves, start, end = torch.autograd.grad((p.log_partition * weights).sum(), list(leaves.values()))
    weights = weights.cpu()
    per_step = expected * weights[:, None, None, None]
    same(moves, {"shared": per_step.sum((0, 1)), "per item": per_step.sum(1), "per step": per_step}[kind])
    firsts, lasts = torch.zeros(3).double(), torch.zeros(3).double()
    for weight, w in zip(weights, every, strict=True):
        for y, value in oracle.log_probabilities(w).items():
            firsts[y[0]] += weight * math.exp(value)
            lasts[y[-1]] += weight * math.exp(value)
    same(start, firsts)
    same(end, lasts)

    def backwards(labels):  # the broken twin of `moves_at`
        return [(t, j, i) for t, i, j in oracle.moves_at(labels)]

    assert (p.edge_marginals.cpu() - dense(every, 3, 3, 3, parts=backwards)).abs().max() > 0.01


@every_backend
def test_edge_marginals_are_differentiable(backend):
    scores = scores_of(21, batch=2, steps=3)

    def function(*tensors: Tensor) -> Tensor:
        return build(dict(zip(scores, tensors, strict=True)), backend, lengths=[3, 2]).edge_marginals

    assert gradcheck(function, tuple(leaves_of(scores).values()), fast_mode=True)


@every_backend
def test_the_hessian_is_the_covariance_of_all_parts(backend):
    scores = scores_of(22, batch=1, steps=3, size=2, kind="per step")
    fixed = {"start": scores.pop("start"), "end": scores.pop("end")}

    def log_partition(flat: Tensor) -> Tensor:
        emissions, transitions = flat[:6].view(1, 3, 2), flat[6:].view(1, 2, 2, 2)
        return build({"emissions": emissions, "transitions": transitions, **fixed}, backend).log_partition.sum()

    flat = torch.cat([scores["emissions"].flatten(), scores["transitions"].flatten()])
    found = torch.autograd.functional.hessian(log_partition, flat)
    parts = [*itertools.product(range(3), range(2)), *itertools.product(range(2), repeat=3)]

    def both(labels):
        return [*oracle.labels_at(labels), *oracle.moves_at(labels)]

    (w,) = weighted({**scores, **fixed})
    covariance = oracle.covariance(w, both)
    expected = [[covariance[a, b] for b in parts] for a in parts]
    same(found, expected)
    same(found, found.T)
    assert torch.linalg.eigvalsh(found).min() > -1e-12


@every_backend
def test_a_second_backward_pass_finds_its_graph(backend):
    leaves = leaves_of(scores_of(23))
    p = build(leaves, backend)
    y = p.mode
    for _ in range(2):
        for value in (p.log_partition, p.marginals, p.entropy(), p.log_prob(y), p.max_score, p.edge_marginals):
            (value**2).sum().backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in leaves.values())


@every_backend
def test_gradients_reach_only_what_asks_for_them(backend):
    scores = scores_of(24)
    whole = leaves_of(scores)
    p = build(whole, backend)
    expected = torch.autograd.grad(
        p.log_partition.sum() + p.entropy().sum() + p.log_prob(p.mode).sum(), [*whole.values()]
    )
    for name, gradient in zip(scores, expected, strict=True):
        one = {**scores, name: scores[name].clone().requires_grad_()}
        p = build(one, backend)
        total = p.log_partition.sum() + p.entropy().sum() + p.log_prob(p.mode).sum()
        same(torch.autograd.grad(total, one[name])[0], gradient)


# Sizes


@every_backend
@every_kind
@pytest.mark.parametrize(("batch", "steps", "size"), [(1, 1, 1), (1, 1, 4), (2, 3, 1), (3, 1, 2), (1, 2, 2), (1, 5, 2)])
def test_edge_sizes(batch, steps, size, kind, backend):
    scores = scores_of(25, batch=batch, steps=steps, size=size, kind=kind)
    leaves = leaves_of(scores)
    p = build(leaves, backend)
    every = weighted(scores)
    same(p.log_partition, [oracle.log_partition(w) for w in every])
    same(p.entropy(), [oracle.entropy(w) for w in every])
    same(p.max_score, [max(s for _, s in w) for w in every])
    same(p.edge_marginals, dense(every, steps - 1, size, size, parts=oracle.moves_at))
    same(p.marginals.sum(-1), torch.ones(batch, steps))
    found, labels = p.top_k(size**steps + 2)
    for item, w in enumerate(every):
        assert labels_of(p.mode[item]) == oracle.modes(w)[0]
        same(found[item], [s for _, s in oracle.top_k(w, 99)] + [-INF] * 2)
        assert {labels_of(row) for row in labels[item]} == {*dict(w), ()}
        assert {labels_of(row) for row in p.sample((30,))[:, item]} <= dict(w).keys()
    gradients = torch.autograd.grad((p.log_partition + p.entropy() + p.log_prob(p.mode)).sum(), [*leaves.values()])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert p.relaxed_sample(hard=True).sum() == batch * steps


@every_backend
@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_items_of_all_lengths(dtype, kind, backend):
    """More items than any kernel takes abreast, one of them constrained, one extreme, none in the way of another."""
    scores = scores_of(43, batch=37, steps=4, size=3, kind=kind, dtype=dtype)
    lengths = [1 + (5 * item) % 4 for item in range(37)]
    scores["emissions"][6, 0, :2] = scores["emissions"][30, 1, 1] = -INF
    scores["emissions"][11, 1] = torch.tensor([-2000.0, 2000.0, 0.0])
    every, slack = weighted(scores, lengths), 1e-6 if dtype == torch.float32 else 1e-12
    for item, length in enumerate(lengths):
        scores["emissions"][item, length:] = math.nan
    leaves = leaves_of(scores)
    p = build(leaves, backend, lengths=lengths)
    same(p.log_partition, [oracle.log_partition(w) for w in every], rtol=slack, atol=10 * slack)
    gradients = torch.autograd.grad(p.log_partition.sum(), [*leaves.values()])
    same(gradients[0], dense(every, 4, 3), rtol=0, atol=1000 * slack)
    same(p.marginals, dense(every, 4, 3), rtol=0, atol=1000 * slack)
    moves = dense(every, 3, 3, 3, parts=oracle.moves_at)
    summed_moves = {"shared": moves.sum((0, 1)), "per item": moves.sum(1), "per step": moves}[kind]
    same(gradients[1], summed_moves, rtol=0, atol=4000 * slack)
    best = [oracle.modes(w)[0] for w in every]
    assert [labels_of(row) for row in p.mode] == best
    assert [labels_of(row) for row in p.top_k(1)[1][:, 0]] == best
    for item, w in enumerate(every):
        assert {labels_of(row) for row in p.sample((5,))[:, item]} <= dict(w).keys()


@every_backend
@every_kind
def test_two_positions_have_a_single_move(kind, backend):
    # Per step, the transitions are then (B, 1, C, C), which a careless kernel takes for (B, C, C).
    for seed in range(2):
        scores = scores_of(seed, batch=8, steps=2, size=17, kind=kind)
        p = build(scores, backend, lengths=[2, 1, 2, 2, 2, 1, 2, 2])
        every = weighted(scores, p.lengths.tolist())
        same(p.log_partition, [oracle.log_partition(w) for w in every])
        assert [labels_of(row) for row in p.mode] == [oracle.modes(w)[0] for w in every]


@every_backend
def test_an_empty_batch(backend):
    p = build(scores_of(batch=0), backend, lengths=torch.zeros(0, dtype=torch.long))
    assert p.log_partition.shape == p.max_score.shape == p.entropy().shape == (0,)
    assert p.marginals.shape == (0, 4, 3)
    assert p.edge_marginals.shape == (0, 3, 3, 3)
    assert p.mode.shape == (0, 4)
    assert p.top_k(2)[1].shape == (0, 2, 4)
    assert p.sample((5,)).shape == (5, 0, 4)
    assert p.log_prob(p.mode).shape == (0,)


@every_backend
@every_kind
def test_what_lies_past_the_longest_item_may_be_cut_off(kind, backend):
    scores, lengths = scores_of(26, steps=6, kind=kind), [4, 1, 3]
    cut = {**scores, "emissions": scores["emissions"][:, :4]}
    if kind == "per step":
        cut["transitions"] = scores["transitions"][:, :3]
    p, q = build(scores, backend, lengths=lengths), build(cut, backend, lengths=lengths)
    same(p.log_partition, q.log_partition)
    same(p.marginals[:, :4], q.marginals)
    same(p.entropy(), q.entropy())
    assert not p.marginals[:, 4:].any()
    assert not p.edge_marginals[:, 3:].any()
    assert p.mode[:, :4].equal(q.mode)
    assert (p.mode[:, 4:] == -1).all()
    assert (p.sample((3,))[..., 4:] == -1).all()


@every_backend
def test_low_memory_changes_nothing(backend):
    scores, lengths = scores_of(27, batch=2, steps=50, size=4), [50, 33]
    results = []
    for low_memory in (False, True):
        leaves = leaves_of(scores)
        p = build(leaves, backend, lengths=lengths, low_memory=low_memory)
        values = p.log_prob(p.mode)
        results.append([values, p.log_partition, *torch.autograd.grad(values.sum(), [*leaves.values()])])
    for one, two in zip(*results, strict=True):
        same(one, two)


@every_backend
@every_kind
def test_strides_do_not_matter(kind, backend):
    scores = scores_of(28, kind=kind)
    strided = {name: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor for name, tensor in scores.items()}
    strided["start"] = torch.stack([scores["start"]] * 2, 1)[:, 0]
    strided["end"] = scores["end"][:1].expand(3)
    scores["end"] = strided["end"].clone()
    results = []
    for given in (scores, strided):
        leaves = {name: tensor.requires_grad_() for name, tensor in given.items()}
        p = build(leaves, backend)
        results.append([p.log_partition, p.mode, *torch.autograd.grad(p.log_partition.sum(), [*leaves.values()])])
    for one, two in zip(*results, strict=True):
        same(one, two)


@every_backend
def test_auto_agrees_with_every_backend(backend):
    scores, lengths = scores_of(29, batch=5, steps=20, size=7), [20, 1, 13, 7, 20]
    p, q = build(scores, backend, lengths=lengths), LinearChain(**scores, lengths=lengths)
    for one, two in ((p.log_partition, q.log_partition), (p.marginals, q.marginals), (p.top_k(7)[0], q.top_k(7)[0])):
        same(one, two)
    assert p.mode.cpu().equal(q.mode)


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "gpu"])
def test_a_band_is_the_same_chain_as_its_matrix(backend):
    diagonals = torch.randn(6, 3, generator=seeded(30), dtype=torch.float64).requires_grad_()
    emissions = torch.randn(2, 9, 6, generator=seeded(31), dtype=torch.float64).requires_grad_()
    band = SparseTransitions.banded(diagonals, lower=1)
    results = []
    for transitions in (band, band.dense()):
        p = LinearChain(emissions, transitions, lengths=[9, 4], backend=backend)
        edges = p.edge_marginals
        if not isinstance(transitions, SparseTransitions):
            edges = edges[..., band.sources, band.targets]
        value = (p.log_partition + p.entropy()).sum()
        gradients = torch.autograd.grad(value, [emissions, diagonals], retain_graph=True)
        results.append(
            [p.log_partition, p.entropy(), p.marginals, p.mode, p.top_k(4)[0], p.max_score, edges, *gradients]
        )
    for one, two in zip(*results, strict=True):
        same(one, two)
    full, flat = (LinearChain(emissions, each, backend=backend) for each in (band, band.dense()))
    same(full.cross_entropy(flat), full.entropy())
    same(flat.cross_entropy(full), full.entropy())


# Ties


@every_backend
@every_kind
def test_the_lowest_label_wins_a_tie_going_backwards(kind, backend):
    lengths = [4, 1, 3]
    several = differ = 0
    for seed in range(12):
        generator = seeded(seed)
        scores = {
            name: torch.randint(0, 2, tensor.shape, generator=generator).double()
            for name, tensor in scores_of(kind=kind).items()
        }
        p = build(scores, backend, lengths=lengths)
        for item, w in enumerate(weighted(scores, lengths)):
            assert labels_of(p.mode[item]) == oracle.first_mode(w)
            several += len(oracle.modes(w)) > 1
            differ += min(oracle.modes(w)) != oracle.first_mode(w)  # the broken twin: going forwards
            best, labels = p.top_k(6)
            known, expected = dict(w), oracle.top_k(w, 6)
            same(best[item], [s for _, s in expected] + [-INF] * (6 - len(expected)))
            found = [labels_of(row) for row in labels[item]][: len(expected)]
            assert len(set(found)) == len(expected)
            same(best[item, : len(expected)], [known[y] for y in found])
    assert several > 10
    assert differ > 0


@every_backend
def test_all_labellings_alike(backend):
    p = build({"emissions": torch.zeros(2, 3, 2), "transitions": torch.zeros(2, 2)}, backend)
    assert p.mode.tolist() == [[0, 0, 0]] * 2
    scores, labels = p.top_k(8)
    assert not scores.any()
    assert {labels_of(row) for row in labels[1]} == set(itertools.product(range(2), repeat=3))
    same(p.entropy(), torch.full((2,), 3 * math.log(2)), atol=1e-6)


# Number types


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype, backend):
    leaves = leaves_of(scores_of(40, steps=6, dtype=torch.float32))
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in leaves.items()}
    exact = leaves_of({name: tensor.detach().double() for name, tensor in leaves.items()})
    p, q = build(leaves, backend, lengths=[6, 2, 4]), build(exact, backend, lengths=[6, 2, 4])
    for name in ("log_partition", "marginals", "max_score", "edge_marginals"):
        assert getattr(p, name).dtype == torch.float32
        same(getattr(p, name), getattr(q, name), rtol=2e-6, atol=2e-6)
    assert p.mode.equal(q.mode)
    assert p.entropy().dtype == p.log_prob(p.mode).dtype == torch.float32
    found = torch.autograd.grad(p.log_partition.sum(), [*leaves.values()])
    for one, two in zip(found, torch.autograd.grad(q.log_partition.sum(), [*exact.values()]), strict=True):
        assert one.dtype == dtype
        same(one, two, rtol=1e-2, atol=1e-2)


def test_scores_take_the_type_of_the_emissions():
    scores = scores_of(41)
    mixed = {name: tensor.float() if name == "emissions" else tensor for name, tensor in scores.items()}
    assert build(mixed).log_partition.dtype == torch.float32
    same(build(mixed).log_partition, build(scores).log_partition, rtol=1e-6, atol=1e-6)


def summed(scores: dict[str, Tensor], lengths: list[int], add) -> list[float]:
    """log Z (`add` is logsumexp) or the highest score (amax) for shared transitions: the plain recursion in float64."""
    emissions, transitions, start, end = (tensor.double() for tensor in scores.values())
    values, rows = [], start + emissions[:, 0]
    for t in range(1, emissions.shape[1] + 1):
        values += [(item, float(add(rows[item] + end, -1))) for item, length in enumerate(lengths) if length == t]
        if t < emissions.shape[1]:
            rows = add(rows.unsqueeze(-1) + transitions, -2) + emissions[:, t]
    return [value for _, value in sorted(values)]


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_float32_error_of_a_long_chain(backend):
    lengths = [4096, 3001]
    # The matrix products of the scan would need gigabytes at 32 labels.
    scores = scores_of(42, batch=2, steps=4096, size=12 if backend == "scan" else 32, dtype=torch.float32)
    p = build(scores, backend, lengths=lengths)
    truth = torch.tensor(summed(scores, lengths, torch.logsumexp), dtype=torch.float64)
    assert ((p.log_partition.cpu() - truth) / truth).abs().max() < 1e-6
    best = torch.tensor(summed(scores, lengths, torch.amax), dtype=torch.float64)
    assert ((p.max_score.cpu() - best) / best).abs().max() < 1e-6
    assert ((p.log_prob(p.mode).cpu() - (best - truth)) / truth).abs().max() < 1e-6
    if backend not in ("reference", "scan"):  # there it would take seconds
        same(p.marginals.sum(-1), (p.mode >= 0).double(), atol=1e-5)


# Extreme scores


@every_backend
@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_scores(dtype, kind, backend):
    lengths = [4, 1, 3]
    values = torch.tensor([1e4, -1e4, -INF, 0.0, 1.0, -700.0, 88.0])
    for seed in range(4):
        generator = seeded(seed)
        scores = {
            name: values[torch.randint(len(values), tensor.shape, generator=generator)].to(dtype)
            for name, tensor in scores_of(kind=kind).items()
        }
        scores["emissions"][:, :, 0] = torch.randn(3, 4, generator=generator).to(dtype)
        scores["transitions"][..., 0, 0] = scores["start"][0] = scores["end"][0] = 1.5
        leaves, slack = leaves_of(scores), rounding(scores)
        p = build(leaves, backend, lengths=lengths)
        every = weighted(scores, lengths)
        same(p.log_partition, [oracle.log_partition(w) for w in every], rtol=0, atol=slack)
        same(p.max_score, [max(s for _, s in w) for w in every], rtol=0, atol=slack)
        same(p.marginals, dense(every, 4, 3), rtol=0, atol=2 * slack)
        gradients = torch.autograd.grad((p.log_partition + p.entropy()).sum(), [*leaves.values()])
        assert all(gradient.isfinite().all() for gradient in gradients)
        samples = p.sample((20,), generator=seeded(seed, backend))
        for item, w in enumerate(every):
            assert labels_of(p.mode[item]) in oracle.modes(w, slack=slack)
            assert {labels_of(row) for row in samples[:, item]} <= dict(w).keys()


@every_backend
def test_one_certain_labelling_among_extremes(backend):
    scores = {name: torch.full_like(tensor, -1e4) for name, tensor in scores_of(batch=1, dtype=torch.float32).items()}
    y = torch.tensor([[2, 0, 1, 1]])
    scores["emissions"].scatter_(2, y.unsqueeze(-1), 1e4)
    leaves = leaves_of(scores)
    p = build(leaves, backend)
    y = y.to(p.lengths.device)
    assert p.mode.equal(y)
    assert p.sample((10,)).eq(y).all()
    same(p.log_prob(y), [0.0])
    same(p.entropy(), [0.0])
    same(p.marginals[0], torch.eye(3)[y[0].cpu()])
    (gradient, *_) = torch.autograd.grad(p.log_prob(y).sum(), [*leaves.values()])
    assert not gradient.any()
