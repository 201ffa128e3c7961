"""Diagnosing models: what is found of plain and mended stacks, of trained runs, and what the page says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from toy_task import TINY, toy_config

from thalweg.diagnostics import GradientWatch
from thalweg.errors import ConfigError, DataError
from thalweg.recipes.resolving import resolve
from thalweg.tasks import build_config, train
from thalweg.tasks.config import as_settings
from thalweg.tasks.diagnosis.findings import Finding, findings
from thalweg.tasks.diagnosis.measures import Diagnosis, diagnose
from thalweg.tasks.diagnosis.subject import Subject
from thalweg.tasks.report import write_report
from thalweg.tasks.report.diagnosis import write_diagnosis

DEEP = {"hidden": 12, "embedding": 8, "encoder_layers": 8, "decoder_layers": 8, "bidirectional": False}


def looked_at(subject: Subject) -> tuple[Diagnosis, tuple[Finding, ...]]:
    diagnosis = diagnose(subject, rows=16, steps=2)
    return diagnosis, findings(diagnosis)


def fresh(files: tuple[Path, Path], model: dict, **sections) -> Subject:
    config = toy_config(files[0], epochs=2, model={} if "family" in model else model, **sections)
    if "family" in model:
        config = build_config(as_settings(config) | {"model": model})
    return resolve(config).subject(device="cpu")


def about(found: tuple[Finding, ...], subject: str) -> list[Finding]:
    return [finding for finding in found if finding.about == subject]


def scaled(model: nn.Module, factor: float, words: str) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if words in name:
                p.mul_(factor)


def test_a_deep_plain_stack_is_found_and_the_fix_helps(toy_files: tuple[Path, Path]) -> None:
    plain, found = looked_at(fresh(toy_files, DEEP))
    for kind in ("depth", "signal"):
        problems = about(found, kind)
        assert [finding.severity for finding in problems] == ["problem", "problem"]
        assert problems[0].change == ("model.residual=residual", "model.norm=layer")
    assert "at layer 1 they are" in about(found, "depth")[0].text
    mended, found = looked_at(fresh(toy_files, DEEP | {"residual": "residual", "norm": "layer"}))
    assert {finding.severity for finding in about(found, "depth")} == {"good"}
    assert not about(found, "signal")
    assert mended.flow.through_depth("encoder") > 100 * plain.flow.through_depth("encoder")
    ends = [next(row.largest for row in each.depth if row.name == "encoder 1") for each in (plain, mended)]
    assert ends[0] < 1e-3 < 0.3 < ends[1]


def test_every_family_and_cell_is_measured(toy_files: tuple[Path, Path]) -> None:
    transformer, found = looked_at(fresh(toy_files, TINY | {"encoder_layers": 2, "norm": "post"}))
    assert not transformer.spans
    assert [row.name for row in transformer.depth] == ["encoder 1"]
    assert set(transformer.norms) == {"encoder", "decoder"}
    assert about(found, "depth")
    plain, _ = looked_at(fresh(toy_files, {"cell": "rnn-tanh", "hidden": 6, "attention": "none"}))
    assert [layer.name for layer in plain.spans] == ["encoder 1", "encoder 1 backward", "decoder 1"]
    for layer in plain.spans:
        assert layer.report.bound is not None
        assert bool((layer.report.largest <= layer.report.bound[:, None] * 1.001).all())
    json.dumps(plain.to_json(), allow_nan=False)


def test_explosion_through_time_is_found(toy_files: tuple[Path, Path]) -> None:
    subject = fresh(toy_files, {"cell": "rnn-relu", "hidden": 8, "bidirectional": False}, training={"clip": 0.0})
    with torch.no_grad():
        subject.model.encoder.core.weight_hh_l0.copy_(8 * torch.eye(8))
        subject.model.encoder.core.bias_hh_l0.fill_(1.0)
    _, found = looked_at(subject)
    worst = next(finding for finding in about(found, "time") if finding.severity == "problem")
    assert "explode through time in encoder 1" in worst.text
    assert worst.change == ("training.clip=1", "model.initialisation=orthogonal", "model.cell=gru")


def test_forgetting_matters_without_attention(toy_files: tuple[Path, Path]) -> None:
    for attention, severity in (("none", "warning"), ("additive", "note")):
        subject = fresh(toy_files, {"cell": "rnn-tanh", "hidden": 8, "attention": attention, "bidirectional": False})
        scaled(subject.model, 0.05, "weight_hh")
        _, found = looked_at(subject)
        assert {finding.severity for finding in about(found, "time")} == {severity}
        assert "forgets" in about(found, "time")[0].text


def test_saturated_gates_and_dead_units_are_found(toy_files: tuple[Path, Path]) -> None:
    subject = fresh(toy_files, {"hidden": 8})
    scaled(subject.model, 60.0, "weight_ih")
    _, found = looked_at(subject)
    assert about(found, "saturation")[0].severity == "warning"
    assert "model.norm=layer" in about(found, "saturation")[0].change
    subject = fresh(toy_files, TINY)
    with torch.no_grad():
        subject.model.encoder.layers[0].feedforward.up.bias.fill_(-50)
    _, found = looked_at(subject)
    assert "100% of the units of encoder 1 (feedforward) are dead" in about(found, "saturation")[0].text


def test_decay_is_put_into_words(toy_files: tuple[Path, Path]) -> None:
    none, uneven, strong = (
        about(looked_at(fresh(toy_files, {"hidden": 6}, training=more))[1], "decay")[0]
        for more in (
            {},
            {"optimiser": "adam_l2", "weight_decay": 1e-4, "learning_rate": 0.001},
            {"optimiser": "adamw", "weight_decay": 30.0, "epochs": 500},
        )
    )
    assert none.text == "no weight decays"
    assert (uneven.severity, uneven.change) == ("warning", ("training.optimiser=adamw",))
    assert (strong.severity, strong.change) == ("warning", ("training.weight_decay=3",))


def test_long_steps_and_clipping_are_found(toy_files: tuple[Path, Path]) -> None:
    _, found = looked_at(fresh(toy_files, {"hidden": 6}, training={"learning_rate": 0.5, "clip": 0.001}))
    texts = [finding.text for finding in about(found, "steps")]
    assert any("steps are long" in text for text in texts)
    assert any("clipping takes most" in text for text in texts)


def test_a_run_that_learnt_reads_its_source(learnt: Path, toy_files: tuple[Path, Path]) -> None:
    subject = resolve(learnt).subject(data=str(toy_files[1]), device="cpu")
    weights = {name: value.clone() for name, value in subject.model.state_dict().items()}
    diagnosis, found = looked_at(subject)
    assert subject.trained
    assert subject.steps > 0
    assert about(found, "reading")[0].severity == "good"
    assert diagnosis.reading.loss < 0.5 < diagnosis.reading.shuffled
    assert all(torch.equal(value, weights[name]) for name, value in subject.model.state_dict().items())
    assert all(p.grad is None for p in subject.model.parameters())
    assert not subject.model.training
    blind = resolve(learnt).subject(data=str(toy_files[1]), device="cpu")
    scaled(blind.model, 0.0, "source_embedding")
    _, found = looked_at(blind)
    assert "does not read its source" in about(found, "reading")[0].text
    assert not resolve(learnt, fresh=True).subject(data=str(toy_files[1]), device="cpu").trained


def test_measuring_twice_gives_the_same(toy_files: tuple[Path, Path]) -> None:
    once, again = (looked_at(fresh(toy_files, {"hidden": 6, "dropout": 0.3}))[0].to_json() for _ in range(2))
    assert once == again


def test_the_page_is_whole_and_loads_nothing(toy_files: tuple[Path, Path], tmp_path: Path) -> None:
    subject = dataclasses.replace(fresh(toy_files, DEEP), name="<b>deep</b>")
    diagnosis, found = looked_at(subject)
    page, beside = write_diagnosis(diagnosis, found, tmp_path / "page.html", command="thalweg train x.yaml")
    text = page.read_text(encoding="utf-8")
    for word in ("http://", "https://", "<script", "<link", "<b>deep</b>"):
        assert word not in text.replace("http://www.w3.org", "")
    for word in ("encoder 8", "gradients vanish", "model.residual=residual", "Weight decay", "&lt;b&gt;deep"):
        assert word in text
    assert "thalweg train x.yaml model.residual=residual model.norm=layer" in text
    record = json.loads(beside.read_text(encoding="utf-8"))
    assert record["findings"][0]["severity"] == "problem"
    assert record["through_depth"]["encoder"] < 0.02
    assert len(record["states"]) == 16


def test_what_cannot_be_looked_at_is_refused(toy_files: tuple[Path, Path], tmp_path: Path, learnt: Path) -> None:
    (tmp_path / "bare").mkdir()
    with pytest.raises(ConfigError, match="folder without"):
        resolve(tmp_path / "bare").subject()
    with pytest.raises(DataError, match="give the pairs to look at with --data"):
        resolve(learnt).subject(data=str(tmp_path / "absent.tsv"), device="cpu")
    with pytest.raises(ConfigError, match="`rows` must be at least 2"):
        diagnose(fresh(toy_files, {"hidden": 4}), rows=1)
    lone = tmp_path / "one.tsv"
    lone.write_text("abc\tCBA\n", encoding="utf-8")
    with pytest.raises(DataError, match="at least 2 pairs"):
        looked_at(resolve(learnt).subject(data=str(lone), device="cpu"))


def test_watched_training_is_logged_shown_and_not_repeated_by_resuming(
    toy_files: tuple[Path, Path], tmp_path: Path
) -> None:
    config = toy_config(toy_files[0], epochs=2, model={"hidden": 8, "encoder_layers": 2})
    train(config, tmp_path / "run", watch=GradientWatch(every=4))

    def steps() -> list[int]:
        lines = (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()
        events = [json.loads(line) for line in lines]
        return [event["step"] for event in events if event["event"] == "gradients"]

    first = steps()
    assert first == list(range(0, first[-1] + 1, 4))
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "Gradient, first layer over last" in page
    assert "Step over weights" in page
    more = dataclasses.replace(config, training=dataclasses.replace(config.training, epochs=3))
    train(more, tmp_path / "run", resume=True, watch=GradientWatch(every=4))
    after = steps()
    assert after[: len(first)] == first
    assert len(after) == len(set(after)) > len(first)
