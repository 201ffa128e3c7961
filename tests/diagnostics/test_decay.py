"""Section O: decay as a penalty, exactly; and what each optimiser makes of it, by rule and measured."""

from __future__ import annotations

import copy
import itertools
import json
import math

import pytest
import torch
from torch import nn

from oracles.decay import Adam, Sgd, shrinkage
from thalweg.diagnostics.decay import DecayMeter, DecayReport, measure_decay, shrinkage_by_rule
from thalweg.errors import ConfigError
from thalweg.learning.optimisers import build_optimiser
from thalweg.recipes.experiments.decay import DecaySettings, measure_letters, run_decay

NAMES = ["sgd", "adam_l2", "adamw"]


def net(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)


def task(seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(12, 4, generator=draw, dtype=dtype), torch.randn(12, 2, generator=draw, dtype=dtype)
    return lambda model: (model(x) - y).square().mean()


def _step_apart(decayed, own, penalised, other, loss, gamma):
    """A step of each, the second on the penalised loss: the largest difference of a weight afterwards."""
    for model, optimiser in ((decayed, own), (penalised, other)):
        optimiser.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters()) if model is penalised else 0.0
        (loss(model) + gamma * penalty).backward()
        optimiser.step()
    pairs = zip(decayed.parameters(), penalised.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("gamma", [0.0, 0.01, 0.5])
def test_o1_sgd_with_decay_is_sgd_on_the_penalised_loss(momentum, gamma):
    decayed, penalised, loss = net(), net(), task()
    own = torch.optim.SGD(decayed.parameters(), lr=0.05, momentum=momentum, weight_decay=2 * gamma)
    other = torch.optim.SGD(penalised.parameters(), lr=0.05, momentum=momentum)
    for _ in range(30):
        assert _step_apart(decayed, own, penalised, other, loss, gamma) < 1e-13


def test_o1_the_decay_in_a_step_is_twice_eta_gamma():
    """Against the rule written out: θ (1 - 2 η γ) - η ∇L."""
    eta, gamma, model = 0.05, 0.03, net()
    by_rule = [p.detach().clone() for p in model.parameters()]
    optimiser = torch.optim.SGD(model.parameters(), lr=eta, weight_decay=2 * gamma)
    for _ in range(10):
        optimiser.zero_grad()
        task()(model).backward()
        by_rule = [(1 - 2 * eta * gamma) * w - eta * p.grad for w, p in zip(by_rule, model.parameters(), strict=True)]
        optimiser.step()
        for w, p in zip(by_rule, model.parameters(), strict=True):
            torch.testing.assert_close(p.detach(), w, rtol=1e-13, atol=1e-14)


def test_o1_does_not_hold_for_another_decay_or_optimiser():
    """The broken twins: half the decay, and Adam."""
    loss, gamma = task(), 0.05
    for kind, decay in ((torch.optim.SGD, gamma), (torch.optim.Adam, 2 * gamma), (torch.optim.AdamW, 2 * gamma)):
        decayed, penalised = net(), net()
        own = kind(decayed.parameters(), lr=0.05, weight_decay=decay)
        other = torch.optim.SGD(penalised.parameters(), lr=0.05)
        assert [_step_apart(decayed, own, penalised, other, loss, gamma) for _ in range(3)][-1] > 1e-3


def test_o1_with_momentum_it_takes_decay_inside_the_gradient():
    """Torch's SGD stays exact; decay that leaves momentum out does so only without momentum."""
    gradients = [0.3, -0.2, 0.5, 0.1, -0.4, 0.2]
    eta, gamma = 0.1, 0.2
    for momentum in (0.0, 0.9):
        penalised, coupled, decoupled = 1.5, 1.5, 1.5
        plain = Sgd(eta, 0.0, momentum)
        inside = Sgd(eta, 2 * gamma, momentum)
        outside = Sgd(eta, 2 * gamma, momentum, decoupled=True)
        weight = nn.Parameter(torch.tensor([1.5], dtype=torch.float64))
        torchs = torch.optim.SGD([weight], lr=eta, momentum=momentum, weight_decay=2 * gamma)
        for g in gradients:
            penalised = plain.step(penalised, g + 2 * gamma * penalised)
            coupled, decoupled = inside.step(coupled, g), outside.step(decoupled, g)
            weight.grad = torch.tensor([g], dtype=torch.float64)
            torchs.step()
        assert coupled == pytest.approx(penalised, abs=1e-14)
        assert float(weight.detach()) == pytest.approx(penalised, abs=1e-14)
        assert (abs(decoupled - penalised) < 1e-14) == (momentum == 0.0)


def spread_gradients(count=400, seed=0):
    """Weights of one size whose gradients differ by factors of up to 10,000; sixty steps of noise."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-4, 0, count, dtype=torch.float64)
    start = torch.randn(count, generator=draw, dtype=torch.float64)
    start = torch.where(start < 0, -1.0, 1.0) * (0.5 + torch.rand(count, generator=draw, dtype=torch.float64))
    return sizes, start, torch.randn(60, count, generator=draw, dtype=torch.float64) * sizes


def measured(name, *, rate=1e-3, decay=0.05, fused=True, **settings):
    sizes, start, gradients = spread_gradients()
    holder = nn.ParameterList([nn.Parameter(start.clone())])
    optimiser = build_optimiser(
        name, holder, learning_rate=rate, weight_decay=decay, decay="all", fused=fused, **settings
    )
    meter = DecayMeter(holder, optimiser)
    for gradient in gradients:
        holder[0].grad = gradient.clone()
        meter.step()
    return sizes, meter.report(), (start, gradients, holder[0].detach())


def test_o2_adam_with_l2_shrinks_small_gradients_more():
    _, report, (start, _, _) = measured("adam_l2", decay=1e-3)
    bins = report.by_gradient(8)
    gradients, rates = zip(*bins, strict=True)
    assert list(gradients) == sorted(gradients)
    assert all(after < 1.1 * before for before, after in itertools.pairwise(rates))
    assert rates[0] > 100 * rates[-1]
    # Where decay is all of the gradient a step is η whatever λ; where it is little the rate falls as 1 / gradient.
    assert rates[0] == pytest.approx(1e-3 / float(start.abs().median()), rel=0.1)
    for gradient, rate in bins[-3:]:
        assert rate == pytest.approx(1e-3 * 1e-3 / gradient, rel=0.4)
    (group,) = report.groups
    assert group.small > 100 * group.large
    assert "shrink" in report.advice
    assert "optimiser=adamw" in report.advice


def test_o2_decoupled_decay_shrinks_all_alike():
    _, report, _ = measured("adamw")
    rates = [rate for _, rate in report.by_gradient(8)]
    assert rates == pytest.approx([1e-3 * 0.05] * 8, rel=1e-9)
    torch.testing.assert_close(report.rates["0"], torch.full((400,), 5e-5, dtype=torch.float64), rtol=1e-8, atol=0)
    (group,) = report.groups
    assert group.small == pytest.approx(group.large, rel=1e-9) == pytest.approx(5e-5, rel=1e-9)
    assert group.half_life == round(math.log(2) / 5e-5) == 13863
    assert "13,863 steps" in report.advice


def test_o2_sgd_shrinks_all_alike_too():
    _, report, _ = measured("sgd")
    torch.testing.assert_close(report.rates["0"], torch.full((400,), 5e-5, dtype=torch.float64), rtol=1e-8, atol=0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("name", "make", "settings"),
    [
        ("sgd", lambda d: Sgd(1e-3, d), {}),
        ("sgd", lambda d: Sgd(1e-3, d, 0.8), {"momentum": 0.8}),
        ("adam_l2", lambda d: Adam(1e-3, d, decoupled=False), {}),
        ("adam_l2", lambda d: Adam(1e-3, d, decoupled=False, beta2=0.95), {"beta2": 0.95}),
        ("adamw", lambda d: Adam(1e-3, d, decoupled=True), {}),
    ],
)
def test_what_is_measured_is_the_difference_of_twin_steps(name, make, settings, fused):
    _, report, (start, gradients, end) = measured(name, fused=fused, **settings)
    for i in range(0, 400, 37):
        rate, last, _ = shrinkage(lambda on: make(0.05 if on else 0.0), start[i].item(), gradients[:, i].tolist())
        assert float(report.rates["0"][i]) == pytest.approx(rate, rel=1e-6, abs=1e-12)
        assert float(end[i]) == pytest.approx(last, abs=1e-12)  # the run itself is the optimiser's own
        rms = math.sqrt(math.fsum(g * g for g in gradients[:, i].tolist()) / 60)
        assert float(report.gradients["0"][i]) == pytest.approx(rms)


def test_the_oracle_can_fail():
    _, report, (start, gradients, _) = measured("adam_l2")
    wrong, _, _ = shrinkage(
        lambda on: Adam(1e-3, 0.05 if on else 0.0, decoupled=True), start[0].item(), gradients[:, 0].tolist()
    )
    assert float(report.rates["0"][0]) != pytest.approx(wrong, rel=0.5)


def test_rules():
    def by_rule(name, steps=0, **settings):
        _, start, gradients = spread_gradients()
        weight = nn.Parameter(start.clone())
        optimiser = build_optimiser(name, [weight], learning_rate=0.01, weight_decay=0.2, decay="all", **settings)
        for gradient in gradients[:steps]:
            weight.grad = gradient.clone()
            optimiser.step()
        return shrinkage_by_rule(optimiser)[weight], optimiser.state.get(weight)

    assert set(by_rule("adamw")[0].tolist()) == {0.01 * 0.2}
    assert set(by_rule("sgd")[0].tolist()) == {0.01 * 0.2}
    assert by_rule("sgd", momentum=0.75)[0].tolist() == pytest.approx([4 * 0.01 * 0.2] * 400)
    assert by_rule("adam_l2")[0].isnan().all()
    found, state = by_rule("adam_l2", steps=5)
    corrected = state["exp_avg_sq"] / (1 - 0.999**5)
    torch.testing.assert_close(found, 0.002 / (corrected.sqrt() + 1e-8), rtol=1e-6, atol=0)
    weight = nn.Parameter(torch.ones(2))
    assert shrinkage_by_rule(torch.optim.Adagrad([weight], weight_decay=0.1))[weight].isnan().all()
    assert (shrinkage_by_rule(torch.optim.Adagrad([weight]))[weight] == 0).all()


def test_momentum_comes_to_the_rule():
    """The sum over past decays grows from ηλ to ηλ / (1 - μ)."""
    weight = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.float64))])
    meter = DecayMeter(weight, torch.optim.SGD(weight.parameters(), lr=1e-4, momentum=0.5, weight_decay=0.1))
    sums = []
    for _ in range(40):
        weight[0].grad = torch.zeros(3, dtype=torch.float64)
        meter.step()
        sums.append(meter.report().groups[0].measured * meter.steps)
    each = [after - before for before, after in zip([0.0, *sums], sums, strict=False)]
    assert each[0] == pytest.approx(1e-5, rel=1e-9)
    assert each[1] == pytest.approx(1.5e-5, rel=1e-3)
    assert each[-1] == pytest.approx(2e-5, rel=5e-3)
    assert meter.report().groups[0].rule == pytest.approx(2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_measuring_changes_nothing(name):
    """The run beside the meter ends with the same bits as one without."""
    plain, watched = net(dtype=torch.float32), net(dtype=torch.float32)
    loss = task(dtype=torch.float32)
    settings = {"learning_rate": 0.01, "weight_decay": 0.1, "momentum": 0.9}
    own, beside = (build_optimiser(name, model, **settings) for model in (plain, watched))
    meter = DecayMeter(watched, beside)
    for step in range(6):
        for model, optimiser, move in ((plain, own, own.step), (watched, beside, meter.step)):
            for group in optimiser.param_groups:
                group["lr"] = 0.01 / (1 + step)
            optimiser.zero_grad()
            loss(model).backward()
            move()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    report = meter.report()
    assert [row.name for row in report.groups] == ["matrices", "vectors"]
    matrices, vectors = report.groups
    assert matrices.measured > 0
    assert (vectors.measured, vectors.rule, vectors.half_life) == (0.0, 0.0, math.inf)
    assert sum(row.size for row in report.groups) == sum(p.numel() for p in plain.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_measuring_on_copies(name):
    model, loss = net(), task()
    optimiser = build_optimiser(name, model, learning_rate=0.01, weight_decay=0.1)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()

    def noisy(m):
        return loss(m) + 0 * torch.rand(())

    first = measure_decay(model, optimiser, noisy, steps=4)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not optimiser.state
    assert all(p.grad is None for p in model.parameters())
    again = measure_decay(model, optimiser, noisy, steps=4)
    assert str(first) == str(again)
    assert (first.steps, first.optimiser) == (4, type(optimiser).__name__)
    if name != "adam_l2":
        assert first.groups[0].measured == pytest.approx(first.groups[0].rule, rel=1e-6)


def test_an_optimiser_in_the_middle_of_its_run():
    """AdamW's measure does not depend on its past."""
    model, loss = net(), task()
    optimiser = build_optimiser("adamw", model, learning_rate=0.01, weight_decay=0.1)
    for _ in range(5):
        optimiser.zero_grad()
        loss(model).backward()
        optimiser.step()
    state = copy.deepcopy(optimiser.state_dict())
    report = measure_decay(model, optimiser, loss, steps=3)
    assert report.groups[0].measured == pytest.approx(1e-3, rel=1e-6)
    for index, slots in optimiser.state_dict()["state"].items():
        assert all(torch.equal(value, state["state"][index][slot]) for slot, value in slots.items())


def test_parameters_without_a_gradient_do_not_shrink():
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "idle": nn.Linear(2, 2)}).double()
    optimiser = build_optimiser("adamw", model, learning_rate=0.1, weight_decay=0.1)
    report = measure_decay(model, optimiser, lambda m: m["used"](torch.ones(1, 2).double()).sum(), steps=2)
    rows = {row.name: row for row in report.parameters}
    assert rows["used.weight"].measured == pytest.approx(0.01, rel=1e-6)
    assert (rows["idle.weight"].measured, rows["idle.weight"].rule) == (0.0, 0.0)


