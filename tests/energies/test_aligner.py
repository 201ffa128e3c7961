"""The aligner that learns from pairs: EM beside enumeration, files, and corrupted entries that an audit finds."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
import torch

from oracles import alignments
from thalweg.data import load_dataset
from thalweg.energies import AlignerConfig, ChunkAligner
from thalweg.errors import CheckpointError, ConfigError, DataError, NotFittedError

TINY = [("ab", "xy"), ("ba", "yx"), ("aab", "xy"), ("b", "y"), ("bb", "yyx")]
SETTINGS = [{}, {"source": 1, "target": 1}, {"both": True, "insert": False}, {"source": 3, "delete": False}]


def by_enumeration(pairs, moves, theta):
    """log-likelihood and expected counts of pairs of chunks under theta, from every path."""
    total, counts = 0.0, {}
    for x, y in pairs:
        ways = []
        for path in alignments.paths(len(x), len(y), moves):
            cuts = [(x[i - moves[m][0] : i], y[j - moves[m][1] : j]) for i, j, m in path]
            ways.append((cuts, math.prod(theta[cut] for cut in cuts)))
        whole = math.fsum(weight for _, weight in ways)
        if not whole:
            continue
        total += math.log(whole)
        for cuts, weight in ways:
            for cut in cuts:
                counts[cut] = counts.get(cut, 0.0) + weight / whole
    return total, counts


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_em_equals_enumeration(settings):
    aligner = ChunkAligner(**settings, iterations=3, tolerance=0.0).fit(TINY)
    moves = aligner.config.moves
    table = [("".join(u), "".join(v)) for u, v in aligner.chunks]
    assert len(set(table)) == len(table)
    theta = dict.fromkeys(table, 1 / len(table))
    for found in aligner.history:
        total, counts = by_enumeration(TINY, moves, theta)
        assert found == pytest.approx(total, rel=1e-12)
        last, theta = theta, {cut: counts.get(cut, 0.0) / math.fsum(counts.values()) for cut in table}
    assert all(b >= a - 1e-9 for a, b in itertools.pairwise(aligner.history))
    share = aligner.counts / aligner.counts.sum()
    assert share.tolist() == pytest.approx([last[cut] for cut in table], rel=1e-9, abs=1e-15)


def test_a_broken_count_is_noticed(monkeypatch):
    """A count that leaves the posterior out: the law above must see it."""
    monkeypatch.setattr(ChunkAligner, "_posterior", lambda self, grid, scores: (scores.sum((1, 2, 3)), scores.exp()))
    with pytest.raises(AssertionError):
        test_em_equals_enumeration({})


def lexicon(size: int) -> list[tuple[str, tuple[str, ...]]]:
    entries = load_dataset("cmudict", "dev").pairs
    return [(pair.source, tuple(pair.target.split())) for pair in entries[:size]]


def planted(pairs, count: int, seed: int = 0):
    """Some entries with the targets of one another."""
    chosen = random.Random(seed).sample(range(len(pairs)), count)
    moved = dict(zip(chosen, [pairs[n][1] for n in [*chosen[1:], chosen[0]]], strict=True))
    return [(x, moved.get(n, y)) for n, (x, y) in enumerate(pairs)], set(chosen)


@pytest.fixture(scope="module")
def learned():
    """A lexicon with planted errors, which entries they are, and what was learned from it."""
    pairs, wrong = planted(lexicon(600), 15)
    return pairs, wrong, ChunkAligner().fit(pairs)


def test_the_likelihood_never_falls_and_words_are_cut_as_one_would(learned):
    pairs, _, aligner = learned
    assert all(b >= a - 1e-6 for a, b in itertools.pairwise(aligner.history))
    assert aligner.history[-1] > aligner.history[0] + 5 * len(pairs)
    [back] = aligner.align([("back", ("B", "AE", "K"))])
    assert back is not None
    assert back.text(within="+").endswith("c+k|K")
    for (x, y), found in zip(pairs, aligner.align(pairs), strict=True):
        assert found is not None
        assert "".join(s for u, _ in found.chunks for s in u) == x
        assert tuple(s for _, v in found.chunks for s in v) == y


def test_planted_errors_rank_first(learned):
    pairs, wrong, aligner = learned
    first = set(aligner.surprise(pairs).argsort(descending=True)[: len(wrong)].tolist())
    assert len(first & wrong) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("language", ["ady", "gre", "ice", "ita", "khm", "lav", "mlt_latn", "rum", "slv", "wel_sw"])
def test_planted_errors_rank_first_in_other_languages(language: str, shared_data: Path):
    file = shared_data / "g2p" / "low" / f"{language}_train.tsv"
    if not file.is_file():
        pytest.skip(f"needs {file.name}, not in {file.parent}; set THALWEG_DATA")
    rows = [line.split("\t")[:2] for line in file.read_text(encoding="utf-8").splitlines()]
    pairs, wrong = planted([(x, tuple(y.split())) for x, y in rows], 20)
    surprise = ChunkAligner().fit(pairs).surprise(pairs)
    order = surprise.argsort(descending=True).tolist()
    assert len(set(order[:20]) & wrong) >= 12
    assert len(set(order[:60]) & wrong) >= 17


def test_surprise_of_pairs_that_were_not_learned_from():
    """There is nothing of theirs to take off: few pairs learned, many judged."""
    few = ChunkAligner().fit([("a", "b")])
    strange = few.surprise([("nan", ["n", "a", "n"]), ("aaaa", "bbbb"), ("xyz", "a")])
    assert strange.isfinite().all()
    assert (strange > 0).all()
    assert strange[1] < strange[2]


@pytest.mark.slow
def test_which_errors_an_audit_finds(shared_data: Path):
    """Targets passed on, targets cut in half, single sounds changed, which are little beside the rest of an entry."""
    file = shared_data / "g2p" / "low" / "ice_train.tsv"
    if not file.is_file():
        pytest.skip(f"needs {file.name}, not in {file.parent}; set THALWEG_DATA")
    rows = [line.split("\t")[:2] for line in file.read_text(encoding="utf-8").splitlines()]
    pairs = [(x, tuple(y.split())) for x, y in rows]
    draw = random.Random(5)
    chosen, sounds = draw.sample(range(len(pairs)), 30), sorted({sound for _, y in pairs for sound in y})
    passed_on, changed, halved = chosen[:10], chosen[10:20], chosen[20:]
    wrong = dict(zip(passed_on, [pairs[n][1] for n in [*passed_on[1:], passed_on[0]]], strict=True))
    for n in changed:
        target = list(pairs[n][1])
        place = draw.randrange(len(target))
        target[place] = draw.choice([sound for sound in sounds if sound != target[place]])
        wrong[n] = tuple(target)
    wrong |= {n: pairs[n][1][: max(1, len(pairs[n][1]) // 2)] for n in halved}
    planted_ones = [(x, wrong.get(n, y)) for n, (x, y) in enumerate(pairs)]
    order = ChunkAligner().fit(planted_ones).surprise(planted_ones).argsort(descending=True).tolist()
    assert {*passed_on, *halved} <= set(order[:30])
    assert len(set(order[:100]) & set(changed)) >= 6


def test_passes_are_told_and_pairs_beyond_memory_are_refused():
    heard = []
    aligner = ChunkAligner(iterations=3, tolerance=0.0).fit(TINY, listener=heard.append)
    assert [(event["done"], event["of"]) for event in heard] == [(n, 3) for n in (1, 2, 3)]
    assert len(aligner.history) == 4
    with pytest.raises(ConfigError, match=r"`pairs` = 1 and `source_symbols` = 300000 and .* must fit into memory"):
        ChunkAligner().fit([("a" * 300_000, "b" * 300_000)])


def test_files(tmp_path: Path):
    aligner = ChunkAligner(source=3, insert=False).fit(TINY)
    path = tmp_path / "aligner.safetensors"
    aligner.save(path)
    again = ChunkAligner.load(path)
    assert again.config == aligner.config
    assert again.history == aligner.history
    assert again.align(TINY) == aligner.align(TINY)
    assert torch.equal(again.surprise(TINY), aligner.surprise(TINY))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError):
        ChunkAligner.load(path)
    with pytest.raises(CheckpointError):
        ChunkAligner.load(tmp_path / "absent.safetensors")


def test_what_was_never_seen_and_what_does_not_fit():
    aligner = ChunkAligner(insert=False, target=1).fit(TINY)
    unknown, long, empty = aligner.align([("aq", "xz"), ("b", "yyyy"), ("", "")])
    assert unknown is not None
    assert unknown.text() == "a|x q|z"
    assert long is None
    assert empty is not None
    assert empty.chunks == []
    assert aligner.surprise([("b", "yyyy")]).tolist() == [math.inf]
    assert aligner.align([]) == []
    for wrong in ({"source": 0}, {"target": 9}, {"iterations": 0}, {"tolerance": -1.0}, {"source": True}):
        with pytest.raises(ConfigError):
            AlignerConfig(**wrong)
    with pytest.raises(DataError, match="at least one pair"):
        ChunkAligner().fit([])
    with pytest.raises(DataError, match="no pair can be aligned"):
        ChunkAligner(insert=False, target=1).fit([("a", "xyz")])
    for pairs in ([("a", "b", "c")], [(None, "a")], [((1, 2), "a")]):
        with pytest.raises(DataError, match="must be"):
            ChunkAligner().fit(pairs)  # type: ignore[arg-type]
    with pytest.raises(NotFittedError):
        ChunkAligner().align(TINY)
    many = [chr(0x4E00 + n) for n in range(3000)]
    with pytest.raises(ConfigError, match="lower the longest chunk"):
        ChunkAligner(source=4, target=4).fit([(many, many)])
