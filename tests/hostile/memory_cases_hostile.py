"""Memories, Hopfield layers and sparse maps that are given what nobody should.

A case passes where the answer is that of plain PyTorch (NaN wherever that has one) or a ``ThalwegError`` of one line.
Run by :mod:`forks`, each in a process of its own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hostile.forks import refused
from thalweg.energies import HopfieldMemory
from thalweg.kernels import memory, sparse
from thalweg.kernels.reference import memory as plain_memory
from thalweg.kernels.reference import sparse_maps as plain_maps
from thalweg.layers import Hopfield, HopfieldLookup, HopfieldPooling
from thalweg.layers import sparse as maps

NAN, INF = math.nan, math.inf
WRONG = {"nan": NAN, "inf": INF, "-inf": -INF}
SIZES = ((1, 1, 1), (1, 3, 2), (2, 5, 4), (9, 100, 16), (20, 200, 8))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def shown(found: Tensor, plain: Tensor) -> None:
    """Equal where plain PyTorch has numbers that agree; never a finite number where it has none."""
    assert found.shape == plain.shape
    finite = plain.isfinite()
    assert not found[~finite].isfinite().any(), (found, plain)
    both = finite & found.isfinite()
    torch.testing.assert_close(found[both], plain[both], atol=1e-4, rtol=1e-3)


def exactly_shown(found: Tensor, plain: Tensor) -> None:
    shown(found, plain)
    assert torch.equal(found.isfinite(), plain.isfinite()), (found, plain)


def _associate_case(value: float) -> None:
    """NaN and infinities in queries, patterns and values, near and far, show as in plain PyTorch."""
    for where in ("queries", "keys", "values"):
        for Q, N, D, beta in ((*size, beta) for size in SIZES for beta in (1.0, 1e-3, 1e3)):
            parts = {"queries": draw(Q, D), "keys": draw(N, D, seed=1), "values": draw(N, D, seed=2)}
            parts[where][len(parts[where]) // 2, D // 2] = value
            queries, keys, values = parts.values()
            mixed, lse = memory.associate(queries, keys, values, beta=beta)
            want, level = plain_memory.associate(queries, keys, values, beta, None, None)
            exactly_shown(mixed, want)
            shown(lse, level)
            if where != "values":
                shown(
                    memory.attend(queries, keys, beta), plain_memory.associate(queries, keys, keys, beta, None, None)[0]
                )


def _settle_case(value: float) -> None:
    for where in ("queries", "patterns"):
        for Q, N, D, steps in ((*size, steps) for size in SIZES for steps in (0, 1, 4)):
            parts = {"queries": draw(Q, D), "patterns": draw(N, D, seed=1)}
            parts[where][len(parts[where]) // 2, D // 2] = value
            found = memory.settle(*parts.values(), beta=1.0, max_steps=steps, tol=1e-5)
            plain = plain_memory.settle(*parts.values(), 1.0, steps, 1e-5, None, None)
            shown(found.state, plain.state)
            shown(found.energies, plain.energies)


def _far_case() -> None:
    """What is far below the best pattern counts for nothing, unless it is no number."""
    keys = torch.zeros(300, 4)
    keys[:, 0] = torch.linspace(0, -500, 300)
    query, values = torch.tensor([[10.0, 0.0, 0.0, 0.0]]), draw(300, 4)
    whole = memory.associate(query, keys, values, beta=1.0)[0]
    torch.testing.assert_close(whole, values[:1])
    for value in (NAN, INF, -INF):
        values[250, 2] = value
        mixed = memory.associate(query, keys, values, beta=1.0)[0]
        assert mixed[0, 2].isnan()
        assert mixed[0, [0, 1, 3]].isfinite().all()
    values[250, 2] = 1e38  # times a weight of nothing
    torch.testing.assert_close(memory.associate(query, keys, values, beta=1.0)[0], values[:1])


def _large_case() -> None:
    """Scores beyond what a float32 counts one by one have an answer still."""
    for size in (1e9, 1e15, 1e25):
        queries, keys = draw(3, 5) * size, draw(40, 5, seed=1)
        found = memory.attend(queries, keys, 1.0)
        torch.testing.assert_close(found, keys[(queries @ keys.T).argmax(1)])


def _memory_case(name: str) -> None:
    wrong: dict[str, Any] = {
        "whole numbers": torch.ones(2, 4).long(),
        "truth values": torch.ones(2, 4).bool(),
        "complex": torch.ones(2, 4, dtype=torch.complex64),
        "another width": draw(2, 5),
        "no axis": torch.tensor(1.0),
        "nothing": None,
        "a list": [[1.0] * 4],
    }
    stored = HopfieldMemory(draw(6, 4))
    for query in wrong.values():
        refused(lambda query=query: getattr(stored, name)(query), "`q`")
    # Rows that are none, shared or scattered are what they say; nothing was changed by what was refused.
    rows = draw(3, 4)

    def answer(queries: Tensor) -> Tensor:
        found = getattr(stored, name)(queries)
        return found if isinstance(found, Tensor) else found.state

    torch.testing.assert_close(answer(rows.t().contiguous().t()), answer(rows))
    torch.testing.assert_close(answer(rows[:1].expand(3, 4)), answer(rows[:1].repeat(3, 1)))
    torch.testing.assert_close(answer(rows.repeat(1, 2)[:, :4]), answer(rows))
    assert len(answer(rows[:0])) == 0


def _patterns_case() -> None:
    for patterns in (None, [[1.0]], torch.ones(2, 3).long(), draw(4), draw(0, 3), draw(3, 0), draw(1, 1, 1, 1)):
        refused(lambda patterns=patterns: HopfieldMemory(patterns), "`patterns`")
    for beta in (0, -1, NAN, INF, "a", 10**400, True, torch.ones(2), torch.tensor(NAN)):
        refused(lambda beta=beta: HopfieldMemory(draw(3, 2), beta=beta), "`beta`")
    for beta in (0.0, -1.0, NAN, torch.tensor(NAN), torch.tensor(-1.0), torch.tensor(INF)):
        refused(lambda beta=beta: memory.associate(draw(1, 2), draw(3, 2), draw(3, 2), beta=beta), "`beta`")
    stored, query = HopfieldMemory(draw(3, 2)), draw(1, 2)
    for steps in (-1, 1.5, None, True, NAN):
        refused(lambda steps=steps: stored.retrieve(query, max_steps=steps), "`max_steps`")
    for steps in (10**12, 10**18, 10**30):
        refused(lambda steps=steps: stored.retrieve(query, max_steps=steps), "`max_steps`", "memory")
    for tol in (-1, NAN, None, "a", True, 10**400):
        refused(lambda tol=tol: stored.retrieve(query, tol=tol), "`tol`")
    for k in (0, -1, None, 1.5, True, 10**18):
        refused(lambda k=k: memory.nearest(query, draw(3, 2), k), "`k`")
    for separation in (None, "nope", [1], 0.5, NAN, True):
        refused(lambda separation=separation: HopfieldMemory(draw(3, 2), separation=separation))


def _spread_case() -> None:
    """Patterns of any strides are what they say, and follow what is done to them in place."""
    base, queries = draw(6, 8), draw(2, 4)
    for patterns in (base[:, ::2], base[::2, 4:], base[:, 1:5], base.t()[:4].t(), base[:1, :4].expand(5, 4)):
        stored, copied = HopfieldMemory(patterns), HopfieldMemory(patterns.contiguous())
        for name in ("update", "energy", "concave"):
            torch.testing.assert_close(getattr(stored, name)(queries), getattr(copied, name)(queries))
        torch.testing.assert_close(stored.retrieve(queries).state, copied.retrieve(queries).state)
    patterns = draw(6, 4)
    stored = HopfieldMemory(patterns)
    stored.update(queries)
    with torch.no_grad():
        stored.patterns.fill_(NAN)
    assert stored.update(queries).isnan().all()
    assert stored.energy(queries).isnan().all()
    assert stored.retrieve(queries).state.isnan().all()


def _given_away_case() -> None:
    """What a retrieval gave is the caller's: changed, it changes nothing that is still to be asked for."""
    for separation in ("softmax", "sparsemax"):
        for stored in (HopfieldMemory(draw(6, 4), beta=5.0, separation=separation),):
            wanted = stored.retrieve(draw(2, 4)).weights
            found = stored.retrieve(draw(2, 4))
            found.state.add_(100.0)
            found.energies.zero_()
            torch.testing.assert_close(found.weights, wanted)
            torch.testing.assert_close(stored.retrieve(draw(2, 4)).weights, wanted)


