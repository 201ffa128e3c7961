"""Exported runs: the files, the runner that stands alone, and what is verified before anything is written."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from thalweg.data import Alphabet, Symbols
from thalweg.errors import ConfigError, MissingDependencyError, ThalwegError
from thalweg.learning.checkpoint import Checkpoint, save_checkpoint
from thalweg.tasks import load, registry
from thalweg.tasks.base import Task
from thalweg.tasks.config import as_settings, to_yaml
from thalweg.tasks.registry import build_config
from thalweg.tasks.transduce import onnx_export
from thalweg.tasks.transduce.answers import Source
from thalweg.tasks.transduce.codec import Codec, tag_symbol, write_sides
from thalweg.tasks.transduce.models import build_model
from thalweg.tasks.transduce.onnx_export import export_onnx, verify
from thalweg.tasks.transduce.onnx_runner import Found, Runner
from thalweg.tasks.transduce.search_settings import SearchConfig

pytest.importorskip("onnxruntime")

TINY = {"family": "transformer", "width": 16, "heads": 2, "feedforward": 24, "encoder_layers": 2, "decoder_layers": 2}
MODELS = {
    "lstm": {"hidden": 12, "embedding": 8},
    "gru": {"cell": "gru", "hidden": 12, "embedding": 8},
    "lstm-plain": {"attention": "none", "hidden": 12, "embedding": 8},
    "gru-plain": {"cell": "gru", "attention": "none", "hidden": 12, "embedding": 8},
    "monotonic": {"family": "monotonic", "hidden": 12, "embedding": 8},
    "monotonic-zeroth": {"family": "monotonic", "order": "zeroth", "cell": "gru", "hidden": 12, "embedding": 8},
    "monotonic-edits": {"family": "monotonic", "order": "edits", "spelling": False, "hidden": 12, "embedding": 8},
    "transformer": TINY,
    "rotary": TINY | {"positions": "rotary"},
    "causal": TINY | {"kind": "causal"},
}


def words(count=40):
    rng = random.Random(0)
    return ["a", "f", *("".join(rng.choices("abcdef", k=rng.randint(1, 9))) for _ in range(count)), "abcdef" * 8]


def untrained(folder, model, *, tags=(), target="characters"):
    """A run with weights that make its answers differ; trained on nothing, with a dev file."""
    dev = folder / "dev.tsv"
    column = f"\t{';'.join(tags)}" if tags else ""
    dev.write_text("".join(f"{word}\tx{column}\n" for word in words()), encoding="utf-8")
    settings = {"data": {"train": str(dev), "dev": str(dev)}, "model": model}
    config = build_config(settings)
    source = Codec(Symbols(), Alphabet.build([tuple("abcdef"), tuple(map(tag_symbol, tags))]))
    side = Codec(Symbols(kind=target), Alphabet.build([["uv", "w", "x", "y"] if target == "spaced" else "uvwxy"]))
    torch.manual_seed(1)
    made = build_model(config, source, side)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(2.0)
    meta = {"task": "transduce", "config": as_settings(config), **write_sides(source, side), "longest": 9, "epoch": 1}
    run = folder / "run"
    save_checkpoint(run / "model.safetensors", Checkpoint(dict(made.state_dict()), meta))
    (run / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    return run


@pytest.mark.parametrize("name", MODELS)
def test_greedy_and_beam_are_those_of_the_run(tmp_path, name):
    run = untrained(tmp_path, MODELS[name])
    written = export_onnx(run, tmp_path / "out")
    assert "verified on" in written.said
    assert sorted(path.name for path in written.files) == ["encoder.onnx", "model.json", "runner.py", "step.onnx"]
    runner, ours = Runner(tmp_path / "out", threads=1), load(run, device="cpu")
    for search, k in (("greedy", 1), ("beam", 5), ("beam", 3)):
        how = SearchConfig(search=search, width=k)
        for one, other in zip(ours.predict(words(), k=k, how=how), runner.predict(words(), k=k, width=k), strict=True):
            assert [answer.text for answer in one.answers] == [answer.text for answer in other]
            assert [answer.finished for answer in one.answers] == [answer.finished for answer in other]
            for a, b in zip(one.answers, other, strict=True):
                assert a.log_prob == pytest.approx(b.log_prob, abs=1e-4, rel=1e-5)


def test_one_word_and_many_are_answered_alike(tmp_path):
    export_onnx(untrained(tmp_path, MODELS["lstm"]), tmp_path / "out")
    runner = Runner(tmp_path / "out", threads=1)
    many = runner.predict(words(100), k=3)
    for word, answers in list(zip(words(100), many, strict=True))[::17]:
        alone = runner.predict([word], k=3)[0]
        assert [answer.text for answer in alone] == [answer.text for answer in answers]
    assert runner.predict(["", "a", "é"])[0] == []  # an empty text has no answer, an unknown letter has
    assert runner.predict([]) == []


def test_tags_come_before_the_text(tmp_path):
    run = untrained(tmp_path, MODELS["transformer"], tags=("V", "PST"), target="spaced")
    export_onnx(run, tmp_path / "out")
    runner, ours = Runner(tmp_path / "out", threads=1), load(run, device="cpu")
    expected = [p.answers[0].text for p in ours.predict([Source("abc", ("V",)), Source("abc", ("PST",))])]
    found = runner.predict(["abc", "abc"], tags=[("V", "no such tag"), ("PST",)])
    assert [answers[0].text for answers in found] == expected


def test_the_runner_stands_alone(tmp_path):
    run = untrained(tmp_path, MODELS["lstm"], target="spaced")
    export_onnx(run, tmp_path / "out", text=["abc"])
    program = tmp_path / "out" / "runner.py"
    barred = "import sys; sys.modules['torch'] = sys.modules['thalweg'] = None; import runpy, sys\n"
    code = f"{barred}sys.argv = ['runner.py', 'abc', '--k', '2']; runpy.run_path({str(program)!r}, run_name='__main__')"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    lines = [line.split("\t") for line in said.stdout.splitlines()]
    expected = next(load(run, device="cpu").predict(["abc"], k=2)).answers
    assert [line[1] for line in lines] == [answer.text for answer in expected]


def test_settings_beside_the_graphs(tmp_path):
    export_onnx(untrained(tmp_path, MODELS["causal"]), tmp_path / "out", text=["abc"])
    settings = json.loads((tmp_path / "out" / "model.json").read_text(encoding="utf-8"))
    assert settings["source"]["alphabet"] == list("abcdef")
    assert (settings["memory"], settings["state"]) == (["memory", "mask", "start"], ["past"])
    assert settings["special"] == {"unk": 0, "pad": 1, "bos": 2, "eos": 3}
    runner = Runner(tmp_path / "out", threads=1)
    with pytest.raises(ValueError, match="within the 512 positions"):
        runner.predict(["abc" * 200])


def test_nothing_is_written_where_answers_differ(tmp_path, monkeypatch):
    run = untrained(tmp_path, MODELS["lstm"])
    told = onnx_export.build_graphs

    def wrong(model):
        with torch.no_grad():
            model.output.bias[5] += 0.5
        graphs = told(model)
        with torch.no_grad():
            model.output.bias[5] -= 0.5
        return graphs

    monkeypatch.setattr(onnx_export, "build_graphs", wrong)
    with pytest.raises(ThalwegError, match=r"answers `.*` otherwise"):
        export_onnx(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ties_may_change_places_and_nothing_else():
    def apart(ours, theirs):
        made = [[Found((n, 3), score, True) for n, score in each] for each in (ours, theirs)]
        return onnx_export._difference(*made)

    assert apart([(4, -1.0), (5, -2.0)], [(4, -1.0), (5, -2.00005)]).share < 1
    assert apart([(4, -1.0), (5, -2.0)], [(4, -1.0), (5, -2.0002)]).share > 1
    assert apart([(4, -1.0), (5, -1.00001)], [(5, -1.0), (4, -1.00001)]).tied
    assert apart([(4, -1.0), (5, -2.0)], [(5, -1.0), (4, -2.0)]).share == np.inf
    assert apart([(4, -1.0)], []).share == np.inf
    assert apart([(4, -100.0)], [(4, -100.0005)]).share < 1


def test_what_cannot_be_exported_is_one_line(tmp_path, learnt, monkeypatch):
    with pytest.raises(ConfigError, match="give --data or --text"):
        export_onnx(learnt, tmp_path, data="x.tsv", text=["a"])
    with pytest.raises(ConfigError, match="got none"):
        verify(load(learnt, device="cpu"), _Settings(), [Source("")])
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'thalweg\[onnx\]'"):
        export_onnx(learnt, tmp_path)
    with pytest.raises(ConfigError, match="no export as onnx"):
        registry.task_named("density").export("runs/x", tmp_path, layout="onnx")
    assert "onnx" in (Task.export.__doc__ or "")


class _Settings:
    settings = {"max_length": 9}  # noqa: RUF012


def test_a_learnt_run_is_verified_on_what_was_held_out(tmp_path, learnt):
    written = export_onnx(learnt, tmp_path / "out")
    assert "(held out)" in written.said
