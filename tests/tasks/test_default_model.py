"""The model where nothing is said: chosen by the pairs, told in a line, the same from Python, YAML and words."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import yaml
from toy_task import answer, write_pairs
from typer.testing import CliRunner

from thalweg.cli.main import app
from thalweg.data import Example
from thalweg.energies import Monotonic, MonotonicConfig, Seq2SeqConfig
from thalweg.errors import ConfigError
from thalweg.tasks import build_config, load, train
from thalweg.tasks.registry import task_named
from thalweg.tasks.transduce.choosing import FEW, MANY, choose_model, order_of
from thalweg.tasks.transduce.ensembles import open_runs
from thalweg.tasks.transduce.onnx_export import export_onnx
from thalweg.tasks.transduce.presets import AutoConfig

QUICK = {"epochs": 2, "device": "cpu", "warmup": 0, "learning_rate": 0.01}


def words(count, length=5, seed=0):
    draw = random.Random(seed)
    return [tuple(draw.randrange(4, 14) for _ in range(length)) for _ in range(count)]


def doubled(word):
    """Every even symbol twice, shifted to another alphabet: monotone, of another length."""
    return tuple(symbol + 20 for symbol in word for _ in range(2 - symbol % 2))


@pytest.mark.parametrize(("length", "least"), [(3, 0.7), (5, 0.8), (12, 0.8)])
def test_the_order_of_symbols_that_belong_together(length, least):
    drawn = words(300, length)
    along = order_of([Example(word, doubled(word)) for word in drawn])
    assert along > least
    backwards = order_of([Example(word, doubled(word)[::-1]) for word in drawn])
    assert backwards == pytest.approx(-along, abs=1e-9)
    mixed = random.Random(1)
    targets = [doubled(word) for word in drawn]
    targets = [tuple(mixed.sample(target, len(target))) for target in targets]
    assert abs(order_of([Example(*pair) for pair in zip(drawn, targets, strict=True)])) < 0.2


def test_the_order_of_nearly_nothing():
    assert order_of([]) == 0.0
    assert order_of([Example((4,), (5,))] * 5) == 0.0
    assert order_of([Example((4, 4), (5, 5))] * 5) == 0.0


@pytest.mark.parametrize(
    ("examples", "tagged", "model", "why"),
    [
        (
            [Example(word, doubled(word)) for word in words(200)],
            False,
            MonotonicConfig(),
            "200 pairs, and the",
        ),
        ([Example(word, word[::-1]) for word in words(200)], False, Seq2SeqConfig(), "no common order"),
        ([Example(word, doubled(word)) for word in words(200)], True, Seq2SeqConfig(), "tags stand before"),
        ([Example(word, doubled(word)) for word in words(200, 30)], False, Seq2SeqConfig(), "are long"),
        (
            [Example(word, doubled(word)) for word in words(FEW + 1)],
            False,
            MonotonicConfig(dropout=0.2, spelling=False),
            "in 2,001 pairs;",
        ),
        (
            [Example(word, doubled(word)) for word in words(1000)] * (MANY // 1000),
            False,
            Seq2SeqConfig(hidden=256, dropout=0.2),
            "20,000 pairs teach",
        ),
    ],
)
def test_what_is_picked(examples, tagged, model, why):
    config, line = choose_model(build_config({"training": {"seed": 3}}), examples, tagged=tagged)
    assert config.model == model
    family = "monotonic" if isinstance(model, MonotonicConfig) else "recurrent"
    plain = build_config({"model": {"family": family}, "training": {"seed": 3}})
    assert config == replace(plain, model=model)
    assert why in line
    assert "\n" not in line
    said = build_config({"model": {"hidden": 9}})
    assert choose_model(said, examples, tagged=tagged) == (said, ""), "what is said is meant"


def test_nothing_said_is_the_same_everywhere():
    for settings in ({}, {"model": "auto"}, {"model": {"family": "auto"}}, {"model": {"preset": "auto"}}):
        assert build_config({**settings, "training": {"epochs": 3}}) == build_config({"training": {"epochs": 3}})
    assert build_config({}).model == AutoConfig()
    with pytest.raises(ConfigError, match=r"`model\.hidden` is not a setting of auto models but of recurrent ones"):
        build_config({"model": {"family": "auto", "hidden": 9}})


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("along")
    texts = ["".join(chr(93 + symbol) for symbol in word) for word in words(120)]
    along = [(text, "".join(c.upper() * (2 - ord(c) % 2) for c in text)) for text in texts]
    write_pairs(folder / "train.tsv", along[:100])
    write_pairs(folder / "dev.tsv", along[100:])
    write_pairs(folder / "turned.tsv", [(text, answer(text)) for text in texts])
    return folder


def test_a_training_says_what_it_picked_and_keeps_it(pairs, tmp_path):
    settings = ["epochs=2", "--device", "cpu", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, ["train", "--data", str(pairs / "train.tsv"), *settings])
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("picked")]
    assert line.startswith("picked  monotonic: ")
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert written["model"]["family"] == "monotonic"
    assert isinstance(load(tmp_path / "run", device="cpu").model, Monotonic)
    assert (tmp_path / "run" / "report.html").is_file()
    turned = {"data": {"train": str(pairs / "turned.tsv")}, "training": QUICK}
    train(turned, tmp_path / "turned")
    assert load(tmp_path / "turned", device="cpu").meta["config"]["model"]["family"] == "recurrent"


@pytest.fixture(scope="module")
def ensemble(pairs, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "three"
    messages: list[dict] = []
    data = {"train": str(pairs / "train.tsv"), "dev": str(pairs / "dev.tsv")}
    settings = {"data": data, "model": {"family": "monotonic", "hidden": 8, "embedding": 8}}
    train({**settings, "training": QUICK | {"ensemble": 3, "seed": 5}}, out, listener=messages.append)
    train({**settings, "training": QUICK | {"seed": 6}}, out.parent / "alone")
    return out, messages


def test_an_ensemble_answers_as_one(ensemble, pairs):
    out, messages = ensemble
    assert [e["message"] for e in messages if e["event"] == "member"] == [
        "member  2 of 3, seed 6",
        "member  3 of 3, seed 7",
    ]
    assert len([e for e in messages if e.get("lines")]) == 1, "the data are told of once"
    assert (out / "log.jsonl").read_text(encoding="utf-8").count('"event": "end"') == 1
    one = load(out, device="cpu")
    spread = [open_runs([path], device="cpu") for path in (out / "model.safetensors", *sorted(out.glob("members/*")))]
    assert len(one.model.members) == len(spread) == 3
    (found,) = one.predict(["abba"])
    ids = [one.source.alphabet.encode("abba")]
    together = one.search(ids, k=1, how=one.usual)
    # The mean of probabilities, symbol by symbol, by hand.
    total, states = 0.0, [each.model.begin(each._padded(ids, each.source)) for each in spread]
    tokens = together.tokens.new_full((1,), one.model.bos)
    for symbol in together.tokens[0, 0, : together.lengths[0, 0]].tolist():
        steps = [each.model.step(tokens, state) for each, state in zip(spread, states, strict=True)]
        states = [state for _, state in steps]
        total += sum(log_probs[0, symbol].exp() for log_probs, _ in steps).div(3).log().item()
        tokens = together.tokens.new_full((1,), symbol)
    assert found.answers[0].log_prob == pytest.approx(total, abs=1e-4)
    done = CliRunner().invoke(app, ["predict", str(out), "--text", "abba", "--device", "cpu"])
    assert found.answers[0].text in done.stdout
    done = CliRunner().invoke(app, ["evaluate", str(out), str(pairs / "dev.tsv"), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    (small,) = load(out, device="cpu", precision="int8").predict(["abba"])
    assert small.answers[0].log_prob == pytest.approx(found.answers[0].log_prob, abs=0.5)
    servant = task_named("transduce").serving(out, device="cpu")
    (served,) = servant.answer(servant.questions(["abba"]), servant.plan_of({}))
    assert served.answers[0].text == found.answers[0].text
    with pytest.raises(ConfigError, match=r"got an ensemble of 3; name one: .*three/model.safetensors"):
        export_onnx(out, out / "onnx")


def test_a_member_is_the_run_of_its_seed(ensemble):
    out, _ = ensemble
    for name in ("model.safetensors", "last.safetensors"):
        assert_same(out.parent / "alone" / name, out / "members" / "2" / name)


def test_an_ensemble_grows_when_it_is_resumed(ensemble, pairs, tmp_path):
    import shutil

    out, _ = ensemble
    shutil.copytree(out, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "members" / "3")
    done = CliRunner().invoke(app, ["train", "--resume", "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert_same(out / "members" / "3" / "model.safetensors", tmp_path / "run" / "members" / "3" / "model.safetensors")
    done = CliRunner().invoke(app, ["train", "--resume", "--out", str(tmp_path / "run"), "--ensemble", "4"])
    assert done.exit_code == 0, done.output
    assert len(load(tmp_path / "run", device="cpu").model.members) == 4


def assert_same(one, other):
    import torch

    from thalweg.learning.checkpoint import load_checkpoint

    first, second = (load_checkpoint(path).tensors for path in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("number", [0, -1, 1001, 1.5])
def test_wrong_numbers_of_models(number):
    with pytest.raises(ConfigError, match=r"training.ensemble"):
        build_config({"training": {"ensemble": number}})


def test_ensembles_are_of_strings(tmp_path):
    done = CliRunner().invoke(app, ["train", "--task", "classify", "digits", "--ensemble", "2"])
    assert done.exit_code == 2
    assert "`training.ensemble` is not a setting" in done.stderr


def test_a_killed_training_goes_on_to_the_same_bits(pairs, tmp_path):
    class Killed(Exception):  # noqa: N818
        """Stands for kill -9."""

    def kill(event):
        if event["event"] == "step" and event["epoch"] == 2 and event["batch"] == 4:
            raise Killed

    hard = {"checkpoint_every": 3, "average": 0.9, "label_smoothing": 0.1, "batch_size": 16}
    model = {"family": "monotonic", "hidden": 8, "embedding": 8, "dropout": 0.3}
    data = {"train": str(pairs / "train.tsv"), "dev": str(pairs / "dev.tsv")}
    config = build_config({"data": data, "model": model, "training": QUICK | hard | {"epochs": 3}})
    train(config, tmp_path / "whole")
    with pytest.raises(Killed):
        train(config, tmp_path / "cut", listener=kill)
    train(config, tmp_path / "cut", resume=True)
    for name in ("model.safetensors", "last.safetensors"):
        assert_same(tmp_path / "whole" / name, tmp_path / "cut" / name)
