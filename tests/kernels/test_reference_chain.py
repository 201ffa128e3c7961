"""The reference against enumeration of every path in plain Python, for every kind of transitions."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thalweg.errors import ConfigError
from thalweg.kernels.potentials import Chain, SparseTransitions
from thalweg.kernels.reference import chain as reference
from thalweg.kernels.reference.recursion import fold, scan
from thalweg.kernels.semirings import Entropy, Expectation, KMax, Log, Max, Sample, Semiring

INF = math.inf
KINDS = ["shared", "item", "step", "sparse"]
# B is the number of lengths; T the longest; each with and without a position that nobody reaches.
SIZES = {
    "ragged": ([4, 3, 2, 1], 4, 3),
    "padded": ([3, 1, 2], 5, 3),
    "one-step": ([1, 1], 1, 3),
    "one-label": ([3, 1], 3, 1),
    "one": ([1], 1, 1),
    "two-labels": ([6, 5], 6, 2),
    "short": ([2, 1], 2, 2),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_size = pytest.mark.parametrize("size", SIZES)
with_holes = pytest.mark.parametrize("holes", [0.0, 0.25], ids=["full", "holes"])


class Case(NamedTuple):
    chain: Chain
    names: tuple[str, ...] = ("emissions", "transitions", "start", "end")

    def inputs(self) -> list[Tensor]:
        moves = self.chain.transitions
        scores = moves.scores if isinstance(moves, SparseTransitions) else moves
        return [self.chain.emissions, scores, self.chain.start, self.chain.end]

    def with_inputs(self, *inputs: Tensor) -> Chain:
        emissions, scores, start, end = inputs
        moves = self.chain.transitions
        moves = moves._replace(scores=scores) if isinstance(moves, SparseTransitions) else scores
        return Chain(emissions, moves, start, end, self.chain.lengths)

    def leaves(self) -> list[Tensor]:
        return [each.detach().clone().requires_grad_() for each in self.inputs()]


def build(
    kind: str, size: str = "ragged", holes: float = 0.0, seed: int = 0, scale: float = 1.0, padding=math.nan
) -> Case:
    lengths, T, C = SIZES[size]
    B = len(lengths)
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        scores = scale * torch.randn(shape, generator=source, dtype=torch.float64)
        return torch.where(torch.rand(shape, generator=source) < holes, -INF, scores)

    emissions, start, end = draw(B, T, C), draw(C), draw(C)
    start[0] = end[0] = 0.0  # something stays possible
    emissions[..., 0] = 0.5
    transitions = draw(*{"item": (B, C, C), "step": (B, T - 1, C, C)}.get(kind, (C, C)))
    transitions[..., 0, 0] = -0.25
    for item, length in enumerate(lengths):
        emissions[item, length:] = padding
        if kind == "step":
            transitions[item, length - 1 :] = padding
    if kind == "sparse":
        gone = torch.rand(C, C, generator=source) < holes
        gone[0, 0] = False
        edges = SparseTransitions.of_dense(transitions.masked_fill(gone, -INF))
        return Case(Chain(emissions, edges, start, end, torch.tensor(lengths)))
    return Case(Chain(emissions, transitions, start, end, torch.tensor(lengths)))


def entropy(chain: Chain) -> Tensor:
    return fold(Entropy(), chain)[1]


def max_score(chain: Chain) -> Tensor:
    return fold(Max(), chain)


# The oracle: numbers out of the tensors, then plain Python.


def move(chain: Chain, item: int, t: int, i: int, j: int) -> float:
    moves = chain.transitions
    if isinstance(moves, SparseTransitions):
        edges = zip(moves.sources.tolist(), moves.targets.tolist(), moves.scores.tolist(), strict=True)
        return next((score for a, b, score in edges if (a, b) == (i, j)), -INF)
    where = {2: (), 3: (item,), 4: (item, t)}[moves.dim()]
    return moves[(*where, i, j)].item()


def paths(chain: Chain, item: int, length: int | None = None) -> dict[tuple[int, ...], float]:
    """Every path of an item and its score."""
    L = int(chain.lengths[item]) if length is None else length
    C = chain.emissions.shape[2]
    e, start, end = chain.emissions[item].tolist(), chain.start.tolist(), chain.end.tolist()
    table = {(t, i, j): move(chain, item, t, i, j) for t in range(L - 1) for i in range(C) for j in range(C)}
    return {
        y: start[y[0]]
        + sum(e[t][y[t]] for t in range(L))
        + sum(table[t, y[t], y[t + 1]] for t in range(L - 1))
        + end[y[-1]]
        for y in itertools.product(range(C), repeat=L)
    }


def log_sum(scores) -> float:
    scores = list(scores)
    top = max(scores)
    return top if top == -INF else top + math.log(math.fsum(math.exp(each - top) for each in scores))


def chances(chain: Chain, item: int) -> dict[tuple[int, ...], float]:
    scores = paths(chain, item)
    total = log_sum(scores.values())
    return {y: math.exp(each - total) for y, each in scores.items() if each > -INF}


def items(chain: Chain) -> range:
    return range(len(chain.lengths))


def close(found: Tensor | float, expected: float, tolerance: float = 1e-11) -> bool:
    found = float(found)
    return found == expected or math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)


def matches_enumeration(log_partition, chain: Chain) -> bool:
    values = log_partition(chain)
    return values.shape == chain.lengths.shape and all(
        close(values[item], log_sum(paths(chain, item).values())) for item in items(chain)
    )


# Values


@every_kind
@every_size
@with_holes
def test_log_partition(kind: str, size: str, holes: float) -> None:
    for seed in range(3):
        case = build(kind, size, holes, seed)
        assert matches_enumeration(reference.log_partition, case.chain)
        if kind != "sparse":
            for method in ("loop", "scan", "auto"):
                assert matches_enumeration(lambda c, m=method: reference.log_partition(c, method=m), case.chain)


def test_enumeration_can_fail() -> None:
    case = build("item", padding=0.1)
    chain, log_partition = case.chain, reference.log_partition
    assert matches_enumeration(log_partition, chain)
    turned = chain._replace(transitions=chain.transitions.mT)  # type: ignore[union-attr]
    longer = chain._replace(lengths=torch.full_like(chain.lengths, 4))
    assert not matches_enumeration(lambda c: log_partition(turned), chain)  # i -> j taken for j -> i
    assert not matches_enumeration(lambda c: log_partition(longer), chain)  # lengths forgotten
    assert not matches_enumeration(lambda c: log_partition(c._replace(end=torch.zeros(3).double())), chain)
    assert not matches_enumeration(max_score, chain)  # the wrong algebra
    assert not matches_enumeration(lambda c: log_partition(c) + 1e-9, chain)  # nearly right


@every_kind
@every_size
@with_holes
def test_best_paths(kind: str, size: str, holes: float) -> None:
    for seed, k in itertools.product(range(2), (1, 2, 7)):
        case = build(kind, size, holes, seed)
        chain, T = case.chain, case.chain.steps
        best, mode = reference.viterbi(chain)
        scores, labels = reference.top_k(chain, k)
        assert labels.dtype == mode.dtype == torch.int64
        assert scores.shape == (len(chain.lengths), k)
        assert labels.shape == (len(chain.lengths), k, T)
        assert torch.equal(max_score(chain), best)
        for item in items(chain):
            ranked = sorted(((s, y) for y, s in paths(chain, item).items() if s > -INF), reverse=True)
            assert close(best[item], ranked[0][0])
            assert mode[item].tolist() == [*ranked[0][1], *[-1] * (T - len(ranked[0][1]))]
            for rank in range(k):
                if rank < len(ranked):
                    assert close(scores[item, rank], ranked[rank][0])
                    assert labels[item, rank].tolist() == [*ranked[rank][1], *[-1] * (T - len(ranked[rank][1]))]
                else:
                    assert scores[item, rank] == -INF
                    assert (labels[item, rank] == -1).all()


@every_kind
def test_ties_take_the_lowest_label_from_the_end(kind: str) -> None:
    case = build(kind, "two-labels", scale=0.0, padding=0.0)
    for seed in range(8):
        source = torch.Generator().manual_seed(seed)
        inputs = [torch.randint(0, 2, each.shape, generator=source).double() for each in case.inputs()]
        chain = case.with_inputs(*inputs)
        best, mode = reference.viterbi(chain)
        scores, labels = reference.top_k(chain, 40)
        assert torch.equal(labels[:, 0], mode)
        for item in items(chain):
            scored = paths(chain, item)
            ties = [y for y, s in scored.items() if s == best[item]]
            assert tuple(mode[item, : len(ties[0])].tolist()) == min(ties, key=lambda y: y[::-1])
            found = {
                tuple(row[row >= 0].tolist()): s for row, s in zip(labels[item], scores[item].tolist(), strict=True)
            }
            assert len(found) - (() in found) == min(40, len(scored))  # distinct
            ranked = sorted(scored.values(), reverse=True)[:40]
            assert sorted((s for s in found.values() if s > -INF), reverse=True) == ranked


@every_kind
@every_size
@with_holes
def test_scores_of_paths(kind: str, size: str, holes: float) -> None:
    case = build(kind, size, holes)
    chain = case.chain
    source = torch.Generator().manual_seed(3)
    labels = torch.randint(0, chain.size, (2, 5, len(chain.lengths), chain.steps), generator=source)
    for item, length in enumerate(chain.lengths.tolist()):
        labels[..., item, length:] = torch.randint(-9, 9, labels[..., item, length:].shape, generator=source)
    found = reference.score(chain, labels)
    assert found.shape == (2, 5, len(chain.lengths))
    for a, b, item in itertools.product(range(2), range(5), items(chain)):
        y = tuple(labels[a, b, item, : chain.lengths[item]].tolist())
        assert close(found[a, b, item], paths(chain, item)[y])
    assert torch.equal(reference.score(chain, labels[0, 0]), found[0, 0])


@every_kind
@every_size
@with_holes
def test_entropy_and_expectation(kind: str, size: str, holes: float) -> None:
    case, other = build(kind, size, holes), build(kind, size, 0.0, seed=9)
    found = entropy(case.chain)
    means, own = (reference.expectation(case.chain, each.chain) for each in (other, case))
    for item in items(case.chain):
        p, values, scores = chances(case.chain, item), paths(other.chain, item), paths(case.chain, item)
        assert close(found[item], -math.fsum(each * math.log(each) for each in p.values()))
        assert close(means[item], math.fsum(each * values[y] for y, each in p.items()))
        assert close(own[item], math.fsum(each * scores[y] for y, each in p.items()))


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, KINDS)), ids="-".join)
def test_expectation_across_kinds(kinds: tuple[str, str]) -> None:
    for seed in range(3):
        case, other = build(kinds[0], holes=0.2, seed=seed), build(kinds[1], holes=0.1, seed=seed + 7)
        found = reference.expectation(case.chain, other.chain)
        for item in items(case.chain):
            p, values = chances(case.chain, item), paths(other.chain, item)
            assert close(found[item], math.fsum(each * values[y] for y, each in p.items()))


@every_kind
@every_size
@with_holes
def test_edge_marginals(kind: str, size: str, holes: float) -> None:
    case = build(kind, size, holes)
    chain, C = case.chain, case.chain.size
    found = reference.edge_marginals(chain)
    if isinstance(chain.transitions, SparseTransitions):
        moves = chain.transitions
        assert found.shape == (len(chain.lengths), chain.steps - 1, len(moves.scores))
        whole = found.new_zeros(*found.shape[:2], C, C)
        whole[..., moves.sources, moves.targets] = found
        found = whole
    assert found.shape == (len(chain.lengths), chain.steps - 1, C, C)
    for item in items(chain):
        expected = torch.zeros(chain.steps - 1, C, C, dtype=torch.float64)
        for y, chance in chances(chain, item).items():
            for t, (i, j) in enumerate(itertools.pairwise(y)):
                expected[t, i, j] += chance
        torch.testing.assert_close(found[item], expected, rtol=1e-11, atol=1e-12)
        assert (found[item, int(chain.lengths[item]) - 1 :] == 0).all()


@every_kind
@every_size
@with_holes
def test_samples_are_inverse_cumulative(kind: str, size: str, holes: float) -> None:
    case = build(kind, size, holes)
    chain, S = case.chain, 20
    uniforms = torch.rand(S, len(chain.lengths), chain.steps, generator=torch.Generator().manual_seed(0)).double()
    uniforms[0], uniforms[1], uniforms[2] = 0.0, 1.0, 1.0 - 2**-53  # the ends, and one that is not allowed
    found = reference.sample(chain, uniforms)
    assert found.dtype == torch.int64
    for item in items(chain):
        L, p = int(chain.lengths[item]), chances(chain, item)
        assert (found[:, item, L:] == -1).all()
        for s in range(S):
            suffix: tuple[int, ...] = ()
            for t in reversed(range(L)):
                shares = [
                    math.fsum(each for y, each in p.items() if y[t:] == (label, *suffix)) for label in range(chain.size)
                ]
                heap = [sum(shares[: label + 1]) / sum(shares) for label in range(chain.size)]
                last = max(label for label, share in enumerate(shares) if share > 0)
                suffix = (min(sum(each <= uniforms[s, item, t] for each in heap), last), *suffix)
            assert found[s, item, :L].tolist() == list(suffix)


@every_kind
def test_samples_have_the_right_frequencies(kind: str) -> None:
    case = build(kind, holes=0.2)
    chain, S = case.chain, 20_000
    uniforms = torch.rand(S, len(chain.lengths), chain.steps, generator=torch.Generator().manual_seed(1))
    found = reference.sample(chain, uniforms.double())
    for item in items(chain):
        p = chances(chain, item)
        rows, counts = found[:, item, : chain.lengths[item]].unique(dim=0, return_counts=True)
        seen = dict(zip(map(tuple, rows.tolist()), counts.tolist(), strict=True))
        assert seen.keys() <= p.keys()
        for y, chance in p.items():
            assert abs(seen.get(y, 0) - S * chance) < 5 * math.sqrt(S * chance * (1 - chance)) + 1e-6


# One algebra, two algorithms

ALGEBRAS: dict[str, Semiring] = {
    "log": Log(),
    "max": Max(),
    "4-max": KMax(4),
    "sample": Sample(),
    "entropy": Entropy(),
    "expectation": Expectation(),
}


@pytest.mark.parametrize("algebra", ALGEBRAS)
@pytest.mark.parametrize("kind", KINDS[:3])
@every_size
@with_holes
def test_fold_equals_scan(algebra: str, kind: str, size: str, holes: float) -> None:
    case, other = build(kind, size, holes), build("step", size, 0.1, seed=5)
    chains = [case.chain, other.chain] if algebra == "expectation" else [case.chain]
    loop, tree = fold(ALGEBRAS[algebra], *chains), scan(ALGEBRAS[algebra], *chains)
    torch.testing.assert_close(loop, tree, rtol=1e-11, atol=1e-11)
    assert algebra == "expectation" or loop[..., 0].isfinite().any()


def test_auto_takes_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build("shared")
    with pytest.raises(ConfigError, match=r"auto, loop, scan, got 'scam'; did you mean `scan`"):
        reference.log_partition(case.chain, method="scam")
    values = []
    for faster in (True, False):
        monkeypatch.setattr(reference, "scan_is_faster", lambda _, answer=faster: answer)
        values.append(reference.log_partition(case.chain))
    torch.testing.assert_close(*values)


# Derivatives


@every_kind
@every_size
@with_holes
def test_gradients_are_enumerated_expectations(kind: str, size: str, holes: float) -> None:
    """First derivatives of log Z are the chances of its parts, second ones their covariances."""
    case = build(kind, size, holes)
    chain, leaves = case.chain, case.leaves()
    value = reference.log_partition(case.with_inputs(*leaves))
    gradients = torch.autograd.grad(value.sum(), leaves, create_graph=True)
    flat = torch.cat([each.flatten() for each in gradients])
    counts, p = [], []  # (paths, parts) of each item
    for item in items(chain):
        chance = chances(chain, item)
        counts.append(torch.stack([parts(case, item, y) for y in chance]))
        p.append(torch.tensor(list(chance.values()), dtype=torch.float64))
    means = [each @ count for each, count in zip(p, counts, strict=True)]
    torch.testing.assert_close(flat, torch.stack(means).sum(0), rtol=1e-11, atol=1e-11)
    covariance = sum((n.T * q) @ n - torch.outer(m, m) for n, q, m in zip(counts, p, means, strict=True))
    assert isinstance(covariance, Tensor)
    if not flat.requires_grad:  # one path and no more: log Z is its score, a linear function
        assert (covariance == 0).all()
        return
    hessian = [
        torch.cat([each.flatten() for each in torch.autograd.grad(row, leaves, retain_graph=True)]) for row in flat
    ]
    torch.testing.assert_close(torch.stack(hessian), covariance, rtol=1e-10, atol=1e-10)


def parts(case: Case, item: int, y: tuple[int, ...]) -> Tensor:
    """How often a path uses each score, all inputs in one row."""
    moves = case.chain.transitions
    used = [torch.zeros(each.shape, dtype=torch.float64) for each in case.inputs()]
    used[2][y[0]] += 1
    used[3][y[-1]] += 1
    for t, label in enumerate(y):
        used[0][item, t, label] += 1
    for t, (i, j) in enumerate(itertools.pairwise(y)):
        if isinstance(moves, SparseTransitions):
            (edge,) = [e for e, a in enumerate(moves.sources.tolist()) if (a, moves.targets[e].item()) == (i, j)]
            used[1][edge] += 1
        else:
            used[1][(*{2: (), 3: (item,), 4: (item, t)}[moves.dim()], i, j)] += 1
    return torch.cat([each.flatten() for each in used])


FUNCTIONS = ["log_partition", "scan", "entropy", "edge_marginals", "expectation"]


@pytest.mark.parametrize(
    ("function", "kind"), [(f, k) for f in FUNCTIONS for k in KINDS if (f, k) != ("scan", "sparse")]
)
@with_holes
def test_numerical_derivatives(function: str, kind: str, holes: float) -> None:
    case, other = build(kind, "padded", holes), build(kind, "padded", 0.0, seed=4)

    def value(*inputs: Tensor) -> Tensor:
        chain = case.with_inputs(*inputs[:4])
        match function:
            case "scan":
                return reference.log_partition(chain, method="scan")
            case "expectation":
                return reference.expectation(chain, other.with_inputs(*inputs[4:]))
            case _:
                return (entropy if function == "entropy" else getattr(reference, function))(chain)

    inputs = case.leaves() + (other.leaves() if function == "expectation" else [])
    assert gradcheck(value, inputs, fast_mode=True)
    assert gradgradcheck(value, inputs, fast_mode=True)


@pytest.mark.parametrize("method", ["loop", "scan"])
def test_third_derivatives(method: str) -> None:
    case = build("shared", "padded", holes=0.2)

    def gradient(*inputs: Tensor) -> tuple[Tensor, ...]:
        value = reference.log_partition(case.with_inputs(*inputs), method=method).sum()
        return torch.autograd.grad(value, inputs, create_graph=True)

    assert gradgradcheck(gradient, case.leaves(), fast_mode=True)


@every_kind
def test_gradient_of_max_score_marks_the_mode(kind: str) -> None:
    case = build(kind, holes=0.2)
    leaves = case.leaves()
    chain = case.with_inputs(*leaves)
    scores, mode = reference.viterbi(chain)
    for value in (scores, max_score(chain), reference.top_k(chain, 2)[0][:, 0]):
        gradients = torch.autograd.grad(value.sum(), leaves, retain_graph=True)
        expected = sum(parts(case, item, tuple(mode[item, : chain.lengths[item]].tolist())) for item in items(chain))
        assert isinstance(expected, Tensor)
        torch.testing.assert_close(torch.cat([each.flatten() for each in gradients]), expected)


# The edges of what is possible


@pytest.mark.parametrize(
    ("kind", "method"), [*((k, m) for k in KINDS[:3] for m in ("loop", "scan")), ("sparse", "loop")]
)
def test_infeasible_items(kind: str, method: str) -> None:
    case = build(kind)
    leaves = case.leaves()
    with torch.no_grad():
        leaves[0][0, 1] = -INF  # nothing at one position
        leaves[0][1, 2, 1:] = -INF  # the only last label left cannot end
        leaves[3][0] = -INF
    chain = case.with_inputs(*leaves)
    dead = torch.tensor([True, True, False, False])
    value = reference.log_partition(chain) if kind == "sparse" else reference.log_partition(chain, method=method)
    assert torch.equal(value == -INF, dead)
    for quantity in (value, entropy(chain), reference.edge_marginals(chain), reference.expectation(chain, chain)):
        whole = torch.autograd.grad(quantity.sum(), leaves, create_graph=True)
        assert all(each.isfinite().all() for each in whole)
        assert (whole[0][:2] == 0).all()
        again = torch.autograd.grad(sum((each * each).sum() for each in whole), leaves)
        assert all(each.isfinite().all() for each in again)
    assert (reference.edge_marginals(chain)[:2] == 0).all()
    scores, labels = reference.top_k(chain, 2)
    assert torch.equal(reference.viterbi(chain)[0] == -INF, dead)
    assert (scores[:2] == -INF).all()
    samples = reference.sample(chain, torch.rand(3, 4, 4))
    for found in (reference.viterbi(chain)[1], labels, samples[0], samples[2]):
        assert (found[:2] == -1).all()
        assert (found[2:, ..., 0] >= 0).all()


@every_kind
def test_expectation_at_minus_infinity(kind: str) -> None:
    case = build(kind, padding=0.0)
    mine, theirs = case.leaves(), case.leaves()
    with torch.no_grad():
        theirs[0][0, 1, 2] = -INF  # possible under the chain
        theirs[0][1, 1, 2] = mine[0][1, 1, 2] = -INF  # impossible under it
    found = reference.expectation(case.with_inputs(*mine), case.with_inputs(*theirs))
    assert found[0] == -INF
    assert found[1:].isfinite().all()
    for value in (found[1:], found):  # the -inf itself passes gradient 0
        gradients = torch.autograd.grad(value.sum(), mine + theirs, retain_graph=True)
        assert all(each.isfinite().all() for each in gradients)
        assert (gradients[0][0] == 0).all()


@every_kind
@pytest.mark.parametrize("padding", [math.nan, INF, -INF, 1e30])
def test_padding_reaches_nothing(kind: str, padding: float) -> None:
    case, plain = build(kind, padding=padding), build(kind, padding=0.0)
    uniforms = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    results, gradients = [], []
    for each in (case, plain):
        leaves = each.leaves()
        chain = each.with_inputs(*leaves)
        values = [reference.log_partition(chain), entropy(chain), reference.expectation(chain, chain)]
        values += [reference.edge_marginals(chain), reference.top_k(chain, 3)[0], max_score(chain)]
        values += [reference.score(chain, reference.viterbi(chain)[1])]
        if kind != "sparse":
            values.append(reference.log_partition(chain, method="scan"))
        results.append(
            [*values, reference.viterbi(chain)[1], reference.top_k(chain, 3)[1], reference.sample(chain, uniforms)]
        )
        first = torch.autograd.grad(sum((v * v.detach().cos()).sum() for v in values), leaves, create_graph=True)
        gradients.append([*first, *torch.autograd.grad(sum((g * g).sum() for g in first), leaves)])
    for a, b in zip(results[0] + gradients[0], results[1] + gradients[1], strict=True):
        assert torch.equal(a, b)
    past = torch.arange(4) >= case.chain.lengths.unsqueeze(-1)
    for step in (0, 4):
        assert (gradients[0][step][past] == 0).all()
        if kind == "step":
            assert (gradients[0][step + 1][past[:, 1:]] == 0).all()


@every_kind
def test_the_callers_tensors_are_left_alone(kind: str) -> None:
    case = build(kind, holes=0.2)
    before = [each.clone() for each in [*case.inputs(), case.chain.lengths]]
    versions = [each._version for each in case.inputs()]
    chain = case.chain
    labels = torch.full((4, 4), -1).masked_fill(torch.arange(4) < chain.lengths.unsqueeze(-1), 1)
    uniforms = torch.rand(2, 4, 4).double()
    kept = labels.clone(), uniforms.clone()
    reference.log_partition(chain), reference.score(chain, labels), reference.viterbi(chain), reference.top_k(chain, 3)
    reference.sample(chain, uniforms), reference.expectation(chain, chain), reference.edge_marginals(chain)
    assert [each._version for each in case.inputs()] == versions
    for a, b in zip([*case.inputs(), chain.lengths, labels, uniforms], [*before, *kept], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@with_holes
def test_extreme_scores(kind: str, dtype: torch.dtype, holes: float) -> None:
    for seed in range(3):
        case = build(kind, holes=holes, seed=seed, scale=1e4)
        leaves = [each.detach().to(dtype).requires_grad_() for each in case.leaves()]
        chain = case.with_inputs(*leaves)
        value = reference.log_partition(chain)
        assert value.dtype == dtype
        # The scores as rounded to the type, summed exactly; the parts of a path are far larger than their sum can be.
        for item in items(chain):
            expected = log_sum(paths(chain, item).values())
            assert abs(value[item].item() - expected) <= 1e5 * torch.finfo(dtype).eps
        values = [value, entropy(chain), reference.expectation(chain, chain), reference.edge_marginals(chain)]
        if kind != "sparse":
            values.append(reference.log_partition(chain, method="scan"))
        gradients = torch.autograd.grad(sum(each.sum() for each in values), leaves, create_graph=True)
        again = torch.autograd.grad(sum((each * each).sum() for each in gradients), leaves)
        assert all(each.isfinite().all() for each in (*values, *gradients, *again))


@pytest.mark.parametrize("method", ["loop", "scan"])
def test_single_precision_stays_close_over_long_chains(method: str) -> None:
    source = torch.Generator().manual_seed(0)
    emissions, transitions = torch.randn(2, 4096, 5, generator=source), torch.randn(5, 5, generator=source)
    zero, lengths = torch.zeros(5), torch.tensor([4096, 3000])
    chain = Chain(emissions, transitions, zero, zero, lengths)
    fine = Chain(emissions.double(), transitions.double(), zero.double(), zero.double(), lengths)
    exact = reference.log_partition(fine, method="scan")
    error = reference.log_partition(chain, method=method).double() / exact - 1
    assert error.abs().max() < 3e-7


def test_single_precision_of_the_other_quantities() -> None:
    source = torch.Generator().manual_seed(0)
    emissions, transitions = torch.randn(1, 800, 5, generator=source), torch.randn(5, 5, generator=source)
    chain = Chain(emissions, transitions, torch.zeros(5), torch.zeros(5), torch.tensor([800]))
    fine = Chain(*(each.double() for each in chain[:4]), chain.lengths)  # type: ignore[union-attr]
    for quantity in (entropy, max_score, lambda c: reference.expectation(c, c)):
        assert abs(quantity(chain).item() / quantity(fine).item() - 1) < 3e-7


@every_kind
@pytest.mark.parametrize("T", [1, 3])
def test_empty_batches(kind: str, T: int) -> None:
    C, lengths = 2, torch.zeros(0, dtype=torch.long)
    shape = {"item": (0, C, C), "step": (0, T - 1, C, C)}.get(kind, (C, C))
    moves = torch.zeros(shape)
    transitions = SparseTransitions.of_dense(moves) if kind == "sparse" else moves
    chain = Chain(torch.zeros(0, T, C), transitions, torch.zeros(C), torch.zeros(C), lengths)
    assert reference.log_partition(chain).shape == (0,)
    assert reference.expectation(chain, chain).shape == (0,)
    assert reference.score(chain, torch.zeros(3, 0, T, dtype=torch.long)).shape == (3, 0)
    assert [each.shape for each in reference.viterbi(chain)] == [(0,), (0, T)]
    assert [each.shape for each in reference.top_k(chain, 2)] == [(0, 2), (0, 2, T)]
    assert reference.sample(chain, torch.zeros(3, 0, T)).shape == (3, 0, T)
    assert reference.edge_marginals(chain).shape == (0, T - 1, *((4,) if kind == "sparse" else (C, C)))
    if kind != "sparse":
        assert reference.log_partition(chain, method="scan").shape == (0,)


def test_no_edges_at_all() -> None:
    none = SparseTransitions.of_edges([], [], torch.zeros(0, requires_grad=True), size=2)
    chain = Chain(torch.zeros(2, 3, 2), none, torch.zeros(2), torch.zeros(2), torch.tensor([1, 3]))
    assert reference.log_partition(chain).tolist() == pytest.approx([math.log(2), -INF])
    assert reference.viterbi(chain)[1].tolist() == [[0, -1, -1], [-1, -1, -1]]
    assert reference.top_k(chain, 3)[0].tolist() == [[0, 0, -INF], [-INF] * 3]
    assert reference.sample(chain, torch.full((1, 2, 3), 0.6)).tolist() == [[[1, -1, -1], [-1, -1, -1]]]
    assert reference.edge_marginals(chain).shape == (2, 2, 0)
    assert reference.score(chain, torch.zeros(2, 3, dtype=torch.long)).tolist() == [0, -INF]


# Memory


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        # A view costs nothing, however large it looks: what counts is the memory behind it.
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(made) if isinstance(x, Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return made


def test_shared_matrices_are_not_copied_for_each_position() -> None:
    B, T, C = 4, 20, 6
    leaves = [torch.zeros(shape).requires_grad_() for shape in ((B, T, C), (C, C), (C,), (C,))]
    chain = Chain(*leaves, torch.full((B,), T))
    with Largest() as largest:
        value = reference.log_partition(chain, method="loop").sum()
        torch.autograd.grad(value, leaves)
        reference.viterbi(chain)
        reference.sample(chain, torch.rand(2, B, T))
    assert largest.numel <= B * T * C < B * T * C * C


def test_sparse_moves_are_never_made_dense() -> None:
    B, T, C = 2, 4, 5000
    diagonals = torch.randn(C, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    edges = SparseTransitions.banded(diagonals, lower=0)
    emissions = torch.zeros(B, T, C, requires_grad=True)
    chain = Chain(emissions, edges, torch.zeros(C), torch.zeros(C), torch.tensor([4, 2]))
    with Largest() as largest:
        value = reference.log_partition(chain).sum() + reference.expectation(chain, chain).sum()
        first = torch.autograd.grad(value, [emissions, diagonals], create_graph=True)
        torch.autograd.grad(sum((each * each).sum() for each in first), [emissions, diagonals])
        scores, labels = reference.top_k(chain, 3)
        torch.testing.assert_close(reference.score(chain, labels.transpose(0, 1)), scores.mT)
        reference.sample(chain, torch.rand(3, B, T))
        reference.edge_marginals(chain)
    assert largest.numel <= 10 * B * T * 2 * C < C * C


# Tools people use around it


def test_compiles_whole() -> None:
    case = build("shared", "short", padding=0.0)
    emissions, transitions, start, end = case.inputs()

    def both(emissions: Tensor, transitions: Tensor) -> tuple[Tensor, Tensor]:
        chain = Chain(emissions, transitions, start, end, case.chain.lengths)
        return reference.log_partition(chain, method="loop"), reference.viterbi(chain)[1]

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(emissions, transitions), both(emissions, transitions), strict=True):
        torch.testing.assert_close(found, expected)


def test_works_under_function_transforms() -> None:
    case = build("shared", "padded")
    emissions, transitions, start, end = case.inputs()

    def value(emissions: Tensor) -> Tensor:
        return reference.log_partition(Chain(emissions, transitions, start, end, case.chain.lengths))

    many = torch.stack((emissions, emissions + 1))
    torch.testing.assert_close(torch.func.vmap(value)(many), torch.stack([value(each) for each in many]))
    by_function = torch.func.grad(lambda x: value(x).sum())(emissions)
    leaf = emissions.clone().requires_grad_()
    torch.testing.assert_close(by_function, torch.autograd.grad(value(leaf).sum(), leaf)[0])
