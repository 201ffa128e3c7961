from __future__ import annotations

import itertools
import random
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracles.data_plain import covers_once, padding_cells, plain_pad
from thalweg.data import BOS, EOS, PAD, Batches, Example, pad
from thalweg.errors import ConfigError, ShapeError


def make(count: int, seed: int = 0) -> list[Example]:
    rng = random.Random(seed)
    return [
        Example(
            tuple(rng.randrange(4, 30) for _ in range(rng.randint(1, 20))),
            tuple(rng.randrange(4, 30) for _ in range(rng.randint(0, 20))),
        )
        for _ in range(count)
    ]


ids = st.integers(0, 40)


@given(st.lists(st.lists(ids, min_size=1, max_size=6), min_size=1, max_size=6), st.sampled_from([PAD, -1]))
def test_pad(sequences, filler):
    padded = pad(sequences, pad=filler)
    tokens, lengths, mask = plain_pad(sequences, filler)
    assert padded.tokens.tolist() == tokens
    assert padded.lengths.tolist() == lengths
    assert padded.mask.tolist() == mask
    assert (padded.tokens.dtype, padded.lengths.dtype, padded.mask.dtype) == (
        torch.int64,
        torch.int64,
        torch.bool,
    )


@given(st.lists(st.lists(ids, max_size=6), min_size=1, max_size=6))
def test_pad_with_end(sequences):
    padded = pad([tuple(sequence) for sequence in sequences], end=EOS)
    tokens, lengths, mask = plain_pad(sequences, PAD, EOS)
    assert (padded.tokens.tolist(), padded.lengths.tolist(), padded.mask.tolist()) == (tokens, lengths, mask)


def test_the_pad_oracle_can_fail():
    broken = pad([[5, 6], [7]], pad=0).tokens.tolist()
    assert broken != plain_pad([[5, 6], [7]], PAD)[0]


def test_pad_wrong_inputs():
    with pytest.raises(ShapeError, match="at least one sequence"):
        pad([])
    with pytest.raises(ShapeError, match="sequence 1 is empty"):
        pad([[4], []])
    assert pad([[]], end=EOS).tokens.tolist() == [[EOS]]


@pytest.mark.parametrize(
    ("count", "size", "bucket"),
    [(1, 1, 1), (1, 8, 50), (7, 1, 2), (10, 5, 1), (103, 8, 3), (103, 8, 50), (64, 64, 2)],
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_once_in_every_epoch(count, size, bucket, shuffle):
    batches = Batches(make(count), size=size, bucket=bucket, shuffle=shuffle)
    for n in range(3):
        epoch = batches.epoch(n)
        assert len(epoch) == len(batches)
        assert covers_once(epoch, count, size)


def test_the_coverage_oracle_can_fail():
    assert not covers_once([(0, 1), (1, 2)], 3, 2)
    assert not covers_once([(0,), (1,), (2, 3)], 4, 2)
    assert not covers_once([(0, 1)], 3, 2)


def test_the_order_depends_on_seed_and_epoch_alone():
    examples = make(200)
    one, two = Batches(examples, size=8, seed=3), Batches(examples, size=8, seed=3)
    late = two.epoch(5)  # asked for first here, after others there
    assert [one.epoch(n) for n in range(6)][5] == late
    assert one.epoch(0) != one.epoch(1)
    assert one.epoch(0) != Batches(examples, size=8, seed=4).epoch(0)
    torch.manual_seed(1)
    assert one.epoch(0) == two.epoch(0)


def test_like_lengths_come_together():
    examples = make(2000)
    lengths = [len(example.source) for example in examples]
    bucketed = padding_cells(Batches(examples, size=20, bucket=50).epoch(0), lengths)
    plain = padding_cells(Batches(examples, size=20, bucket=1).epoch(0), lengths)
    assert bucketed < plain / 5


def test_batches_of_one_length_still_mix_between_epochs():
    batches = Batches([Example((4, 5), (4,))] * 100, size=10)
    assert {frozenset(rows) for rows in batches.epoch(0)}.isdisjoint(frozenset(rows) for rows in batches.epoch(1))


def test_the_batches_of_an_epoch_are_not_in_order_of_length():
    examples = make(400)
    longest = [max(len(examples[row].source) for row in rows) for rows in Batches(examples, size=8).epoch(0)]
    assert longest != sorted(longest)


def test_without_shuffling_rows_are_sorted_by_length():
    examples = make(50)
    batches = Batches(examples, size=8, shuffle=False)
    flat = [row for rows in batches.epoch(0) for row in rows]
    assert flat == sorted(range(50), key=lambda row: (len(examples[row].source), len(examples[row].target), row))
    assert batches.epoch(0) == batches.epoch(9)


def test_a_batch_holds_its_rows():
    examples = make(30)
    seen = []
    for batch in Batches(examples, size=4).iterate(2):
        source, _, source_mask = plain_pad([examples[row].source for row in batch.rows], PAD)
        target, lengths, _ = plain_pad([examples[row].target for row in batch.rows], PAD, EOS)
        assert batch.source.tokens.tolist() == source
        assert batch.source.mask.tolist() == source_mask
        assert batch.target.tokens.tolist() == target
        assert batch.target.lengths.tolist() == lengths
        assert BOS not in batch.target.tokens
        assert batch.size == len(batch.rows) == batch.source.size
        seen += batch.rows
    assert sorted(seen) == list(range(30))


@pytest.mark.parametrize("start", [0, 1, 5, 8])
def test_resuming_in_the_middle(start):
    batches = Batches(make(30), size=4, seed=1)
    whole = list(batches.iterate(1))
    rest = list(batches.iterate(1, start=start))
    assert [batch.rows for batch in rest] == [batch.rows for batch in whole[start:]]
    assert all(torch.equal(a.source.tokens, b.source.tokens) for a, b in zip(rest, whole[start:], strict=True))


def test_to_another_device():
    batch = next(Batches(make(3), size=3).iterate(0)).to("meta")
    assert batch.source.tokens.device.type == batch.target.mask.device.type == "meta"
    assert batch.size == 3


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"size": 0}, "`size` of batches must be at least 1, got 0"),
        ({"size": 2, "bucket": 0}, "`bucket`"),
        ({"size": 2, "seed": -1}, "`seed`"),
    ],
)
def test_wrong_settings(settings, says):
    with pytest.raises(ConfigError, match=says):
        Batches(make(3), **settings)


