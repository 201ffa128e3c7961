"""The sections of a report that show single items: predictions, attention, confusions, worst errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from thalweg.tasks.report.page import bar
from thalweg.tasks.report.part import ReportPart
from thalweg.tasks.report.run import EvaluationRecord, RunRecord
from thalweg.tasks.report.tables import outputs_table, table_of
from thalweg.tasks.report.text import (
    as_list,
    as_number,
    closest,
    describe,
    difference,
    escape,
    figure,
    foreign,
    note,
    probability,
    symbol,
)

ANSWERS = 5
MAPS = 12
SIDE = 60
"""Symbols shown on each side of a heat map; longer items are cut and say so."""
SAMPLED = ("temperature", "top_k", "sampling_seed")
SETTINGS = {
    "beam": ("width", "length_penalty"),
    "diverse": ("width", "groups", "diversity", "length_penalty"),
    "exact": ("width", "max_expansions"),
    "sample": SAMPLED,
    "nucleus": ("top_p", *SAMPLED),
    "typical": ("typical", *SAMPLED),
    "min-p": ("min_p", *SAMPLED),
    "stochastic": ("temperature", "sampling_seed"),
    "mbr": ("samples", *SAMPLED),
}
EVERYWHERE = ("min_length", "max_length", "prefix", "lexicon", "k")
OPTIONS = {"sampling_seed": "seed"}  # settings whose option has another name
ALWAYS = ("diversity", "max_expansions")  # settings whose 0 is not the default


class StringReport(ReportPart):
    """What a report shows of strings: predictions, attention, confusions, worst errors.

    >>> 'id="evaluation-1"' in StringReport().section(EvaluationRecord(name="test"), 1)
    True
    """

    def facts(self, start: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """The symbols of both sides."""
        for side in ("source", "target"):
            yield f"{side.capitalize()} symbols", _symbols_fact(start.get(side))

    def shape(self, model: dict[str, Any]) -> dict[str, Any]:
        """A model's settings without those that do nothing in it."""
        idle = {
            "attention_dropout": not model.get("attention_dropout"),
            "encoder_layers": model.get("kind") == "causal",
            "max_positions": model.get("positions") != "learned",
            **dict.fromkeys(("masked_epochs", "masked_share", "masked_rate"), not model.get("masked_epochs")),
            **dict.fromkeys(("lora", "lora_alpha", "lora_dropout", "lora_targets"), not model.get("lora")),
        }
        return {key: value for key, value in model.items() if not idle.get(key)}

    def conditions(self, metrics: dict[str, Any]) -> list[str]:
        """The search, the runs that answered, and what counted as right."""
        parts = []
        if options := _search_options(metrics):
            name = options.pop("search")
            parts.append(foreign(f"{name} search ({describe(options)})" if options else f"{name} search"))
        if isinstance(path := metrics.get("path"), str):
            parts.append(foreign(path))
        if others := _others(metrics):
            how = "vote" if metrics["ensemble"].get("vote") is True else "mean of probabilities"
            parts.append(foreign(f"with {describe(others)} ({how})"))
        if isinstance(precision := metrics.get("precision"), str):
            parts.append(escape(f"{precision} weights"))
        return [*parts, "any of several references counts"] if metrics.get("references") == "any" else parts

    def remarks(self, metrics: dict[str, Any]) -> str:
        """What exact search found out, where it was used."""
        exact = metrics.get("exact")
        if not isinstance(exact, dict):
            return ""
        names = {
            "proved": "of the answers are proved the most probable",
            "beam_optimal": f"are found by a beam of {figure(exact.get('width'))}",
            "beam_beaten": "are more probable than the beam's",
            "empty": "are empty",
        }
        shares = {key: as_number(exact.get(key)) for key in names}
        parts = [f"{share:.2%} {names[key]}" for key, share in shares.items() if share is not None]
        return f"<p>{escape('; '.join(parts))}.</p>" if parts else ""

    def section(self, evaluation: EvaluationRecord, place: int) -> str:
        """All that one evaluation shows of single items."""
        tables = (
            f'<div class="pair"><div><h3>Commonest confusions</h3>{confusion_table(evaluation.confusions)}</div>'
            f"<div><h3>Worst errors</h3>{worst_table(evaluation.worst)}</div></div>"
        )
        return (
            f'<section id="evaluation-{place}"><h2>Answers on {foreign(evaluation.name)}</h2>'
            f"{_first(evaluation)}{_predictions(evaluation)}<h3>Attention</h3>{attention_maps(evaluation.attention)}{tables}</section>"
        )

    def commands(self, run: str, record: RunRecord) -> list[tuple[str, list[str]]]:
        """Every evaluation again, and predictions."""
        lines = [("Evaluate", _evaluate(run, evaluation)) for evaluation in record.evaluations]
        return [
            *(lines or [("Evaluate", ["thalweg", "evaluate", run, "test.tsv"])]),
            ("Predict from the keyboard or a pipe", ["thalweg", "predict", run, "-", "--k", "5"]),
            ("Predict a file", ["thalweg", "predict", run, "words.txt", "--k", "5"]),
        ]


