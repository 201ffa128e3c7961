"""Diagnosing image networks: healthy, vanishing and dead ones, their layers, Jacobians, norms, pages and logs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from thalweg.diagnostics import GradientWatch, gradient_flow, saturation
from thalweg.diagnostics.layer_names import map_layers, naming_of
from thalweg.diagnostics.map_use import channel_use, layer_stretches, norm_use, run_layers
from thalweg.energies.convnet.config import ConvNetConfig
from thalweg.energies.convnet.model import ConvNet
from thalweg.errors import ConfigError, DataError
from thalweg.recipes.resolving import resolve
from thalweg.tasks.classify.subject import ImageSubject
from thalweg.tasks.diagnosis.findings import Finding, findings
from thalweg.tasks.diagnosis.measures import Diagnosis, diagnose
from thalweg.tasks.registry import task_named, train
from thalweg.tasks.report import write_report
from thalweg.tasks.report.diagnosis import write_diagnosis

TASK = task_named("classify")
SMALL = ("path=digits", "channels=6,8", "hidden=16", "dropout=0", "batch_size=64", "device=cpu")
DEEP = ("path=digits", "channels=6", "units=12", "hidden=16", "dropout=0", "batch_size=32", "activation=tanh")


def fresh(*words: str, preset: str = "convnet") -> ImageSubject:
    subject = resolve(TASK.configure(TASK.overrides(TASK.presets[preset], words))).subject(device="cpu")
    assert isinstance(subject, ImageSubject)
    return subject


def looked_at(subject: ImageSubject) -> tuple[Diagnosis, tuple[Finding, ...]]:
    diagnosis = diagnose(subject, rows=16, steps=2)
    return diagnosis, findings(diagnosis)


def about(found: tuple[Finding, ...], subject: str) -> list[Finding]:
    return [finding for finding in found if finding.about == subject]


def convnet(**settings) -> ConvNet:
    torch.manual_seed(0)
    shape = {"channels": (4, 6), "hidden": (8,), "dropout": 0.0} | settings
    return ConvNet(ConvNetConfig(**shape), classes=3, channels=1, size=(8, 8))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "digits"
    words = (*SMALL, "epochs=6", "learning_rate=0.01", "warmup=5")
    train(TASK.configure(TASK.overrides(TASK.presets["convnet-norm"], words)), out, watch=GradientWatch(every=20))
    return out


SHAPES = [
    {},
    {"units": 3, "convolutions": 2, "norm": "batch", "squeeze": 2},
    {"activation": "gelu", "pooling": "average", "dropout": 0.3, "head": "average_max", "hidden": ()},
    {"skip": "residual", "units": 2, "convolutions": 2, "expansion": 0.5, "norm": "group"},
    {"skip": "residual", "order": "pre", "stem": 4, "norm": "batch", "pooling": "stride", "head": "attention"},
    {"order": "pre", "stem": 4, "units": 2, "pooling": "average"},
    {"skip": "highway", "norm": "weight", "hidden_norm": True, "hidden_dropout": 0.5, "head_dropout": 0.5},
    {"skip": "dense", "growth": 3, "units": 2, "norm": "layer", "hidden_norm": True, "hidden": (8, 7)},
    {"separable": True, "channels": (8, 8), "stem": 5, "activation": "silu"},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_layers_in_a_row_are_the_network(shape: dict) -> None:
    net = convnet(**shape).eval()
    images = torch.randn(3, 1, 8, 8)
    layers, outputs = map_layers(net), run_layers(net, images)
    torch.testing.assert_close(-outputs[-1], net(images))
    config = net.config
    deep = sum(config.unit_counts) * (config.convolutions if config.skip == "none" else 1) + bool(config.stem)
    if config.skip == "dense":  # a convolution at the end of the block where channels differ
        deep += 2
    assert [layer.name for layer in layers] == [
        *(f"convolutions {n + 1}" for n in range(deep)),
        *(f"classifier {n + 1}" for n in range(len(config.hidden) + 1)),
    ]
    naming, names = naming_of(net), {layer.name for layer in layers}
    assert {naming(name) for name, _ in net.named_parameters()} == names
    flow = gradient_flow(net, lambda m: m(images).square().mean())
    assert [site.name for site in flow.sites] == [layer.name for layer in layers]
    assert all(len(site.by_time) == 1 and site.gradient > 0 for site in flow.sites)
    assert sum(layer.size for layer in flow.layers) == sum(p.numel() for p in net.parameters())
    assert len({(row.name, row.gate) for row in saturation(net, lambda m: m(images)).rows}) >= deep - 1


def test_gradients_are_those_of_a_network_cut_by_hand() -> None:
    net = convnet(units=2, norm="group").double()
    images = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    flow = gradient_flow(net, lambda m: m(images).square().sum())
    for place, site in enumerate(flow.sites):
        point = run_layers(net, images)[place].detach().requires_grad_()
        x = point
        for layer in map_layers(net)[place + 1 :]:
            x = layer(x)
        (slope,) = torch.autograd.grad(x.square().sum(), point)
        assert site.gradient == pytest.approx(float(slope.norm()), rel=1e-9)
        # The cut can fail: it is another number one layer on.
        assert all(site.gradient != pytest.approx(other.gradient, rel=1e-3) for other in flow.sites if other != site)


def test_stretches_are_those_of_the_whole_jacobian() -> None:
    net = convnet(channels=(4,), norm="batch", activation="tanh", pooling="average").double().eval()
    images = torch.randn(1, 1, 8, 8, dtype=torch.float64)
    rows = layer_stretches(net, images)
    assert [row.name for row in rows] == ["convolutions 1", "classifier 1", "classifier 2"]
    x = images
    for row, layer in zip(rows, map_layers(net), strict=True):
        matrix = torch.autograd.functional.jacobian(layer, x)
        assert isinstance(matrix, Tensor)
        values = np.linalg.svd(matrix.reshape(row.outputs, row.inputs).numpy(), compute_uv=False)
        assert row.largest == pytest.approx(values[0], rel=0.03)
        assert row.largest + row.error >= values[0] * 0.999
        assert row.mean == pytest.approx(np.sqrt(np.mean(values**2)), rel=0.35)
        x = layer(x).detach()


def test_channels_and_norms_are_counted_as_numpy_does() -> None:
    net = convnet(channels=(4,), norm="batch").eval()
    with torch.no_grad():
        net.blocks[0].norm.weight[1] = 0
        net.blocks[0].norm.running_mean.fill_(0.5)
    images = torch.randn(6, 1, 8, 8)
    first = channel_use(net, images)[0]
    assert (first.name, first.channels, first.constant) == ("convolutions 1", 4, 0.25)
    (row,) = norm_use(net, lambda m: m(images))
    x = net.blocks[0].convolution(images).detach().double().numpy()
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    assert row.kind == "batch"
    assert row.deviation == pytest.approx((np.sqrt(variance.min()), np.sqrt(variance.max())), rel=1e-5)
    assert row.shift == pytest.approx(np.sort(np.abs(0.5 - mean) / np.sqrt(variance + 1e-5))[1], rel=1e-4)
    assert row.scale == pytest.approx(np.sort((1 + 1e-5) / (variance + 1e-5))[1], rel=1e-4)
    assert row.gain[0] == 0
    grouped = convnet(channels=(4,), norm="layer")
    (row,) = norm_use(grouped, lambda m: m(images))
    per_image = grouped.blocks[0].convolution(images).detach().double().numpy().reshape(6, -1).std(1)
    assert row.groups == 6
    assert row.deviation == pytest.approx((per_image.min(), per_image.max()), rel=1e-5)
    assert np.isnan(row.shift)


def test_dead_units_of_maps_are_channels_and_smooth_rectifiers_have_them_too() -> None:
    images = torch.randn(5, 1, 8, 8)
    for activation, share in (("relu", 0.5), ("gelu", 0.5), ("elu", 0.5), ("silu", 0.5), ("mish", 0.5)):
        net = convnet(channels=(4,), hidden=(), activation=activation)
        with torch.no_grad():
            net.blocks[0].convolution.bias[:2] = -100
            net.blocks[0].convolution.bias[2:] = 5
        (row,) = saturation(net, lambda m: m(images)).rows
        assert (row.name, row.kind, row.stuck, row.share) == ("convolutions 1", activation, share, share)


def test_a_healthy_network_is_found_healthy(run: Path) -> None:
    subject = resolve(run).subject(device="cpu")
    weights = {name: value.clone() for name, value in subject.model.state_dict().items()}
    diagnosis, found = looked_at(subject)
    assert {finding.severity for finding in found} <= {"note", "good"}
    assert "the model looks at its image" in about(found, "reading")[0].text
    assert diagnosis.images is not None
    assert diagnosis.images.accuracy > 0.8
    assert diagnosis.reading.loss < diagnosis.reading.shuffled
    assert [row.kind for row in diagnosis.images.norms] == ["batch"] * 3
    assert all(torch.equal(value, weights[name]) for name, value in subject.model.state_dict().items())
    assert all(p.grad is None for p in subject.model.parameters())
    assert diagnose(subject, rows=16, steps=2).to_json() == diagnosis.to_json()
    assert not resolve(run, fresh=True).subject(device="cpu").trained


def test_vanishing_gradients_are_found_and_the_advice_mends_them() -> None:
    plain, found = looked_at(fresh(*DEEP))
    for kind in ("depth", "signal"):
        problems = [finding for finding in about(found, kind) if finding.severity == "problem"]
        assert problems[0].change == ("model.norm=batch", "model.skip=residual")
    assert "gradients vanish on their way down the convolutions: at layer 1" in about(found, "depth")[0].text
    mended, found = looked_at(fresh(*DEEP, "norm=batch", "skip=residual"))
    assert {finding.severity for finding in about(found, "depth")} == {"good"}
    assert not about(found, "signal")
    assert plain.flow.through_depth("convolutions") < 0.02 < 0.5 < mended.flow.through_depth("convolutions")
    assert plain.images is not None
    # A layer by itself loses half of a random direction: that to the twelfth is what is left.
    assert 0.3 < plain.images.stretches[5].mean < 0.7


def test_dead_units_saturation_and_constant_channels_are_found() -> None:
    subject = fresh(*SMALL)
    with torch.no_grad():
        subject.model.blocks[1].convolution.bias[:6] = -50
    _, found = looked_at(subject)
    (dead,) = about(found, "saturation")
    assert dead.severity == "warning"
    assert "75% of the units of convolutions 2 (activation) are dead: 0 on the whole batch" in dead.text
    assert dead.change == ("model.norm=batch", "model.activation=leaky_relu")
    _, found = looked_at(dataclasses.replace(subject, trained=True))
    assert about(found, "saturation")[0].change[0] == "training.learning_rate=0.0003"
    assert not about(found, "channels"), "dead units are not told of twice"
    subject = fresh(*SMALL, "activation=tanh")
    with torch.no_grad():
        subject.model.blocks[0].convolution.bias.fill_(30)
    _, found = looked_at(subject)
    assert "100% of the values of the activation of convolutions 1 are at an end" in about(found, "saturation")[0].text
    assert about(found, "saturation")[0].change[:2] == ("model.norm=batch", "model.activation=relu")
    assert "100% of the channels of convolutions 1 hardly vary" in about(found, "channels")[0].text


def test_stale_running_statistics_and_runaway_networks_are_found(run: Path) -> None:
    subject = resolve(run).subject(device="cpu")
    assert isinstance(subject, ImageSubject)
    for part in subject.model.modules():
        if isinstance(part, nn.BatchNorm1d) and part.running_var is not None:
            part.running_var.mul_(9)
    _, found = looked_at(subject)
    stale = about(found, "normalisation")[0]
    assert (stale.severity, stale.change) == ("warning", ("model.norm=group",))
    with torch.no_grad():
        next(subject.model.parameters()).fill_(torch.nan)
    diagnosis, found = looked_at(subject)
    assert found[0].text.startswith("the energies are no numbers")
    json.dumps(diagnosis.to_json(), allow_nan=False)


def test_decay_and_long_steps_are_put_into_words() -> None:
    _, found = looked_at(fresh(*SMALL, "weight_decay=0"))
    assert about(found, "decay")[0].text == "no weight decays"
    diagnosis, found = looked_at(fresh(*SMALL, "optimiser=adamw", "weight_decay=0.5", "learning_rate=0.3"))
    assert [row.name for row in diagnosis.decay.groups] == ["matrices", "vectors"]
    assert any("steps are long" in finding.text for finding in about(found, "steps"))


def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    subject = dataclasses.replace(fresh(*SMALL, "norm=batch"), name="<b>net</b>")
    diagnosis, found = looked_at(subject)
    page, beside = write_diagnosis(diagnosis, found, tmp_path / "page.html", command="thalweg train x.yaml")
    text = page.read_text(encoding="utf-8")
    for word in ("http://", "https://", "<script", "<link", "<b>net</b>", 'id="time"'):
        assert word not in text.replace("http://www.w3.org", "")
    for word in ("convolutions 2", "hardly vary", "What its norms measure", "Weight decay", "8 × 8 pixels", "accuracy"):
        assert word in text
    record = json.loads(beside.read_text(encoding="utf-8"))
    assert record["batch"] == {"rows": 16, "height": 8, "width": 8}
    assert len(record["states"]) == 4
    assert [row["name"] for row in record["images"]["channels"]][:2] == ["convolutions 1", "convolutions 2"]


def test_what_cannot_be_looked_at_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent: expected a folder.*with --data PATH$"):
        resolve(run).subject(data="absent", device="cpu")
    with pytest.raises(ConfigError, match="no images: give a folder"):
        resolve(TASK.configure({})).subject(device="cpu")
    with pytest.raises(DataError, match="absent: expected a folder"):
        resolve(TASK.configure({"data": {"path": "absent"}})).subject(device="cpu")
    named = resolve(TASK.configure({"model": {"channels": [4], "hidden": []}})).subject(data="digits", device="cpu")
    assert (named.name, named.trained) == ("config", False)
    with pytest.raises(ConfigError, match="`rows` must be at least 2"):
        diagnose(named, rows=1)
    (tmp_path / "odd.yaml").write_text("task: clasify\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="did you mean `classify`"):
        resolve(tmp_path / "odd.yaml").subject()


def test_watched_training_is_logged_by_layer_and_shown(run: Path) -> None:
    events = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    profiles = [event for event in events if event["event"] == "gradients"]
    assert [event["step"] for event in profiles] == list(range(0, 20 * len(profiles), 20))
    names = ["convolutions 1", "convolutions 2", "classifier 1", "classifier 2"]
    for profile in profiles:
        assert list(profile["layers"]) == names
        assert list(profile["sites"]) == names
        assert all(len(norms) == 1 and norms[0] > 0 for norms in profile["sites"].values())
    assert "Gradient, first layer over last" in write_report(run).read_text(encoding="utf-8")
