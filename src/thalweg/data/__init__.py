"""What comes in: symbols, alphabets, readers, batches and data sets.

>>> from thalweg.data import Alphabet, Symbols, read_pairs
>>> file = read_pairs("names.tsv", text="aba\\tAba\\nabu\\tAbu\\n")
>>> alphabet = Alphabet.build(Symbols().split(text) for text in file.sources())
>>> alphabet.encode(Symbols().split("baz"))
[5, 4, 0]
"""

from thalweg.data.batches import Batch, Batches, Example, pad
from thalweg.data.datasets import DatasetInfo, find_data, list_datasets, load_dataset
from thalweg.data.images.augmentation import Augmentation
from thalweg.data.images.batches import ImageBatch, ImageBatches
from thalweg.data.images.reading import (
    ImageData,
    ImageSplit,
    channel_statistics,
    read_images,
    read_labelled,
    read_unlabelled,
)
from thalweg.data.text.alphabet import BOS, EOS, PAD, UNK, Alphabet
from thalweg.data.text.conllu import Sentence, Word, read_conllu
from thalweg.data.text.indicators import Indicators, word_indicators
from thalweg.data.text.readers import Pair, PairFile, read_pairs, read_sources, read_tagged_sources, split_tags
from thalweg.data.text.subwords import Subwords, train_subwords
from thalweg.data.text.symbols import Symbols, guess_symbols

__all__ = [
    "BOS",
    "EOS",
    "PAD",
    "UNK",
    "Alphabet",
    "Augmentation",
    "Batch",
    "Batches",
    "DatasetInfo",
    "Example",
    "ImageBatch",
    "ImageBatches",
    "ImageData",
    "ImageSplit",
    "Indicators",
    "Pair",
    "PairFile",
    "Sentence",
    "Subwords",
    "Symbols",
    "Word",
    "channel_statistics",
    "find_data",
    "guess_symbols",
    "list_datasets",
    "load_dataset",
    "pad",
    "read_conllu",
    "read_images",
    "read_labelled",
    "read_pairs",
    "read_sources",
    "read_tagged_sources",
    "read_unlabelled",
    "split_tags",
    "train_subwords",
    "word_indicators",
]
