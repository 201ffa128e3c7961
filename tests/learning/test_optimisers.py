"""Optimisers by name, learning-rate schedules, plateau and teacher forcing against closed forms."""

import copy
import itertools
import math
from pathlib import Path

import pytest
import torch
from tiny_regression import Data, Killed, kill_at, make, same_files

from thalweg.errors import CheckpointError, ConfigError
from thalweg.learning.checkpoint import flatten_optimiser, load_checkpoint, restore_optimiser, save_checkpoint
from thalweg.learning.optimisers import (
    Plateau,
    build_optimiser,
    decay_groups,
    learning_rate_factor,
    teacher_forcing_at,
)
from thalweg.recipes import load_recipe
from thalweg.tasks.config import as_settings
from thalweg.tasks.registry import build_config
from thalweg.tasks.runs import as_begun, check_continues

GRADIENTS = [[1.0, -0.01, 0.0], [0.5, 0.02, 0.0], [2.0, -0.03, 0.0]]
START = [1.0, -2.0, 3.0]


def run(name, *, fused, decay, rate=0.1, **settings):
    """Three steps of the library's optimiser with the gradients above."""
    weight = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))
    optimiser = build_optimiser(
        name, [weight], learning_rate=rate, weight_decay=decay, decay="all", fused=fused, **settings
    )
    for gradient in GRADIENTS:
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimiser.step()
    return weight.detach().tolist()


def plain_sgd(decay, rate=0.1, momentum=0.0):
    result = []
    for i, w in enumerate(START):
        velocity = 0.0
        for step, gradient in enumerate(GRADIENTS):
            g = gradient[i] + decay * w
            velocity = g if step == 0 else momentum * velocity + g
            w -= rate * velocity
        result.append(w)
    return result


def plain_adam(decay, rate=0.1, *, decoupled, beta1=0.9, beta2=0.999, epsilon=1e-8):
    result = []
    for i, w in enumerate(START):
        m = v = 0.0
        for step, gradient in enumerate(GRADIENTS, start=1):
            g = gradient[i]
            if decoupled:
                w *= 1 - rate * decay
            else:
                g += decay * w
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            w -= rate * (m / (1 - beta1**step)) / (math.sqrt(v / (1 - beta2**step)) + epsilon)
        result.append(w)
    return result


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_names_mean_what_they_say(fused, decay):
    close = {"rel": 1e-9, "abs": 1e-9}
    assert run("sgd", fused=fused, decay=decay) == pytest.approx(plain_sgd(decay), **close)
    with_momentum = run("sgd", fused=fused, decay=decay, momentum=0.9)
    assert with_momentum == pytest.approx(plain_sgd(decay, momentum=0.9), **close)
    assert run("adam_l2", fused=fused, decay=decay) == pytest.approx(plain_adam(decay, decoupled=False), **close)
    assert run("adamw", fused=fused, decay=decay) == pytest.approx(plain_adam(decay, decoupled=True), **close)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("name", "decoupled"), [("adam_l2", False), ("adamw", True)])
def test_beta2_is_the_decay_of_the_squares(name, decoupled, fused):
    close = {"rel": 1e-9, "abs": 1e-9}
    expected = plain_adam(0.2, decoupled=decoupled, beta2=0.98)
    assert expected != pytest.approx(plain_adam(0.2, decoupled=decoupled), **close)
    assert run(name, fused=fused, decay=0.2, beta2=0.98) == pytest.approx(expected, **close)


def test_the_two_adams_differ_by_their_decay():
    assert plain_adam(0.2, decoupled=False) != pytest.approx(plain_adam(0.2, decoupled=True), abs=1e-3)
    # Decoupled decay shrinks a weight without gradient by the same factor each step; L2 moves it by whole steps.
    assert run("adamw", fused=True, decay=0.2)[2] == pytest.approx(3.0 * (1 - 0.1 * 0.2) ** 3)
    assert run("adam_l2", fused=True, decay=0.2)[2] == pytest.approx(3.0 - 3 * 0.1, abs=1e-2)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("adam_l2", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        ("adafactor", torch.optim.Adafactor),
    ],
)
def test_they_are_torchs_own(name, kind):
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    optimiser = build_optimiser(name, [torch.nn.Parameter(torch.zeros(2)), frozen], learning_rate=0.5)
    assert type(optimiser) is kind
    assert [len(group["params"]) for group in optimiser.param_groups] == [1]
    assert optimiser.defaults["lr"] == 0.5


@pytest.mark.parametrize("name", ["adam", "Adamw", "adagrad", ""])
def test_unknown_optimiser(name):
    with pytest.raises(ConfigError, match=r"is not known; (did you mean|choose one of)"):
        build_optimiser(name, [torch.nn.Parameter(torch.zeros(1))], learning_rate=0.1)


