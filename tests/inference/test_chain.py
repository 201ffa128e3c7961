"""What is particular to linear chains: conditioning, constraints, posteriors, wrong arguments.

The laws that they share with every structure are in test_chain_contract.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from chain_cases import INF, build, dense, every_backend, every_kind, labels_of, same, scores_of, seeded, weighted
from torch.distributions import kl_divergence

from oracles import chains as oracle
from thalweg.errors import ConfigError, InfeasibleError, MissingDependencyError, ShapeError
from thalweg.inference import LinearChain, SparseTransitions

# Sums that are known exactly


@every_backend
@every_kind
def test_integer_weights_are_counted_exactly(kind, backend):
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randint(0, 5, tensor.shape, generator=generator).double()
        for name, tensor in scores_of(kind=kind).items()
    }
    weights["start"] += 1
    lengths = [4, 2, 3]
    items = oracle.items(**{k: v.long().tolist() for k, v in weights.items()}, lengths=lengths)
    counts = [oracle.count(item) for item in items]
    assert min(counts) > 0
    logs = {name: tensor.log() for name, tensor in weights.items()}
    assert [round(math.exp(oracle.log_partition(w))) for w in weighted(logs, lengths)] == counts
    same(build(logs, backend, lengths=lengths).log_partition.exp(), [float(c) for c in counts], rtol=1e-12)
    turned = [item._replace(moves=[[*map(list, zip(*m, strict=True))] for m in item.moves]) for item in items]
    assert [oracle.count(item) for item in turned] != counts  # a count that runs the wrong way would be seen


# Conditioning


@every_backend
@every_kind
def test_given_some_labels(kind, backend):
    scores, lengths = scores_of(3, kind=kind), [4, 1, 3]
    fixed = torch.tensor([[-1, 2, -1, 0], [1, 9, -5, 9], [-1, -1, 1, 7]])  # past a length anything goes
    allowed = torch.rand(3, 4, 3, generator=seeded(0)) < 0.7
    allowed[0, 1, 2] = allowed[0, 3, 0] = allowed[1, 0, 1] = allowed[2, 2, 1] = allowed[:, :, 2] = True
    p = build(scores, backend, lengths=lengths)
    before = p.log_partition.clone()
    named = [[{l} if l >= 0 else {0, 1, 2} for l in row] for row in fixed.tolist()]
    masked = [[{l for l in range(3) if ok[l]} for ok in rows] for rows in allowed.tolist()]
    both = [[a & b for a, b in zip(*rows, strict=True)] for rows in zip(named, masked, strict=True)]
    device = p.lengths.device
    for q, sets in (
        (p.given(fixed.to(device)), named),
        (p.given(allowed=allowed.to(device)), masked),
        (p.given(fixed.to(device), allowed=allowed.to(device)), both),
        (p.given(fixed.to(device)).given(allowed=allowed.to(device)), both),
    ):
        kept = [
            oracle.given(w, rows[:length])
            for w, rows, length in zip(weighted(scores, lengths), sets, lengths, strict=True)
        ]
        same(q.log_partition, [oracle.log_partition(w) for w in kept])
        same(q.entropy(), [oracle.entropy(w) for w in kept])
        same(q.marginals, dense(kept, 4, 3))
        for item, w in enumerate(kept):
            assert labels_of(q.mode[item]) == oracle.modes(w)[0]
            assert {labels_of(row) for row in q.sample((50,))[:, item]} <= dict(w).keys()
    same(p.log_partition, before)
    assert not p.given().log_partition.sub(p.log_partition).any()


def test_broken_conditioning_is_noticed():
    scores = scores_of(3)
    (w, *_), q = weighted(scores), build(scores).given(torch.tensor([[-1, 2, -1, 0]] * 3))
    anything = [{0, 1, 2}] * 4
    assert abs(oracle.log_partition(oracle.given(w, anything)) - float(q.log_partition[0])) > 0.1


def test_a_whole_labelling_given_leaves_its_score():
    scores = scores_of(4)
    p, y = build(scores), torch.tensor([[0, 1, 2, 0], [2, 2, 2, 2], [1, 0, 1, 0]])
    q = p.given(y)
    same(q.log_partition, p.score(y))
    same(q.entropy(), torch.zeros(3))
    same(q.log_prob(y), torch.zeros(3))
    same(q.log_partition - p.log_partition, p.log_prob(y))
    assert q.mode.equal(y)


# Constraints


@every_backend
@every_kind
def test_forbidden_moves_have_no_weight_at_all(kind, backend):
    scores, lengths = scores_of(5, batch=2, steps=5, kind=kind), [5, 3]
    scores["transitions"][..., 0, 2] = scores["transitions"][..., 1, 1] = -INF
    scores["emissions"][0, 2, 1] = scores["start"][2] = scores["end"][0] = -INF
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in scores.items()}
    p = build(leaves, backend, lengths=lengths)
    every = weighted(scores, lengths)
    same(p.log_partition, [oracle.log_partition(w) for w in every])
    gradients = torch.autograd.grad(p.log_partition.sum() + p.entropy().sum(), list(leaves.values()))
    for gradient, tensor in zip(gradients, scores.values(), strict=True):
        assert gradient.isfinite().all()
        assert (gradient[torch.isneginf(tensor)] == 0).all()
    assert (p.marginals[0, 2, 1] == 0).all()
    assert (p.marginals[:, 0, 2] == 0).all()
    assert (p.edge_marginals[:, :, 0, 2] == 0).all()
    assert (p.edge_marginals[:, :, 1, 1] == 0).all()
    samples = p.sample((500,))
    for item, w in enumerate(every):
        assert {labels_of(row) for row in samples[:, item]} <= dict(w).keys()
        assert labels_of(p.mode[item]) == oracle.modes(w)[0]
    forbidden = torch.tensor([[1, 1, 0, 1, 2], [0, 2, 1, 0, 0]], device=p.lengths.device)
    assert p.score(forbidden).tolist() == p.log_prob(forbidden).tolist() == [-INF, -INF]
    single = build({k: v.float() for k, v in scores.items()}, backend, lengths=lengths)
    same(single.log_partition, p.log_partition, rtol=1e-6, atol=1e-6)


@every_backend
def test_divergence_from_what_forbids_more_is_infinite(backend):
    scores = scores_of(6, batch=2)
    tight = {**scores, "transitions": scores["transitions"].clone()}
    tight["transitions"][0, 1] = -INF
    p, q = build(scores, backend), build(tight, backend)
    assert kl_divergence(p, q).tolist() == p.cross_entropy(q).tolist() == [INF, INF]
    pairs = zip(weighted(tight), weighted(scores), strict=True)
    same(kl_divergence(q, p), [oracle.kl_divergence(*pair) for pair in pairs])
    same(kl_divergence(q, q), torch.zeros(2))


NEEDING = {
    "log_partition": lambda p: p.log_partition,
    "marginals": lambda p: p.marginals,
    "edge_marginals": lambda p: p.edge_marginals,
    "mode": lambda p: p.mode,
    "max_score": lambda p: p.max_score,
    "top_k": lambda p: p.top_k(2),
    "sample": lambda p: p.sample((2,)),
    "log_prob": lambda p: p.log_prob(torch.zeros(4, 3, dtype=torch.long, device=p.lengths.device)),
    "log_prob of many": lambda p: p.log_prob(torch.zeros(2, 4, 3, dtype=torch.long, device=p.lengths.device)),
    "entropy": lambda p: p.entropy(),
    "cross_entropy": lambda p: p.cross_entropy(p.tempered(2.0)),
    "kl": lambda p: kl_divergence(p, p),
    "kl to it": lambda p: kl_divergence(p.given(allowed=torch.isfinite(p.potentials.emissions)), p),
    "max_posterior": lambda p: p.max_posterior(),
    "posterior_threshold": lambda p: p.posterior_threshold(0.5),
    "perturbed_mode": lambda p: p.perturbed_mode(3),
    "expected_mode": lambda p: p.expected_mode(3),
    "relaxed_sample": lambda p: p.relaxed_sample((3,)),
    "hard relaxed_sample": lambda p: p.relaxed_sample((3,), hard=True),
}


@every_backend
@pytest.mark.parametrize("name", NEEDING)
def test_items_without_a_labelling_are_named(name, backend):
    # Items 1 and 3 lack a way, not a label; item 0 has only one position and needs none.
    scores = scores_of(0, batch=4, steps=3, size=2)
    scores["transitions"].fill_(-INF)
    scores["transitions"][0, 1] = scores["transitions"][1, 0] = 0.0
    scores["emissions"][1, 0, 0] = scores["emissions"][1, 1, 0] = -INF
    scores["emissions"][3, 2, 0] = scores["emissions"][3, 1, 1] = -INF
    scores["emissions"][3, 0, 1] = -INF
    lengths = [1, 3, 3, 3]
    with pytest.raises(InfeasibleError, match=r"batch items? 1(, 3| and 3)\b") as caught:
        NEEDING[name](build(scores, backend, lengths=lengths))
    message = str(caught.value)
    assert "\n" not in message
    assert not {"2", "4", "5", "7"} & set(message.replace(",", " ").split())
    same(
        build({k: v[[0, 2]] if k == "emissions" else v for k, v in scores.items()}, lengths=[1, 3]).log_partition,
        [oracle.log_partition(w) for i, w in enumerate(weighted(scores, lengths)) if i in (0, 2)],
    )


def test_what_needs_no_sum_does_not_mind_infeasible_items():
    scores = scores_of(0, batch=2)
    scores["emissions"][1, 0] = -INF
    p, y = build(scores), torch.zeros(2, 4, dtype=torch.long)
    assert p.score(y)[1] == -INF
    assert p.energy(y)[1] == INF
    assert p.tempered(2.0).score(y)[1] == p.given(y).score(y)[1] == -INF
    assert p.batch_shape == (2,)
    assert "LinearChain" in repr(p)
    conflict = build(scores_of()).given(
        torch.tensor([[0, -1, -1, -1]] * 3), allowed=torch.arange(3).expand(3, 4, 3) > 0
    )
    with pytest.raises(InfeasibleError, match="0, 1, 2"):
        _ = conflict.mode


@every_backend
def test_unchecked_items_without_a_labelling_do_no_harm(backend):
    scores = scores_of(0)
    scores["emissions"][1, 0] = -INF
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in scores.items()}
    p = build(leaves, backend, validate_args=False)
    assert torch.isneginf(p.log_partition).tolist() == [False, True, False]
    gradients = torch.autograd.grad(p.log_partition[[0, 2]].sum(), list(leaves.values()))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][1].any()


# Wrong arguments

ZEROS = {"emissions": torch.zeros(2, 3, 4), "transitions": torch.zeros(4, 4)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"emissions": torch.zeros(3, 4)}, r"`emissions` must be \(B, T, C\).*got \(3, 4\)"),
        ({"emissions": torch.zeros(2, 0, 4)}, r"`emissions` .*got \(2, 0, 4\)"),
        ({"emissions": torch.zeros(2, 3, 0)}, r"`emissions` .*got \(2, 3, 0\)"),
        ({"emissions": torch.zeros(2, 3, 4).long()}, r"`emissions` .*floating.*int64"),
        ({"transitions": torch.zeros(3, 4)}, r"`transitions` .*C = 4.*got \(3, 4\)"),
        ({"transitions": torch.zeros(3, 4, 4)}, r"`transitions` .*B = 2.*got \(3, 4, 4\)"),
        ({"transitions": torch.zeros(2, 3, 4, 4)}, r"`transitions` .*T = 3.*got \(2, 3, 4, 4\)"),
        ({"transitions": torch.zeros(4)}, r"`transitions` .*got \(4,\)"),
        (
            {"transitions": SparseTransitions.of_edges([0], [0], torch.zeros(1), size=5)},
            r"`transitions` .*C = 4.*got 5",
        ),
        ({"start": torch.zeros(3)}, r"`start` must be \(C,\) with C = 4.*got \(3,\)"),
        ({"end": torch.zeros(1, 4)}, r"`end` must be \(C,\) with C = 4.*got \(1, 4\)"),
        ({"lengths": torch.tensor([1, 2, 3])}, r"`lengths` .*B = 2.*got \(3,\)"),
        ({"lengths": torch.tensor([1.0, 2.0])}, r"`lengths` .*integers.*float32"),
        ({"lengths": torch.tensor([True, True])}, r"`lengths` .*integers.*bool"),
        ({"lengths": torch.tensor([0, 2])}, r"`lengths` .*1\.\.T with T = 3, got 0 at batch item 0"),
        ({"lengths": torch.tensor([2, 4])}, r"`lengths` .*1\.\.T with T = 3, got 4 at batch item 1"),
        ({"lengths": [3, -1]}, r"`lengths` .*got -1 at batch item 1"),
    ],
)
def test_wrong_shapes(wrong, message):
    with pytest.raises(ShapeError, match=message) as caught:
        LinearChain(**{**ZEROS, **wrong})
    assert "\n" not in str(caught.value)


def test_wrong_labels():
    p = LinearChain(**ZEROS, lengths=[3, 2])
    good = torch.zeros(2, 3, dtype=torch.long)
    for wrong, message in (
        (good[:1], r"B = 2 and T = 3.*got \(1, 3\)"),
        (good.float(), "float32"),
        (good[:, :2], r"got \(2, 2\)"),
        (good + 4, "0..3, got 4 at position 0 of batch item 0"),
        (
            good.clone().index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(-1)),
            "got -1 at position 1 of batch item 1",
        ),
    ):
        for method in (p.score, p.energy, p.log_prob):
            with pytest.raises(ShapeError, match=message):
                method(wrong)
    past = good.clone()
    past[1, 2] = -7
    same(p.score(past), p.score(good))
    with pytest.raises(ShapeError, match=r"-1\.\.3, got -2"):
        p.given(good - 2)
    with pytest.raises(ShapeError, match=r"\(B, T\)"):
        p.given(good.expand(5, 2, 3))
    with pytest.raises(ShapeError, match="`allowed` must be bool"):
        p.given(allowed=torch.zeros(2, 3, 4))
    with pytest.raises(ShapeError, match=r"`allowed` .*got \(2, 3, 5\)"):
        p.given(allowed=torch.ones(2, 3, 5, dtype=torch.bool))


def test_wrong_settings():
    p = LinearChain(**ZEROS)
    for k in (0, -1):
        with pytest.raises(ShapeError, match=f"`k` must be an integer of at least 1, got {k}"):
            p.top_k(k)
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="`temperature` must be above 0"):
            p.tempered(temperature)
    with pytest.raises(ConfigError, match="did you mean `reference`"):
        LinearChain(**ZEROS, backend="referense")
    with pytest.raises((ConfigError, MissingDependencyError), match=r'backend="auto"|pip install'):
        LinearChain(**ZEROS, backend="gpu")
    other = LinearChain(torch.zeros(2, 3, 5), torch.zeros(5, 5))
    with pytest.raises(ShapeError, match=r"\(2, 3, 4\), got \(2, 3, 5\)"):
        p.cross_entropy(other)
    with pytest.raises(ShapeError, match="lengths"):
        p.cross_entropy(LinearChain(**ZEROS, lengths=[3, 2]))


# Decoding by posteriors


@every_backend
@every_kind
def test_max_posterior_has_the_least_hamming_risk(kind, backend):
    lengths = [4, 1, 3]
    better = 0
    for seed in range(4):
        scores = scores_of(seed, kind=kind)
        p = build(scores, backend, lengths=lengths)
        found = p.max_posterior()
        assert found.dtype == torch.int64
        for item, w in enumerate(weighted(scores, lengths)):
            assert found[item, lengths[item] :].tolist() == [-1] * (4 - lengths[item])
            least = oracle.least_risk(w, 3)
            assert abs(oracle.hamming_risk(w, labels_of(found[item])) - least) < 1e-9
            better += oracle.hamming_risk(w, labels_of(p.mode[item])) > least + 1e-6
    assert better  # the mode would fail this test


def test_posterior_threshold():
    scores, lengths = scores_of(8), [4, 1, 3]
    p = build(scores, lengths=lengths)
    best = p.max_posterior()
    kept = set()
    for threshold in (0.0, 0.4, 0.6, 1.1):
        for otherwise in (-1, 2):
            found = p.posterior_threshold(threshold, otherwise)
            for item, w in enumerate(weighted(scores, lengths)):
                sure = oracle.marginals(w, oracle.labels_at)
                for t in range(4):
                    label = int(best[item, t])
                    reached = sure.get((t, label), 0.0) >= threshold
                    expected = -1 if t >= lengths[item] else label if reached else otherwise
                    assert int(found[item, t]) == expected
                    kept.add(reached)
    assert kept == {True, False}
    even = LinearChain(torch.zeros(1, 2, 2), torch.zeros(2, 2))
    assert even.posterior_threshold(0.5).tolist() == [[0, 0]]  # the threshold itself is enough


def test_checks_stay_on_whatever_torch_is_told():
    # torch.compile switches off the validation of all distributions in the process.
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        with pytest.raises(InfeasibleError, match="batch item 0"):
            _ = LinearChain(torch.full((1, 2, 2), -math.inf), torch.zeros(2, 2)).mode
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)


@pytest.mark.parametrize("backend", ["cpu", *(["gpu"] if torch.cuda.is_available() else [])])
def test_scores_changed_before_the_backward_pass_are_noticed(backend):  # plain PyTorch has its own copies
    device = "cuda" if backend == "gpu" else "cpu"
    emissions = torch.zeros(1, 3, 2, device=device).requires_grad_()
    scores = emissions * 2
    loss = LinearChain(scores, torch.zeros(2, 2, device=device), backend=backend).log_partition.sum()
    with torch.no_grad():
        scores[0, 0, 0] = 5.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_backend
def test_lengths_may_be_a_strided_view(backend):
    scores = scores_of(5, batch=3, steps=4, size=3)
    lengths = torch.tensor([4, 1, 2, 1, 3, 1])[::2]
    want = build(scores, backend, lengths=[4, 2, 3])
    got = build(scores, backend, lengths=lengths.to(want.potentials.lengths.device))
    assert torch.equal(got.log_partition, want.log_partition)
    assert torch.equal(got.mode, want.mode)
