"""Chains and CRF layers under values that no one should give: the reference's answer or a ThalwegError."""

from __future__ import annotations

import math
import random
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from hostile import forks
from thalweg.errors import ShapeError, ThalwegError
from thalweg.inference import LinearChain, SparseTransitions, sparse_map
from thalweg.kernels.potentials import Chain
from thalweg.layers import CRF

CASES: dict[str, Callable[[], None]] = {}

refused = partial(forks.refused, kind=ShapeError)

SIZES = ((1, 4, 3), (2, 1, 3), (32, 5, 3), (3, 6, 40), (2, 5, 1))  # one item, one step, lanes, rows, one label
KINDS = ("shared", "item", "step", "sparse")


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def scores(size: tuple[int, int, int], kind: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What a chain is made of, drawn from one seed."""
    B, T, C = size
    seed = torch.Generator().manual_seed(B + 10 * T + 100 * C)
    moves = {"shared": (C, C), "sparse": (C, C), "item": (B, C, C), "step": (B, T - 1, C, C)}[kind]
    shapes = {"emissions": (B, T, C), "transitions": moves, "start": (C,), "end": (C,)}
    return {name: torch.randn(shape, generator=seed, dtype=dtype) for name, shape in shapes.items()}


def lengths_of(size: tuple[int, int, int]) -> Tensor:
    return torch.arange(size[0]) % size[1] + 1


def build(given: dict[str, Tensor], kind: str, **settings) -> LinearChain:
    given = dict(given)
    if kind == "sparse":
        given["transitions"] = SparseTransitions.of_dense(given["transitions"])  # type: ignore[assignment]
    return LinearChain(given.pop("emissions"), given.pop("transitions"), **given, **settings)


def quantities(chain: LinearChain, gold: Tensor) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Every number that a chain gives and that must be as the reference has it."""
    yield "log_partition", lambda: chain.log_partition
    yield "log_prob", lambda: chain.log_prob(gold)
    yield "score", lambda: chain.score(gold)
    yield "marginals", lambda: chain.marginals
    yield "edge_marginals", lambda: chain.edge_marginals
    yield "entropy", chain.entropy
    yield "cross_entropy", lambda: chain.cross_entropy(chain)
    yield "max_score", lambda: chain.max_score
    yield "top_k", lambda: chain.top_k(2)[0]


def gradient(chain: LinearChain, gold: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(chain.log_prob(gold).sum(), leaf)[0]


def answer(compute: Callable[[], Tensor]) -> Tensor | ThalwegError:
    try:
        return compute()
    except ThalwegError as error:
        if "\n" in str(error):
            raise
        return error


def alike(name: str, ours: Tensor | ThalwegError, reference: Tensor | ThalwegError) -> None:
    """Both refuse, or both have the same numbers, NaN where the other has NaN."""
    if isinstance(ours, ThalwegError) or isinstance(reference, ThalwegError):
        assert type(ours) is type(reference), (name, ours, reference)
        return
    torch.testing.assert_close(
        ours, reference, rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )


def against_reference(size: tuple[int, int, int], kind: str, name: str, value: float, place: int) -> None:
    """One score replaced: every quantity and the gradient as the reference has them, by the same errors if any."""
    given = scores(size, kind)
    flat = given[name].view(-1)
    if not len(flat):
        return
    flat[place % len(flat)] = value
    gold = torch.zeros(size[:2], dtype=torch.long)
    for lengths in (None, lengths_of(size)):
        chains = [build(given, kind, lengths=lengths, backend=backend) for backend in ("auto", "reference")]
        for (what, ours), (_, theirs) in zip(*(quantities(chain, gold) for chain in chains), strict=True):
            alike(f"{what} {size} {kind} {name}[{place}] = {value}", answer(ours), answer(theirs))
        if lengths is None and value != value and kind == "shared" and name == "emissions":
            assert chains[0].log_partition.isnan().any()
            assert chains[0].max_score.isnan().any()
        found = []
        for backend in ("auto", "reference"):
            leaf = given["emissions"].clone().requires_grad_()
            chain = build({**given, "emissions": leaf}, kind, lengths=lengths, backend=backend)
            found.append(answer(lambda chain=chain, leaf=leaf: gradient(chain, gold, leaf)))
        alike(f"gradient {size} {kind} {name}[{place}] = {value}", *found)


def _every_place() -> None:
    for kind, name in product(KINDS, ("emissions", "transitions", "start", "end")):

        def run(kind: str = kind, name: str = name) -> None:
            for size, value in product(SIZES, (math.nan, math.inf)):
                against_reference(size, kind, name, value, place=1)

        CASES[f"{kind}_{name}_nan_or_infinite"] = run


_every_place()


@case
def every_score_is_nan() -> None:
    for size in SIZES:
        chain = LinearChain(torch.full(size, math.nan), torch.zeros(size[2], size[2]))
        assert chain.log_partition.isnan().all()


@case
def an_infinite_score_is_named() -> None:
    for size in ((1, 4, 3), (32, 5, 3), (3, 6, 40)):
        given = scores(size, "shared")
        given["emissions"][0, 2, 1] = math.inf
        chain = build(given, "shared")
        gold = torch.zeros(size[:2], dtype=torch.long)
        asked = [compute for name, compute in quantities(chain, gold) if name != "score"]
        for compute in (*asked, lambda: chain.mode, lambda: chain.sample((2,)), chain.max_posterior):  # noqa: B023
            refused(compute, "+inf", "`emissions`", "position 2, label 1 of batch item 0")


@case
def nan_in_padding_counts_for_nothing() -> None:
    for size in SIZES[:4]:
        clean, dirty = scores(size, "shared"), scores(size, "shared")
        lengths = lengths_of(size)
        past = torch.arange(size[1]) >= lengths.unsqueeze(1)
        for value in (math.nan, math.inf, -math.inf):
            dirty["emissions"][past] = value
            gold = torch.zeros(size[:2], dtype=torch.long)
            ours = quantities(build(dirty, "shared", lengths=lengths), gold)
            theirs = quantities(build(clean, "shared", lengths=lengths), gold)
            for (name, one), (_, two) in zip(ours, theirs, strict=True):
                alike(name, one(), two())


@case
def a_layer_that_diverged_shows_it() -> None:
    for B, T, C in SIZES:
        layer = CRF(C, batch_first=True)
        for parameter in layer.parameters():
            emissions = torch.randn(B, T, C, requires_grad=True)
            gold = torch.zeros(B, T, dtype=torch.long)
            with torch.no_grad():
                kept = parameter.clone()
                parameter.view(-1)[0] = math.nan
            used = parameter is not layer.transitions or T > 1
            if used:
                assert layer(emissions, gold).isnan()
                assert layer.loss(emissions, gold).isnan().any()
                assert layer.k_best(emissions, 2).probabilities.isnan().any()
            with torch.no_grad():
                parameter.copy_(kept)
        bad = torch.randn(B, T, C)
        bad[0, 0, 0] = math.nan
        assert layer(bad, gold).isnan()


@case
def what_diverged_shows_with_a_graph_and_in_labels() -> None:
    for size, kind in product(SIZES, KINDS):
        given = scores(size, kind)
        given["emissions"][0, -1, 0] = math.nan
        leaf = given["emissions"].clone().requires_grad_()
        chain = build({**given, "emissions": leaf}, kind)
        for compute in (lambda: chain.max_score, lambda: chain.top_k(2)[0]):  # noqa: B023
            values = compute()
            assert values[0].isnan().all()
            assert not values[1:].isnan().any()
            assert torch.autograd.grad(values.nan_to_num(neginf=0.0).sum() + values[0].sum(), leaf)[0][0].isnan().any()
        for labels in (chain.mode, chain.max_posterior(), chain.top_k(1)[1].squeeze(1), chain.sample()):
            assert (labels[0] == -1).all()
            assert (labels[1:] >= 0).all()


@case
def lengths_changed_afterwards() -> None:
    for size, kind, value in product(SIZES, KINDS, (10**6, 0, -5, 2**62)):
        given, lengths = scores(size, kind), lengths_of(size)
        gold = torch.zeros(size[:2], dtype=torch.long)
        want = build(given, kind, lengths=lengths.clone(), backend="reference")
        theirs = lengths.clone()
        leaf = given["emissions"].clone().requires_grad_()
        chain = build(given, kind, lengths=theirs)
        graph = build({**given, "emissions": leaf}, kind, lengths=theirs)
        entropy = graph.entropy()
        theirs.fill_(value)
        for (name, one), (_, two) in zip(quantities(chain, gold), quantities(want, gold), strict=True):
            alike(name, one(), two())
        assert torch.equal(chain.mode, want.mode)
        other = given["emissions"].clone().requires_grad_()
        expected = build({**given, "emissions": other}, kind, lengths=lengths, backend="reference").entropy()
        alike("gradient", *(torch.autograd.grad(x.sum(), y)[0] for x, y in ((entropy, leaf), (expected, other))))


@case
def lengths_handed_out_or_held_are_no_way_in() -> None:
    for size in SIZES:
        chain = build(scores(size, "shared"), "shared", lengths=lengths_of(size))
        chain.lengths.fill_(10**6)
        before = chain.mode
        chain.potentials.lengths.fill_(10**6)  # nobody should; it is told of
        fresh = chain.tempered(1.0)
        for compute in (lambda: fresh.log_partition, lambda: fresh.mode, lambda: fresh.marginals):  # noqa: B023
            refused(compute, "`lengths` must lie in 1..T")
        assert torch.equal(chain.mode, before)


@case
def gold_labels_changed_before_the_backward_pass() -> None:
    for size, kind, low_memory, value in product(SIZES, KINDS, (False, True), (10**9, -(10**9), 0)):
        given = scores(size, kind)
        found = []
        for change in (True, False):
            leaf = given["emissions"].clone().requires_grad_()
            gold = torch.arange(size[0] * size[1]).view(size[:2]) % size[2]
            weights = torch.arange(1.0, size[0] + 1)
            value_of = build({**given, "emissions": leaf}, kind, low_memory=low_memory).log_prob(gold)
            if change:
                gold.fill_(value)
            found.append(torch.autograd.grad((value_of * weights).sum(), leaf)[0])
        alike("gradient", *found)


@case
def labels_out_of_range() -> None:
    for size, kind, value in product(SIZES, KINDS, (-1, -(10**15), 10**15, 40)):
        chain = build(scores(size, kind), kind)
        gold = torch.zeros(size[:2], dtype=torch.long)
        gold[-1, -1] = value
        for compute in (lambda: chain.log_prob(gold), lambda: chain.score(gold)):  # noqa: B023
            refused(compute, "labels must lie in", str(value), f"position {size[1] - 1} of batch item {size[0] - 1}")
        layer = CRF(size[2], batch_first=True)
        refused(lambda: layer(torch.randn(size), gold), "labels must lie in", str(value))  # noqa: B023


@case
def labels_of_a_wrong_kind() -> None:
    chain = build(scores((2, 4, 3), "shared"), "shared")
    for gold in (torch.zeros(2, 4), torch.zeros(4, 2).long(), torch.zeros(2, 3).long(), torch.zeros(4).long()):
        refused(lambda gold=gold: chain.log_prob(gold), "labels must be integers")
    for kind in (torch.int8, torch.int32, torch.uint8, torch.bool):
        alike(str(kind), chain.log_prob(torch.ones(2, 4).to(kind)), chain.log_prob(torch.ones(2, 4).long()))
    sliced = torch.zeros(4, 2, dtype=torch.long).t()
    alike("transposed", chain.log_prob(sliced), chain.log_prob(sliced.contiguous()))
    one = torch.zeros(1, 1, dtype=torch.long).expand(2, 4)
    alike("expanded", chain.log_prob(one), chain.log_prob(one.contiguous()))


@case
def wrong_inputs_are_told_of() -> None:
    e, a = torch.randn(2, 4, 3), torch.randn(3, 3)
    refused(lambda: LinearChain(e.tolist(), a), "`emissions`", "list")  # type: ignore[arg-type]
    refused(lambda: LinearChain(None, a), "`emissions`", "NoneType")  # type: ignore[arg-type]
    refused(lambda: LinearChain(e, a.tolist()), "`transitions`", "list")  # type: ignore[arg-type]
    refused(lambda: LinearChain(e.to(torch.complex64), a), "`emissions`", "complex64")
    refused(lambda: LinearChain(e, a.to(torch.complex64)), "`transitions`", "complex64")
    refused(lambda: LinearChain(e.long(), a), "`emissions`", "floating")
    refused(lambda: LinearChain(e, a, start=[1.0] * 3), "`start`", "list")  # type: ignore[arg-type]
    refused(lambda: LinearChain(e, a, end=torch.zeros(4)), "`end`", "(4,)")
    refused(lambda: LinearChain(e.to_sparse(), a), "`emissions`", "sparse")
    refused(lambda: LinearChain(torch.randn(2, 0, 3), a), "`emissions`")
    refused(lambda: LinearChain(torch.randn(2, 4, 0), torch.zeros(0, 0)), "`emissions`")
    for lengths in ([1], [0, 1], [5, 1], [-1, 1], [1.0, 2.0], [True, True], "ab", [[1, 2]], [10**30, 1], [None, 1]):
        refused(lambda lengths=lengths: LinearChain(e, a, lengths=lengths), "`lengths`")  # type: ignore[arg-type]
    for k in (0, -1, 1.5, True, None, math.nan, "2"):
        refused(lambda k=k: LinearChain(e, a).top_k(k), "`k`")  # type: ignore[arg-type]


@case
def layouts_that_are_not_contiguous() -> None:
    for size in SIZES:
        B, T, C = size
        given = scores(size, "shared")
        gold = torch.zeros(B, T, dtype=torch.long)
        want = dict(quantities(build(given, "shared"), gold))
        views = {
            "transposed": given["emissions"].permute(2, 1, 0).contiguous().permute(2, 1, 0),
            "every second": torch.randn(2 * B, T, 2 * C)[::2, :, ::2].copy_(given["emissions"]),
        }
        for layout, emissions in views.items():
            moves = given["transitions"].t().contiguous().t()
            chain = LinearChain(emissions, moves, start=given["start"], end=given["end"])
            for name, compute in quantities(chain, gold):
                alike(f"{layout} {name}", compute(), want[name]())
        flat = torch.randn(1, 1, C).expand(B, T, C)
        zero = torch.zeros(1).expand(C, C)
        for (name, one), (_, two) in zip(
            quantities(LinearChain(flat, zero), gold),
            quantities(LinearChain(flat.clone(), zero.clone()), gold),
            strict=True,
        ):
            alike(f"expanded {name}", one(), two())


@case
def no_items() -> None:
    chain = LinearChain(torch.randn(0, 4, 3), torch.randn(3, 3))
    gold = torch.zeros(0, 4, dtype=torch.long)
    assert all(len(compute()) == 0 for _, compute in quantities(chain, gold))
    assert chain.mode.shape == (0, 4)
    assert chain.sample((2,)).shape == (2, 0, 4)


@case
def results_belong_to_the_caller() -> None:
    for size in SIZES:
        chain = build(scores(size, "shared"), "shared")
        gold = torch.zeros(size[:2], dtype=torch.long)
        before = {name: compute().clone() for name, compute in quantities(chain, gold)}
        mode = chain.mode.clone()
        for _, compute in quantities(chain, gold):
            compute().fill_(100.0)
        chain.mode.fill_(7)
        for name, compute in quantities(chain, gold):
            assert torch.equal(compute(), before[name]), name
        assert torch.equal(chain.mode, mode)


@case
def edges_out_of_range() -> None:
    e, zero, one = torch.randn(2, 4, 3), torch.tensor([0, 1]), torch.zeros(2)
    wrong = {
        "0..2": [(torch.tensor([0, 10**9]), zero), (zero, torch.tensor([0, 3])), (torch.tensor([-1, 0]), zero)],
        "sorted": [(zero, torch.tensor([1, 0])), (zero.flip(0), torch.zeros(2).long()), (zero * 0, zero * 0)],
        "int64": [(zero.int(), zero), (zero, zero.double())],
        "same E": [(torch.tensor([0]), zero), (torch.tensor([[0, 1]]), zero), ([0, 1], zero)],
    }
    for word, pairs in wrong.items():
        for sources, targets in pairs:
            moves = SparseTransitions(sources, targets, one, 3)  # type: ignore[arg-type]
            refused(lambda moves=moves: LinearChain(e, moves), word)
            refused(moves.dense, word)
    refused(lambda: LinearChain(e, SparseTransitions(zero, zero, torch.zeros(2).long(), 3)), "floating")
    refused(lambda: LinearChain(e, SparseTransitions(zero, zero, one, 4)), "size C = 3")
    for size in (0, -1, 1.5, None, True):
        refused(SparseTransitions(zero, zero, one, size).dense, "`size`")  # type: ignore[arg-type]


@case
def edges_changed_afterwards() -> None:
    e = torch.randn(3, 4, 3)
    sources, targets = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2])
    chain = LinearChain(e, SparseTransitions(sources, targets, torch.zeros(3), 3))
    want = LinearChain(e, SparseTransitions(sources.clone(), targets.clone(), torch.zeros(3), 3), backend="reference")
    sources.fill_(10**9)
    targets.fill_(-(10**9))
    gold = torch.zeros(3, 4, dtype=torch.long)
    for (name, one), (_, two) in zip(quantities(chain, gold), quantities(want, gold), strict=True):
        alike(name, one(), two())


