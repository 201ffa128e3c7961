"""The laws that every exact structure obeys. A test class inherits them and fills in the hooks.

A structure is a distribution p(y) = exp(score(y)) / Z over finitely many y. The laws compare it with itself and with
enumeration in plain Python: `oracle`, any namespace with the functions of `oracles.chains` that take weighted lists.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.distributions import Distribution, kl_divergence

from thalweg.errors import InfeasibleError, ShapeError


class Case(NamedTuple):
    """The scores of a small ragged batch, by the names that `make` gives them, and the length of each item."""

    scores: dict[str, Tensor]
    lengths: Tensor  # (B,)

    def map(self, function) -> Case:
        """The same with `function(name, tensor)` in place of each tensor of scores."""
        return self._replace(scores={name: function(name, tensor) for name, tensor in self.scores.items()})

    def leaves(self) -> Case:
        """Fresh tensors that ask for a gradient."""
        return self.map(lambda _, tensor: tensor.detach().clone().requires_grad_())


QUANTITIES = {
    "log_partition": lambda p: p.log_partition,
    "marginals": lambda p: p.marginals,
    "mode": lambda p: p.mode,
    "max_score": lambda p: p.max_score,
    "entropy": lambda p: p.entropy(),
    "best scores": lambda p: p.top_k(3)[0],
    "best structures": lambda p: p.top_k(3)[1],
}


def same(actual: Tensor, expected: Any, **tolerance: float) -> None:
    """Equality up to rounding; NaN is never right."""
    if not isinstance(expected, Tensor):
        expected = torch.tensor(expected, dtype=torch.float64)
    tolerance = tolerance or {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(actual.detach().cpu().double(), expected.detach().cpu().double(), **tolerance)


def at(nested, place):
    """An entry of lists in lists."""
    for index in place:
        nested = nested[index]
    return nested


class StructureContract:
    """Subclass it as `TestSomething`; each law is one test, run for every value of the subclass's own fixtures."""

    oracle: Any  # a module such as `oracles.chains`
    part_scores: str  # the scores whose gradient of log Z is `marginals`, of the same shape (B, ...)
    device = "cpu"
    draws = 6_000

    # The hooks.

    def case(self, seed: int = 0, *, dtype: torch.dtype = torch.float64, constrained: bool = False) -> Case:
        """A batch of at least three items of different lengths, the shapes and lengths the same for every seed.

        No two structures tie. `constrained` puts -inf into some scores, the same for every seed, and leaves each item
        at least two structures; without it every score is finite.
        """
        raise NotImplementedError

    def make(self, case: Case):
        """The structure under test."""
        raise NotImplementedError

    def enumerate(self, case: Case) -> list[list[tuple[Any, float]]]:
        """For each item every structure of positive weight with its score, from `tolist()` of the tensors."""
        raise NotImplementedError

    def parts(self, y: Any) -> list[tuple[int, ...]]:
        """Where `marginals[b]` of a distribution that is certain of `y` holds a one."""
        raise NotImplementedError

    def structure(self, row: Tensor) -> Any:
        """What one item of `mode` stands for, as `enumerate` writes it; None for the filling of `top_k`."""
        raise NotImplementedError

    def tensor(self, case: Case, structures: list[Any]) -> Tensor:
        """The inverse: one structure for each item as `score` takes them, (B, ...)."""
        raise NotImplementedError

    def per_item(self, name: str) -> bool:
        """Whether the first axis of these scores is the batch; otherwise all items share them."""
        raise NotImplementedError

    def padding(self, case: Case) -> dict[str, Tensor]:
        """Which entries lie outside the items: a mask for each tensor of scores that has any."""
        raise NotImplementedError

    def shifted(self, case: Case, constant: float) -> Case:
        """Scores under which every structure scores `constant` more."""
        raise NotImplementedError

    def infeasible(self, case: Case, item: int) -> Case:
        """Scores under which one item has no structure left and the others have all of theirs."""
        raise NotImplementedError

    # What the laws share.

    def cases(self) -> list[Case]:
        return [self.case(), self.case(2, constrained=True)]

    def select(self, case: Case, items: list[int]) -> Case:
        scores = case.map(lambda name, tensor: tensor[items] if self.per_item(name) else tensor).scores
        return Case(scores, case.lengths[items])

    def filled(self, case: Case, value: float) -> Case:
        """The same with `value` in all the padding."""
        masks = self.padding(case)
        return case.map(lambda name, tensor: tensor.masked_fill(masks[name], value) if name in masks else tensor)

    def generator(self, seed: int = 0) -> torch.Generator:
        return torch.Generator(device=self.device).manual_seed(seed)

    def dense(self, values: list[dict[tuple[int, ...], float]], like: Tensor) -> Tensor:
        """Numbers for the parts of each item as a tensor of the shape of `marginals`."""
        result = torch.zeros(like.shape, dtype=torch.float64)
        for item, parts in enumerate(values):
            for part, value in parts.items():
                result[(item, *part)] = value
        return result

    def stacked(self, case: Case) -> Tensor:
        """All structures of each item, (N, B, ...); items that have fewer repeat their last."""
        weighted = self.enumerate(case)
        count = max(map(len, weighted))
        return torch.stack([self.tensor(case, [w[min(n, len(w) - 1)][0] for w in weighted]) for n in range(count)])

    def function_of(self, case: Case, quantity):
        """A quantity as a function of the tensors of scores, and those tensors."""
        names = list(case.scores)

        def function(*tensors: Tensor) -> Tensor:
            return quantity(self.make(case._replace(scores=dict(zip(names, tensors, strict=True)))))

        return function, tuple(case.leaves().scores.values())

    # The laws.

    def test_it_is_a_distribution(self):
        case = self.case()
        p, items = self.make(case), len(case.lengths)
        assert isinstance(p, Distribution)
        assert p.batch_shape == (items,)
        assert p.mode.shape == (items, *p.event_shape)
        assert p.sample().shape == (items, *p.event_shape)
        assert p.sample((2, 3)).shape == (2, 3, items, *p.event_shape)
        assert p.sample(torch.Size([0])).shape == (0, items, *p.event_shape)
        same(p.mean, p.marginals)

    def test_log_partition_equals_enumeration(self):
        for case in self.cases():
            same(self.make(case).log_partition, [self.oracle.log_partition(w) for w in self.enumerate(case)])

    def test_marginals_are_the_gradient_of_log_partition(self):
        for case in self.cases():
            leaves = case.leaves()
            p = self.make(leaves)
            expected = self.dense(
                [self.oracle.marginals(w, self.parts) for w in self.enumerate(case)], case.scores[self.part_scores]
            )
            gradients = torch.autograd.grad(p.log_partition.sum(), list(leaves.scores.values()))
            same(gradients[list(leaves.scores).index(self.part_scores)], expected)
            same(p.marginals, expected)
            same(self.make(case).marginals, expected)
            for gradient, scores in zip(gradients, leaves.scores.values(), strict=True):
                assert gradient.isfinite().all()
                assert (gradient[torch.isneginf(scores)] == 0).all()

    def test_second_derivatives_are_covariances_of_parts(self):
        for case in self.cases():
            leaves = case.leaves()
            scores = leaves.scores[self.part_scores]
            (gradient,) = torch.autograd.grad(self.make(leaves).log_partition.sum(), scores, create_graph=True)
            directions = torch.randn(3, *scores.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            covariances = [self.oracle.covariance(w, self.parts) for w in self.enumerate(case)]
            for direction in directions:
                (product,) = torch.autograd.grad((gradient * direction.to(scores)).sum(), scores, retain_graph=True)
                expected: list[Counter] = [Counter() for _ in covariances]
                for b, pairs in enumerate(covariances):
                    weights = direction[b].tolist()
                    for (a, c), value in pairs.items():
                        expected[b][a] += value * at(weights, c)
                same(product, self.dense(expected, scores))

    def test_batch_equals_loop(self):
        for case in self.cases():
            whole = self.make(case)
            for item in range(len(case.lengths)):
                alone = self.make(self.select(case, [item]))
                for quantity in QUANTITIES.values():
                    same(quantity(alone)[0], quantity(whole)[item])

    def test_permuting_the_batch_permutes_the_answer(self):
        for case in self.cases():
            order = [2, 0, 1, *range(3, len(case.lengths))]
            permuted, whole = self.make(self.select(case, order)), self.make(case)
            for quantity in QUANTITIES.values():
                same(quantity(permuted), quantity(whole)[order])

    def test_mode_attains_max_score(self):
        for case in self.cases():
            p = self.make(case)
            weighted = self.enumerate(case)
            same(p.score(p.mode), p.max_score)
            same(p.max_score, [max(s for _, s in w) for w in weighted])
            for row, w in zip(p.mode, weighted, strict=True):
                assert self.structure(row) in self.oracle.modes(w, slack=1e-9)

    def test_top_k_is_sorted_distinct_and_equals_enumeration(self):
        for case in self.cases():
            weighted = self.enumerate(case)
            for k in (1, 2, 5, min(map(len, weighted)) + 2):
                scores, structures = self.make(case).top_k(k)
                assert scores.shape == (len(weighted), k)
                assert structures.shape[:2] == (len(weighted), k)
                for item, w in enumerate(weighted):
                    best = self.oracle.top_k(w, k)
                    missing = k - len(best)
                    same(scores[item], [s for _, s in best] + [-math.inf] * missing)
                    found = [self.structure(row) for row in structures[item]]
                    assert found[len(best) :] == [None] * missing
                    assert len(set(found)) == len(best) + (missing > 0)
                    known = dict(w)
                    same(scores[item, : len(best)], [known[y] for y in found[: len(best)]])

    def test_samples_follow_the_distribution(self):
        for case in self.cases():
            p = self.make(case)
            samples = p.sample((self.draws,), generator=self.generator(7)).cpu()
            shape = p.marginals.shape
            for item, w in enumerate(self.enumerate(case)):
                rows, counts = samples[:, item].unique(dim=0, return_counts=True)
                seen = Counter({self.structure(row): int(n) for row, n in zip(rows, counts, strict=True)})
                probable = {y: math.exp(v) for y, v in self.oracle.log_probabilities(w).items()}
                bound = self.oracle.variation_bound(self.draws, len(probable))
                assert self.oracle.total_variation(seen, probable) < bound
                share = Counter()
                for y, n in seen.items():
                    share.update(dict.fromkeys(self.parts(y), n / self.draws))
                difference = self.dense([share], torch.empty(1, *shape[1:]))[0] - p.marginals[item].cpu()
                assert difference.abs().max() < self.oracle.frequency_bound(self.draws, shape[1:].numel())

    def test_seeds_repeat_and_differ(self):
        p = self.make(self.case())
        first, again, other = (p.sample((20,), generator=self.generator(seed)) for seed in (1, 1, 2))
        assert first.equal(again)
        assert not first.equal(other)
        torch.manual_seed(3)
        first = p.sample((20,))
        torch.manual_seed(3)
        assert p.sample((20,)).equal(first)
        assert not p.sample((20,)).equal(first)

    def test_log_prob_normalises(self):
        for case in self.cases():
            p, every = self.make(case), self.stacked(case)
            logs, scores = p.log_prob(every), p.score(every)
            same(p.energy(every), -scores)
            same(logs, scores - p.log_partition)
            for item, w in enumerate(self.enumerate(case)):
                same(scores[: len(w), item], [s for _, s in w])
                same(logs[: len(w), item], list(self.oracle.log_probabilities(w).values()))
                same(logs[: len(w), item].exp().sum(), 1.0)
                same(p.log_prob(every[0])[item], logs[0, item])

    def test_entropy_is_the_mean_of_minus_log_prob(self):
        for case in self.cases():
            leaves = case.leaves()
            entropy = self.make(leaves).entropy()
            same(entropy, [self.oracle.entropy(w) for w in self.enumerate(case)])
            for gradient in torch.autograd.grad(entropy.sum(), list(leaves.scores.values())):
                assert gradient.isfinite().all()

    def test_divergence_and_cross_entropy(self):
        plain, tight = self.cases()
        unlike = {"plain": self.case(1), "tight": self.case(3, constrained=True)}
        pairs_of_cases = [(plain, plain), (plain, unlike["plain"]), (plain, tight)]
        pairs_of_cases += [(tight, tight), (tight, unlike["tight"]), (tight, plain)]
        for one, two in pairs_of_cases:
            p, q = self.make(one), self.make(two)
            pairs = list(zip(self.enumerate(one), self.enumerate(two), strict=True))
            divergence = kl_divergence(p, q)
            same(divergence, [self.oracle.kl_divergence(*pair) for pair in pairs])
            same(p.cross_entropy(q), [self.oracle.cross_entropy(*pair) for pair in pairs])
            same(p.cross_entropy(q), p.entropy() + divergence)
            assert (divergence > -1e-9).all()
            if one is two:
                same(divergence, torch.zeros(len(pairs)))
            else:
                assert (divergence > 1e-3).any()

    def test_another_set_is_refused(self):
        case = self.case()
        p, q = self.make(case), self.make(self.select(case, [1, 2, 0, *range(3, len(case.lengths))]))
        for ask in (kl_divergence, lambda p, q: p.cross_entropy(q)):
            with pytest.raises(ShapeError, match="must have the same"):
                ask(p, q)

    def test_gradcheck(self):
        case = self.case()
        best = self.make(case).mode
        for quantity in (
            lambda p: p.log_partition,
            lambda p: p.marginals,
            lambda p: p.entropy(),
            lambda p: p.score(best),
            lambda p: p.log_prob(best),
            lambda p: p.max_score,
            lambda p: p.tempered(0.7).log_partition,
        ):
            function, inputs = self.function_of(case, quantity)
            assert gradcheck(function, inputs, fast_mode=True)

    def test_gradcheck_of_divergence(self):
        case, other = self.case(), self.case(1)
        function, inputs = self.function_of(case, lambda p: kl_divergence(p, self.make(other)))
        assert gradcheck(function, inputs, fast_mode=True)
        function, inputs = self.function_of(other, lambda q: self.make(case).cross_entropy(q))
        assert gradcheck(function, inputs, fast_mode=True)

    def test_gradgradcheck(self):
        function, inputs = self.function_of(self.case(), lambda p: p.log_partition)
        assert gradgradcheck(function, inputs, fast_mode=True)

    def test_an_earlier_look_takes_no_gradient_away(self):
        fresh, leaves = self.case().leaves(), self.case().leaves()
        p = self.make(leaves)
        with torch.no_grad():
            looks = [quantity(p) for quantity in QUANTITIES.values()]
            looks += [p.sample(), p.score(p.mode), p.log_prob(p.mode), p.cross_entropy(p.tempered(2.0))]
        assert not any(look.requires_grad for look in looks)
        p.sample()
        for name in ("log_partition", "marginals", "max_score", "entropy", "best scores"):
            found = (QUANTITIES[name](p) ** 2).sum()
            assert found.requires_grad
            expected = (QUANTITIES[name](self.make(fresh)) ** 2).sum()
            for one, two in zip(
                torch.autograd.grad(found, list(leaves.scores.values()), retain_graph=True),
                torch.autograd.grad(expected, list(fresh.scores.values())),
                strict=True,
            ):
                same(one, two)

    @pytest.mark.parametrize("filling", [math.nan, math.inf, -math.inf])
    def test_padding_is_inert(self, filling):
        for clean in self.cases() if math.isnan(filling) else [self.case(2, constrained=filling < 0)]:
            masks = self.padding(clean)
            assert any(mask.any() for mask in masks.values())
            dirty = self.filled(clean, filling).leaves()
            clean = clean.leaves()
            p, q = self.make(dirty), self.make(clean)
            for quantity in QUANTITIES.values():
                same(quantity(p), quantity(q))
            same(p.log_prob(p.mode), q.log_prob(q.mode))
            same(kl_divergence(p, q), torch.zeros(len(clean.lengths)))
            total = p.log_partition.sum() + p.entropy().sum() + (p.marginals**2).sum() + p.log_prob(p.mode).sum()
            twin = q.log_partition.sum() + q.entropy().sum() + (q.marginals**2).sum() + q.log_prob(q.mode).sum()
            gradients = torch.autograd.grad(total, list(dirty.scores.values()))
            for name, found, expected in zip(
                dirty.scores, gradients, torch.autograd.grad(twin, list(clean.scores.values())), strict=True
            ):
                same(found, expected)
                if name in masks:
                    assert (found[masks[name]] == 0).all()
            samples = (each.sample((50,), generator=self.generator(5)) for each in (p, q))
            assert torch.equal(*samples)

    def test_the_callers_tensors_are_unchanged(self):
        for case in self.cases():
            dirty = self.filled(case, math.nan).leaves()
            before = {name: tensor.detach().clone() for name, tensor in dirty.scores.items()}
            lengths = dirty.lengths.clone()
            p = self.make(dirty)
            for quantity in QUANTITIES.values():
                quantity(p)
            p.sample((2,))
            (kl_divergence(p, p.tempered(2.0)) + p.log_prob(p.mode)).sum().backward()
            assert dirty.lengths.equal(lengths)
            for name, tensor in dirty.scores.items():
                torch.testing.assert_close(tensor.detach(), before[name], rtol=0, atol=0, equal_nan=True)

    def test_temperature_divides_scores(self):
        for case, temperature in itertools.product(self.cases(), (0.5, 1.0, 3.0)):
            p = self.make(case).tempered(temperature)
            weighted = [self.oracle.tempered(w, temperature) for w in self.enumerate(case)]
            same(p.log_partition, [self.oracle.log_partition(w) for w in weighted])
            same(p.marginals, self.dense([self.oracle.marginals(w, self.parts) for w in weighted], p.marginals))
            same(p.mode, self.make(case).mode)

    def test_a_constant_shifts_log_partition_alone(self):
        for case, constant in itertools.product(self.cases(), (-3.0, 200.0)):
            p, q = self.make(case), self.make(self.shifted(case, constant))
            same(q.log_partition, p.log_partition + constant)
            same(q.max_score, p.max_score + constant)
            same(q.marginals, p.marginals)
            same(q.entropy(), p.entropy())
            same(q.mode, p.mode)

    def test_float32_is_close_to_float64(self):
        for seed, constrained in ((0, False), (2, True)):
            single = self.case(seed, dtype=torch.float32, constrained=constrained)
            p, q = self.make(single), self.make(single.map(lambda _, tensor: tensor.double()))
            for name, quantity in QUANTITIES.items():
                found = quantity(p)
                assert found.dtype in (torch.float32, torch.int64), name
                same(found, quantity(q), rtol=2e-6, atol=2e-6)

    def test_an_item_without_structures_is_named(self):
        for clean, item in itertools.product(self.cases(), (0, 1)):
            case = self.infeasible(clean, item)
            p, y = self.make(case), self.make(clean).mode
            assert p.score(y).shape == p.energy(y).shape == (len(case.lengths),)
            needing = {**QUANTITIES, "sample": lambda p: p.sample(), "log_prob": lambda p, y=y: p.log_prob(y)}
            for quantity in needing.values():
                with pytest.raises(InfeasibleError, match=rf"\b{item}\b") as caught:
                    quantity(self.make(case))
                assert "\n" not in str(caught.value)
            rest = [b for b in range(len(case.lengths)) if b != item]
            same(self.make(self.select(case, rest)).log_partition, self.make(clean).log_partition[rest])

    def test_plus_adds_to_the_scores_of_parts(self):
        for case in self.cases():
            p = self.make(case)
            extra = torch.randn(p.marginals.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            extra = extra.to(p.marginals)
            more = p.plus(extra)
            changed = [
                [(y, s + math.fsum(float(extra[(item, *part)]) for part in self.parts(y))) for y, s in w]
                for item, w in enumerate(self.enumerate(case))
            ]
            same(more.log_partition, [self.oracle.log_partition(w) for w in changed])
            same(more.score(p.mode), p.score(p.mode) + (extra * p.parts_of(p.mode)).flatten(1).sum(1))
            with pytest.raises(ShapeError, match="must be"):
                p.plus(extra[..., :1] if extra.shape[-1] > 1 else extra[:1])

    def test_given_parts_is_conditioning(self):
        for case in self.cases():
            p = self.make(case)
            draws = p.sample((3,), generator=self.generator(2))
            allowed = p.parts_of(draws).sum(0) > 0
            q = p.given(allowed=allowed)
            for item, w in enumerate(self.enumerate(case)):
                kept = [(y, s) for y, s in w if all(allowed[(item, *part)] for part in self.parts(y))]
                same(q.log_partition[item], self.oracle.log_partition(kept))
                assert float(q.log_partition[item]) <= float(p.log_partition[item]) + 1e-9

    def test_parts_and_back(self):
        for case in self.cases():
            p = self.make(case)
            every = self.stacked(case)
            parts = p.parts_of(every)
            assert parts.shape == (len(every), *p.marginals.shape)
            for n, item in itertools.product(range(len(every)), range(len(case.lengths))):
                marked = [tuple(where) for where in parts[n, item].nonzero().tolist()]
                assert sorted(marked) == sorted(self.parts(self.structure(every[n, item])))
            assert torch.equal(p.structure_of(parts), every)

    def test_noise_on_the_parts(self):
        case = self.case()
        p = self.make(case)
        modes = p.perturbed_mode(200, scale=0.5, generator=self.generator(4))
        assert modes.shape == (200, *p.mode.shape)
        known = [{y for y, _ in w} for w in self.enumerate(case)]
        assert all(self.structure(modes[n, item]) in known[item] for n in range(200) for item in range(len(known)))
        assert torch.equal(p.perturbed_mode(1, scale=1e-9, generator=self.generator())[0], p.mode)
        mean = p.expected_mode(200, scale=0.5, generator=self.generator(4))
        same(mean, p.parts_of(modes).mean(0))
        relaxed = p.relaxed_sample((7,), temperature=1e-3, generator=self.generator(5))
        hard = p.relaxed_sample((7,), temperature=0.5, hard=True, generator=self.generator(5))
        same(relaxed, hard, rtol=0, atol=1e-3)
        leaves = case.leaves()
        for value in (
            self.make(leaves).expected_mode(20, generator=self.generator(6)),
            self.make(leaves).relaxed_sample((2,), hard=True, generator=self.generator(6)),
        ):
            scores = leaves.scores[self.part_scores]
            factors = torch.arange(value.numel(), device=value.device).view(value.shape)
            (gradient,) = torch.autograd.grad((value * factors).sum(), scores)
            assert gradient.isfinite().all()
            assert gradient.abs().sum() > 0
            mask = self.padding(case).get(self.part_scores)
            assert mask is None or (gradient[mask.to(gradient.device)] == 0).all()

    def test_posterior_decoding_gets_most_parts_right(self):
        for case in self.cases():
            p = self.make(case)
            found, mode = ([(p.marginals * p.parts_of(y)).flatten(1).sum(1)] for y in (p.max_posterior(), p.mode))
            assert (found[0] >= mode[0] - 1e-9).all()
