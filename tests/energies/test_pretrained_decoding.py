"""Pretrained encoder-decoders under our searches give what `generate` gives: symbols and scores, whole batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install transformers==5.22.0")

from contracts.tiny_seq2seq import MAX, PLACES, VARIANTS, V, build, generated, sources
from thalweg.energies.pretrained.decoding import PretrainedDecoder, decoder_of, settings_of
from thalweg.energies.transformer.generation import GenerationRules, read_rules
from thalweg.energies.transformer.huggingface import ConvertedTransformer
from thalweg.energies.transformer.model import Transformer
from thalweg.errors import ConfigError, ShapeError, ThalwegError
from thalweg.inference import (
    beam_search,
    exact_search,
    greedy,
    sample_sequences,
    stochastic_beam_search,
)
from thalweg.inference.search.beam import search as beam
from thalweg.inference.search.compiled import compiled_search
from thalweg.layers.low_precision import reduce_precision
from thalweg.layers.padded import Padded

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

OPTIONS: dict[str, dict[str, Any]] = {
    "bigrams": {"no_repeat_ngram_size": 2},
    "single symbols": {"no_repeat_ngram_size": 1},
    "first symbol": {"forced_bos_token_id": 9},
    "least length": {"min_length": 6},
    "least new": {"min_new_tokens": 6},
    "suppressed": {"suppress_tokens": [6, 7, 11]},
    "suppressed at first": {"begin_suppress_tokens": [5, 6, 7, 8, 9, 10]},
    "bad words": {},  # those that would be said
    "all": {"no_repeat_ngram_size": 3, "forced_bos_token_id": 9, "min_length": 5, "suppress_tokens": [6]},
}


CONVERTED = [name for name in VARIANTS if name not in ("bert2bert-projected", "roberta2bert")]
BOTH = [*((name, False) for name in VARIANTS), *((name, True) for name in CONVERTED)]


def ours(variant: str, *, ending: bool = True, convert: bool = False, **options: Any) -> Any:
    """The model under the same options.

    With ``ending`` eos is forced at the limit, for they rank what the limit cut among what is finished.
    """
    model = build(variant)
    eos = settings_of(model)["eos_token_id"]
    told = {**settings_of(model), **options, "forced_eos_token_id": eos if ending else None}
    how = {"rules": read_rules(told, eos), "last_step": MAX if ending else None}
    decoder = decoder_of(model, **how, convert=convert)
    assert isinstance(decoder, ConvertedTransformer if convert else PretrainedDecoder), decoder.path
    return decoder


def least(decoder: Any) -> dict[str, Any]:
    return {"min_length": decoder.rules.min_length} if decoder.rules.min_length else {}


def assert_same(found: Any, rows: list[list[list[int]]], scores: Tensor, penalty: float = 0.0) -> None:
    assert found.sequences() == rows
    torch.testing.assert_close(found.scores / found.lengths**penalty, scores, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("variant", "convert"), BOTH)
def test_greedy_is_equal(variant: str, convert: bool) -> None:
    decoder = ours(variant, ending=False, convert=convert)
    source, inputs = sources(build(variant), seed=1)
    found = greedy(decoder, source, max_length=MAX)
    assert_same(found, *generated(build(variant), inputs))
    assert found.tokens[:, 0].unique(dim=0).size(0) > 1, "the test needs a model that reads its source"


@pytest.mark.parametrize(("variant", "convert"), BOTH)
def test_beams_are_equal(variant: str, convert: bool) -> None:
    decoder = ours(variant, convert=convert)
    source, inputs = sources(build(variant), seed=2)
    for penalty in (0.0, 1.0):
        found = beam_search(decoder, source, width=4, k=3, max_length=MAX, length_penalty=penalty)
        settings = {"length_penalty": penalty, "forced_eos_token_id": decoder.eos}
        assert_same(found, *generated(build(variant), inputs, width=4, k=3, **settings), penalty)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("variant", "convert"), [("t5-gated", False), ("bert2bert", False), ("byt5", True), ("bert2bert", True)]
)
def test_options_are_equal(variant: str, convert: bool, options: str) -> None:
    source, inputs = sources(build(variant), seed=3)
    plain = beam_search(ours(variant), source, width=3, max_length=MAX, length_penalty=0.6)
    told: dict[str, Any] = OPTIONS[options]
    if options == "bad words":
        one, two, three = (plain.sequences()[item][0] for item in range(3))
        told = {"bad_words_ids": [one[:1], two[:2], three[:3]]}
    decoder = ours(variant, convert=convert, **told)
    told = {**told, "forced_eos_token_id": decoder.eos}
    found = beam_search(decoder, source, width=3, max_length=MAX, length_penalty=0.6, **least(decoder))
    assert found.sequences() != plain.sequences(), "the option must change something"
    assert_same(found, *generated(build(variant), inputs, width=3, k=3, length_penalty=0.6, **told), 0.6)
    best = greedy(decoder, source, max_length=MAX, **least(decoder))
    assert_same(best, *generated(build(variant), inputs, **told))


@pytest.mark.parametrize("variant", CONVERTED)
def test_logits_of_converted_models_are_equal(variant: str) -> None:
    model, decoder = build(variant), ours(variant, convert=True)
    source, inputs = sources(model)
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(5, V - 1, (5, 20), generator=draw)
    target = Padded(tokens, torch.full((5,), 20), torch.ones(5, 20, dtype=torch.bool))
    fed = torch.cat((torch.full((5, 1), decoder.bos), tokens[:, :-1]), dim=1)
    with torch.no_grad():
        expected = model(**inputs, decoder_input_ids=fed).logits
        torch.testing.assert_close(decoder(source, target), expected, atol=1e-5, rtol=1e-5)
        state, steps = decoder.begin(source), []
        for symbols in fed.unbind(dim=1):
            log_probs, state = Transformer.step(decoder, symbols, state)
            steps.append(log_probs)
    torch.testing.assert_close(torch.stack(steps, dim=1), expected.log_softmax(dim=2), atol=1e-5, rtol=1e-5)
    decoder.train()  # the differentiable path, without dropout
    for part in decoder.modules():
        if hasattr(part, "dropout") and isinstance(part.dropout, float):
            part.dropout = 0.0
        if hasattr(part, "p"):
            part.p = 0.0
    state = decoder.begin(source)
    for n, symbols in enumerate(fed.unbind(dim=1)[:4]):
        log_probs, state = Transformer.step(decoder, symbols, state)
        torch.testing.assert_close(log_probs, steps[n], atol=1e-5, rtol=1e-5)


def test_what_cannot_be_converted_says_why() -> None:
    own = "the model's own modules and cache (config.json: "
    assert decoder_of(build("roberta2bert")).path.startswith(own + "`model_type` of the encoder must be bert")
    assert decoder_of(build("bert2bert-projected")).path.startswith(own + "`hidden_size` must be alike")
    assert "bfloat16" in decoder_of(copy.deepcopy(build("t5")).bfloat16()).path
    assert "fewer bits" in decoder_of(reduce_precision(build("t5"), "int8")).path


@pytest.mark.parametrize("variant", CONVERTED)
def test_the_compiled_call_gives_what_single_steps_give(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ours(variant, ending=False, convert=True, suppress_tokens=[6, 7])
    source, _ = sources(build(variant), seed=5)
    calls: list[bool] = []

    def spy(*arguments: Any) -> Any:
        calls.append((found := compiled_search(*arguments)) is not None)
        return found

    monkeypatch.setattr(beam, "compiled_search", spy)
    for penalty, least in ((0.0, 0), (1.0, 4)):
        about: dict[str, Any] = {"width": 4, "max_length": MAX, "length_penalty": penalty, "min_length": least}
        found = beam_search(decoder, source, **about)
        single = beam_search(decoder, source, **about, rows_at_once=10_000)
        assert found.sequences() == single.sequences()
        assert not bool(torch.isin(found.tokens, torch.tensor([6, 7])).any())
        torch.testing.assert_close(found.scores, single.scores, atol=1e-5, rtol=1e-5)
    assert calls == [True, True]
    with torch.no_grad():  # the weights are read where they are
        for parameter in decoder.parameters():
            parameter.mul_(1.3)
    again = beam_search(decoder, source, **about)
    single = beam_search(decoder, source, **about, rows_at_once=10_000)
    assert again.sequences() == single.sequences() != found.sequences()


def test_rules_are_read_from_the_model() -> None:
    model = build("marian")
    assert PretrainedDecoder(model).rules.forbidden == (V - 1,)
    assert PretrainedDecoder(model, rules=GenerationRules()).rules.forbidden == ()


def test_padding_batch_and_order_do_not_matter() -> None:
    decoder = ours("bert2bert", ending=False, no_repeat_ngram_size=2)
    source, _ = sources(decoder.model, seed=2)
    together = beam_search(decoder, source, width=3, max_length=MAX)
    order = torch.tensor([3, 0, 4, 2, 1])
    shuffled = beam_search(decoder, Padded(*(part[order] for part in source)), width=3, max_length=MAX)
    pieces = beam_search(decoder, source, width=3, max_length=MAX, rows_at_once=6)
    for b, length in enumerate(source.lengths.tolist()):
        one = Padded(source.tokens[b : b + 1, :length], source.lengths[b : b + 1], source.mask[b : b + 1, :length])
        alone = beam_search(decoder, one, width=3, max_length=MAX)
        row = order.tolist().index(b)
        assert alone.sequences()[0] == together.sequences()[b] == shuffled.sequences()[row] == pieces.sequences()[b]
        torch.testing.assert_close(alone.scores[0], together.scores[b], atol=1e-5, rtol=1e-5)


class WrongOrder(PretrainedDecoder):
    """Forgets to reorder the past."""

    def select(self, state: Any, rows: Tensor) -> Any:
        past = tuple((keys[: rows.numel()], values[: rows.numel()]) for keys, values in state.past)
        right = super().select(state, rows)
        fits = past and past[0][0].size(0) == rows.numel()
        return type(state)(**{**vars(right), "past": past}) if fits else right


def test_a_wrong_reorder_is_found() -> None:
    model = build("t5-gated")
    source, inputs = sources(model, seed=2)
    rows, _ = generated(model, inputs, width=4, k=3, length_penalty=0.0)
    right = beam_search(ours("t5-gated", ending=False), source, width=4, k=3, max_length=MAX)
    wrong = beam_search(WrongOrder(model), source, width=4, k=3, max_length=MAX)
    assert right.sequences() == rows
    assert wrong.sequences() != rows


def test_states_are_values() -> None:
    decoder = ours("bert2bert", ending=False, no_repeat_ngram_size=3)
    source, _ = sources(decoder.model)
    with torch.no_grad():
        _, state = decoder.step(torch.full((5,), decoder.bos), decoder.begin(source))
        tokens = torch.tensor([5, 6, 7, 8, 9])
        first, _ = decoder.step(tokens, state)
        rows = torch.tensor([4, 1, 1])
        other, _ = decoder.step(tokens[rows], decoder.select(state, rows))
        again, _ = decoder.step(tokens, state)
    assert torch.equal(first, again)
    torch.testing.assert_close(other, first[rows], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["t5", "bert2bert"])
def test_every_search_takes_it(variant: str) -> None:
    decoder = ours(variant, ending=False)
    source, _ = sources(decoder.model, items=2)
    beam = beam_search(decoder, source, width=5, max_length=4)
    proved = exact_search(decoder, source, max_length=4, max_expansions=400)
    both = proved.finished[:, 0] & beam.finished[:, 0]
    assert bool((proved.scores[:, 0] >= beam.scores[:, 0] - 1e-5)[both & proved.optimal].all())
    drawn = sample_sequences(decoder, source, n=3, max_length=4, generator=torch.Generator().manual_seed(0))
    apart = stochastic_beam_search(decoder, source, n=3, max_length=4, generator=torch.Generator().manual_seed(0))
    for found in (beam, drawn, apart):
        for item, (rows, scores) in enumerate(zip(found.sequences(), found.scores.tolist(), strict=True)):
            length = int(source.lengths[item])
            one = Padded(
                source.tokens[item : item + 1, :length],
                source.lengths[item : item + 1],
                source.mask[item : item + 1, :length],
            )
            for row, score in zip(rows, scores, strict=False):
                assert score == pytest.approx(forced(decoder, one, row), abs=1e-4)


def forced(decoder: PretrainedDecoder, source: Padded, row: list[int]) -> float:
    """Log-probability of a target by one pass of their model over all of it."""
    fed = torch.tensor([[decoder.bos, *row[:-1]]])
    with torch.no_grad():
        logits = decoder.model(input_ids=source.tokens, attention_mask=source.mask.long(), decoder_input_ids=fed).logits
    return logits.log_softmax(dim=2)[0, torch.arange(len(row)), row].sum().item()


@pytest.mark.parametrize("change", ["range", "length", "empty", "target", "training"])
@pytest.mark.parametrize("variant", ["bert2bert", "roberta2bert", "bart", "t5"])
def test_bad_input_is_one_line(variant: str, change: str) -> None:
    decoder, most = ours(variant, ending=False), MAX
    source, _ = sources(decoder.model)
    if change == "range":
        source.tokens[1, 0] = V
    elif change in ("length", "target"):
        if variant == "t5":
            pytest.skip("relative positions have no end")
        longer = torch.full((1, PLACES + 1), 7)
        mask = torch.ones_like(longer, dtype=torch.bool)
        if change == "length":
            source = Padded(longer, torch.tensor([PLACES + 1]), mask)
            assert greedy(decoder, Padded(longer[:, 1:], torch.tensor([PLACES]), mask[:, 1:]), max_length=2).size == 1
        most = PLACES + 1
        decoder.rules = GenerationRules(forbidden=(decoder.eos,))
    elif change == "empty":
        source = Padded(source.tokens, torch.zeros_like(source.lengths), torch.zeros_like(source.mask))
    else:
        decoder.model.train()
    try:
        with pytest.raises(ThalwegError) as caught:
            greedy(decoder, source, max_length=most)
    finally:
        decoder.model.eval()
    assert isinstance(caught.value, ConfigError if change == "training" else ShapeError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("convert", [False, True])
def test_symbols_that_are_none_are_named(convert: bool) -> None:
    model = build("t5")
    source, _ = sources(model)
    for wrong in ({"bos": V}, {"rules": GenerationRules(forbidden=(V,))}, {"rules": GenerationRules(first=-1)}):
        with pytest.raises(ConfigError, match=r"0 \.\.\. 19") as caught:
            greedy(decoder_of(model, **wrong, convert=convert), source, max_length=3)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    for wrong in ("folder", None, torch.nn.Linear(1, 1)):
        with pytest.raises(ConfigError, match="must be an encoder-decoder that transformers has loaded"):
            decoder_of(wrong, convert=convert)  # type: ignore[arg-type]


def test_a_model_without_start_or_with_two_ends_is_refused() -> None:
    model = build("bert2bert")
    kept, model.generation_config.eos_token_id = model.generation_config.eos_token_id, [3, 4]
    try:
        with pytest.raises(ConfigError, match="`eos_token_id` must be one symbol"):
            PretrainedDecoder(model)
    finally:
        model.generation_config.eos_token_id = kept
    kept, model.config.decoder_start_token_id = model.config.decoder_start_token_id, None
    model.generation_config.decoder_start_token_id = None
    try:
        with pytest.raises(ConfigError, match="`decoder_start_token_id` must be a symbol"):
            PretrainedDecoder(model)
        assert PretrainedDecoder(model, bos=2).bos == 2
    finally:
        model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = kept