WARMUP, TOTAL = 8, 100


@pytest.mark.parametrize("schedule", ["constant", "plateau", "inverse_sqrt", "cosine"])
def test_warm_up_is_a_straight_rise(schedule):
    found = [learning_rate_factor(schedule, s, warmup=WARMUP, total=TOTAL) for s in range(WARMUP)]
    assert found == pytest.approx([(s + 1) / WARMUP for s in range(WARMUP)])
    assert found[-1] == 1.0


def test_schedules_after_the_warm_up():
    after = range(WARMUP, TOTAL)

    def curve(schedule):
        return [learning_rate_factor(schedule, s, warmup=WARMUP, total=TOTAL) for s in after]

    assert curve("constant") == curve("plateau") == [1.0] * len(after)
    # The n-th step (from 1) has sqrt(w / n): continuous with the end of the warm-up.
    assert curve("inverse_sqrt") == pytest.approx([math.sqrt(WARMUP / (s + 1)) for s in after])
    half_turn = [math.cos(math.pi * (s - WARMUP) / (TOTAL - WARMUP) / 2) ** 2 for s in after]
    assert curve("cosine") == pytest.approx(half_turn)
    for name in ("inverse_sqrt", "cosine"):
        values = curve(name)
        assert values == sorted(values, reverse=True)
        assert all(0 < v <= 1 for v in values)


def test_schedules_at_the_edges():
    assert learning_rate_factor("cosine", TOTAL, warmup=WARMUP, total=TOTAL) == pytest.approx(0.0)
    assert learning_rate_factor("cosine", 10 * TOTAL, warmup=WARMUP, total=TOTAL) == pytest.approx(0.0)
    for schedule in ("constant", "plateau", "inverse_sqrt", "cosine"):
        assert learning_rate_factor(schedule, 0, warmup=0, total=1) == 1.0
        # A warm-up as long as the training, or longer, is all rise.
        assert learning_rate_factor(schedule, 3, warmup=10, total=4) == pytest.approx(0.4)
    assert learning_rate_factor("inverse_sqrt", 99, warmup=0, total=100) == pytest.approx(0.1)


def test_unknown_schedule():
    with pytest.raises(ConfigError, match="schedule `cosin` is not known; did you mean `cosine`"):
        learning_rate_factor("cosin", 0, warmup=0, total=1)


@pytest.mark.parametrize("patience", [0, 1, 3])
def test_plateau_cuts_after_patience(patience):
    plateau = Plateau(factor=0.1, patience=patience)
    assert plateau.update(True) == 1.0
    for cuts in (1, 2):
        for _ in range(patience):
            assert plateau.update(False) == pytest.approx(0.1 ** (cuts - 1))
        assert plateau.update(False) == pytest.approx(0.1**cuts)
    # An improvement starts the waiting anew but raises nothing.
    for _ in range(patience):
        plateau.update(False)
    assert plateau.update(True) == pytest.approx(0.01)
    for _ in range(patience):
        assert plateau.update(False) == pytest.approx(0.01)
    assert plateau.update(False) == pytest.approx(0.001)


def test_teacher_forcing():
    shares = [n / 20 for n in range(21)]
    assert [teacher_forcing_at("constant", 0.7, 0.1, s) for s in shares] == [0.7] * 21
    linear = [teacher_forcing_at("linear", 0.9, 0.1, s) for s in shares]
    assert linear == pytest.approx([0.9 - 0.8 * s for s in shares])
    curve = [teacher_forcing_at("inverse_sigmoid", 0.9, 0.1, s) for s in shares]
    assert curve[0] == pytest.approx(0.9)
    assert curve[10] == pytest.approx(0.5)
    assert curve[20] == pytest.approx(0.1)
    assert curve == sorted(curve, reverse=True)
    # A sigmoid through both ends: symmetric about the middle, steepest there.
    assert [a + b for a, b in zip(curve, curve[::-1], strict=True)] == pytest.approx([1.0] * 21)
    slopes = [a - b for a, b in itertools.pairwise(curve)]
    assert max(slopes) == pytest.approx(slopes[9])
    stretch = (1 / (1 + math.exp(-3)) - 0.5) / (1 / (1 + math.exp(-6)) - 0.5)
    assert curve[15] == pytest.approx(0.5 - 0.4 * stretch)


def test_forcing_may_rise_and_stays_a_probability():
    for schedule in ("linear", "inverse_sigmoid"):
        values = [teacher_forcing_at(schedule, 0.0, 1.0, n / 50) for n in range(51)]
        assert values == sorted(values)
        assert all(-1e-12 <= v <= 1 + 1e-12 for v in values)


