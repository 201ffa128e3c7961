from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from oracles import chains as oracle
from thalweg.errors import ConfigError, DataError, InfeasibleError, ShapeError
from thalweg.inference.structures.chain import LinearChain
from thalweg.inference.structures.tag_schemes import tag_constraints
from thalweg.layers.crf import CRF
from thalweg.layers.padded import keeps_all, kept_lengths

B, T, C = 4, 5, 3
PREFIX = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 0]], dtype=torch.bool)
GAPS = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 1, 0, 1], [0, 1, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
MASKS = {"none": None, "prefix": PREFIX, "gaps": GAPS}


def layer(batch_first: bool = True, **kwargs) -> CRF:
    torch.manual_seed(3)
    crf = CRF(C, batch_first, **kwargs).double()
    with torch.no_grad():
        for parameter in crf.parameters():
            parameter.normal_()
    return crf


def data(mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Emissions and tags, batch first; what is masked is NaN and -100."""
    generator = torch.Generator().manual_seed(5)
    emissions = torch.randn(B, T, C, generator=generator, dtype=torch.float64)
    tags = torch.randint(C, (B, T), generator=generator)
    if mask is not None:
        emissions = emissions.masked_fill(~mask.unsqueeze(2), math.nan)
        tags = tags.masked_fill(~mask, -100)
    return emissions, tags


def kept(row: Tensor, mask: Tensor | None, item: int) -> Tensor:
    return row if mask is None else row[mask[item]]


def weighted(crf: CRF, emissions: Tensor, mask: Tensor | None, item: int) -> list:
    """Every tag sequence over the kept positions of an item with its score, by enumeration."""
    rows = kept(emissions[item], mask, item).tolist()
    transitions, start, end = (p.tolist() for p in (crf.transitions, crf.start_transitions, crf.end_transitions))
    if crf.is_constrained:
        rules = [crf.get_buffer(f"_{name}_constraints").tolist() for name in ("transitions", "start", "end")]
        transitions = [[a + b for a, b in zip(*row, strict=True)] for row in zip(transitions, rules[0], strict=True)]
        start = [a + b for a, b in zip(start, rules[1], strict=True)]
        end = [a + b for a, b in zip(end, rules[2], strict=True)]
    return oracle.paths(oracle.items([rows], transitions, start, end)[0])


@pytest.fixture(params=list(MASKS))
def mask(request) -> Tensor | None:
    return MASKS[request.param]


def test_likelihood_matches_enumeration(mask):
    crf, (emissions, tags) = layer(), data(mask)
    values = crf(emissions, tags, mask, reduction="none")
    for item in range(B):
        gold = tuple(kept(tags[item], mask, item).tolist())
        expected = oracle.log_probabilities(weighted(crf, emissions, mask, item))[gold]
        assert values[item].item() == pytest.approx(expected, abs=1e-10)
    torch.testing.assert_close(crf.loss(emissions, tags, mask), -values)


def test_oracle_can_fail():
    crf, (emissions, tags) = layer(), data(GAPS)
    broken = GAPS.clone()
    broken[0, 1] = True  # a position too many
    emissions = emissions.nan_to_num()
    expected = oracle.log_probabilities(weighted(crf, emissions, GAPS, 0))[tuple(tags[0][GAPS[0]].tolist())]
    assert crf(emissions, tags.clamp(min=0), broken, "none")[0].item() != pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "token_mean"])
def test_reductions(mask, reduction):
    crf, (emissions, tags) = layer(), data(mask)
    values = crf(emissions, tags, mask, reduction="none").tolist()
    tokens = B * T if mask is None else int(mask.sum())
    expected = {"none": values, "sum": sum(values), "mean": sum(values) / B, "token_mean": sum(values) / tokens}
    assert crf(emissions, tags, mask, reduction).tolist() == pytest.approx(expected[reduction])
    if reduction == "sum":
        assert crf(emissions, tags, mask).tolist() == pytest.approx(expected["sum"])


def test_decode_and_k_best_match_enumeration(mask):
    crf, (emissions, _) = layer(), data(mask)
    decoded, best = crf.decode(emissions, mask), crf.k_best(emissions, 5, mask)
    assert best.tags.shape == (B, 5, T)
    for item in range(B):
        every = weighted(crf, emissions, mask, item)
        expected = oracle.top_k(every, 5)
        assert tuple(decoded[item]) == expected[0][0]
        found = [tuple(kept(row, mask, item).tolist()) for row in best.tags[item]]
        assert found[: len(expected)] == [path for path, _ in expected]
        assert best.scores[item].tolist()[: len(expected)] == pytest.approx([score for _, score in expected])
        log_probs = oracle.log_probabilities(every)
        probabilities = [math.exp(log_probs[path]) for path, _ in expected]
        assert best.probabilities[item].tolist() == pytest.approx(probabilities + [0.0] * (5 - len(expected)))
        assert torch.isneginf(best.scores[item, len(expected) :]).all()
        assert bool((best.tags[item, len(expected) :] == -1).all())
        if mask is not None:
            assert bool((best.tags[item][:, ~mask[item]] == -1).all())


def test_marginals_match_enumeration(mask):
    crf, (emissions, _) = layer(), data(mask)
    found = crf.marginals(emissions, mask)
    assert found.shape == emissions.shape
    for item in range(B):
        expected = oracle.marginals(weighted(crf, emissions, mask, item), oracle.labels_at)
        rows = kept(found[item], mask, item)
        for (position, label), value in expected.items():
            assert rows[position, label].item() == pytest.approx(value)
        if mask is not None:
            assert bool((found[item][~mask[item]] == 0).all())


def test_samples_follow_the_distribution():
    crf, (emissions, _) = layer(), data(GAPS)
    n = 4000
    drawn = crf.sample(emissions, (2, n // 2), GAPS, generator=torch.Generator().manual_seed(1))
    assert drawn.shape == (2, n // 2, B, T)
    assert bool(((drawn == -1) == ~GAPS).all())
    item = 1  # two kept positions, nine sequences
    counts = Counter(tuple(row[GAPS[item]].tolist()) for row in drawn.flatten(0, 1)[:, item])
    exact = {y: math.exp(p) for y, p in oracle.log_probabilities(weighted(crf, emissions, GAPS, item)).items()}
    assert oracle.total_variation(counts, exact) < oracle.variation_bound(n, len(exact))


def test_layouts_agree(mask):
    first, last = layer(True), layer(False)
    emissions, tags = data(mask)
    turned = None if mask is None else mask.t()
    there = (emissions.transpose(0, 1), tags.t(), turned)
    torch.testing.assert_close(first(emissions, tags, mask, "none"), last(*there, "none"))
    assert first.decode(emissions, mask) == last.decode(there[0], turned)
    marginals = last.marginals(there[0], turned)
    assert marginals.shape == (T, B, C)
    torch.testing.assert_close(first.marginals(emissions, mask), marginals.transpose(0, 1))
    assert torch.equal(first.k_best(emissions, 3, mask).tags, last.k_best(there[0], 3, turned).tags)
    seeds = [torch.Generator().manual_seed(2) for _ in range(2)]
    ours = first.sample(emissions, (6,), mask, generator=seeds[0])
    theirs = last.sample(there[0], (6,), turned, generator=seeds[1])
    assert theirs.shape == (6, T, B)
    assert torch.equal(ours, theirs.transpose(1, 2))
    assert last.sample(there[0], mask=turned).shape == (T, B)


def test_gradients_go_back_to_the_kept_positions(mask):
    crf, (emissions, tags) = layer(), data(mask)
    emissions.requires_grad_()
    crf(emissions, tags, mask).backward()
    gold = torch.nn.functional.one_hot(tags.clamp(min=0), C).double()
    gold = gold if mask is None else gold * mask.unsqueeze(2)
    torch.testing.assert_close(emissions.grad, gold - crf.marginals(emissions.detach(), mask).detach())
    parameters = list(crf.parameters())

    def likelihood(clean: Tensor, *_: Tensor) -> Tensor:
        return crf(clean if mask is None else clean.masked_fill(~mask.unsqueeze(2), 0.3), tags, mask)

    clean = emissions.detach().nan_to_num().requires_grad_()
    assert torch.autograd.gradcheck(likelihood, (clean, *parameters))


@pytest.mark.parametrize("kind", [torch.uint8, torch.int64, torch.bool])
def test_kinds_of_masks(kind):
    crf, (emissions, tags) = layer(), data(GAPS)
    torch.testing.assert_close(crf(emissions, tags, GAPS.to(kind)), crf(emissions, tags, GAPS))


def test_mask_with_gaps_is_the_chain_without_them():
    crf, (emissions, tags) = layer(), data(GAPS)
    for item in range(B):
        where = GAPS[item]
        alone = crf(emissions[item][where].unsqueeze(0), tags[item][where].unsqueeze(0))
        torch.testing.assert_close(crf(emissions, tags, GAPS, "none")[item], alone)


def test_distribution_is_a_chain():
    crf, (emissions, tags) = layer(), data(PREFIX)
    chain = crf.distribution(emissions, PREFIX)
    assert isinstance(chain, LinearChain)
    assert chain.lengths.tolist() == PREFIX.sum(1).tolist()
    torch.testing.assert_close(chain.log_prob(tags), crf(emissions, tags, PREFIX, "none"))


LABELS = ["O", "B-x", "I-x"]


def test_constraints_are_kept_to():
    crf = layer(constraints=tag_constraints(LABELS))
    emissions, _ = data()
    emissions[:, :, 2] += 20  # all for I-x, which may not begin
    assert crf.decode(emissions) == [[1, 2, 2, 2, 2]] * B
    marginals = crf.marginals(emissions)
    assert bool((marginals[:, 0, 2] == 0).all())
    for item in range(B):
        every = weighted(crf, emissions, None, item)
        assert len(every) < C**T
        expected = oracle.marginals(every, oracle.labels_at)
        assert marginals[item, 1, 2].item() == pytest.approx(expected[1, 2])
    tags = torch.tensor([[1, 2, 2, 2, 2], [0, 0, 0, 0, 0], [0, 1, 2, 0, 0], [1, 1, 1, 1, 1]])
    values = crf(emissions, tags, reduction="none")
    for item, row in enumerate(tags.tolist()):
        expected = oracle.log_probabilities(weighted(crf, emissions, None, item))[tuple(row)]
        assert values[item].item() == pytest.approx(expected)
    values.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in crf.parameters() if p.grad is not None)
    assert crf.transitions.grad is not None
    assert crf.transitions.grad[0, 2] == 0


def test_constraints_are_no_parameters():
    plain, ruled = CRF(C), CRF(C, constraints=tag_constraints(LABELS))
    assert list(plain.state_dict()) == list(ruled.state_dict())
    ruled.load_state_dict(plain.state_dict())
    assert bool(ruled.transitions.isfinite().all())
    assert ruled.double().get_buffer("_start_constraints").dtype == torch.float64
    assert "constrained" in repr(ruled)


@pytest.mark.parametrize(
    ("tags", "mask", "message"),
    [
        ([2, 2, 0], None, r"tag 2 cannot be the first \(position 0 of batch item 1\)"),
        ([1, 0, 2], None, r"tag 2 cannot follow tag 0 \(position 2 of batch item 1\)"),
        ([1, 0, 2], [True, False, True], None),
        ([0, 1, 2], [True, False, True], r"tag 2 cannot follow tag 0 \(position 2 of batch item 1\)"),
    ],
)
def test_forbidden_tags_are_named(tags, mask, message):
    crf = CRF(C, batch_first=True, constraints=tag_constraints(LABELS))
    tags = torch.tensor([[0, 0, 0], tags])
    mask = None if mask is None else torch.tensor([[True] * 3, mask])
    if message is None:
        assert bool(crf(torch.zeros(2, 3, C), tags, mask).isfinite())
        return
    with pytest.raises(DataError, match=message):
        crf(torch.zeros(2, 3, C), tags, mask)


def test_forbidden_last_tag_is_named():
    crf = CRF(5, batch_first=True, constraints=tag_constraints(["O", "B-x", "I-x", "E-x", "S-x"], "BIOES"))
    with pytest.raises(DataError, match=r"tag 1 cannot be the last \(position 1 of batch item 0\)"):
        crf(torch.zeros(1, 2, 5), torch.tensor([[0, 1]]))


def test_infeasible_items_are_named():
    crf = CRF(C, batch_first=True, constraints=tag_constraints(LABELS))
    emissions = torch.zeros(2, 2, C)
    emissions[1, 0, :2] = -math.inf
    for ask in (crf.decode, crf.marginals, crf.sample, lambda e: crf.k_best(e, 2)):
        with pytest.raises(InfeasibleError, match="batch item 1"):
            ask(emissions)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(T, C), torch.zeros(T)), r"`emissions` must be \(T, B, C\) with C = 3"),
        ((torch.zeros(T, B, 2), torch.zeros(T, B)), r"C = 3 \(num_tags\), got \(5, 4, 2\)"),
        ((torch.zeros(T, B, C), torch.zeros(B, T).long()), r"`tags` must be \(T, B\) = \(5, 4\)"),
        ((torch.zeros(T, B, C), torch.zeros(T, B)), "integers"),
        ((torch.zeros(T, B, C), torch.full((T, B), 3)), "0..2, got 3 at position 0 of batch item 0"),
        ((torch.zeros(T, B, C), torch.zeros(T, B).long(), PREFIX), r"`mask` must be .* \(T, B\) = \(5, 4\)"),
        ((torch.zeros(T, B, C), torch.zeros(T, B).long(), torch.ones(T, B)), "bool or integers"),
        (
            (torch.zeros(T, B, C), torch.zeros(T, B).long(), torch.arange(B).expand(T, B)),
            "at least one position of each item, got none for batch item 0",
        ),
    ],
)
def test_shape_errors(arguments, message):
    with pytest.raises(ShapeError, match=message):
        CRF(C)(*arguments)


def test_other_errors():
    with pytest.raises(ConfigError, match="did you mean `token_mean`"):
        CRF(C)(torch.zeros(T, B, C), torch.zeros(T, B).long(), reduction="tokenmean")
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(ConfigError, match="`num_tags` must be an integer of at least 1"):
            CRF(wrong)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"`constraints.transitions` must be \(2, 2\) for num_tags = 2"):
        CRF(2, constraints=tag_constraints(LABELS))
    with pytest.raises(ConfigError, match="backend"):
        CRF(C, backend="tpu").decode(torch.zeros(T, B, C))


def test_parameters_are_those_of_pytorch_crf():
    crf = CRF(C)
    names = {"start_transitions": (C,), "end_transitions": (C,), "transitions": (C, C)}
    assert {name: tuple(p.shape) for name, p in crf.state_dict().items()} == names
    large = CRF(200)
    assert all(float(p.detach().abs().max()) < 0.1001 and p.requires_grad for p in large.parameters())
    assert float(large.transitions.detach().abs().max()) > 0.099
    assert repr(CRF(C, batch_first=True)) == "CRF(num_tags=3, batch_first=True)"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(dtype):
    crf = CRF(C, batch_first=True)
    emissions, tags = data()
    half = emissions.to(dtype).requires_grad_()
    value = crf(half, tags)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, crf(half.detach().float(), tags))
    value.backward()
    assert half.grad is not None
    assert half.grad.dtype == dtype
    assert crf.to(dtype)(half.detach(), tags).dtype == torch.float32


# Beside pytorch-crf


@pytest.fixture
def peer():
    return pytest.importorskip("torchcrf", reason="pytorch-crf is not installed: pip install pytorch-crf==0.7.2")


@pytest.mark.parametrize("batch_first", [True, False])
def test_same_answers_as_pytorch_crf(peer, batch_first):
    torch.manual_seed(7)
    theirs = peer.CRF(C, batch_first=batch_first)
    torch.manual_seed(7)
    ours = CRF(C, batch_first=batch_first)
    for (name, a), (other, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a, b)
    for crf in (ours, theirs):
        crf.double()
    emissions, tags = data()
    mask = PREFIX
    if not batch_first:
        emissions, tags, mask = emissions.transpose(0, 1), tags.t(), mask.t()
    for each in (mask, torch.ones_like(mask)):
        for reduction in ("none", "sum", "mean", "token_mean"):
            inputs = [emissions.clone().requires_grad_() for _ in range(2)]
            values = [crf(x, tags, each, reduction=reduction) for crf, x in zip((ours, theirs), inputs, strict=True)]
            torch.testing.assert_close(*values)
            grads = [
                torch.autograd.grad(v.sum(), [x, *crf.parameters()])
                for v, x, crf in zip(values, inputs, (ours, theirs), strict=True)
            ]
            torch.testing.assert_close(*grads)
        assert ours.decode(emissions, each) == theirs.decode(emissions, each)


def test_parameters_load_both_ways(peer):
    ours, theirs = CRF(C), peer.CRF(C)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.transitions, theirs.transitions)
    again = CRF(C)
    theirs.load_state_dict(again.state_dict())
    assert torch.equal(again.end_transitions, theirs.end_transitions)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [None, torch.bool, torch.uint8])
def test_sums_are_those_of_the_items(batch_first, kind):
    # A sum has a way of its own, a large batch as well.
    crf, generator = layer(batch_first), torch.Generator().manual_seed(7)
    emissions = torch.randn(20, 9, C, generator=generator, dtype=torch.float64)
    tags = torch.randint(C, (20, 9), generator=generator)
    mask = None if kind is None else torch.ones(20, 9, dtype=kind)
    if not batch_first:
        emissions, tags = emissions.transpose(0, 1), tags.t()
        mask = None if mask is None else mask.t()
    inputs = [emissions.requires_grad_(), *crf.parameters()]
    found = [
        torch.autograd.grad(crf(emissions, tags, mask, reduction=how).sum(), inputs, create_graph=True)
        for how in ("sum", "none")
    ]
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)
    second = [torch.autograd.grad(torch.cat([g.flatten() for g in each]).square().sum(), inputs) for each in found]
    for one, two in zip(*second, strict=True):
        torch.testing.assert_close(one, two)


def test_transitions_may_be_computed_by_something_else():
    crf, (emissions, tags) = layer(), data()
    before = crf(emissions, tags)
    torch.nn.utils.parametrize.register_parametrization(crf, "transitions", torch.nn.Identity())
    torch.testing.assert_close(crf(emissions, tags), before)
    crf(emissions, tags).backward()
    assert all(parameter.grad is not None for parameter in crf.parameters())


def test_a_mask_of_any_layout_is_looked_at():
    for mask, all_kept in ((torch.ones(3, 4), True), (torch.ones(0, 4), True), (torch.eye(3), False)):
        mask = mask.bool()
        assert keeps_all(mask) is all_kept
        assert keeps_all(mask.t()) is all_kept
    wide = torch.zeros(6, 6, dtype=torch.bool)
    wide[::2, ::2] = True
    assert keeps_all(wide[::2, ::2])
    assert not keeps_all(wide[:, ::2])
    assert not keeps_all(wide[1:3, 1:3])


@pytest.mark.parametrize("T", [1, 5, 16, 1500])
def test_masks_are_counted_and_gaps_are_found(T: int):
    draw = torch.Generator().manual_seed(T)
    lengths = torch.randint(0, T + 1, (6,), generator=draw)
    mask = torch.arange(T) < lengths[:, None]
    mask[3:] = torch.rand(3, T, generator=draw) < 0.7
    expected = []
    for row in mask.tolist():
        count = sum(row)
        expected.append(count if all(row[:count]) else -count)
    for given in (mask, mask.t().contiguous().t(), mask.repeat(1, 2)[:, :T]):
        assert kept_lengths(given).tolist() == expected
    assert kept_lengths(mask[:0]).shape == (0,)