def test_wrong_data_and_epochs():
    with pytest.raises(ShapeError, match="at least one example"):
        Batches([], size=2)
    with pytest.raises(ShapeError, match="example 1 has an empty source"):
        Batches([Example((4,), ()), Example((), (4,))], size=2)
    batches = Batches(make(3), size=2)
    with pytest.raises(ConfigError, match="from 0, got -1"):
        batches.epoch(-1)
    for start in (-1, 3):
        with pytest.raises(ConfigError, match=r"0\.\.2"):
            batches.iterate(0, start=start)


def test_twelve_thousand_words_take_well_under_a_second():
    examples = make(12_000)
    start = time.process_time()  # others may want the machine as well
    assert sum(batch.size for batch in Batches(examples, size=32).iterate(0)) == 12_000
    assert pad([example.source for example in examples]).size == 12_000
    assert time.process_time() - start < 2.0  # about 0.06 s on one idle core


@given(st.integers(1, 60), st.integers(45, 300), st.booleans(), st.integers(0, 3))
def test_batches_by_tokens(count, tokens, shuffle, epoch):
    examples = make(count)
    batches = Batches(examples, tokens=tokens, shuffle=shuffle, seed=1)
    found = batches.epoch(epoch)
    assert sorted(row for rows in found for row in rows) == list(range(count))
    assert len(found) == len(batches) == len(batches.epoch(epoch + 1))
    for rows in found:
        widest = max(len(examples[r].source) for r in rows) + max(len(examples[r].target) + 1 for r in rows)
        assert len(rows) * widest <= tokens
    built = list(batches.iterate(epoch))
    assert [batch.rows for batch in built] == found
    assert all(batch.source.tokens.numel() + batch.target.tokens.numel() <= tokens for batch in built)
    middle = len(found) // 2
    assert [batch.rows for batch in batches.iterate(epoch, start=middle)] == found[middle:]


def test_batches_by_tokens_are_as_full_as_they_can_be():
    examples = make(200)
    found = Batches(examples, tokens=100, shuffle=False).epoch(0)
    for rows, after in itertools.pairwise(found):
        more = [*rows, after[0]]
        widest = max(len(examples[r].source) for r in more) + max(len(examples[r].target) + 1 for r in more)
        assert len(more) * widest > 100, "the next row would have fitted"


def test_batches_by_tokens_mix_and_depend_on_seed_and_epoch_alone():
    examples = make(400)
    one, same, other = (Batches(examples, tokens=200, seed=seed) for seed in (1, 1, 2))
    assert one.epoch(3) == same.epoch(3)
    assert one.epoch(3) != one.epoch(4)
    assert one.epoch(3) != other.epoch(3)
    assert sorted(map(len, one.epoch(3))) == sorted(map(len, one.epoch(4)))


def test_a_pair_that_no_batch_can_hold():
    with pytest.raises(
        ConfigError, match=r"batches of 6 tokens cannot hold example 1, which has 7 with its end; raise"
    ):
        Batches([Example((4,), (4,)), Example((4, 4, 4), (5, 5, 5))], tokens=6)
    with pytest.raises(ConfigError, match="`tokens` of batches must be at least 0, got -1"):
        Batches(make(3), tokens=-1)