@case
def several_threads_at_once() -> None:
    torch.set_num_threads(2)
    wrong: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(20):
                size = SIZES[(number + turn) % len(SIZES)]
                given = scores(size, "shared")
                gold = torch.zeros(size[:2], dtype=torch.long)
                if turn % 3 == 2:
                    given["emissions"][0, 0, 0] = math.nan
                for backend in ("auto", "reference"):
                    leaf = given["emissions"].clone().requires_grad_()
                    found = gradient(build({**given, "emissions": leaf}, "shared", backend=backend), gold, leaf)
                    want = found if backend == "auto" else want  # noqa: F821
                alike("gradient", want, found)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def interrupted(work: Callable[[], object], times: int, seed: int) -> None:
    """Run ``work`` again and again, with an interrupt at a random moment of each round."""
    draw = random.Random(seed)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def rounds() -> None:
        while True:
            work()

    signal.signal(signal.SIGALRM, interrupt)
    for _ in range(times):
        try:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 3e-3))
            rounds()
        except KeyboardInterrupt:
            pass
    signal.setitimer(signal.ITIMER_REAL, 0)


@case
def interrupts() -> None:
    torch.set_num_threads(2)
    for size in ((64, 32, 9), (64, 32, 32)):
        given = scores(size, "shared")
        gold = torch.zeros(size[:2], dtype=torch.long)

        def once(given: dict[str, Tensor] = given, gold: Tensor = gold) -> Tensor:
            leaf = given["emissions"].clone().requires_grad_()
            chain = build({**given, "emissions": leaf}, "shared")
            chain.log_prob(gold).sum().backward()
            assert leaf.grad is not None
            return leaf.grad

        want = once()
        interrupted(once, 250, seed=size[2])
        alike("gradient", once(), want)