def _search_options(metrics: dict[str, Any]) -> dict[str, Any]:
    """Name and k of a search with the settings that matter to it, by their options; a setting of 0 is off."""
    search = metrics.get("search")
    if not isinstance(search, dict) or not isinstance(name := search.get("name"), str):
        return {}
    options: dict[str, Any] = {"search": name}
    for key in (*SETTINGS.get(name, ()), *EVERYWHERE):
        value = search.get(key)
        number = as_number(value)
        if number or (isinstance(value, str) and value) or (number == 0 and key in ALWAYS):
            options[OPTIONS.get(key, key)] = value
    return options


def _others(metrics: dict[str, Any]) -> list[str]:
    """The runs that answered with this one."""
    ensemble = metrics.get("ensemble")
    runs = ensemble.get("runs") if isinstance(ensemble, dict) else None
    return [str(run) for run in runs] if isinstance(runs, list) else []


def _symbols_fact(value: object) -> str:
    if not isinstance(value, dict):
        return describe(value or "")
    size = f"{figure(value['size'])} in the alphabet" if "size" in value else ""
    return " · ".join(part for part in (describe(value.get("symbols") or ""), size) if part)


def _evaluate(run: str, evaluation: EvaluationRecord) -> list[str]:
    metrics = evaluation.metrics or {}
    words = ["thalweg", "evaluate", run, str(metrics.get("file") or f"{evaluation.name}.tsv")]
    for key, value in _search_options(metrics).items():
        words += [f"--{key.replace('_', '-')}", str(value)]
    for other in _others(metrics):
        words += ["--ensemble", other]
    if isinstance(ensemble := metrics.get("ensemble"), dict) and ensemble.get("vote") is True:
        words += ["--vote"]
    if isinstance(precision := metrics.get("precision"), str):
        words += ["--precision", precision]
    if metrics.get("references") in ("each", "any"):
        words += ["--references", metrics["references"]]
    if evaluation.name not in re.sub(r"[:/]", "-", words[3]):  # else it is the name that the file gives
        words += ["--name", evaluation.name]
    return words


def _first(evaluation: EvaluationRecord) -> str:
    """The first answers beside the references, as papers print them."""
    if not evaluation.first:
        return ""
    items = []
    for item in evaluation.first:
        tags = ";".join(_strings(item.get("features")))
        source = f"{item.get('source', '')} ({tags})" if tags else str(item.get("source", ""))
        answers = [each for each in as_list(item.get("answers")) if isinstance(each, dict)]
        best = str(answers[0].get("text", "")) if answers else ""
        items.append((source, _strings(item.get("references")), [best]))
    chosen = f"{len(items)} of {figure(evaluation.items)}"
    return f'<h3>First answers <span class="muted">{chosen}</span></h3>{outputs_table(["answer"], items)}'


