from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch

from oracles import search as oracle
from oracles.beams import Book
from thalweg.errors import ConfigError
from thalweg.inference import BeamTree, TableModel, beam_search

D3 = TableModel(oracle.tree_language_model(), vocab_size=len(oracle.WORDS), bos=0)


def d3(width: int) -> BeamTree:
    tree = beam_search(D3, torch.tensor([0]), width=width, max_length=3, return_tree=True).tree
    assert tree is not None
    return tree


@pytest.mark.parametrize("eos", [3, None])
@pytest.mark.parametrize(
    "options",
    [
        {"width": 1},
        {"width": 2},
        {"width": 9},
        {"width": 3, "min_length": 2},
        {"width": 4, "groups": 2, "diversity": 0.7},
    ],
    ids=str,
)
def test_the_tree_is_the_textbook_record(eos, options):
    every = [oracle.random_table(n, vocab=4, eos=eos, depth=4, impossible=0.2) for n in range(5)]
    model = TableModel(every, vocab_size=4, bos=0, eos=eos)
    plain = beam_search(model, torch.arange(5), max_length=4, **options)
    found = beam_search(model, torch.arange(5), max_length=4, return_tree=True, **options)
    assert plain.tree is None
    assert found.tokens.equal(plain.tokens)
    assert found.tree is not None
    for item, table in enumerate(every):
        book = Book(table, eos=eos, k=options["width"], max_length=4, **options)
        nodes = found.tree.nodes(item)
        depth = max(len(node.tokens) for node in nodes)
        for step in range(1, depth + 1):
            seen = sorted((node.tokens, node.fate, node.score) for node in nodes if len(node.tokens) == step)
            expected = sorted((tokens, fate, score) for tokens, score, fate in book.candidates[step])
            assert [node[:2] for node in seen] == [c[:2] for c in expected]
            assert all(math.isclose(a[2], b[2], abs_tol=1e-9) for a, b in zip(seen, expected, strict=True))
        for node in nodes[1:]:
            above = nodes[node.parent]
            assert above.tokens == node.tokens[:-1]
            assert above.fate == "kept"
            assert node.score <= above.score
        finished = {node.tokens for node in nodes if node.fate == "finished"}
        assert {tuple(s) for s, f in zip(found.sequences()[item], found.finished[item], strict=False) if f} <= finished


def test_d3_by_width():
    def words(node):
        return " ".join(oracle.WORDS[symbol] for symbol in node.tokens)

    fates = {words(node): (round(node.score, 6), node.fate) for node in d3(2).nodes(0)}
    assert fates["the green"] == (-4.9, "dropped")
    assert fates["a blue"] == (-4.3, "kept")
    assert fates["the red rectangle"] == (-9.1, "finished")
    assert "the green rectangle" not in fates
    assert {words(node): node.fate for node in d3(4).nodes(0)}["the green rectangle"] == "finished"


def test_dot_and_drawing(tmp_path):
    tree = d3(2)
    dot = tree.to_dot(0, oracle.WORDS)
    assert dot.count("->") == len(tree.nodes(0)) - 1
    assert 'label="green\\n-4.90", color="#9a9a9a"' in dot
    assert tree.to_dot(0, oracle.WORDS, dropped=0).count("dashed") == 0
    assert tree.to_dot(0, oracle.WORDS, dropped=1).count("dashed") == 2
    assert '"3\\n' in tree.to_dot(0)
    quoted = ['"', "\\", *oracle.WORDS[2:]]
    assert 'label="\\\\\\n-1.50"' in tree.to_dot(0, quoted)
    figure = tree.draw(0, oracle.WORDS, tmp_path / "tree.png")
    assert (tmp_path / "tree.png").stat().st_size > 5000
    texts = {text.get_text() for text in figure.axes[0].texts}
    assert "the  \N{MINUS SIGN}1.50" in texts
    assert "green  \N{MINUS SIGN}4.90" in texts
    assert len(tree.draw(dropped=0).axes[0].lines) == len(tree.nodes(0)) - 1 - 4
    tree.draw(0, oracle.WORDS, tmp_path / "tree.svg")


def test_leaves_stand_apart_and_unicode_is_drawn(tmp_path):
    torch.manual_seed(0)
    names = ["<s>", "</s>", "ə", "t͡ʃ", "ŋ", " ", "\N{COMBINING TILDE}", "$x$", "λ", "ж"]
    model = TableModel.markov((2 * torch.randn(10, 10)).log_softmax(1), bos=0, eos=1)
    tree = beam_search(model, torch.tensor([0]), width=3, max_length=5, min_length=3, return_tree=True).tree
    assert tree is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = tree.draw(0, names, tmp_path / "tree.png")
    places = [text.get_position() for text in figure.axes[0].texts if text.get_color() != "none"]
    assert len(set(places)) == len(places) == len(tree.nodes(0))
    for depth in {x for x, _ in places}:
        column = sorted(y for x, y in places if x == depth)
        assert all(b - a >= 1 for a, b in itertools.pairwise(column))


def test_wrong_item():
    with pytest.raises(ConfigError, match="`item` must be one of"):
        d3(2).nodes(1)
