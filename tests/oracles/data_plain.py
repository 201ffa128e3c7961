"""Padding, batching and pair counting the slow, obvious way."""

from __future__ import annotations


def plain_pad(sequences, pad, end=None):
    rows = [[*sequence, end] if end is not None else list(sequence) for sequence in sequences]
    width = max(len(row) for row in rows)
    tokens = [row + [pad] * (width - len(row)) for row in rows]
    mask = [[column < len(row) for column in range(width)] for row in rows]
    return tokens, [len(row) for row in rows], mask


def padding_cells(batches, lengths):
    """Cells of padding if each batch is padded to its longest row."""
    return sum(max(lengths[row] for row in rows) * len(rows) - sum(lengths[row] for row in rows) for rows in batches)


def covers_once(batches, count, size):
    """Whether the batches hold every row once, all but one of them full."""
    rows = sorted(row for batch in batches for row in batch)
    short = [batch for batch in batches if len(batch) != size]
    return rows == list(range(count)) and len(short) <= 1 and all(0 < len(batch) <= size for batch in batches)


def count_pairs(text):
    """(pairs, exact repeats, sources with several targets) of clean text, by pairwise comparison."""
    pairs = [tuple(line.split("\t")) for line in text.split("\n") if line]
    repeats = sum(any(pair == earlier for earlier in pairs[:index]) for index, pair in enumerate(pairs))
    sources = []
    for source, _ in pairs:
        if source not in sources:
            sources.append(source)
    several = 0
    for source in sources:
        targets = []
        for other, target in pairs:
            if other == source and target not in targets:
                targets.append(target)
        several += len(targets) > 1
    return len(pairs), repeats, several