def test_unknown_forcing_schedule():
    with pytest.raises(ConfigError, match="teacher-forcing schedule `liner` is not known; did you mean `linear`"):
        teacher_forcing_at("liner", 1.0, 0.0, 0.5)


class Assorted(torch.nn.Module):
    """Every kind of parameter there is."""

    def __init__(self):
        super().__init__()
        nn = torch.nn
        self.embedding = nn.Embedding(5, 4)
        self.lstm = nn.LSTM(4, 3)
        self.grid_norm = nn.LayerNorm((2, 3))  # two axes, and yet a norm
        self.batch = nn.BatchNorm1d(3)
        self.instance = nn.InstanceNorm1d(3, affine=True)
        self.group = nn.GroupNorm(1, 3)
        self.rms = nn.RMSNorm(3)
        self.long = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
        self.spectral = nn.utils.parametrizations.orthogonal(nn.Linear(3, 2, bias=False))
        self.bias = nn.Parameter(torch.zeros(2, 3))  # two axes, and yet a bias
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.row = nn.Linear(4, 1)
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)
        self.tied = nn.Linear(4, 5, bias=False)
        self.tied.weight = self.embedding.weight


MATRICES = {
    *("embedding.weight", "lstm.weight_ih_l0", "lstm.weight_hh_l0", "row.weight"),
    *("long.parametrizations.weight.original1", "spectral.parametrizations.weight.original"),
}


def names_of(model, group):
    named = {id(p): name for name, p in model.named_parameters()}
    return {named[id(p)] for p in group["params"]}


def test_groups_of_every_kind_of_parameter():
    model = Assorted()
    everything = {name for name, p in model.named_parameters() if p.requires_grad}
    for name in ("sgd", "adam_l2", "adamw"):
        matrices, vectors = build_optimiser(name, model, learning_rate=0.1, weight_decay=0.3).param_groups
        assert [g["name"] for g in (matrices, vectors)] == ["matrices", "vectors"]
        assert [g["weight_decay"] for g in (matrices, vectors)] == [0.3, 0.0]
        assert names_of(model, matrices) == MATRICES
        assert names_of(model, vectors) == everything - MATRICES
        (one,) = build_optimiser(name, model, learning_rate=0.1, weight_decay=0.3, decay="all").param_groups
        assert (one["name"], one["weight_decay"]) == ("all", 0.3)
        assert names_of(model, one) == everything
    kept = [p for p in model.parameters() if p.requires_grad]
    for group in decay_groups(model, 0.3):
        assert [id(kept[place]) for place in group["places"]] == [id(p) for p in group["params"]]


def test_groups_of_parameters_alone_go_by_shape():
    matrix, vector = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
    assert [g["name"] for g in decay_groups([vector], 0.1)] == ["vectors"]
    assert [g["name"] for g in decay_groups([matrix], 0.1)] == ["matrices"]
    assert [g["places"] for g in decay_groups(iter([vector, matrix]), 0.1)] == [[1], [0]]
    with pytest.raises(ValueError, match="empty parameter list"):
        build_optimiser("sgd", [], learning_rate=0.1)


def test_unknown_decay():
    with pytest.raises(ConfigError, match="decay `matrix` is not known; did you mean `matrices`"):
        decay_groups([], 0.1, "matrix")