@case
def transforms_of_torch_func() -> None:
    for size in ((2, 4, 3), (32, 5, 3)):
        given = {name: x.double() for name, x in scores(size, "shared").items()}
        gold = torch.zeros(size[:2], dtype=torch.long)
        rest = {name: x for name, x in given.items() if name != "emissions"}
        plain = dict(quantities(build(given, "shared"), gold))
        for name in plain:

            def value(x: Tensor, name: str = name) -> Tensor:
                chain = build({**rest, "emissions": x}, "shared")  # noqa: B023
                return (dict(quantities(chain, gold))[name]() ** 2).sum()  # noqa: B023

            leaf = given["emissions"].clone().requires_grad_()
            want = torch.autograd.grad(value(leaf), leaf)[0]
            for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
                torch.testing.assert_close(transform(value)(given["emissions"]), want, msg=f"{transform} {name}")
            pair = torch.stack((given["emissions"], given["emissions"] + 1))
            both = torch.stack([value(x) for x in pair])
            torch.testing.assert_close(torch.func.vmap(value)(pair), both, msg=name)
    small = scores((1, 3, 2), "shared", torch.float64)

    def log_partition(x: Tensor) -> Tensor:
        return LinearChain(x, small["transitions"]).log_partition.sum()

    want = torch.autograd.functional.hessian(log_partition, small["emissions"])
    torch.testing.assert_close(torch.func.hessian(log_partition)(small["emissions"]), want)