def _transform_case() -> None:
    """Transforms of ``torch.func`` and forward derivatives see plain operations: none is lost, none is refused."""
    queries = draw(2, 4)
    for separation in ("softmax", "sparsemax"):
        stored = HopfieldMemory(draw(20, 4), separation=separation)
        names = ("energy", "concave", "weights", "update", "recall")
        asked: list[Any] = [*(getattr(stored, name) for name in names), lambda q: stored.retrieve(q, 3).state]  # noqa: B023
        for ask in [*asked, lambda q: memory.associate(q, stored.patterns, stored.patterns, beta=1.0)[0]]:  # noqa: B023

            def value(q: Tensor, ask: Callable[[Tensor], Tensor] = ask) -> Tensor:
                return ask(q).square().sum()

            wanted = torch.autograd.functional.jacobian(value, queries)
            for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
                torch.testing.assert_close(transform(value)(queries), wanted, atol=1e-4, rtol=1e-3)
            with forward_ad.dual_level():
                moving = forward_ad.make_dual(queries, torch.ones_like(queries))
                found = forward_ad.unpack_dual(value(moving)).tangent
            torch.testing.assert_close(found, wanted.sum(), atol=1e-4, rtol=1e-3)
        for ask in asked[:4]:
            torch.testing.assert_close(torch.func.vmap(lambda q, ask=ask: ask(q[None])[0])(queries), ask(queries))
    layer, x = Hopfield(4, heads=2), draw(2, 3, 4)
    wanted = torch.autograd.functional.jacobian(lambda x: layer(x).square().sum(), x)
    torch.testing.assert_close(torch.func.jacfwd(lambda x: layer(x).square().sum())(x), wanted, atol=1e-4, rtol=1e-3)


