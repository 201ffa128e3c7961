"""Losses against their formulas in plain Python: sequences, vectors of energies, pairs; gradients at every corner."""

import math

import pytest
import torch

from oracles import losses as oracle
from thalweg.errors import ConfigError, ShapeError
from thalweg.learning import losses
from thalweg.learning.losses import sequence_nll

B, T, V = 3, 4, 5
LENGTHS = torch.tensor([4, 2, 1])
MASK = torch.arange(T) < LENGTHS[:, None]
INF = math.inf


def plain(logits, gold, length, smoothing):
    """The docstring's sum, symbol by symbol."""
    total = 0.0
    for t in range(length):
        row = logits[t]
        top = max(row)
        norm = top + math.log(sum(math.exp(v - top) for v in row))
        allowed = [v for v in row if v != -INF]
        spread = sum(v - norm for v in allowed) / len(allowed)
        # Without smoothing the spread has no say, not even an infinite one.
        total -= (1 - smoothing) * (row[gold[t]] - norm) + (smoothing * spread if smoothing else 0.0)
    return total


def data(forbidden=()):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(B, T, V, dtype=torch.float64, generator=generator)
    logits[:, :, list(forbidden)] = -INF
    return logits, torch.randint(2 if forbidden else 0, V, (B, T), generator=generator)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("forbidden", [(), (0, 1)])
