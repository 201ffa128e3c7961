"""A transducer as a service asks it: words in, records, trees and marks out."""

from __future__ import annotations

import dataclasses
import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from thalweg.data.text.readers import read_pairs, split_tags
from thalweg.errors import ConfigError
from thalweg.inference.search.beam.tree import Node
from thalweg.metrics import Score, closest_reference, scored
from thalweg.metrics.strings import Words
from thalweg.tasks.serving import Exam, Plan, Servant, measured_scores
from thalweg.tasks.transduce.answers import Prediction, Source, read_answers
from thalweg.tasks.transduce.codec import Piece, is_tag
from thalweg.tasks.transduce.evaluation import tally_of
from thalweg.tasks.transduce.search_settings import SearchConfig
from thalweg.tasks.transduce.training import words_of
from thalweg.tasks.transduce.transducer import Transducer

# Steps of exact search, at worst, that cost as much as a plain answer.
_EXPANSIONS = 50
# Sources that a caller may try.
_EXAMPLES = 6


class StringServant(Servant):
    """Strings to strings.

    Args:
        transducer: what answers; its first answer is asked for here, so that what is compiled is compiled.
        searching: makes options a search, as the task's own commands do.
        takes: names of the options; run: where its scores are.

    >>> from thalweg.data import Alphabet, Symbols
    >>> from thalweg.energies import Seq2Seq, Seq2SeqConfig
    >>> from thalweg.tasks.transduce.codec import Codec
    >>> codec = Codec(Symbols(), Alphabet.build(["abc"]))
    >>> model = Seq2Seq(Seq2SeqConfig(hidden=8), source_size=7, target_size=7)
    >>> servant = StringServant(Transducer(model, codec, codec, longest=4, meta={}), SearchConfig, takes=("width",))
    >>> plan = servant.plan_of({"k": 2, "width": 3})
    >>> servant.answer(servant.questions(["cab", "a"]), plan)[1].source
    'a'
    """

    view = "strings"

    def __init__(
        self,
        transducer: Transducer,
        searching: Callable[..., SearchConfig],
        *,
        takes: Iterable[str],
        run: str | Path = "",
    ):
        self.transducer, self.searching, self.takes, self.run = transducer, searching, frozenset(takes), run
        self._made = lru_cache(maxsize=256)(self._make)  # a search is checked once, not at each request
        self.attends = self._warm()

    def _warm(self) -> bool:
        """Search for a symbol's answers, and tell whether they say where they looked."""
        side = self.transducer.source
        letter = next((each for each in side.alphabet.symbols if not is_tag(each)), "")
        piece = (*(each for each in side.alphabet.symbols[:1] if is_tag(each)), letter)
        found = self.transducer.search([side.alphabet.encode(piece)], k=5, how=self.searching())
        answers = read_answers(found, self.transducer.target, proving=False)[0]
        return any(look is not None for look in self.transducer.attend([(piece, answer) for answer in answers]))

    def describe(self) -> dict[str, Any]:
        """Options, directions of the scripts, tags, scores and words to try."""
        usual, sides = self.searching(), (self.transducer.source, self.transducer.target)
        return {
            "default": {"k": 5, "search": usual.search, "width": usual.width},
            "attention": self.attends,
            "features": self.transducer.featured,
            "direction": {
                name: _direction(side.alphabet.symbols) for name, side in zip(("source", "target"), sides, strict=True)
            },
            "examples": self._examples(),
            "scores": measured_scores(self.run) if self.run else {},
        }

    def _examples(self) -> list[str]:
        """Some sources that it was measured on."""
        for path in sorted(Path(self.run).glob("evaluation/*/predictions.jsonl")) if self.run else ():
            try:
                with open(path, encoding="utf-8") as lines:
                    sources = [json.loads(line)["source"] for line in islice(lines, 1000)]
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                continue
            distinct = list(dict.fromkeys(source for source in sources if isinstance(source, str)))
            return distinct[:: max(1, len(distinct) // _EXAMPLES)][:_EXAMPLES]
        return []

    def plan_of(self, options: Mapping[str, Any]) -> Plan:
        """A search, whether attention is wanted, and what becomes of symbols never seen."""
        return self._made(tuple(sorted(options.items())))

    def _make(self, options: tuple[tuple[str, Any], ...]) -> Plan:
        rest = dict(options)
        k, attention, unknown = rest.pop("k", 5), rest.pop("attention", False), rest.pop("unknown", "report")
        how = self.searching(**rest)
        if unknown == "copy" and how.prefix:
            raise ConfigError("copying unknown symbols answers in pieces, which a prefix does not go with")
        costs = {"exact": max(1, (how.max_expansions or 10**9) // _EXPANSIONS), "mbr": how.samples, "greedy": 1}
        weight = costs.get(how.search, max(how.width, k) if how.search in ("beam", "diverse") else k)
        return Plan(k, (how, attention, unknown), how.draws, weight)

    def questions(self, inputs: Sequence[Any], features: Sequence[str] = ()) -> list[Source]:
        """Texts of one line, with the tags of each or of all."""
        if len(features) not in (0, 1, len(inputs)):
            raise ConfigError(
                f"`features` must be one for all inputs or one for each of {len(inputs)}, got {len(features)}"
            )
        tags = [split_tags(words) for words in features] or [()]
        tags = tags * len(inputs) if len(tags) == 1 else tags
        found = []
        for place, (text, own) in enumerate(zip(inputs, tags, strict=True)):
            if not isinstance(text, str):
                raise ConfigError(f"inputs[{place}] must be a text, got something else")
            if any(mark in text for mark in "\t\n\r"):
                raise ConfigError(f"inputs[{place}] must be one line without tabs; send each line as an input")
            if self.transducer.featured != bool(own) and (text or own):
                wanted = (
                    "needs tags in `features`, such as `V;PST`" if self.transducer.featured else "reads no `features`"
                )
                raise ConfigError(f"this model {wanted}")
            found.append(Source(text.strip(), own))
        return found

    def answer(self, questions: Sequence[Source], plan: Plan) -> list[Prediction]:
        """The records of ``thalweg predict``."""
        how, attention, unknown = plan.how  # type: ignore[misc]
        return list(
            self.transducer.predict(
                questions, k=plan.k, how=how, attention=attention, unknown=unknown, batch_size=max(1, len(questions))
            )
        )

    def symbols(self, record: Prediction) -> dict[str, Any]:
        """Tags and letters of the source, and the symbols of each answer without the end."""
        return {
            "source": self._shown(Source(record.source, record.features)),
            "answers": [list(answer.symbols) for answer in record.answers],
        }

    def _shown(self, source: Source) -> list[str]:
        side = self.transducer.source
        tags = [tag.strip() for tag in side.tags(source.features)]
        return [*tags, *side.symbols.split(source.text)]

    def tree(self, question: Source, plan: Plan, *, exact: bool = False) -> dict[str, Any]:
        """Every candidate of the beam by number, and which of them make up its best hypothesis."""
        how: SearchConfig = plan.how[0]  # type: ignore[index]
        if not question.text:
            return {"source_symbols": [], "nodes": [], "best": [], "exact": None}
        symbols, found = self.transducer.grow(question, how=how)
        assert found.tree is not None
        nodes, names = found.tree.nodes(0), self.transducer.target.alphabet.names
        answer = [token for token in found.tokens[0, 0].tolist() if token >= 0]
        return {
            "source_symbols": [each.strip() if is_tag(each) else each for each in symbols],
            "nodes": [_told(number, node, names) for number, node in enumerate(nodes)],
            "best": _path(nodes, tuple(answer)),
            "exact": self._optimum(symbols, how) if exact else None,
        }

    def _optimum(self, symbols: Piece, how: SearchConfig) -> dict[str, Any] | None:
        proving = dataclasses.replace(how, search="exact", groups=0, length_penalty=0.0)
        found = self.transducer.search([self.transducer.source.alphabet.encode(symbols)], k=1, how=proving)
        for answer in read_answers(found, self.transducer.target, proving=True)[0]:
            return {"symbols": list(answer.symbols), "log_prob": answer.log_prob, "optimal": bool(answer.optimal)}
        return None

    def exam(self, text: str, plan: Plan) -> StringExam:
        """Pairs, one a line: source, tab, target; tags in a third column where the model reads them."""
        exam = StringExam(self.transducer, text, plan.k)
        for line, question in enumerate(exam.questions, start=1):
            if len(question.text) > self.longest:
                raise ConfigError(f"line {line}: expected a source of at most {self.longest:,} characters, got more")
        return exam


def _told(number: int, node: Node, names: Sequence[str]) -> dict[str, Any]:
    symbol = names[node.tokens[-1]] if node.tokens else ""
    own = {"symbol": symbol, "score": node.score, "fate": node.fate, "step": len(node.tokens)}
    return {"id": number, "parent": node.parent, **own}


def _path(nodes: Sequence[Node], answer: tuple[int, ...]) -> list[int]:
    """Numbers of the nodes of a hypothesis, from the root."""
    place = {node.tokens: number for number, node in enumerate(nodes) if node.fate != "dropped"}
    return [place[answer[:length]] for length in range(len(answer) + 1) if answer[:length] in place]


def _direction(symbols: Iterable[str]) -> str:
    """Whether most letters are written from right to left."""
    kinds = Counter(unicodedata.bidirectional(letter) for symbol in symbols if not is_tag(symbol) for letter in symbol)
    return "rtl" if kinds["R"] + kinds["AL"] > kinds["L"] else "ltr"


class StringExam(Exam):
    """Pairs to be answered: error rates with intervals, and what was wrong.

    >>> from thalweg.data import Alphabet, Symbols
    >>> from thalweg.energies import Seq2Seq, Seq2SeqConfig
    >>> from thalweg.tasks.transduce.codec import Codec
    >>> codec = Codec(Symbols(), Alphabet.build(["abc"]))
    >>> model = Seq2Seq(Seq2SeqConfig(hidden=8), source_size=7, target_size=7)
    >>> exam = StringExam(Transducer(model, codec, codec, longest=4, meta={}), "ab\\tba\\n", 1)
    >>> exam.marked(0, Prediction("ab", ()))["edits"]
    2
    """

    def __init__(self, transducer: Transducer, text: str, k: int):
        pairs = read_pairs("upload", text=text, features=transducer.featured)
        self.questions = [Source(pair.source, pair.features) for pair in pairs.pairs]
        self.references = [pair.target for pair in pairs.pairs]
        self.side, self.k = transducer.target, k
        self.gold = [self.side.units(target) for target in self.references]
        self.words: Words = words_of(self.side, pairs.targets())

    def marked(self, place: int, record: Prediction) -> dict[str, Any]:
        """As in ``predictions.jsonl`` of an evaluation."""
        best = self.side.counted(record.answers[0].symbols) if record.answers else ()
        _, edits = closest_reference(best, [self.gold[place]])
        return {**record.to_json(), "references": [self.references[place]], "correct": edits == 0, "edits": edits}

    def scores(self, records: Sequence[Prediction], *, resamples: int = 1000) -> dict[str, Score]:
        """CER, WER and the others of ``thalweg evaluate``."""
        answers = [[self.side.counted(answer.symbols) for answer in record.answers] for record in records]
        ks = sorted({n for n in (3, 5, 10, self.k) if 1 < n <= self.k})
        gold = [[each] for each in self.gold[: len(answers)]]
        return scored(tally_of(self.side, answers, gold, ks, self.words), resamples=resamples)