def _layer_case(make: Callable[[], Any], *, shows: bool = True) -> None:
    layer = make().eval()
    for wrong in (None, [[1.0]], torch.ones(2, 3, 4).long(), draw(2, 3, 5), draw(3, 4)):
        refused(lambda wrong=wrong: layer(wrong))
    x = draw(2, 3, 4)
    whole = layer(x)
    torch.testing.assert_close(layer(x.transpose(0, 1).contiguous().transpose(0, 1)), whole)
    torch.testing.assert_close(layer(x[:1].expand(2, 3, 4)), layer(x[:1].repeat(2, 1, 1)))
    assert len(layer(x[:0])) == 0
    x[0, 1, 2] = NAN
    spoiled = layer(x)
    # PyTorch's attention takes a query that is no number, among few patterns, for one that sees none.
    assert not shows or spoiled[0].isnan().any()
    torch.testing.assert_close(spoiled[1], whole[1])


def _bare_layer_case() -> None:
    """A layer that is nothing but one attention, which a kernel of its own computes."""
    layer = Hopfield(4, static=("stored", "state", "values", "output"), normalise=())
    stored, state = draw(1, 50, 4), draw(1, 3, 4)
    refused(lambda: layer(stored.long(), state.long()), "floating point")
    for value in WRONG.values():
        spoiled = stored.clone()
        spoiled[0, 20, 1] = value
        shown(layer(spoiled, state), torch.softmax(state @ spoiled.mT / 2, -1) @ spoiled)


def _map_case(name: str) -> None:
    scores = draw(4, 6)
    function = getattr(maps, name)
    for wrong in (torch.arange(6), torch.ones(3).bool(), torch.ones(2, dtype=torch.complex64), None, [1.0, 2.0]):
        refused(lambda wrong=wrong: function(wrong), "`scores`", "floating point")
    for dim in (2, -3, None, 1.0, "a", 10**18):
        refused(lambda dim=dim: function(scores, dim=dim), "`dim`")
    torch.testing.assert_close(function(scores.t().contiguous().t()), function(scores))
    torch.testing.assert_close(function(scores[:1].expand(4, 6)), function(scores[:1].repeat(4, 1)))
    for empty in (draw(0), draw(3, 0), draw(0, 3)):
        assert function(empty).shape == empty.shape
    given = scores.clone()
    weights = function(given)
    given.fill_(NAN)
    torch.testing.assert_close(function(scores), weights)
    for value in (NAN, INF):
        given = scores.clone()
        given[1, 2] = value
        found = function(given)
        assert found[1].isnan().all()
        torch.testing.assert_close(found[[0, 2, 3]], weights[[0, 2, 3]])


