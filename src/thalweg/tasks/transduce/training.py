"""Transduction: from pairs of strings to a trained model that turns one into the other."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from thalweg.data import Alphabet, Batch, Batches, Example, PairFile, Symbols, guess_symbols
from thalweg.data.datasets import unit_hash
from thalweg.data.text.named_pairs import open_pairs
from thalweg.data.text.subwords import Subwords, train_subwords
from thalweg.energies.monotonic.model import Monotonic
from thalweg.energies.pretrained.config import PretrainedConfig
from thalweg.energies.pretrained.loading import fresh_reach
from thalweg.energies.pretrained.model import Pretrained
from thalweg.energies.seq2seq.model import Seq2Seq
from thalweg.energies.transformer.model import Transformer
from thalweg.errors import ConfigError, DataError
from thalweg.learning.checkpoint import MODEL, load_checkpoint
from thalweg.learning.losses import sequence_nll
from thalweg.learning.losses.sequences import SequenceLoss
from thalweg.learning.trainer import resolve_device
from thalweg.limits import within_memory
from thalweg.metrics import score_strings
from thalweg.tasks.runs import Listener, RunLog, TrainResult, meta_of
from thalweg.tasks.transduce.choosing import choose_model
from thalweg.tasks.transduce.codec import Codec, tag_symbol, write_sides
from thalweg.tasks.transduce.config import TransduceConfig
from thalweg.tasks.transduce.masking import train_masked
from thalweg.tasks.transduce.models import SequenceModel, build_model, longest_answer
from thalweg.tasks.transduce.pretrained import FOLDER, Sides, open_checkpoint, save_network, stored
from thalweg.tasks.transduce.searching import forced_prefix, lexicon_trie
from thalweg.tasks.transduce.transducer import Transducer, member_folder

# Numbers that the logits of dev data may take at once: half a gigabyte.
_LOGITS = 2**27


@within_memory("lower training.batch_size, the sizes of the model or search.width, or split the longest lines")
def fit(config: TransduceConfig, log: RunLog, root: Path | None = None) -> TrainResult:
    """Train a model on pairs of strings; see :meth:`~thalweg.tasks.base.Task.fit`.

    Of an ensemble the first model's run is the log's own, and those of the others are in ``members`` there.

    >>> fit(TransduceConfig(), RunLog("runs/names"))
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: no training data: give `--data train.tsv` or `data.train` in the config
    """
    splits = read_splits(config, root)
    result = _fit_one(config, log, splits)
    first, count = config.training.seed, config.training.ensemble
    for n in range(1, count):
        if not result.reason:
            break
        if log.listener:
            log.listener({"event": "member", "message": f"member  {n + 1} of {count}, seed {first + n}"})
        how = dataclasses.replace(config.training, ensemble=1, seed=first + n)
        quiet = partial(_without_lines, log.listener) if log.listener else None
        next_log = log.beside(member_folder(log.out, n + 1), quiet)
        found = _fit_one(dataclasses.replace(config, training=how), next_log, splits)
        result = dataclasses.replace(result, reason=found.reason, seconds=result.seconds + found.seconds)
    return result


def _without_lines(listener: Listener, event: dict[str, Any]) -> None:
    """What is told of the data is told once."""
    listener({key: value for key, value in event.items() if key != "lines"})


def _fit_one(config: TransduceConfig, log: RunLog, splits: tuple[PairFile, PairFile]) -> TrainResult:
    training, dev = splits
    opened = open_sides(config, training)
    source, target = opened.source, opened.target
    examples = examples_of(training, source, target)
    config, picked = choose_model(config, examples, tagged=training.featured)
    how = config.training
    batches = batches_of(examples, target, size=how.batch_size, tokens=how.batch_tokens, seed=how.seed)
    config = dataclasses.replace(config, training=how.planned(len(batches)))
    # Of a checkpoint the tokenizer has looked before.
    reach = fresh_reach(config.model) if isinstance(config.model, PretrainedConfig) and config.model.fresh else None
    _check_reach(training, examples, reach)
    model = _first_model(config, opened, examples, log)
    longest = 1 + max(len(example.target) for example in examples)
    meta = meta_of(config, **write_sides(source, target), longest=longest, data=_digest(training))
    if isinstance(model, Pretrained):
        meta |= {"pretrained": stored(model), "search": opened.task.search()}
    facts = _facts(training, dev, source, target)
    told = {
        "lines": [*_lines(facts, config), *opened.task.lines(), *([picked] if picked else [])],
        "names": {"cer": "PER"} if target.symbols.kind == "spaced" else {},
    }
    if not any(p.requires_grad for p in model.parameters()):
        return log.adopt(model, config, meta, facts, **told)
    loss = SequenceLoss(config.training, model, max_length=longest_answer(model, longest))
    evaluate = _dev_evaluator(config, source, target, dev, longest, meta, reach)
    result = log.train(model, batches, config, meta=meta, facts=facts, told=told, loss=loss, evaluate=evaluate)
    if isinstance(model, Pretrained) and result.reason:
        model.load_state_dict(load_checkpoint(result.run / MODEL).tensors)
        save_network(model, source, target, result.run / FOLDER)
    return result


def _first_model(
    config: TransduceConfig, sides: Sides, examples: Sequence[Example], log: RunLog
) -> Seq2Seq | Monotonic | Transformer | Pretrained:
    """The model as its training begins."""
    torch.manual_seed(config.training.seed)
    masked = None
    if isinstance(config.model, PretrainedConfig) and config.model.masked_epochs:
        texts = [text for example in examples for text in (example.source, example.target) if text]
        masked = train_masked(config, sides.target, texts, log.out, log.listener)
        torch.manual_seed(config.training.seed)
    on_host = resolve_device(config.training.device) == "cpu"
    return build_model(config, sides.source, sides.target, trained=on_host, masked=masked)


@dataclass(frozen=True)
class Prepared:
    """What a config's data become before anything is trained: both alphabets, and the training pairs as numbers.

    Where the config says nothing of its model, the one here has that which is chosen by the pairs.
    """

    config: TransduceConfig
    source: Codec
    target: Codec
    examples: list[Example]


def prepare(config: TransduceConfig, root: Path | None = None) -> Prepared:
    """Read a config's training data as :func:`fit` would.

    >>> prepare(TransduceConfig())
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: no training data: give `--data train.tsv` or `data.train` in the config
    """
    training, _ = read_splits(config, root)
    opened = open_sides(config, training)
    examples = examples_of(training, opened.source, opened.target)
    return Prepared(choose_model(config, examples, tagged=training.featured)[0], opened.source, opened.target, examples)


def read_splits(config: TransduceConfig, root: Path | None = None) -> tuple[PairFile, PairFile]:
    """The training and the dev pairs of a config: the dev file, or what is held out of the training pairs.

    >>> read_splits(TransduceConfig())
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: no training data: give `--data train.tsv` or `data.train` in the config
    """
    if not config.data.train:
        raise ConfigError("no training data: give `--data train.tsv` or `data.train` in the config")
    training = open_pairs(config.data.train, root, features=None if config.data.features == "auto" else False)
    if config.data.dev:
        return training, open_pairs(config.data.dev, root, features=training.featured)
    # By a hash of the source: its targets stay together, and the choice never moves between runs.
    share = config.data.held_out
    held = {s for s in set(training.sources()) if unit_hash(s) < share}
    dev = [pair for pair in training.pairs if pair.source in held]
    rest = [pair for pair in training.pairs if pair.source not in held]
    if not dev or not rest:
        raise DataError(
            f"{training.path}: {len(training)} pairs are too few to keep {share:.0%} apart as dev data; give --dev FILE"
        )
    return PairFile(training.path, tuple(rest)), PairFile(f"{training.path} (held out)", tuple(dev))


def _digest(pairs: PairFile) -> str:
    """A fingerprint of the training pairs, so that a run is never resumed on other data."""
    digest = hashlib.sha256()
    for pair in pairs.pairs:
        columns = (pair.source, pair.target, *([";".join(pair.features)] if pair.features else []))
        digest.update(("\t".join(columns) + "\n").encode())
    return digest.hexdigest()[:16]


def examples_of(pairs: PairFile, source: Codec, target: Codec) -> list[Example]:
    """The pairs as numbers; one that a codec refuses is named by its line.

    >>> from thalweg.data import Alphabet, Pair, Symbols
    >>> side = Codec(Symbols(), Alphabet.build(["ab"]))
    >>> examples_of(PairFile("x.tsv", (Pair("ab", "b", 1),)), side, side)[0].source
    (4, 5)
    """
    examples = []
    for pair in pairs.pairs:
        try:
            examples.append(Example(source.encode(pair.source, pair.features), target.encode(pair.target)))
        except DataError as error:  # a text that is longer than the model's positions
            raise DataError(f"{pairs.path}:{pair.line}: {error}") from None
    return examples


def _check_reach(pairs: PairFile, examples: Sequence[Example], reach: int | None) -> None:
    """Refuse a pair that is longer than the positions of a model with fresh weights."""
    for pair, example in zip(pairs.pairs, examples, strict=True):
        for side, length in (("source", len(example.source)), ("target", len(example.target) + 1)):
            if reach is not None and length > reach:
                raise DataError(
                    f"{pairs.path}:{pair.line}: expected a {side} of at most {reach} symbols, as far as the model's "
                    f"positions reach, got {length}; shorten or split it, or raise max_position_embeddings in "
                    "model.shape"
                )


def batches_of(examples: Sequence[Example], target: Codec, **options: Any) -> Batches:
    """Batches that end and are filled up as the target side has it; options as those of ``Batches``.

    >>> from thalweg.data import Alphabet, Symbols
    >>> side = Codec(Symbols(), Alphabet.build(["ab"]))
    >>> next(batches_of([Example((4,), (5,))], side, size=1).iterate(0)).target.tokens
    tensor([[5, 3]])
    """
    return Batches(examples, pad=target.alphabet.pad, end=target.alphabet.eos, **options)


def _loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    losses = sequence_nll(model(batch.source, batch.target), batch.target.tokens, batch.target.mask)
    return losses.sum(), int(batch.target.lengths.sum())


def _dev_evaluator(
    config: TransduceConfig,
    source: Codec,
    target: Codec,
    dev: PairFile,
    longest: int,
    meta: dict[str, Any],
    reach: int | None,
) -> Callable[[nn.Module], dict[str, float]]:
    # What a search cannot do is said now rather than after an epoch.
    forced_prefix(config.search.prefix, target)
    if config.search.lexicon:
        lexicon_trie(config.search.lexicon, target, len(target.alphabet))
    examples = examples_of(dev, source, target)
    _check_reach(dev, examples, reach)
    # Logits of a whole batch stand in memory at once: of vocabularies of 100,000, those of fewer examples.
    widest = max((len(example.target) + 1 for example in examples), default=1) * len(target.alphabet)
    batches = batches_of(examples, target, size=max(1, min(256, _LOGITS // widest)), shuffle=False)
    gold = [[target.units(pair.target)] for pair in dev.pairs]
    words = words_of(target, dev.targets())

    def evaluate(model: nn.Module) -> dict[str, float]:
        transducer = Transducer(cast(SequenceModel, model), source, target, longest=longest, meta=meta)
        answers: list[list[tuple[str, ...]]] = [[] for _ in examples]
        total, terms = 0.0, 0
        for batch in batches.iterate(0):
            loss, count = _loss(model, batch.to(transducer.device))
            total, terms = total + float(loss), terms + count
            found = transducer.search([examples[row].source for row in batch.rows], k=1, how=config.search)
            for row, ids in zip(batch.rows, found.tokens[:, 0].tolist(), strict=True):
                answers[row] = [target.counted(target.alphabet.decode(ids))]
        scores = score_strings(answers, gold, words=words, resamples=0)
        return {"loss": total / max(1, terms)} | {name: score.value for name, score in scores.items()}

    return evaluate


def words_of(target: Codec, texts: Sequence[str]) -> Literal["item", "space"]:
    """Whether each target is one word, or a text of words between spaces.

    >>> from thalweg.data import Alphabet, Symbols
    >>> side = Codec(Symbols(), Alphabet.build(["ab c"]))
    >>> words_of(side, ["a b", "b c"]), words_of(side, ["ab", "c"])
    ('space', 'item')
    """
    if target.symbols.kind == "spaced":
        return "item"
    return "space" if sum(" " in text.strip() for text in texts) * 2 > len(texts) else "item"


def _facts(training: PairFile, dev: PairFile, source: Codec, target: Codec) -> dict[str, Any]:
    tags = {"features": len(source.features)} if source.features else {}
    return {
        "train": {"path": training.path, "pairs": len(training), "summary": training.summary()},
        "dev": {"path": dev.path, "pairs": len(dev), "summary": dev.summary()},
        "source": {"symbols": str(source.symbols), "size": len(source.alphabet), **tags},
        "target": {"symbols": str(target.symbols), "size": len(target.alphabet)},
    }


def _lines(start: dict[str, Any], config: TransduceConfig) -> list[str]:
    """What a person is told at the start."""
    lines = [f"{split:<7} {start[split]['summary']}" for split in ("train", "dev")]
    for side in ("source", "target"):
        own = isinstance(config.model, PretrainedConfig) and not config.model.fresh
        guessed = getattr(config.data, f"{side}_symbols") == "auto" and not own
        setting = f" (guessed; {side}_symbols=... sets them)" if guessed else ""
        lines.append(f"{side:<7} {start[side]['symbols']}, {start[side]['size']} symbols{setting}")
    return lines


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
            for key in ("source_symbols", "target_symbols", "source_normalise", "target_normalise"):
                if (said := getattr(config.data, key)) != "auto":
                    raise ConfigError(
                        f"data.{key} goes with fresh weights, got `{said}` with a checkpoint, whose tokenizer cuts "
                        "texts as it does; leave it out"
                    )
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