def _predictions(evaluation: EvaluationRecord) -> str:
    if evaluation.items is None:
        return "<h3>Predictions</h3>" + note("predictions.jsonl is absent.")
    if not evaluation.items:
        return "<h3>Predictions</h3>" + note("predictions.jsonl holds no items.")
    parts = []
    groups = (
        ("Wrong", evaluation.wrong, evaluation.items - evaluation.correct),
        ("Right", evaluation.right, evaluation.correct),
    )
    for title, items, count in groups:
        chosen = f"{len(items)} of {figure(count)}, chosen at random" if len(items) < count else figure(count)
        parts.append(f'<h3>{title} predictions <span class="muted">{chosen}</span></h3>')
        cards = "".join(prediction_card(item) for item in items)
        parts.append(f'<div class="cards">{cards}</div>' if items else note(f"None is {title.lower()}."))
    return "".join(parts)


def prediction_card(item: dict[str, Any]) -> str:
    """One item: source, references, the k best answers with probabilities; differences are marked.

    >>> card = prediction_card({"source": "cat", "references": ["k æ t"], "answers": [{"text": "k ʌ t"}]})
    >>> "<mark>ʌ</mark>" in card
    True
    """
    references = _strings(item.get("references"))
    answers = [each for each in as_list(item.get("answers")) if isinstance(each, dict)]
    best = str(answers[0].get("text", "")) if answers else ""
    nearest = closest(best, references)
    shown = [difference(each, best) if each == nearest and each != best else foreign(each) for each in references]
    lines = "".join(_answer(each, references, nearest) for each in answers[:ANSWERS])
    kind = "right" if item.get("correct") is True else "wrong"
    tags = ";".join(_strings(item.get("features")))
    tags = f' <span class="muted">{foreign(tags)}</span>' if tags else ""
    return (
        f'<article class="card answer {kind}">'
        f'<p class="source" dir="auto">{foreign(item.get("source", ""))}{tags}</p>'
        f'<p class="gold"><span class="muted">expected</span> {" <i>or</i> ".join(shown) or "–"}</p>'
        f"<ol>{lines or '<li>no answer</li>'}</ol></article>"
    )


def _answer(answer: dict[str, Any], references: Sequence[str], nearest: str | None) -> str:
    text = str(answer.get("text", ""))
    chance = as_number(answer.get("probability"))
    right = text in references
    shown = foreign(text or "∅") if right or nearest is None or not text else difference(text, nearest)
    marks = '<span class="ok" title="right">✓</span>' if right else ""
    if answer.get("finished") is False:
        round_and_round = ", going round in circles" if answer.get("loop") else ""
        marks += f'<span class="cut" title="cut at the greatest length{round_and_round}">…</span>'
    if (votes := as_number(answer.get("votes"))) is not None:
        marks += f' <span class="muted">{votes:.0f} {"vote" if votes == 1 else "votes"}</span>'
    log_prob = as_number(answer.get("log_prob"))
    proved = ", proved the most probable" if answer.get("optimal") is True else ""
    title = f' title="log-probability {log_prob:.3f}{proved}"' if log_prob is not None else ""
    width = 100 * min(max(chance or 0.0, 0.0), 1.0)
    return (
        f'<li{title}><i class="chance" style="width:{width:.1f}%"></i>'
        f'<span class="text">{shown}{marks}</span>'
        f'<span class="number">{escape(probability(chance))}</span></li>'
    )


def attention_maps(items: Sequence[dict[str, Any]] | None) -> str:
    """Heat maps, targets down and sources across; weights T x S between 0 and 1, a missing one counts as 0.

    >>> item = {"source": ["a"], "prediction": ["b"], "reference": "b", "weights": [[1.0]]}
    >>> "--w:1" in attention_maps([item])
    True
    """
    maps = [_heat_map(item) for item in (items or [])[:MAPS]]
    if not any(maps):
        return note("No attention weights were saved (a model without attention has none).")
    legend = (
        '<p class="muted">Each row is a symbol of the answer, each column a symbol of the source, in reading'
        " order from left to right in every script."
        ' <span class="scale"><span>0</span><i></i><span>1</span></span></p>'
    )
    return f'{legend}<div class="maps">{"".join(maps)}</div>'