def test_edges():
    layer = nn.Linear(1, 1)
    report = measure_decay(layer, torch.optim.SGD(layer.parameters(), lr=0.1), lambda m: m.weight.sum(), steps=1)
    assert report.advice == "no decay: nothing shrinks"
    assert report.by_gradient() == []
    with torch.no_grad():
        layer.weight.zero_()
    optimiser = torch.optim.AdamW(layer.parameters(), lr=0.1)
    report = measure_decay(layer, optimiser, lambda m: 0 * m(torch.ones(1, 1)).sum(), steps=2)
    assert report.rates["weight"].tolist() == [[0.0]]  # nothing there to shrink
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        measure_decay(layer, optimiser, lambda m: m.weight.sum(), steps=0)
    with pytest.raises(ConfigError, match="take a `step"):
        DecayMeter(layer, optimiser).report()
    with pytest.raises(ConfigError, match="parameters of the model alone"):
        DecayMeter(nn.Linear(1, 1), optimiser)


def test_the_table():
    model = net()
    optimiser = build_optimiser("adamw", model, learning_rate=0.01, weight_decay=0.1)
    report = measure_decay(model, optimiser, task(), steps=2)
    assert isinstance(report, DecayReport)
    lines = str(report).splitlines()
    assert lines[0] == "AdamW, 2 steps: relative shrinkage a step"
    assert lines[2].split()[:3] == ["matrices", "matrices", "36"]
    assert "1.00e-03" in lines[2]
    assert lines[2].split()[-1] == "693"
    assert lines[3].split()[-1] == "inf"
    listed = [line.split()[0] for line in lines[4:-1]]
    assert listed == [
        name
        for group in optimiser.param_groups
        for p in group["params"]
        for name, q in model.named_parameters()
        if q is p
    ]
    assert len({len(line) for line in lines[1:-1]}) == 1


