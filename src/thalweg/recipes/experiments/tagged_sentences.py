"""Sentences of words with their tags: of a treebank, or made by a small grammar of chance."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from thalweg.data.datasets import find_data
from thalweg.data.text.conllu import read_conllu
from thalweg.data.text.indicators import Indicators, word_indicators
from thalweg.errors import DataError

Tagged = list[tuple[list[str], list[str]]]
"""Words and tags of sentences."""

# Which tags follow one; words of a tag are stems, and of two tags the same stem with the same ending: neighbours tell.
_FOLLOW = {
    "": ("DET", "PRON", "VERB"),
    "DET": ("ADJ", "NOUN", "NOUN"),
    "ADJ": ("NOUN", "ADJ", "NOUN"),
    "NOUN": ("VERB", "ADP", "."),
    "PRON": ("VERB", "VERB", "NOUN"),
    "VERB": ("DET", "ADP", "."),
    "ADP": ("DET", "NOUN", "PRON"),
}
_ENDINGS = {"ADJ": "ish", "NOUN": "er", "VERB": "er", "ADP": "", "DET": "", "PRON": "", ".": ""}


def read_tagged(data: str, sentences: int, seed: int, root: Path | None = None) -> tuple[Tagged, Tagged]:
    """Sentences to learn from, and others: of a data set such as ``ud/atis``, or ``made``, so many and a third of that.

    >>> train, dev = read_tagged("made", 30, 0)
    >>> len(train), len(dev)
    (30, 10)
    """
    if data == "made":
        every = made_sentences(sentences + max(1, sentences // 3), seed)
        return every[:sentences], every[sentences:]
    if not data.startswith("ud/"):
        raise DataError(f"`data` must be a treebank such as ud/atis, or `made`, got {data!r}")
    train, dev = (
        [(each.column("form"), each.column("upos")) for each in read_conllu(find_data(f"{data}-{part}.conllu", root))]
        for part in ("train", "dev")
    )
    return train, dev


def made_sentences(count: int, seed: int) -> Tagged:
    """Sentences of a grammar of chance, the same for the same seed; words of nouns and verbs overlap.

    >>> words, tags = made_sentences(1, 0)[0]
    >>> len(words) == len(tags)
    True
    """
    chance = random.Random(seed)
    found: Tagged = []
    for _ in range(count):
        words: list[str] = []
        tags: list[str] = []
        while len(tags) < 12:
            tag = chance.choice(_FOLLOW[tags[-1] if tags else ""])
            if tag == ".":
                break
            stem = chance.choice("bdfgklmnprst") + chance.choice("aeiou") + chance.choice("bdgklmnt")
            closed = {"DET": ("the", "a"), "PRON": ("he", "it"), "ADP": ("in", "to")}.get(tag)
            words.append(chance.choice(closed) if closed else stem + _ENDINGS[tag])
            tags.append(tag)
        found.append((words, tags))
    return found


@dataclass(frozen=True)
class Corpus:
    """Tagged sentences as a :class:`~thalweg.energies.LinearTagger` takes them.

    Attributes:
        indicators: those that occur twice or more in the sentences to learn from.
        tags: of these sentences, sorted; a tag that they have not is never right.

    >>> corpus = Corpus.of(made_sentences(20, 0))
    >>> [gold.shape[0] for _, gold in corpus.batches(made_sentences(20, 0), 8)]
    [8, 8, 4]
    """

    indicators: Indicators
    tags: tuple[str, ...]

    @classmethod
    def of(cls, train: Tagged) -> Corpus:
        """What sentences to learn from know."""
        tags = tuple(sorted({tag for _, row in train for tag in row}))
        return cls(Indicators.build((word_indicators(words) for words, _ in train), least=2), tags)

    def batches(self, sentences: Tagged, size: int) -> list[tuple[tuple[Tensor, Tensor], Tensor]]:
        """Sentences by their length, so many at a time: features and lengths, and gold; unknown tags are C."""
        order = sorted(range(len(sentences)), key=lambda place: len(sentences[place][0]))
        numbers = {tag: number for number, tag in enumerate(self.tags)}
        found = []
        for at in range(0, len(order), size):
            chosen = [sentences[place] for place in order[at : at + size]]
            inputs = self.indicators.batch([word_indicators(words) for words, _ in chosen])
            gold = torch.full((len(chosen), int(inputs[1].max())), -1)
            for row, (_, tags) in enumerate(chosen):
                gold[row, : len(tags)] = torch.tensor([numbers.get(tag, len(numbers)) for tag in tags])
            found.append((inputs, gold))
        return found
