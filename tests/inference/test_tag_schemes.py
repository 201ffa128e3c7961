from __future__ import annotations

import itertools
import math
import re

import pytest
import torch

from thalweg.errors import ConfigError, DataError
from thalweg.inference.structures.tag_schemes import TagConstraints, tag_constraints, tag_spans

LETTERS = {"BIO": "BI", "BIOES": "BIES", "BILOU": "BILU", "IOB1": "BI", "IO": "I"}

# The languages of the schemes as regular expressions: an oracle that shares nothing with the code. `x` is a type.
LANGUAGES = {
    "BIO": "B-x (I-x )*",
    "BIOES": "S-x |B-x (I-x )*E-x ",
    "BILOU": "U-x |B-x (I-x )*L-x ",
    "IOB1": "I-x (I-x |B-x )*",
    "IO": "I-x ",
}


def label_names(scheme: str, types: str = "xy") -> list[str]:
    return ["O", *(f"{letter}-{kind}" for kind in types for letter in LETTERS[scheme])]


def is_word(scheme: str, tags: tuple[str, ...]) -> bool:
    spans = "|".join(LANGUAGES[scheme].replace("x", kind) for kind in "xy")
    return re.fullmatch(f"(O |{spans})*", "".join(f"{tag} " for tag in tags)) is not None


def is_permitted(rules: TagConstraints, path: tuple[int, ...]) -> bool:
    total = float(rules.start[path[0]] + rules.end[path[-1]])
    total += sum(float(rules.transitions[i, j]) for i, j in itertools.pairwise(path))
    assert total in (0.0, -math.inf)
    return total == 0.0


def span_sets(length: int, types: str = "xy", first: int = 0):
    """Every set of spans that do not overlap, from position ``first`` on."""
    yield ()
    for start in range(first, length):
        for end in range(start + 1, length + 1):
            for kind in types:
                for rest in span_sets(length, types, end):
                    yield ((start, end, kind), *rest)


@pytest.mark.parametrize("scheme", LETTERS)
def test_permitted_is_what_reads_and_writes_to_itself(scheme):
    labels = label_names(scheme)
    rules = tag_constraints(labels, scheme)
    counted = 0
    for length in range(1, 5):
        for path in itertools.product(range(len(labels)), repeat=length):
            tags = tuple(labels[i] for i in path)
            permitted = is_permitted(rules, path)
            assert permitted == is_word(scheme, tags), tags
            counted += permitted
    assert counted > 0


def written(spans, length, scheme):
    """The tags of spans: the letters of the first, the middle ones, the last, and of a span of one."""
    first, last, single = {"BIOES": "BES", "BILOU": "BLU", "BIO": "BIB", "IOB1": "III", "IO": "III"}[scheme]
    tags = ["O"] * length
    for n, (start, end, kind) in enumerate(spans):
        touches = n > 0 and spans[n - 1][1:] == (start, kind)
        middle = ["I"] * (end - start - 2)
        letters = [single] if end - start == 1 else [first, *middle, last]
        if scheme == "IOB1" and touches:
            letters[0] = "B"
        tags[start:end] = [f"{letter}-{kind}" for letter in letters]
    return tags


@pytest.mark.parametrize("scheme", LETTERS)
def test_spans_are_read_back(scheme):
    for length in range(5):
        for spans in span_sets(length):
            touching = any(a[1:] == (b[0], b[2]) for a, b in itertools.pairwise(spans))
            if scheme == "IO" and touching:
                continue  # it cannot tell them apart
            tags = written(spans, length, scheme)
            assert tag_spans(tags, scheme) == list(spans)
            assert length == 0 or is_word(scheme, tuple(tags))


def test_oracle_can_fail():
    rules = tag_constraints(label_names("BIO"), "BIO")
    broken = rules._replace(start=torch.zeros_like(rules.start))  # lets a sequence begin with I-x
    assert is_permitted(broken, (2,))
    assert not is_permitted(rules, (2,))
    assert not is_word("BIO", ("I-x",))


def test_labels_may_be_absent_or_without_type():
    rules = tag_constraints(["B", "I"], "BIO")
    assert rules.transitions.tolist() == [[0, 0], [0, 0]]
    assert rules.start.tolist() == [0, -math.inf]
    assert tag_spans(["B", "I", "B"]) == [(0, 2, ""), (2, 3, "")]
    segments = tag_constraints(["B", "I", "E", "S"], "BIOES")  # word segmentation: no O
    assert torch.isneginf(segments.end).tolist() == [True, True, False, False]


def test_types_may_hold_dashes():
    assert tag_spans(["B-a-b", "I-a-b", "I-a"], "BIO") == [(0, 2, "a-b"), (2, 3, "a")]
    rules = tag_constraints(["B-a-b", "I-a-b", "I-a"], "BIO")
    assert torch.isneginf(rules.transitions).tolist() == [[False, False, True]] * 2 + [[False, True, False]]


def test_types_and_devices():
    rules = tag_constraints(["O", "B-x"], dtype=torch.float64, device="cpu")
    assert {part.dtype for part in rules} == {torch.float64}
    assert {part.dtype for part in tag_constraints(["O"])} == {torch.float32}
    assert {part.dtype for part in rules.to(torch.float32)} == {torch.float32}
    assert [tuple(part.shape) for part in rules] == [(2, 2), (2,), (2,)]


@pytest.mark.parametrize(
    ("scheme", "label", "message"),
    [
        ("BIO", "E-x", "label 1 must be one of O, B-TYPE, I-TYPE in the scheme BIO, got 'E-x'.*E belongs to BIOES"),
        ("BIOES", "U-x", "belongs to BILOU"),
        ("IO", "B-x", "belongs to BIO and BIOES and BILOU and IOB1"),
        ("BIO", "b-x", "write `B-x`"),
        ("BIO", "B_x", "write `B-x`"),
        ("BIO", "x-B", "write `B-x`"),
        ("BIO", "o", "write `O`"),
        ("BIO", "<pad>", "leave it out: padding"),
        ("BIO", "PER", "write `B-PER` where a span begins"),
        ("BIO", "B-", "got 'B-'"),
        ("BIO", "", "give the label a name"),
    ],
)
def test_labels_that_do_not_fit(scheme, label, message):
    with pytest.raises(DataError, match=message):
        tag_constraints(["O", label], scheme)


def test_other_errors():
    with pytest.raises(ConfigError, match="IOB2 is called BIO"):
        tag_constraints(["O"], "IOB2")
    with pytest.raises(ConfigError, match="did you mean `BIOES`"):
        tag_spans([], "bioe")
    with pytest.raises(DataError, match="distinct, got `B-x` as labels 1 and 2"):
        tag_constraints(["O", "B-x", "B-x"])
    with pytest.raises(DataError, match="list of at least one"):
        tag_constraints([])
    with pytest.raises(DataError, match="list of at least one"):
        tag_constraints("O")
    with pytest.raises(DataError, match="position 1 must be one of"):
        tag_spans(["O", "Q-x"])
