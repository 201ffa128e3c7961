"""A trained transducer: text in, the k best texts with their probabilities out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from thalweg.data import pad
from thalweg.energies.pretrained.model import Pretrained
from thalweg.errors import ConfigError, DataError
from thalweg.files import write_text, writing
from thalweg.inference import Hypotheses, Partial, Trie, stream
from thalweg.layers.padded import Padded
from thalweg.learning.checkpoint import MODEL
from thalweg.learning.trainer import resolve_device
from thalweg.limits import ANSWERS, COUNT, LENGTH, within_memory
from thalweg.tasks.runs import opened
from thalweg.tasks.transduce.answers import (
    Answer,
    Prediction,
    Source,
    cut_at,
    join_answers,
    read_answers,
    with_attention,
)
from thalweg.tasks.transduce.codec import Codec, Piece, read_sides
from thalweg.tasks.transduce.config import TransduceConfig
from thalweg.tasks.transduce.models import (
    SequenceModel,
    device_of_model,
    load_model,
    longest_answer,
    with_precision,
)
from thalweg.tasks.transduce.search_settings import SearchConfig
from thalweg.tasks.transduce.searching import PlannedSearch, best_by_risk, forced_prefix, lexicon_trie, planned_search

PICTURES = (".png", ".svg", ".pdf", ".dot")
# Symbols of the longest training target that a file may claim: a character may become several of them.
LONGEST = 4 * LENGTH


class Transducer:
    """A trained model with its alphabets: text in, the k best texts out.

    Made by :func:`load`.

    >>> from thalweg.data import Alphabet, Symbols
    >>> from thalweg.energies import Seq2Seq, Seq2SeqConfig
    >>> codec = Codec(Symbols(), Alphabet.build(["abc"]))
    >>> model = Seq2Seq(Seq2SeqConfig(hidden=8), source_size=7, target_size=7)
    >>> next(Transducer(model, codec, codec, longest=4, meta={}).predict(["cab"])).source
    'cab'
    """

    # What becomes of a source symbol that it has never seen, as a person is told.
    fate = "read as unknown; --unknown copy copies such symbols"

    def __init__(self, model: SequenceModel, source: Codec, target: Codec, *, longest: int, meta: dict[str, Any]):
        if isinstance(model, nn.Module):
            model.eval()
        self.model, self.source, self.target = model, source, target
        self.longest, self.meta = longest, meta
        self._lexicons: dict[str, Trie] = {}

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return device_of_model(self.model)

    @property
    def searched(self) -> SequenceModel:
        """What a search is given: of a pretrained model its decoder, which may offer searches in one call."""
        return self.model.decoder if isinstance(self.model, Pretrained) else self.model

    @property
    def usual(self) -> SearchConfig:
        """The search where none is asked for: a beam, as wide and as long as a checkpoint's authors have it."""
        return self.settled({})

    def settled(self, how: SearchConfig | Mapping[str, Any]) -> SearchConfig:
        """The search of some settings; what they leave open is as in :attr:`usual`."""
        if isinstance(how, SearchConfig):
            return how
        return SearchConfig(**{"search": "beam", **self.meta.get("search", {}), **how})

    @property
    def featured(self) -> bool:
        """Whether the model reads tags beside the text."""
        return bool(self.source.features)

    @within_memory("lower k, the width or the samples of the search, or split the longest sources")
    def search(
        self,
        sources: Sequence[Sequence[int]],
        *,
        k: int,
        how: SearchConfig,
        generator: torch.Generator | None = None,
        **more: Any,
    ) -> Hypotheses:
        """The k best id sequences for each source id sequence; ``generator`` serves sampling.

        ``more`` goes to the search as it is (``return_tree``, ``on_step``).
        """
        inputs = self._padded(sources, self.source)
        found = self._planned_search(len(sources), k, how, generator).run(self.searched, inputs, **more)
        return best_by_risk(found, k) if how.search == "mbr" else found

    def _padded(self, rows: Sequence[Sequence[int]], side: Codec) -> Padded:
        return pad(rows, pad=side.alphabet.pad).to(self.device)

    def _planned_search(
        self, count: int, k: int, how: SearchConfig, generator: torch.Generator | None
    ) -> PlannedSearch:
        prefix = None
        if how.prefix:
            ids = forced_prefix(how.prefix, self.target)
            prefix = torch.tensor(ids, device=self.device).expand(count, -1)
        if how.lexicon and how.lexicon not in self._lexicons:
            self._lexicons[how.lexicon] = lexicon_trie(how.lexicon, self.target, self.model.vocab_size)
        return planned_search(
            how,
            k=k,
            max_length=longest_answer(self.model, self.longest),
            prefix=prefix,
            allowed=self._lexicons[how.lexicon] if how.lexicon else None,
            generator=generator or (self.generator(how) if how.draws else None),
        )

    def generator(self, how: SearchConfig) -> torch.Generator:
        """The source of randomness of a sampling search."""
        return torch.Generator(device=self.device).manual_seed(how.sampling_seed)

    def predict(
        self,
        texts: Iterable[str | Source],
        *,
        k: int = 1,
        how: SearchConfig | None = None,
        attention: bool = False,
        unknown: Literal["report", "copy"] = "report",
        batch_size: int = 256,
    ) -> Iterator[Prediction]:
        """Answers for each text, in order, streaming: ``batch_size`` texts are read ahead at most.

        Args:
            texts: sources; with their tags, ``Source("run", ("V", "PST"))``, for a model that was trained with them.
            k: answers per text at most (1 with greedy and exact search).
            how: the search; :attr:`usual` by default.
            attention: also give where each answer symbol looked, ``[[weight per source symbol] per answer symbol]``;
                tags come first among the source symbols.
            unknown: a source symbol outside the alphabet is read as the unknown symbol (``report``), or splits the
                text there and is copied through as it is (``copy``).
        """
        check_asked(k, batch_size)
        if unknown not in ("report", "copy"):
            raise ConfigError(f"unknown must be `report` or `copy`, got `{unknown}`")
        how = how or self.usual
        if unknown == "copy" and (how.prefix or how.lexicon):
            raise ConfigError("copying unknown symbols answers in pieces, which prefix and lexicon do not go with")
        waiting, generator = iter(texts), self.generator(how)
        while chunk := [self._source(text) for text in itertools.islice(waiting, batch_size)]:
            split = [self._split(source) for source in chunk]
            strange = [self.source.alphabet.unknown(symbols) for symbols in split]
            rows = [
                cut_at(symbols, set(seen) if unknown == "copy" else set(), self.source.tags(source.features))
                for source, symbols, seen in zip(chunk, split, strange, strict=True)
            ]
            found = self._answer_pieces(rows, k, how, attention, generator)
            for source, row, answers, seen in zip(chunk, rows, found, strange, strict=True):
                whole = len(row) == 1 and row[0][0]
                best = answers[0] if whole else join_answers(answers, self.target.symbols, k)
                missing = (
                    tuple(tag for tag in source.features if not self.source.tags([tag])) if source.features else ()
                )
                yield Prediction(source.text, best, seen, source.features, missing)

    def _source(self, text: str | Source) -> Source:
        source = as_source(text)
        if self.featured and source.text and not source.features:
            raise ConfigError(f"this run reads tags beside the text, got none with `{source.text}`; give its features")
        if source.features and not self.featured:
            raise ConfigError(
                f"this run was trained without features, got `{';'.join(source.features)}` with `{source.text}`; "
                "leave them out"
            )
        return source

    def _split(self, source: Source) -> Piece:
        try:
            return self.source.symbols.split(source.text)
        except DataError as error:  # a text that is longer than the model's positions
            raise DataError(f"{source.where}: {error}" if source.where else str(error)) from None

    def _answer_pieces(
        self,
        rows: list[list[tuple[bool, Piece]]],
        k: int,
        how: SearchConfig,
        attention: bool,
        generator: torch.Generator,
    ) -> list[list[tuple[Answer, ...]]]:
        """Answers of each piece of each row; an unknown run answers itself.

        Equal pieces are searched once, except where each draw counts; neighbours of one length share a batch, which
        keeps padding out of the encoder.
        """
        numbers = itertools.count()
        keys = [[(piece, next(numbers) if how.draws else 0, known) for known, piece in row] for row in rows]
        wanted = {(len(piece), piece, n) for row in keys for piece, n, known in row if known}
        order = [(piece, n) for _, piece, n in sorted(wanted)]
        answers: dict[tuple[Piece, int], tuple[Answer, ...]] = {}
        for start in range(0, len(order), 256):
            group = order[start : start + 256]
            found = self._answers([piece for piece, _ in group], k, how, attention, generator)
            answers.update(zip(group, found, strict=True))
        proved = True if how.proves else None
        return [
            [answers[piece, n] if known else (Answer("", piece, 0.0, True, optimal=proved),) for piece, n, known in row]
            for row in keys
        ]

    def _answers(
        self, words: list[Piece], k: int, how: SearchConfig, attention: bool, generator: torch.Generator
    ) -> list[tuple[Answer, ...]]:
        ids = [self.source.alphabet.encode(word) for word in words]
        rows = read_answers(self.search(ids, k=k, how=how, generator=generator), self.target, proving=how.proves)
        if not attention:
            return rows
        looks = self.attend([(word, answer) for word, row in zip(words, rows, strict=True) for answer in row])
        return with_attention(rows, looks)

    def stream(self, text: str, *, features: Sequence[str] = (), how: SearchConfig | None = None) -> Iterator[Answer]:
        """The best answer so far, after each symbol; the last is what :meth:`predict` gives first.

        Works with greedy, beam and sampling search. A partial answer may be unlike the one before: in a beam another
        beginning can come to the fore.
        """
        how = how or self.usual
        if how.search in ("exact", "stochastic", "mbr"):
            raise ConfigError(
                f"`{how.search}` search has no answer that grows; stream with `beam`, `greedy` or `nucleus`"
            )
        source = self._source(Source(text, tuple(features)))
        ids = self.source.encode(source.text, source.features)
        if not self.source.symbols.split(text):
            return
        search, options = self._planned_search(1, 1, how, None)
        for found in stream(search, self.searched, self._padded([ids], self.source), **options):
            if isinstance(found, Partial):
                best = int(found.scores.argmax())
                symbols = self.target.alphabet.decode(found.tokens[best].tolist())
                ended = bool(found.finished[best])
                yield Answer(self.target.symbols.join(symbols), symbols, float(found.scores[best]), ended)
            else:
                yield from read_answers(found, self.target, proving=how.proves)[0][:1]

    def grow(self, source: Source, *, how: SearchConfig) -> tuple[Piece, Hypotheses]:
        """The symbols of a source as the model reads them, tags first, and the beam's hypotheses with their tree."""
        if how.search not in ("beam", "diverse"):
            raise ConfigError(f"a tree is of a beam, got `{how.search}` search; use `beam` or `diverse`")
        source = self._source(source)
        symbols = (*self.source.tags(source.features), *self.source.symbols.split(source.text))
        ids = self.source.alphabet.encode(symbols)
        return symbols, self.search([ids], k=how.width, how=how, return_tree=True)

    def draw_tree(self, source: Source, path: Path, *, how: SearchConfig) -> None:
        """Write what the beam looked at for a source: a picture, or Graphviz text where ``path`` ends in ``.dot``."""
        if path.suffix not in PICTURES:
            raise ConfigError(f"{path}: expected a name that ends in {', '.join(PICTURES)}, got `{path.suffix}`")
        tree = self.grow(source, how=how)[1].tree
        assert tree is not None
        names = self.target.alphabet.names
        if path.suffix == ".dot":
            write_text(path, tree.to_dot(0, names, dropped=how.width) + "\n")
            return
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            tree.draw(0, names, path, dropped=how.width)

    def attend(self, pairs: Sequence[tuple[Piece, Answer]]) -> list[list[list[float]] | None]:
        """Where each answer looked: weights per answer symbol (end included) and source symbol.

        None for a model without attention, for an empty source, and for an answer cut before its first symbol.
        """

        def there(source: Piece, answer: Answer) -> bool:
            return bool(source) and (answer.finished or bool(answer.symbols))

        real = [(source, answer) for source, answer in pairs if there(source, answer)]
        if not real:
            return [None] * len(pairs)
        sources = self._padded([self.source.alphabet.encode(source) for source, _ in real], self.source)
        ends = [(self.target.alphabet.eos,) if answer.finished else () for _, answer in real]
        answers = [
            (*self.target.alphabet.encode(answer.symbols), *end) for (_, answer), end in zip(real, ends, strict=True)
        ]
        targets = self._padded(answers, self.target)
        with torch.no_grad():
            weights = self.model.attention_weights(sources, targets)
        if weights is None:
            return [None] * len(pairs)
        matrices = iter(
            weights[n, : len(answer), : len(source)].tolist()
            for n, ((source, _), answer) in enumerate(zip(real, answers, strict=True))
        )
        return [next(matrices) if there(source, answer) else None for source, answer in pairs]