def _alpha_case() -> None:
    scores = draw(4, 6)
    for alpha in (
        0,
        -1,
        NAN,
        INF,
        None,
        "a",
        True,
        10**400,
        torch.tensor(NAN),
        torch.tensor([[1.0], [INF], [2.0], [3.0]]),
    ):
        refused(lambda alpha=alpha: maps.entmax(scores, alpha), "`alpha`")
        refused(lambda alpha=alpha: maps.normmax(scores, alpha), "`alpha`")
    refused(lambda: maps.entmax(torch.arange(3), 1.0), "floating point")
    for k in (0, -1, NAN, 7, None, True, "a", INF):
        refused(lambda k=k: maps.k_subsets(scores, k), "`k`")
    refused(lambda: sparse.weights_of_rows(scores[0], 2.0, sparse.ENTMAX), "(R, N)")


def _rows_case(value: float) -> None:
    """Compiled maps beside plain ones, row by row, with values and gradients."""
    for size in (1, 3, 17, 100):
        for kind in (torch.float32, torch.float64):
            scores, gold = draw(5, size).to(kind), torch.arange(5) % size
            scores[1, size // 2], scores[3] = value, value
            for alpha in (1.3, 1.5, 2.0, 3.0):
                exactly_shown(
                    sparse.weights_of_rows(scores, alpha, sparse.ENTMAX),
                    plain_maps.entmax(scores, torch.tensor(alpha, dtype=torch.float64)),
                )
                loss = maps.entmax_loss(scores, gold, alpha)
                assert loss[[0, 2, 4]].isfinite().all()
                assert not loss[3].isfinite()
                assert value == -INF or not loss[1].isfinite()


def _gold_case() -> None:
    scores = draw(4, 6)
    for loss in (maps.sparsemax_loss, maps.entmax15_loss, maps.entmax_loss):
        for wrong in ([-1, 0, 0, 0], [6, 0, 0, 0], [10**12, 0, 0, 0]):
            refused(lambda loss=loss, wrong=wrong: loss(scores, torch.tensor(wrong)), "`gold`", "0..5")
        for wrong in (None, [0, 1, 2, 3], torch.zeros(4), torch.zeros(3).long(), torch.zeros(4).int()):
            refused(lambda loss=loss, wrong=wrong: loss(scores, wrong), "`gold`")
        taught, gold = scores.clone().requires_grad_(), torch.arange(4)
        value = loss(taught, gold)
        gold.fill_(5)  # what was gold stays gold
        value.sum().backward()
        again = scores.clone().requires_grad_()
        loss(again, torch.arange(4)).sum().backward()
        assert torch.equal(taught.grad, again.grad)


def _subset_case() -> None:
    scores = draw(4, 6)
    for twice in ([[0, 0]] * 4, [[0, 1]] * 3 + [[5, 5]]):
        refused(lambda twice=twice: maps.k_subsets_loss(scores, torch.tensor(twice), 2), "`gold`", "2 different")
    refused(lambda: maps.k_subsets_loss(scores, torch.tensor([[0, 0, 1, 1, 0, 1]] * 4), 6), "`gold`", "6 different")
    for wrong in ([[0, 6]] * 4, [[0, -1]] * 4, [[10**12, 0]] * 4):
        refused(lambda wrong=wrong: maps.k_subsets_loss(scores, torch.tensor(wrong), 2), "`gold`", "0..5")
    for hot in ([1, 1, 1, 0, 0, 0], [0.5, 1, 0, 0, 0, 0], [NAN, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]):
        refused(lambda hot=hot: maps.k_subsets_loss(scores, torch.tensor([hot] * 4), 2), "`gold`")
    for k in (0, 2.0, None, True, NAN, 7):
        refused(lambda k=k: maps.k_subsets_loss(scores, torch.tensor([[0, 1]] * 4), k), "`k`")
    whole = maps.k_subsets_loss(scores, torch.ones(4, 6).long(), 6)
    assert torch.equal(maps.k_subsets_loss(scores, torch.arange(6).expand(4, 6), 6), whole)


def _threads_case() -> None:
    """Many threads in one memory, some of whom are refused."""
    torch.set_num_threads(2)
    stored, queries = HopfieldMemory(draw(500, 32), beta=2.0), draw(40, 32)
    wanted = stored.retrieve(queries).state
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                torch.testing.assert_close(stored.retrieve(queries).state, wanted)
                refused(lambda: stored.update(draw(2, 3)), "`q`")
                assert stored.update(torch.full((1, 32), NAN)).isnan().all()
        except BaseException as error:  # told to the thread that waits
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


CASES: dict[str, Callable[[], None]] = {
    "far away": _far_case,
    "large scores": _large_case,
    "patterns and settings": _patterns_case,
    "strides": _spread_case,
    "given away": _given_away_case,
    "transforms": _transform_case,
    "layer": partial(_layer_case, lambda: Hopfield(4, heads=2)),
    "layer sparsemax": partial(_layer_case, lambda: Hopfield(4, separation="sparsemax")),
    "pooling": partial(_layer_case, lambda: HopfieldPooling(4, queries=2)),
    "lookup": partial(_layer_case, lambda: HopfieldLookup(4, patterns=5), shows=False),
    "bare layer": _bare_layer_case,
    "alpha": _alpha_case,
    "gold": _gold_case,
    "subsets": _subset_case,
    "threads": _threads_case,
}
for _name, _value in WRONG.items():
    CASES[f"associate: {_name}"] = partial(_associate_case, _value)
    CASES[f"settle: {_name}"] = partial(_settle_case, _value)
    CASES[f"rows: {_name}"] = partial(_rows_case, _value)
for _name in ("update", "retrieve", "energy", "convex", "concave", "weights", "recall"):
    CASES[f"memory: {_name}"] = partial(_memory_case, _name)
for _name in ("sparsemax", "entmax15", "entmax", "normmax"):
    CASES[f"map: {_name}"] = partial(_map_case, _name)


def at_random(seed: int) -> None:
    """Any sizes, any number anywhere, any beta: the kernels beside plain PyTorch."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    Q, N, D, E = number(1, 40), number(1, 400), number(1, 40), number(1, 40)
    queries, keys, values = draw(Q, D, seed=seed), draw(N, D, seed=seed + 1), draw(N, E, seed=seed + 2)
    value = (NAN, INF, -INF, 1e30, 0.0)[number(0, 5)]
    part = (queries, keys, values)[number(0, 3)]
    part[number(0, part.size(0)), number(0, part.size(1))] = value
    beta, mask = 10.0 ** number(-3, 1), torch.rand(N, generator=generator) < 0.8
    for present in (None, mask) if mask.any() else (None,):
        mixed, lse = memory.associate(queries, keys, values, beta=beta, mask=present)
        want, level = plain_memory.associate(queries, keys, values, beta, present, None)
        shown(mixed, want)
        shown(lse, level)
        found = memory.settle(queries, keys, beta=beta, max_steps=3, tol=1e-6, mask=present)
        plain = plain_memory.settle(queries, keys, beta, 3, 1e-6, present, None)
        assert not found.state[~plain.state.isfinite()].isfinite().any()
        assert not found.energies[~plain.energies.isfinite()].isfinite().any()
    rows = values * 10.0 ** number(-2, 3)
    alpha = (1.1, 1.5, 2.0, 4.0)[number(0, 4)]
    shown(maps.entmax(rows, alpha), plain_maps.entmax(rows, torch.tensor(alpha, dtype=torch.float64)))


def warm() -> None:
    """Compile what the cases share."""
    _far_case()
    _associate_case(NAN)
    _settle_case(INF)
    _bare_layer_case()
    stored = HopfieldMemory(draw(30, 4))
    stored.retrieve(draw(2, 4), 2)
    stored.update(draw(20, 4))
    stored.energy(draw(2, 4))
    maps.entmax_loss(draw(2, 3), torch.tensor([0, 1]), 1.3)
    maps.sparsemax(draw(2, 3))
    maps.entmax15_loss(draw(2, 3).double(), torch.tensor([0, 1]))