@case
def compiled_by_torch() -> None:
    layer = CRF(3, batch_first=True)
    for settings in ({"backend": "eager"}, {"backend": "aot_eager", "dynamic": True}):
        compiled = torch.compile(layer, **settings)
        drawn = torch.compile(lambda e, a: LinearChain(2 * e, a).sample((3,)) + 0, **settings)
        for B, T in ((2, 4), (2, 4), (3, 7), (33, 5)):
            found = []
            for forward in (compiled, layer):
                e = torch.linspace(-1, 1, B * T * 3).view(B, T, 3).requires_grad_()
                value = forward(e, torch.ones(B, T, dtype=torch.long))
                found.append((value.detach(), torch.autograd.grad(value, e)[0]))
            for one, two in zip(*found, strict=True):
                alike("compiled", one, two)
            assert drawn(torch.randn(B, T, 3), torch.zeros(3, 3)).shape == (3, B, T)


@case
def defaults_that_are_not_usual() -> None:
    gold = {size: torch.zeros(size[:2], dtype=torch.long) for size in SIZES}
    given = {size: scores(size, "shared") for size in SIZES}
    plain = {size: {n: f() for n, f in quantities(build(given[size], "shared"), gold[size])} for size in SIZES}
    for size in SIZES:
        with torch.device("meta"):  # new tensors have no memory at all
            chain = build(given[size], "shared", lengths=gold[size].sum(1) + size[1])
            alike("log_partition", chain.log_partition, plain[size]["log_partition"])
        torch.set_default_dtype(torch.float64)
        for name, compute in quantities(build(given[size], "shared"), gold[size]):
            alike(name, compute(), plain[size][name])
        torch.set_default_dtype(torch.float32)