@pytest.mark.parametrize("name", ["sgd", "adam_l2", "adamw"])
def test_only_matrices_shrink(name):
    """Without gradients nothing but the decay acts."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(1.0)
    optimiser = build_optimiser(name, net, learning_rate=0.1, weight_decay=0.5)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimiser.step()
    moved = {key for key, p in net.named_parameters() if not torch.equal(p, torch.ones_like(p))}
    assert moved == {"0.weight", "2.weight"}


def test_groups_change_nothing_where_nothing_decays(tmp_path):
    for decay in ("all", "matrices"):
        make(tmp_path / decay, weight_decay=0.0, decay=decay).fit(Data())
    same_files(tmp_path / "all", tmp_path / "matrices")
    for decay in ("all", "matrices"):
        make(tmp_path / f"{decay}-decayed", weight_decay=0.1, decay=decay).fit(Data())
    with pytest.raises(AssertionError):
        same_files(tmp_path / "all-decayed", tmp_path / "matrices-decayed")


def test_the_rate_moves_in_every_group(tmp_path):
    trainer = make(tmp_path, schedule="cosine", epochs=2)
    trainer.fit(Data())
    rates = {group["name"]: group["lr"] for group in trainer.optimiser.param_groups}
    assert rates.keys() == {"matrices", "vectors"}
    assert rates["matrices"] == rates["vectors"] == pytest.approx(0.05 * math.cos(math.pi * 5 / 6 / 2) ** 2)


@pytest.mark.parametrize("decay", ["matrices", "all"])
@pytest.mark.parametrize("optimiser", ["adamw", "adam_l2", "sgd"])
def test_resumed_groups_equal_uninterrupted_ones(tmp_path, decay, optimiser):
    settings = {"decay": decay, "optimiser": optimiser, "momentum": 0.9, "weight_decay": 0.2}
    make(tmp_path / "whole", **settings).fit(Data())
    for step in (2, 5):
        with pytest.raises(Killed):
            make(tmp_path / f"cut-{step}", listener=kill_at(step), **settings).fit(Data())
        make(tmp_path / f"cut-{step}", **settings).fit(Data(), resume=True)
        same_files(tmp_path / "whole", tmp_path / f"cut-{step}")


def written_before_groups(path, model):
    """The file as it was when all parameters were one group: numbered in the order of the model."""
    checkpoint = load_checkpoint(path)
    tensors = {name: t for name, t in checkpoint.tensors.items() if not name.startswith("optimiser.")}
    optimiser = torch.optim.AdamW(model.parameters())
    restore_optimiser(optimiser, checkpoint.part("optimiser."))
    for index, slots in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{slot}": value for slot, value in slots.items()}
    assert tensors.keys() == checkpoint.tensors.keys()
    save_checkpoint(path, type(checkpoint)(tensors, checkpoint.meta))


@pytest.mark.parametrize("decay", ["all", "matrices"])
def test_a_run_from_before_the_groups_goes_on(tmp_path, decay):
    make(tmp_path / "whole", decay=decay, weight_decay=0.2).fit(Data())
    with pytest.raises(Killed):
        make(tmp_path / "cut", decay=decay, weight_decay=0.2, listener=kill_at(5)).fit(Data())
    trainer = make(tmp_path / "cut", decay=decay, weight_decay=0.2)
    written_before_groups(tmp_path / "cut" / "last.safetensors", trainer.raw)
    trainer.fit(Data(), resume=True)
    same_files(tmp_path / "whole", tmp_path / "cut")


def test_what_is_kept_does_not_depend_on_the_groups():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    both = {decay: build_optimiser("adamw", net, learning_rate=0.1, decay=decay) for decay in ("all", "matrices")}
    for n, p in enumerate(net.parameters()):
        p.grad = torch.full_like(p, 1.0 + n)
    both["matrices"].step()
    kept = flatten_optimiser(both["matrices"], "")
    restore_optimiser(both["all"], kept)
    for p in net.parameters():
        for slot in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(both["all"].state[p][slot], both["matrices"].state[p][slot])
    with pytest.raises(ValueError, match=r"optimiser tensor 0\.exp_avg must be \(4, 3\), got \(4,\)"):
        restore_optimiser(both["all"], {"0.exp_avg": kept["1.exp_avg"]})
    with pytest.raises(ValueError, match="the optimiser has 4 parameters, the file one numbered 4"):
        restore_optimiser(both["all"], {"4.exp_avg": kept["1.exp_avg"]})


def test_a_file_of_another_shape_is_refused(tmp_path):
    with pytest.raises(Killed):
        make(tmp_path, listener=kill_at(3)).fit(Data())
    path = tmp_path / "last.safetensors"
    checkpoint = load_checkpoint(path)
    checkpoint.tensors["optimiser.0.exp_avg"] = torch.zeros(7)
    save_checkpoint(path, checkpoint)
    with pytest.raises(CheckpointError, match=r"does not fit this config \(optimiser tensor 0\.exp_avg must be"):
        make(tmp_path).fit(Data(), resume=True)


def test_a_run_that_said_nothing_about_decay_meant_all():
    """Such a run goes on with `decay: all` alone, and its own config says so."""
    settings = as_settings(build_config({}))
    assert settings["training"]["decay"] == "matrices"
    old = copy.deepcopy(settings)
    del old["training"]["decay"]
    before = {"config": old, "progress": {"epoch": 1, "step": 1}}
    with pytest.raises(CheckpointError, match=r"expected training\.decay=all as before, got matrices"):
        check_continues(Path("last"), before, {"config": settings})
    filled = as_begun(old)
    assert filled["training"]["decay"] == "all"
    assert "decay" not in old["training"]
    check_continues(Path("last"), before, {"config": as_settings(build_config(filled))})
    assert as_begun(settings) == settings
    assert as_begun({}) == {}


@pytest.mark.parametrize("name", ["t1", "t2", "t3", "t6", "t7", "demo", "ar2en-small", "ar2en-best"])
def test_published_recipes_decay_as_they_were_measured(name):
    assert build_config(load_recipe(name).config).training.decay == "all"