SMALL = DecaySettings(words=300, embedding=6, hidden=12, batch=32, steps=30)


def test_o2_measured_on_the_letters_of_english_words():
    found = {name: measure_letters(SMALL, name, 0) for name in ("adam_l2", "adamw", "sgd")}
    ratios = {name: report.groups[0].small / report.groups[0].large for name, (report, _) in found.items()}
    assert ratios["adam_l2"] > 4
    assert ratios["adamw"] == pytest.approx(1, rel=1e-3)
    assert ratios["sgd"] == pytest.approx(1, rel=0.15)  # weights that grow have shorter memories of their decay
    # Rare letters have small gradients: theirs are the embeddings that L2 shrinks most.
    report, counts = found["adam_l2"]
    rows, letters = report.rates["embedding.weight"].median(dim=1).values[1:], counts[1:]
    order = letters.argsort()
    assert rows[order[:6]].median() > 2 * rows[order[-6:]].median()
    assert torch.equal(found["adamw"][1], counts)  # the same batches for all


def test_the_experiment_gives_tables_and_pictures():
    lines = []
    found = run_decay(DecaySettings(words=60, embedding=3, hidden=4, batch=8, steps=3), (0, 1), lines.append)
    assert [row["optimiser"] for row in found.tables[0].rows] == ["adam_l2", "adamw", "sgd"]
    assert found.tables[0].rows[1]["measured"] == "3.00e-04"
    assert [picture.name for picture in found.pictures] == ["shrinkage", "letters"]
    assert all(picture.png.startswith(b"\x89PNG") for picture in found.pictures)
    assert len(lines) == 3
    assert all(len(runs) == 2 for runs in found.figures.values())
    json.dumps(found.figures)