@case
def other_users_of_chains() -> None:
    bad = torch.randn(2, 4, 3)
    bad[0, 1, 1] = math.nan
    assert not sparse_map(LinearChain(torch.randn(2, 4, 3), torch.zeros(3, 3))).value.isnan().any()
    found = answer(lambda: sparse_map(LinearChain(bad, torch.zeros(3, 3))).value)
    assert isinstance(found, ThalwegError) or found[0].isnan()
    for compute in (
        lambda: LinearChain(bad, torch.zeros(3, 3)).given(torch.full((2, 4), -1)).log_partition,
        lambda: LinearChain(bad, torch.zeros(3, 3)).tempered(2.0).log_partition,
        lambda: torch.distributions.kl_divergence(
            LinearChain(bad, torch.zeros(3, 3)), LinearChain(torch.zeros(2, 4, 3), torch.zeros(3, 3))
        ),
    ):
        assert compute()[0].isnan()
        assert compute()[1].isfinite()


def at_random(seed: int, times: int = 60) -> None:
    """Random sizes, kinds, places and values; several scores at once, with constraints and lengths."""
    draw = random.Random(seed)
    for _ in range(times):
        size = draw.randint(1, 40), draw.randint(1, 12), draw.choice((1, 2, 3, 9, 24, 25, 33, 70))
        kind, name = draw.choice(KINDS), draw.choice(("emissions", "transitions", "start", "end"))
        value = draw.choice((math.nan, math.inf, -math.inf, 30.0, -30.0, 1e-45, 0.0))  # more would drown the rest
        against_reference(size, kind, name, value, draw.randrange(10**6))


def warm() -> None:
    """What all cases compile."""
    for size, kind in product(SIZES, KINDS):
        gold = torch.zeros(size[:2], dtype=torch.long)
        leaf = scores(size, kind)["emissions"].requires_grad_()
        chain = build({**scores(size, kind), "emissions": leaf}, kind)
        for _, compute in quantities(chain, gold):
            value = compute().sum()
            if value.requires_grad:
                value.backward()
        with torch.no_grad():
            for _, compute in quantities(build(scores(size, kind), kind), gold):
                compute()
            build(scores(size, kind), kind).sample((2,))
    assert isinstance(build(scores(SIZES[0], "shared"), "shared").potentials, Chain)
