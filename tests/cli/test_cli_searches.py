"""Every search, constraint, ensemble and feature column through the command line; wrong ones are one line, status 2."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner, Result

from thalweg.cli.options import Search

SMALL = ("model.width=16", "heads=2", "feedforward=32", "encoder_layers=1", "decoder_layers=1", "warmup=5")
SMALL += ("epochs=2", "batch_tokens=200", "learning_rate=0.01", "device=cpu")

RECURRENT = ("hidden=8", "embedding=8", "epochs=1", "batch_size=16", "device=cpu")


def invoke(*args: object) -> Result:
    from thalweg.cli.main import app

    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("transformer"), random.Random(0)
    words = ["".join(rng.choices("abcdef", k=rng.randint(2, 6))) for _ in range(60)]
    pairs = folder / "pairs.tsv"
    pairs.write_text("".join(f"{word}\t{word[::-1]}\n" for word in words))
    done = invoke("train", "--data", pairs, "--model", "transformer", "--out", folder / "run", *SMALL)
    assert done.exit_code == 0, done.output
    return folder / "run"


@pytest.fixture(scope="module")
def verbs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder, rng = tmp_path_factory.mktemp("verbs"), random.Random(0)
    words = ["".join(rng.choices("abcd", k=rng.randint(2, 4))) for _ in range(40)]
    file = folder / "verbs.tsv"
    file.write_text("".join(f"{w}\t{w}ed\tV;PST\n{w}\t{w}s\tV;PRS\n" for w in words))
    done = invoke("train", "--data", file, "--out", folder / "run", *RECURRENT)
    assert done.exit_code == 0, done.output
    return folder / "run", file


@pytest.mark.parametrize("search", get_args(Search))
def test_predict_with_every_search(cli: Any, transformer: Path, search: str) -> None:
    options = ["--search", search, "--k", 2, "--max-length", 6, "--format", "jsonl", "--device", "cpu"]
    done = cli("predict", transformer, "--text", "abc", "--text", "fed", *options)
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["source"] for record in records] == ["abc", "fed"]
    for record in records:
        for answer in record["answers"]:
            assert {"text", "log_prob", "probability", "share", "finished"} <= answer.keys()
            assert ("optimal" in answer) == (search in ("beam", "exact"))


@pytest.mark.parametrize("search", get_args(Search))
def test_evaluate_with_every_search(cli: Any, run: Path, tmp_path: Path, search: str) -> None:
    test = tmp_path / "test.tsv"
    test.write_text("abc\tcba\nfed\tdef\n")
    done = cli("evaluate", run, test, "--search", search, "--k", 2, "--max-length", 5, "--json", "--device", "cpu")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["items"] == 2
    assert ("exact" in facts) == (search == "exact")
    written = json.loads((run / "evaluation" / "test" / "metrics.json").read_text())
    assert written["search"]["name"] == search


def test_exact_evaluation_in_words(cli: Any, run: Path, tmp_path: Path) -> None:
    test = tmp_path / "test.tsv"
    test.write_text("abc\tcba\n")
    shown = cli("evaluate", run, test, "--search", "exact", "--max-length", 5, "--device", "cpu").stdout
    assert "proved the most probable" in shown
    assert "beam 5 finds it already" in shown
    assert "it is the empty answer" in shown


def test_constraints(cli: Any, trained: Path, tmp_path: Path) -> None:
    lexicon = tmp_path / "known.txt"
    lexicon.write_text("cba\nfed\n")
    rows = cli("predict", trained, "--text", "abc", "--lexicon", lexicon, "--k", 5, "--device", "cpu").stdout
    assert {row.split("\t")[1] for row in rows.splitlines()} == {"cba", "fed"}
    rows = cli("predict", trained, "--text", "abc", "--prefix", "fe", "--k", 3, "--device", "cpu").stdout
    assert all(row.split("\t")[1].startswith("fe") for row in rows.splitlines())
    rows = cli("predict", trained, "--text", "abc", "--min-length", 9, "--device", "cpu").stdout
    assert len(rows.split("\t")[1]) >= 8


def test_tree(cli: Any, trained: Path, tmp_path: Path) -> None:
    for name in ("tree.png", "tree.dot"):
        done = cli("predict", trained, "--tree", tmp_path / name, "--device", "cpu", stdin="\nabc\nfed\n")
        assert done.exit_code == 0, done.output
        assert len(done.stdout.splitlines()) == 3
        assert (tmp_path / name).stat().st_size > 100


def test_ensembles_and_votes(cli: Any, trained: Path, transformer: Path) -> None:
    words = ["--text", "abc", "--format", "jsonl", "--device", "cpu"]
    alone = json.loads(cli("predict", trained, *words).stdout)
    twice = json.loads(cli("predict", trained, "--ensemble", trained, *words).stdout)
    assert alone["answers"][0]["text"] == twice["answers"][0]["text"]
    mixed = cli("predict", trained, "--ensemble", transformer, *words)
    assert mixed.exit_code == 0, "one alphabet, two families"
    voted = cli("predict", trained, "--ensemble", trained, "--ensemble", transformer, "--vote", *words)
    assert json.loads(voted.stdout)["answers"][0]["votes"] >= 2
    assert json.loads(voted.stdout)["answers"][0]["text"] == alone["answers"][0]["text"]


def test_reduced_precision(cli: Any, transformer: Path) -> None:
    for precision in ("int8", "bf16"):
        done = cli("predict", transformer, "--text", "abc", "--precision", precision, "--device", "cpu")
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith("abc\t")


def test_features(cli: Any, verbs: tuple[Path, Path]) -> None:
    run, file = verbs
    tags = ["--features", "V;PST", "--features", "V PRS"]
    done = cli("predict", run, "--text", "abc", "--text", "dab", *tags, "--device", "cpu")
    assert [line.split("\t")[4] for line in done.stdout.splitlines()] == ["V;PST", "V;PRS"]
    piped = cli("predict", run, "--device", "cpu", stdin="abc\tV;PST\ndab\tignored\tV;PRS\n")
    assert piped.stdout == done.stdout
    lines = cli("predict", run, "--device", "cpu", "--format", "jsonl", stdin="abc\tV;PST;OLD\n\n")
    first, empty = (json.loads(line) for line in lines.stdout.splitlines())
    assert first["features"] == ["V", "PST", "OLD"]
    assert empty == {"source": "", "answers": [], "unknown": []}
    assert "tag `OLD` was not in the training data, first with `abc`: left out" in lines.stderr
    for_all = cli("predict", run, "--text", "abc", "--text", "dab", "--features", "V;PST", "--device", "cpu")
    assert for_all.stdout.count("V;PST") == 2
    assert cli("evaluate", run, file, "--device", "cpu").exit_code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--search", "astar"], "astar"),
        (["--lexicon", "absent.txt"], "absent.txt: expected a text file, got no such file"),
        (["--prefix", "ż"], "the prefix must be of symbols that the model writes, got `ż`"),
        (["--prefix", "a", "--search", "stochastic"], "search.prefix does not go with `stochastic` search"),
        (["--vote"], "--vote needs other runs to vote with; add `--ensemble RUN2`"),
        (["--ensemble", "absent"], "absent/model.safetensors: expected a checkpoint, got no such file"),
        (["--tree", "tree.xyz"], "tree.xyz: expected a name that ends in .png"),
        (["--tree", "tree.png", "--search", "exact"], "--tree draws a beam, got `exact` search"),
        (["--typical", "0"], "search.typical must be in (0, 1], got 0.0"),
        (["--min-p", "2"], "search.min_p must be in (0, 1], got 2.0"),
        (["--groups", "3"], "search.groups must divide search.width = 5, got 3"),
        (["--min-length", "5", "--max-length", "3"], "search.min_length must be at most search.max_length = 3"),
        (["--features", "V;PST"], "trained without features, got `V;PST` with `abc`"),
        (["--precision", "int4"], "int4"),
    ],
)
def test_wrong_options(cli: Any, trained: Path, options: list[str], said: str) -> None:
    done = cli("predict", trained, "--text", "abc", "--device", "cpu", *options)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert done.exception is None or isinstance(done.exception, SystemExit)
    if done.stderr.startswith("error"):
        assert done.stderr.count("\n") == 1


def test_wrong_columns(cli: Any, trained: Path, verbs: tuple[Path, Path], pairs: Path, tmp_path: Path) -> None:
    run, file = verbs
    cases = [
        (("evaluate", run, pairs), "pairs.tsv:1: expected 3 columns (source, tab, target, tab, tags), got 2"),
        (("evaluate", trained, file), "verbs.tsv:1: expected 2 columns (source, tab, target), got 3"),
        (("predict", run, "--text", "abc"), 'this run reads tags beside the text; add `--features "V;PST"`'),
        (("predict", run, "--features", "V;PST"), "--features goes with --text"),
        (("predict", run, "--text", "a", "--features", "V", "--features", "V"), "give one --features for all or one"),
        (("predict", run, "--text", "a", "--features", ";"), "--features must hold tags such as `V;PST`, got none"),
        (("train", "--data", file, "--out", tmp_path / "new", "data.features=none"), "`data.features=auto` trains"),
        (("predict", trained, "--text", "abc", "--ensemble", run), "expected a run without features as"),
    ]
    for words, said in cases:
        done = cli(*words, stdin="")
        assert done.exit_code == 2, words
        assert said in done.stderr
    done = cli("predict", run, stdin="abc\n")
    assert "<stdin>:1: expected source, tab, tags (such as `V;PST`), which this run reads, got 'abc'" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "transfomer"], "--model `transfomer` is not known; did you mean `transformer`?"),
        (["--model", "transformer", "hidden=8"], "`hidden` is not a setting of transformer models but of recurrent"),
        (["--model", "transformer", "width=8"], "`width` is ambiguous; write one of `model.width`, `search.width`"),
        (["--model", "lstm", "heads=2"], "`heads` is not a setting of recurrent models but of transformer ones"),
        (["batch_tokens=3"], "raise `batch_tokens` to"),
        (["batch_tokens=-1"], "training.batch_tokens must be 0 or more, got -1"),
    ],
)
def test_training_mistakes(cli: Any, pairs: Path, tmp_path: Path, words: list[str], said: str) -> None:
    done = cli("train", "--data", pairs, "--out", tmp_path / "run", *words)
    assert done.exit_code == 2
    assert said in done.stderr


def test_help_has_examples(cli: Any) -> None:
    for command, part in (("predict", "--search exact"), ("evaluate", "--vote"), ("train", "--model transformer")):
        shown = cli(command, "--help").stdout
        assert part in shown
    assert "--ensemble" in cli("evaluate", "--help").stdout