def check_asked(k: int, batch_size: int) -> None:
    """Refuse numbers of answers, and of texts to read ahead, that nothing could hold.

    >>> check_asked(0, 256)
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: k must be at least 1 and at most ..., got 0
    """
    for name, value, most in (("k", k, ANSWERS), ("batch_size", batch_size, COUNT)):
        if not 1 <= value <= most:
            raise ConfigError(f"{name} must be at least 1 and at most {most:,}, got {value}")


def as_source(text: str | Source) -> Source:
    """A text with its tags, not longer than it may be.

    >>> as_source("run").features
    ()
    """
    source = Source(text) if isinstance(text, str) else text
    if len(source.text) > LENGTH:
        raise DataError(
            f"expected a text of at most {LENGTH:,} characters, got {len(source.text):,}; shorten or split it"
        )
    return source


def member_folder(run: str | Path, number: int) -> Path:
    """The run of an ensemble's model by its number; the first is the run itself.

    >>> member_folder("runs/names", 1).as_posix(), member_folder("runs/names", 2).as_posix()
    ('runs/names', 'runs/names/members/2')
    """
    return Path(run) if number == 1 else Path(run) / "members" / str(number)


def members_of(run: str | Path) -> list[str | Path]:
    """The runs that answer as one: the run itself, and those of its members that have a model.

    >>> members_of("absent")
    ['absent']
    """
    found: list[str | Path] = [run]
    while (member := member_folder(run, len(found) + 1) / MODEL).is_file():
        found.append(member.parent)
    return found


def load(run: str | Path, *, device: str = "auto", precision: str = "float32") -> Transducer:
    """The best model of a run directory (or the ``model.safetensors`` itself), ready to predict.

    Of an ensemble it is the first model; :func:`~thalweg.tasks.transduce.ensembles.open_runs` gives them all.

    Args:
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        precision: ``float32``; on the CPU also ``bf16`` or ``int8``, which change answers slightly.

    >>> load("absent")
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: absent/model.safetensors: expected a checkpoint, got no such file; ...
    """
    with opened(run, "transduction", TransduceConfig) as (checkpoint, config):
        meta = checkpoint.meta
        source, target = read_sides(meta)
        model = load_model(config, source, target, checkpoint.tensors, meta.get("pretrained"))
        longest = int(meta["longest"])
        if not 1 <= longest <= LONGEST:
            raise ValueError(f"`longest` must be 1 to {LONGEST:,} symbols, got {longest}")
    place = resolve_device(device)
    if precision != "float32" and place != "cpu":
        raise ConfigError(f"precision {precision} is for the CPU, got device `{place}`; add `--device cpu`")
    ready = with_precision(model.to(place).eval(), precision)
    return Transducer(ready, source, target, longest=longest, meta=meta)