def test_equals_plain_python(smoothing, forbidden):
    logits, gold = data(forbidden)
    found = sequence_nll(logits, gold, MASK, smoothing=smoothing)
    rows = zip(logits.tolist(), gold.tolist(), LENGTHS.tolist(), strict=True)
    expected = [plain(*row, smoothing) for row in rows]
    assert found.shape == (B,)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_the_oracle_can_disagree():
    logits, gold = data((0, 1))
    found = sequence_nll(logits, gold, MASK, smoothing=0.1)[0].item()
    # A twin that spreads the smoothing over all V symbols, as if none were forbidden.
    twin = (
        (
            plain(logits[0].tolist(), gold[0].tolist(), T, 0.1)
            - 0.9 * plain(logits[0].tolist(), gold[0].tolist(), T, 0.0)
        )
        * 3
        / V
    )
    assert found != pytest.approx(twin + 0.9 * plain(logits[0].tolist(), gold[0].tolist(), T, 0.0), abs=1e-3)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_equals_torch(smoothing):
    logits, gold = data()
    ours = sequence_nll(logits, gold, MASK, smoothing=smoothing).sum()
    theirs = torch.nn.functional.cross_entropy(logits[MASK], gold[MASK], reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("filling", [1e30, -INF, INF, math.nan])
def test_padding_changes_neither_value_nor_gradient(smoothing, filling):
    def run(value):
        logits, gold = data((0, 1))
        logits = logits.masked_fill(~MASK[:, :, None], value).requires_grad_()
        losses = sequence_nll(logits, gold, MASK, smoothing=smoothing)
        losses.sum().backward()
        return losses.detach(), logits.grad

    clean, filled = run(0.0), run(filling)
    torch.testing.assert_close(filled[0], clean[0], rtol=0, atol=0)
    torch.testing.assert_close(filled[1], clean[1], rtol=0, atol=0)
    assert (filled[1][~MASK] == 0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_is_probability_minus_target(smoothing):
    logits, gold = data((0, 1))
    logits.requires_grad_()
    sequence_nll(logits, gold, MASK, smoothing=smoothing).sum().backward()
    target = (1 - smoothing) * torch.nn.functional.one_hot(gold, V).double()
    target[:, :, 2:] += smoothing / 3
    expected = (logits.detach().softmax(2) - target) * MASK[:, :, None]
    torch.testing.assert_close(logits.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_gradcheck(smoothing):
    logits, gold = data()
    assert torch.autograd.gradcheck(
        lambda x: sequence_nll(x, gold, MASK, smoothing=smoothing), (logits.requires_grad_(),)
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_forbidden_gold_symbol_costs_infinitely_much(smoothing):
    logits, gold = data((0, 1))
    gold[0, 0] = 1
    losses = sequence_nll(logits, gold, MASK, smoothing=smoothing)
    assert losses[0] == INF
    assert losses[1:].isfinite().all()


def test_one_symbol_one_position():
    logits, gold, mask = torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
    assert sequence_nll(logits, gold, mask, smoothing=0.1).item() == 0


def test_the_callers_tensors_are_left_alone():
    logits, gold = data((0, 1))
    before = logits.clone()
    sequence_nll(logits, gold, MASK, smoothing=0.1)
    assert torch.equal(before, logits)


@pytest.mark.parametrize(
    ("logits", "gold", "mask"), [((2, 3), (2,), (2,)), ((2, 3, 4), (2, 4), (2, 3)), ((2, 3, 4), (2, 3), (3, 2))]
)
def test_wrong_shapes(logits, gold, mask):
    with pytest.raises(ShapeError, match=r"`logits` must be \(B, T, V\)"):
        sequence_nll(torch.zeros(logits), torch.zeros(gold, dtype=torch.int64), torch.ones(mask, dtype=torch.bool))


# Vectors of energies.

GENERATOR = torch.Generator().manual_seed(3)
ENERGIES = 2 * torch.randn(6, 5, dtype=torch.float64, generator=GENERATOR)
ENERGIES[1, 2] = ENERGIES[2, 0] = ENERGIES[3, 1:] = INF  # answers that are not there; one item has a single answer
GOLD = torch.tensor([0, 1, 4, 0, 2, 3])
COSTS = 3 * torch.rand(6, 5, dtype=torch.float64, generator=GENERATOR)


def rows(*tensors):
    return zip(*(t.tolist() for t in tensors), strict=True)


def close(found, expected, **tolerance):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.detach().double(), expected, **(tolerance or {"rtol": 1e-12, "atol": 1e-12}))


VECTOR = {
    "nll": (lambda f, y: losses.nll(f, y), lambda f, y, c: oracle.nll(f, y)),
    "nll, beta 0.3": (lambda f, y: losses.nll(f, y, 0.3), lambda f, y, c: oracle.nll(f, y, 0.3)),
    "nll, beta 7": (lambda f, y: losses.nll(f, y, 7.0), lambda f, y, c: oracle.nll(f, y, 7.0)),
    "perceptron": (lambda f, y: losses.perceptron(f, y), lambda f, y, c: oracle.perceptron(f, y)),
    "structured hinge": (
        lambda f, y: losses.structured_hinge(f, y, COSTS[: len(f), : f.size(1)]),
        lambda f, y, c: oracle.structured_hinge(f, y, c),
    ),
    "softmax margin": (
        lambda f, y: losses.softmax_margin(f, y, COSTS[: len(f), : f.size(1)], 2.0),
        lambda f, y, c: oracle.softmax_margin(f, y, c, 2.0),
    ),
    "label smoothing": (
        lambda f, y: losses.label_smoothing(f, y, 0.2, 1.5),
        lambda f, y, c: oracle.label_smoothing(f, y, 0.2, 1.5),
    ),
    "sparsemax": (lambda f, y: losses.fenchel_young(f, y, "sparsemax"), lambda f, y, c: oracle.sparsemax_loss(f, y)),
    "softmax": (lambda f, y: losses.fenchel_young(f, y), lambda f, y, c: oracle.nll(f, y)),
    "risk": (lambda f, y: losses.risk(f, COSTS[: len(f), : f.size(1)], 0.7), lambda f, y, c: oracle.risk(f, c, 0.7)),
}


@pytest.mark.parametrize("name", VECTOR)
def test_a_vector_loss_equals_plain_python(name):
    ours, theirs = VECTOR[name]
    found = ours(ENERGIES, GOLD)
    assert found.shape == (6,)
    close(found, [theirs(*row) for row in rows(ENERGIES, GOLD, COSTS)])


@pytest.mark.parametrize("name", VECTOR)
def test_gradients_of_vector_losses(name):
    ours = VECTOR[name][0]
    finite = ENERGIES.clamp(max=3.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda f: ours(f, GOLD), (finite,))
    # An answer that is not there gets no gradient and leaves none undefined.
    energies = ENERGIES.clone().requires_grad_()
    ours(energies, GOLD).sum().backward()
    assert energies.grad.isfinite().all()
    assert (energies.grad[torch.isinf(ENERGIES)] == 0).all()


@pytest.mark.parametrize("name", VECTOR)
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (1, 3)])
def test_edge_sizes_of_vector_losses(name, shape):
    energies = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    found = VECTOR[name][0](energies, torch.zeros(shape[0], dtype=torch.long))
    found.sum().backward()
    assert found.shape == shape[:1]
    assert energies.grad.isfinite().all()
    if shape == (1, 1):  # a single answer is right, whatever its energy
        assert found.item() == pytest.approx(COSTS[0, 0].item() if name == "risk" else 0.0, abs=1e-12)


def test_a_broken_twin_is_found():
    # Without the division by beta: units of log-probability and not of energy.
    twin = [beta * oracle.nll(f, y, beta) for beta in (0.3,) for f, y in rows(ENERGIES, GOLD)]
    with pytest.raises(AssertionError):
        close(losses.nll(ENERGIES, GOLD, 0.3), twin)
    # A hinge that is active at equality too.
    assert oracle.hinge(0.0, 1.0, 1.0)[1] != float(0.0 - 1.0 + 1.0 >= 0)


def test_e1_gibbs_distribution():
    for beta in (0.0, 0.5, 1.0, 4.0):
        found = losses.gibbs(ENERGIES, beta)
        close(found, [oracle.gibbs(f, beta) for (f,) in rows(ENERGIES)])
        close(found.sum(1), torch.ones(6))
        assert (found[torch.isinf(ENERGIES)] == 0).all()
    even = losses.gibbs(ENERGIES, 0.0)
    close(even[0], [0.2] * 5)
    sure = losses.gibbs(ENERGIES, 500.0)
    assert torch.equal(sure.argmax(1), ENERGIES.argmin(1))


@pytest.mark.parametrize("beta", [0.25, 1.0, 3.0])
def test_e1_nll_gradient_is_gold_less_expectation(beta):
    """dF(x, y) - sum P dF, through energies that are themselves functions of parameters."""
    close(losses.nll(ENERGIES, GOLD, beta), [oracle.nll(f, y, beta) for f, y in rows(ENERGIES, GOLD)])
    energies = ENERGIES.clone().requires_grad_()
    losses.nll(energies, GOLD, beta).sum().backward()
    close(energies.grad, [oracle.nll_gradient(f, y, beta) for f, y in rows(ENERGIES, GOLD)])
    weights = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    losses.nll(x @ weights, GOLD, beta).sum().backward()
    f = (x @ weights).detach()
    expected = torch.zeros(4, 5, dtype=torch.float64)
    for b in range(6):
        p = oracle.gibbs(f[b].tolist(), beta)
        for y in range(5):
            expected[:, y] += x[b] * (float(y == int(GOLD[b])) - p[y])
    close(weights.grad, expected)


def test_nll_keeps_its_digits():
    energies = torch.tensor([[0.0, 40.0], [0.0, 100.0]], dtype=torch.float64)
    found = losses.nll(energies, torch.tensor([0, 0]))
    close(found, [math.exp(-40), math.exp(-100)], rtol=1e-12, atol=0)
    assert losses.nll(torch.tensor([[0.0, 20.0]]), torch.tensor([0])).item() == pytest.approx(math.exp(-20), rel=1e-6)


def test_second_derivatives():
    """The Hessian of nll is that of log-sum-exp, beta (diag(P) - P P'), and nothing undefined comes of extremes."""
    energies = ENERGIES[:1].clone()
    hessian = torch.autograd.functional.hessian(lambda f: losses.nll(f, GOLD[:1], 2.0).sum(), energies).view(5, 5)
    p = torch.tensor(oracle.gibbs(energies[0].tolist(), 2.0), dtype=torch.float64)
    close(hessian, 2 * (p.diag() - torch.outer(p, p)), rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradgradcheck(lambda f: losses.nll(f, GOLD), (ENERGIES.clamp(max=3.0).requires_grad_(),))
    extreme = torch.tensor([[0.0, 200.0], [200.0, 0.0], [0.0, INF]])
    curved = torch.autograd.functional.hessian(lambda f: losses.nll(f, torch.zeros(3, dtype=torch.long)).sum(), extreme)
    assert curved.isfinite().all()


def test_nll_becomes_the_perceptron():
    close(losses.nll(ENERGIES, GOLD, 2000.0), losses.perceptron(ENERGIES, GOLD), rtol=0, atol=1e-3)


def test_order_of_the_margin_losses():
    hinge, soft = (f(ENERGIES, GOLD, COSTS) for f in (losses.structured_hinge, losses.softmax_margin))
    assert (soft >= hinge - 1e-12).all()
    assert (hinge >= losses.perceptron(ENERGIES, GOLD) - COSTS.amax(1)).all()
    close(losses.softmax_margin(ENERGIES, GOLD, 0.0), losses.nll(ENERGIES, GOLD))
    close(losses.structured_hinge(ENERGIES, GOLD, 0.0), losses.perceptron(ENERGIES, GOLD))
    zero_one = 2.5 * (torch.arange(5) != GOLD[:, None])
    close(losses.structured_hinge(ENERGIES, GOLD, 2.5), losses.structured_hinge(ENERGIES, GOLD, zero_one))


def test_perceptron_at_and_around_its_kink():
    for wrong, expected in ((-0.5, [1.0, -1.0]), (0.0, [0.0, 0.0]), (0.5, [0.0, 0.0])):
        energies = torch.tensor([[0.0, wrong]], requires_grad=True)
        losses.perceptron(energies, torch.tensor([0])).sum().backward()
        assert energies.grad.tolist() == [expected]
    energies = torch.tensor([[1.0, 0.0, 0.0]], requires_grad=True)  # of equal ones the first
    losses.perceptron(energies, torch.tensor([0])).sum().backward()
    assert energies.grad.tolist() == [[1.0, -1.0, 0.0]]


def test_a_right_answer_that_is_not_there_costs_infinitely_much():
    energies = torch.tensor([[INF, 0.0, INF], [0.0, 1.0, 2.0]])
    for loss in (losses.nll, losses.perceptron, losses.softmax_margin, losses.structured_hinge, losses.label_smoothing):
        found = loss(energies, torch.tensor([0, 0]))
        assert found[0] == INF
        assert found[1].isfinite()


def test_fenchel_young_of_other_maps():
    finite = ENERGIES.clamp(max=3.0)
    assert losses.fenchel_young(torch.tensor([[0.0, 2.0]]), torch.tensor([0]), "entmax15").item() == 0
    close(losses.fenchel_young(finite, GOLD, 2.0), losses.fenchel_young(finite, GOLD, "sparsemax"))
    close(losses.fenchel_young(finite, GOLD, 1), losses.nll(finite, GOLD))
    with pytest.raises(ConfigError, match="did you mean `sparsemax`"):
        losses.fenchel_young(finite, GOLD, "sparsemx")


# Pairs of the right answer and contrasts.

PAIRS = {
    "simple": (losses.simple, oracle.simple, 1.0),
    "hinge": (losses.hinge, oracle.hinge, 1.0),
    "square_square": (losses.square_square, oracle.square_square, 1.0),
    "square_exponential": (losses.square_exponential, oracle.square_exponential, 0.5),
    "mce": (losses.mce, oracle.mce, 2.0),
}
# At, just below and just above every corner, exactly as float64 has them.
NEAR = [
    0.0,
    1.0,
    -1.0,
    0.5,
    2.0,
    math.nextafter(0, 1),
    math.nextafter(0, -1),
    math.nextafter(1, 2),
    math.nextafter(1, 0),
]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("margin", [0.0, 0.5, 1.0])
def test_pair_losses_equal_plain_python(name, margin):
    ours, theirs, _ = PAIRS[name]
    margin = max(margin, 0.25) if name == "mce" else margin
    f, g = (
        torch.tensor(x, dtype=torch.float64, requires_grad=True)
        for x in zip(*((a, b) for a in NEAR for b in NEAR), strict=True)
    )
    found = ours(f, g, margin)
    found.sum().backward()
    expected = [theirs(a, b, margin) for a, b in rows(f.detach(), g.detach())]
    close(found, [value for value, _, _ in expected])
    close(f.grad, [d for _, d, _ in expected])
    close(g.grad, [d for _, _, d in expected])


def gradients(loss, f, g, *more):
    f, g = (torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (f, g))
    value = loss(f, g, *more)
    value.sum().backward()
    return value.item(), f.grad.item(), g.grad.item()


def test_e2_simple_gradient_is_piecewise():
    # dF where F > 0, -dG where G < m, both strictly.
    assert gradients(losses.simple, 2.0, 0.5) == (2.5, 1.0, -1.0)
    assert gradients(losses.simple, 0.0, 1.0) == (0.0, 0.0, 0.0)
    assert gradients(losses.simple, -1.0, 0.5) == (0.5, 0.0, -1.0)
    assert gradients(losses.simple, 1.0, 3.0) == (1.0, 1.0, 0.0)


def test_e2_hinge_gradient_is_piecewise():
    # dF - dG where F - G + m > 0, strictly.
    assert gradients(losses.hinge, 1.0, 0.5) == (1.5, 1.0, -1.0)
    assert gradients(losses.hinge, 1.0, 2.0) == (0.0, 0.0, 0.0)
    assert gradients(losses.hinge, 1.0, 2.5) == (0.0, 0.0, 0.0)
    assert gradients(losses.hinge, 1.0, math.nextafter(2, 0))[1:] == (1.0, -1.0)
    # Where rounding decides, the condition is the one written: (F - G) + m.
    for m in (0.1, 0.3, 0.7):
        f, g = torch.rand(2, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        g = torch.cat((g, f + m)).requires_grad_()
        f = torch.cat((f, f)).requires_grad_()
        losses.hinge(f, g, m).sum().backward()
        assert torch.equal(f.grad, (f - g + m > 0).double())


def test_e2_log_gradient_is_a_logistic():
    f, g = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 30
    f.requires_grad_(), g.requires_grad_()
    found = losses.log(f, g)
    found.sum().backward()
    expected = [oracle.log(a, b) for a, b in rows(f.detach(), g.detach())]
    close(found, [e[0] for e in expected])
    close(f.grad, [e[1] for e in expected])
    close(g.grad, [e[2] for e in expected])
    assert gradients(losses.log, 0.0, 0.0) == pytest.approx((math.log(2), 0.5, -0.5), rel=1e-14)
    assert losses.log(torch.tensor([500.0]), torch.tensor([-500.0])).item() == 1000


def test_e2_square_square_gradient_is_piecewise():
    # 2 F dF where F > 0, -2 (m - G) dG where G < m.
    assert gradients(losses.square_square, 3.0, 0.5) == (9.25, 6.0, -1.0)
    assert gradients(losses.square_square, 0.0, 1.0) == (0.0, 0.0, 0.0)
    assert gradients(losses.square_square, -3.0, -1.0) == (4.0, 0.0, -4.0)
    assert gradients(losses.square_square, 0.5, 2.0) == (0.25, 1.0, 0.0)


def test_e3_learning_lowers_what_inference_seeks():
    """Inference minimises energy over y, learning a loss over W: gold becomes the lowest answer under each loss."""
    x = torch.randn(20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gold = (x @ torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).argmin(1)
    for loss in (losses.nll, losses.perceptron, losses.structured_hinge, losses.softmax_margin):
        # Not from zero: where all energies are equal the perceptron has nothing to say.
        weights = torch.full((4, 3), 0.1, dtype=torch.float64).tril().requires_grad_()
        optimiser = torch.optim.SGD([weights], lr=2.0)
        for _ in range(150):
            optimiser.zero_grad()
            loss(x @ weights, gold).mean().backward()
            optimiser.step()
        assert torch.equal((x @ weights).argmin(1), gold), loss.__name__


MANY = torch.tensor([[0.4, 0.4, INF], [2.0, -1.0, 0.3], [INF, INF, INF]], dtype=torch.float64)
ONE = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)


@pytest.mark.parametrize("name", [*PAIRS, "log"])
def test_many_contrasts(name):
    ours, theirs, m = PAIRS.get(name, (lambda f, g, m, **how: losses.log(f, g, **how), oracle.log, 0.0))
    worst, total = ours(ONE, MANY, m), ours(ONE, MANY, m, over="sum")
    own = [theirs(f, 1e3, m)[0] for (f,) in rows(ONE)]  # what is left without any contrast
    for b in range(3):
        each = [theirs(float(ONE[b]), g, m)[0] - own[b] for g in MANY[b].tolist() if g != INF]
        assert worst[b].item() == pytest.approx(own[b] + max(each, default=0.0), abs=1e-12)
        assert total[b].item() == pytest.approx(own[b] + sum(each), abs=1e-12)
    f, g = ONE.clone().requires_grad_(), MANY.clone().requires_grad_()
    ours(f, g, m).sum().backward()
    assert g.grad.isfinite().all()
    assert (g.grad != 0).sum(1).tolist()[2] == 0
    assert (g.grad[:2] != 0).sum(1).tolist() == [1, 1]
    assert g.grad[0, 0] != 0  # of equal ones the first
    none = ours(ONE, MANY[:, :0], m)
    close(none, own)
    one = MANY[:, :1]
    close(ours(ONE, one, m), ours(ONE, one[:, 0], m))


def test_a_margin_for_each_contrast():
    margin = torch.tensor([[1.0, 2.0, 9.0]] * 3, dtype=torch.float64)
    close(losses.hinge(ONE, MANY, margin), [0.5 - 0.4 + 2, 0.3 + 9 - 0.3 - 0.1, 0.0])
    close(losses.simple(ONE, MANY[:, 0], margin[:, 0])[:2], [0.5 + 0.6, 0.2])
    with pytest.raises(ShapeError, match="`margin` must be a number or as `contrast`"):
        losses.hinge(ONE, MANY, margin[:2])


def test_gradcheck_of_pair_losses():
    f, g = (torch.randn(*s, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) for s in ((4,), (4, 3)))
    for over in ("worst", "sum"):
        for ours, _, m in PAIRS.values():
            assert torch.autograd.gradcheck(
                lambda a, b, ours=ours, m=m, over=over: ours(a, b, m, over=over),
                (f.requires_grad_(), g.requires_grad_()),
            )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_type_of_energies(dtype):
    energies = ENERGIES.to(dtype).requires_grad_()
    exact = losses.nll(energies.detach().double(), GOLD)
    found = losses.nll(energies, GOLD)
    assert found.dtype == torch.float32
    close(found, exact, rtol=1e-5, atol=1e-5)
    found.sum().backward()
    assert energies.grad.dtype == dtype
    assert losses.hinge(energies[:, 0], energies[:, 1:]).dtype == torch.float32
    assert losses.gibbs(energies).dtype == torch.float32


def test_empty_batches_of_pairs():
    for ours, _, m in PAIRS.values():
        assert ours(torch.zeros(0), torch.zeros(0, 3), m).shape == (0,)


def test_one_line_errors():
    f, y = torch.zeros(2, 3), torch.tensor([0, 1])
    for call, error, words in (
        (lambda: losses.nll(f, y[:1]), ShapeError, r"`energies` must be \(B, C\)"),
        (lambda: losses.nll(f, torch.tensor([0, 3])), ShapeError, r"`gold` must lie in 0\.\.2"),
        (lambda: losses.nll(f, y, 0.0), ConfigError, "`beta` must be above 0"),
        (lambda: losses.nll(f.long(), y), ShapeError, "floating point"),
        (lambda: losses.hinge(f, f), ShapeError, r"`gold` must be \(B,\)"),
        (lambda: losses.hinge(f[:, 0], f, over="mean"), ConfigError, "`over` must be `worst` or `sum`"),
        (lambda: losses.softmax_margin(f, y, f[:1]), ShapeError, r"`cost` must be \(B, C\)"),
        (lambda: losses.label_smoothing(f, y, 1.0), ConfigError, "`epsilon`"),
        (lambda: losses.risk(f, f[:1]), ShapeError, r"must be \(B, C\) both"),
        (lambda: losses.gibbs(f, -1.0), ConfigError, "`beta` must be 0 or more"),
    ):
        with pytest.raises(error, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_losses_leave_the_callers_tensors_alone():
    energies, contrast = ENERGIES.clone(), MANY.clone()
    for ours, _ in VECTOR.values():
        ours(energies, GOLD)
    for ours, _, m in PAIRS.values():
        ours(ONE, contrast, m)
    assert torch.equal(energies, ENERGIES)
    assert torch.equal(contrast, MANY)
