"""How the two sides of a config's pairs are cut and numbered: guessed, asked for, learnt, or as a checkpoint has it."""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.data import Alphabet, PairFile, Symbols, guess_symbols
from thalweg.data.text.subwords import Subwords, train_subwords
from thalweg.energies.pretrained.config import PretrainedConfig
from thalweg.errors import ConfigError
from thalweg.tasks.transduce.codec import Codec, tag_symbol
from thalweg.tasks.transduce.config import TransduceConfig
from thalweg.tasks.transduce.pretrained import Sides, open_checkpoint

__all__ = ["open_sides"]


def open_sides(config: TransduceConfig, training: PairFile) -> Sides:
    """Both codecs for a config's training pairs, and what a checkpoint says of its use.

    >>> from thalweg.data import Pair
    >>> pairs = PairFile("x.tsv", (Pair("ab", "c", 1),))
    >>> open_sides(TransduceConfig(), pairs).source.alphabet.symbols
    ('a', 'b')
    """
    if isinstance(config.model, PretrainedConfig):
        if training.featured:
            raise ConfigError(
                f"{training.path}: pretrained models read text alone, got a column of tags; write them into the "
                "source, or take another family"
            )
        if not config.model.fresh:
            return open_checkpoint(config.model)
    return _from_data(config, training)


def _from_data(config: TransduceConfig, training: PairFile) -> Sides:
    # One embedding for both sides needs one numbering.
    joint = getattr(config.model, "shared", False) or isinstance(config.model, PretrainedConfig)
    texts = (training.sources(), training.targets())
    learnt: dict[int, Subwords] = {}
    cut: list[Symbols | Subwords] = []
    for side, name in enumerate(("source", "target")):
        kind, form = getattr(config.data, f"{name}_symbols"), getattr(config.data, f"{name}_normalise")
        if kind == "subwords":
            shared = joint and config.data.source_symbols == config.data.target_symbols
            key, those = (-1, [*texts[0], *texts[1]]) if shared else (side, texts[side])
            if key not in learnt:
                learnt[key] = train_subwords(those, size=config.data.vocabulary, how=config.data.subwords)
            cut.append(learnt[key])
            continue
        guess = guess_symbols(texts[side])
        cut.append(
            Symbols(kind=guess.kind if kind == "auto" else kind, normalise=guess.normalise if form == "auto" else form)
        )
    pieces = [_pieces(symbols, those) for symbols, those in zip(cut, texts, strict=True)]
    pieces[0].append([tag_symbol(tag) for pair in training.pairs for tag in pair.features])
    if joint:
        pieces = [pieces[0] + pieces[1]] * 2
    source, target = (Codec(symbols, Alphabet.build(split)) for symbols, split in zip(cut, pieces, strict=True))
    return Sides(source, target)


def _pieces(symbols: Symbols | Subwords, texts: Sequence[str]) -> list[Sequence[str]]:
    """All symbols of one side: those of its texts, or all that were learnt, since new texts may need any of them."""
    return [symbols.pieces] if isinstance(symbols, Subwords) else [symbols.split(text) for text in texts]