def _heat_map(item: dict[str, Any]) -> str:
    source, prediction = (_strings(item.get(key)) for key in ("source", "prediction"))
    weights = as_list(item.get("weights"))
    if not source or not prediction or not weights:
        return ""
    head = "".join(f'<th scope="col" dir="auto">{symbol(each)}</th>' for each in source[:SIDE])
    rows = "".join(
        f'<tr><th scope="row" dir="auto">{symbol(each)}</th>{_cells(row, source, each)}</tr>'
        for each, row in list(zip(prediction, weights, strict=False))[:SIDE]
    )
    answer = prediction[:-1] if prediction[-1] == "</s>" else prediction
    reference = str(item.get("reference", ""))
    right = reference in ("".join(answer), " ".join(answer))
    glue = " " if any(len(each) > 1 for each in source) else ""
    caption = f"<b>{foreign(glue.join(source))}</b> "
    spaced = " " in reference or any(len(each) > 1 for each in answer)
    said = (" " if spaced else "").join(answer)
    caption += f'<span class="{"ok" if right else "bad"}">{"✓" if right else "✗"}</span> {foreign(said)}'
    if not right:
        caption += f' <span class="muted">expected</span> {foreign(reference)}'
    if max(len(source), len(prediction)) > SIDE:
        caption += f' <span class="muted">(the first {SIDE} symbols)</span>'
    return (
        f'<figure class="card map"><figcaption>{caption}</figcaption><div class="scroll">'
        f'<table class="heat"><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table>'
        "</div></figure>"
    )


def _cells(row: object, source: Sequence[str], target: str) -> str:
    numbers = [as_number(each) or 0.0 for each in as_list(row)[: len(source)]]
    numbers += [0.0] * (len(source) - len(numbers))
    return "".join(
        f'<td style="--w:{min(max(number, 0.0), 1.0):.3g}"'
        f' title="{escape(target)} ← {escape(each)}: {number:.2f}"></td>'
        for number, each in list(zip(numbers, source, strict=True))[:SIDE]
    )


def confusion_table(rows: Sequence[tuple[str, str, int]] | None) -> str:
    """Expected symbol, predicted symbol and how often, with bars; ∅ stands for no symbol.

    >>> "left out" in confusion_table([("a", "∅", 3)])
    True
    """
    if rows is None:
        return note("confusions.tsv is absent.")
    if not rows:
        return note("No symbol was confused with another.")
    most = max(count for _, _, count in rows) or 1
    body = [
        f'<tr><td class="symbol" dir="auto">{symbol(gold)}</td>'
        f'<td class="symbol" dir="auto">{symbol(guess)}</td>'
        f'<td class="muted">{"added" if gold == "∅" else "left out" if guess == "∅" else "changed"}</td>'
        f'<td class="number">{figure(count)}</td>'
        f'<td class="wide">{bar(count / most)}</td></tr>'
        for gold, guess, count in rows
    ]
    return table_of(("expected", "predicted", "", "#count", ""), body)


def worst_table(rows: Sequence[Sequence[str]] | None) -> str:
    """The items with most edits: rows of source, references (between them " | "), prediction, edits.

    >>> "<mark>zz</mark>" in worst_table([["a", "b | c", "zz", "2"]])
    True
    """
    if rows is None:
        return note("worst.tsv is absent.")
    if not rows:
        return note("Nothing was wrong.")
    body = [
        f'<tr><td dir="auto">{foreign(source)}</td><td dir="auto">{foreign(reference)}</td>'
        f'<td dir="auto">{_againstclosest(guess, reference)}</td>'
        f'<td class="number">{escape(edits)}</td></tr>'
        for source, reference, guess, edits in rows
    ]
    return table_of(("source", "expected", "predicted", "#edits"), body)


def _againstclosest(guess: str, references: str) -> str:
    return difference(guess, closest(guess, references.split(" | ")) or "") if guess else symbol("")


def _strings(value: object) -> list[str]:
    return [value] if isinstance(value, str) else [str(each) for each in as_list(value)]
