"""A transducer of words beside a dictionary: what that has is looked up, the rest is the model's."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from thalweg.errors import ConfigError
from thalweg.tasks.pronounce.dictionary import pronunciations
from thalweg.tasks.pronounce.reading import read
from thalweg.tasks.transduce.answers import Answer, Prediction, Source, join_answers
from thalweg.tasks.transduce.search_settings import SearchConfig
from thalweg.tasks.transduce.transducer import Transducer, as_source, check_asked

DICTIONARY, MODEL = "dictionary", "model"
"""Where an answer is from."""

BOUNDARY = "|"
"""What stands between the words of a sentence."""


@dataclass(frozen=True)
class Pronunciation(Prediction):
    """The answers for one text, and for each of its words.

    Attributes:
        source: the text; answers: of all its words together, best first.
        unknown: characters of it that are neither read nor punctuation, and were left out.
        words: of each word that is said, the answers by itself; each says where it is ``from``.

    >>> Pronunciation("cat", (Answer("K AE T", ("K", "AE", "T"), 0.0, True, origin=DICTIONARY),)).to_json()["words"]
    []
    """

    words: tuple[Prediction, ...] = ()

    @property
    def origin(self) -> str:
        """``dictionary`` or ``model``, or both where words differ; nothing for a text without words.

        >>> Pronunciation("", ()).origin
        ''
        """
        return "+".join(dict.fromkeys(word.answers[0].origin or "" for word in self.words if word.answers))

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        words = [{"word": word.source, "answers": [answer.to_json() for answer in word.answers]} for word in self.words]
        return super().to_json() | {"words": words}

    def tsv(self) -> Iterator[str]:
        """A line an answer: source, answer, log-probability, probability, and where it is from.

        >>> [line.split("\\t")[4] for line in Pronunciation("a", (Answer("AH", ("AH",), 0.0, True),)).tsv()]
        ['']
        """
        return (f"{line}\t{self.origin}" for line in super().tsv())


class Pronouncer(Transducer):
    """A transducer of lower-case English words to phones, beside the CMU Pronouncing Dictionary.

    Made by :func:`thalweg.load` of a model in the box. The search is the model's: it serves the words that the
    dictionary does not have.

    >>> from thalweg.tasks import load
    >>> said = next(load("english", device="cpu").predict(["Read 2 thalwegs"]))
    >>> said.answers[0].text, said.origin
    ('R EH D | T UW | TH AE L W EH G Z', 'dictionary+model')
    """

    fate = "neither an English letter, a number nor punctuation, so left out"

    def predict(
        self,
        texts: Iterable[str | Source],
        *,
        k: int = 1,
        how: SearchConfig | None = None,
        attention: bool = False,
        unknown: Literal["report", "copy"] = "report",
        batch_size: int = 256,
    ) -> Iterator[Pronunciation]:
        """Pronunciations of each text, in order, streaming: ``batch_size`` texts are read ahead at most.

        A text that is one word of the dictionary has all the pronunciations there, whatever k is; the dictionary does
        not say how often each is used, so they share the probability evenly. Any other word has the k best of the
        model, and a sentence the k best of its words together, with ``|`` between words.

        Args:
            texts: words or sentences, see :func:`~thalweg.tasks.pronounce.reading.read`.
            k, how, attention: of words that the dictionary does not have.
            unknown: ``report`` alone: what cannot be read has no phones to copy.
        """
        if unknown != "report":
            raise ConfigError(f"unknown must be `report` for pronunciations, got `{unknown}`")
        check_asked(k, batch_size)
        waiting, known = iter(texts), pronunciations()
        while chunk := [self._text(text) for text in itertools.islice(waiting, batch_size)]:
            read_out = [read(text, known) for text in chunk]
            strange = {word: None for reading in read_out for word in reading.words if word not in known}
            options = {"k": k, "how": how, "attention": attention}
            found = dict(zip(strange, super().predict(strange, **options), strict=True))
            for text, reading in zip(chunk, read_out, strict=True):
                words = tuple(self._word(word, found, known) for word in reading.words)
                yield Pronunciation(text, self._together(words, k), reading.unread, words=words)

    def _text(self, text: str | Source) -> str:
        source = as_source(text)
        if source.features:
            raise ConfigError(
                f"this model reads no features, got `{';'.join(source.features)}` with `{source.text}`; leave them out"
            )
        return source.text

    def _word(self, word: str, found: dict[str, Prediction], known: dict[str, tuple[str, ...]]) -> Prediction:
        if word in found:
            answers = tuple(dataclasses.replace(answer, origin=MODEL) for answer in found[word].answers)
            return Prediction(word, answers)
        ways = known[word]
        share = 1 / len(ways)
        answers = [Answer(way, tuple(way.split()), math.log(share), True, share=share) for way in ways]
        return Prediction(word, tuple(dataclasses.replace(answer, origin=DICTIONARY) for answer in answers))

    def _together(self, words: tuple[Prediction, ...], k: int) -> tuple[Answer, ...]:
        if len(words) < 2:
            return words[0].answers if words else ()
        between = (Answer(BOUNDARY, (BOUNDARY,), 0.0, True),)
        row = [part for word in words for part in (between, word.answers)]
        return join_answers(row[1:], self.target.symbols, k)

    def _source(self, text: str | Source) -> Source:
        """One word as the model reads it, for what shows a single search."""
        whole = self._text(text)
        words = read(whole, pronunciations()).words
        if len(words) > 1:
            raise ConfigError(f"expected one word, got {len(words)} (`{' '.join(words)}`); give them one by one")
        return super()._source(words[0] if words else "")
