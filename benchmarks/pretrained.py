"""Pretrained encoder-decoders beside transformers' ``generate``: same weights, same settings, one run.

    python -m benchmarks pretrained --write                  on this CPU
    python -m benchmarks pretrained --device cuda --write    on a GPU

T5 (1.1), Marian and BERT-to-BERT with random weights, made by transformers itself (pip install -c constraints.txt
transformers==5.22.0), under greedy and beam search. Symbols must be equal and scores equal to 1e-4 before anything is
timed; a difference ends the run. ``Thalweg`` is the decoder that ``decoder_of`` chooses by itself, ``own cache`` the
search over the model's own modules and cache.
"""

from __future__ import annotations

import os
import warnings
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.declaration import Benchmark, Facts, NothingToCompareError, Run, WrongAnswerError, demand
from benchmarks.harness.report import comparison, heading
from benchmarks.harness.timing import Job
from thalweg.energies.pretrained.decoding import decoder_of, settings_of
from thalweg.energies.transformer.generation import read_rules
from thalweg.inference import Hypotheses, beam_search, greedy
from thalweg.layers.padded import Padded

TOLERANCE = 1e-4
OURS, OWN, PEER = "Thalweg", "Thalweg, own cache", "transformers"
SPECIAL = 4  # symbols that are not drawn
EOS, NEVER = 1, -100.0  # the end symbol and its logit: every answer has the same length, so that no side can stop early
RULED = {"no_repeat_ngram_size": 3}


@dataclass(frozen=True)
class Size:
    """Of every model; sources have a half to all of ``source`` symbols, answers ``steps``."""

    width: int = 256
    layers: int = 4
    heads: int = 4
    feedforward: int = 1024
    vocabulary: int = 8000
    source: int = 24
    steps: int = 32


TINY = Size(16, 1, 2, 32, 40, 6, 5)


def t5(transformers: Any, size: Size) -> Any:
    """T5 1.1: gated GELU, an output matrix of its own."""
    config = transformers.T5Config(
        vocab_size=size.vocabulary,
        d_model=size.width,
        d_kv=size.width // size.heads,
        num_heads=size.heads,
        d_ff=size.feedforward,
        num_layers=size.layers,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        tie_word_embeddings=False,
    )
    model = transformers.T5ForConditionalGeneration(config)
    weight = torch.randn_like(model.lm_head.weight) * 3 * size.width**-0.5
    weight[EOS] = 0  # never among the best
    model.lm_head.weight = torch.nn.Parameter(weight)
    return model


def marian(transformers: Any, size: Size) -> Any:
    """Marian, whose padding symbol is barred as in every checkpoint of its kind."""
    both = {"attention_heads": size.heads, "ffn_dim": size.feedforward, "layers": size.layers}
    config = transformers.MarianConfig(
        vocab_size=size.vocabulary,
        d_model=size.width,
        **{f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in both.items()},
        pad_token_id=0,
        eos_token_id=EOS,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
        init_std=0.1,
    )
    model = transformers.MarianMTModel(config)
    model.generation_config.bad_words_ids = [[0]]
    model.final_logits_bias[0, EOS] = NEVER
    return model


def bert2bert(transformers: Any, size: Size) -> Any:
    """BERT on both sides."""
    shape = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": size.feedforward,
        "initializer_range": 0.1,
    }
    encoder = transformers.BertConfig(**shape)
    decoder = transformers.BertConfig(**shape, is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = transformers.EncoderDecoderModel(config)
    symbols = {"decoder_start_token_id": 2, "eos_token_id": EOS, "pad_token_id": 0}
    for key, value in symbols.items():
        setattr(model.config, key, value)
    model.generation_config = transformers.GenerationConfig(**symbols)
    with torch.no_grad():
        model.decoder.cls.predictions.bias[EOS] = NEVER
    return model


FAMILIES: dict[str, Callable[[Any, Size], Any]] = {"T5": t5, "Marian": marian, "BERT-to-BERT": bert2bert}


def begin(run: Run) -> Any:
    """The peer."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers
    except ImportError:
        raise NothingToCompareError(
            "transformers is not installed, nothing is measured; run: pip install transformers==5.22.0"
        ) from None
    transformers.logging.set_verbosity_error()
    return transformers


def sources(size: Size, batch: int, device: str) -> Padded:
    """Ragged sources."""
    draw = torch.Generator().manual_seed(batch)
    lengths = torch.randint(size.source // 2, size.source + 1, (batch,), generator=draw)
    lengths[0] = size.source
    mask = torch.arange(size.source) < lengths.unsqueeze(1)
    tokens = torch.randint(SPECIAL, size.vocabulary, (batch, size.source), generator=draw)
    return Padded(tokens.where(mask, 0), lengths, mask).to(device)


def search(decoder: Any, source: Padded, width: int, steps: int) -> Hypotheses:
    """All hypotheses of the beam; greedy at width 1."""
    if width == 1:
        return greedy(decoder, source, max_length=steps)
    return beam_search(decoder, source, width=width, max_length=steps, length_penalty=1.0)


def generate(model: Any, source: Padded, width: int, steps: int, **options: Any) -> Any:
    """The same by transformers."""
    if width > 1:
        options = {"num_return_sequences": width, "early_stopping": "never", "length_penalty": 1.0, **options}
    with torch.no_grad():
        return model.generate(
            input_ids=source.tokens,
            attention_mask=source.mask.long(),
            num_beams=width,
            do_sample=False,
            max_new_tokens=steps,
            **options,
        )


def compared(run: Run, model: Any, size: Size, batch: int, width: int, options: dict[str, Any]) -> Facts:
    """One batch size and width: equality, then times."""
    source = sources(size, batch, run.args.device)
    eos = settings_of(model)["eos_token_id"]
    rules = read_rules({**settings_of(model), **options}, eos)
    ours, own = (decoder_of(model, rules=rules, convert=convert) for convert in (True, False))
    decoders = {OURS: ours, **({OWN: own} if type(ours) is not type(own) else {})}
    jobs = [
        *(Job(name, lambda d=d: search(d, source, width, size.steps), compiles=True) for name, d in decoders.items()),
        Job(PEER, lambda: generate(model, source, width, size.steps, **options)),
    ]

    def check(answers: dict[str, Any]) -> dict[str, float]:
        asked = {**options, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        theirs = generate(model, source, width, size.steps, **asked)
        tokens = theirs.sequences[:, 1:].view(batch, width, -1)
        worst, ties = 0.0, 0
        for name in decoders:
            found = answers[name]
            if found.tokens.shape != tokens.shape:
                raise WrongAnswerError(f"{name}: expected hypotheses {tuple(tokens.shape)}, got others")
            # Scores must agree in any case, so that two of a beam can only have changed places where they are as good.
            there = (found.tokens == tokens[:, :1]).all(dim=2)  # (B, K)
            if not bool(there.any(dim=1).all()):
                raise WrongAnswerError(f"{name}: expected the symbols that transformers gives, got others")
            ties += int((~there[:, 0]).sum())
            scores = _scores(theirs, tokens, width)
            off = (found.scores / (found.lengths if width > 1 else 1) - scores).abs() / scores.abs().clamp(min=1)
            demand(f"{name}, scores beside transformers", off.max().item(), TOLERANCE)
            worst = max(worst, off.max().item())
        return {"difference": worst, "ties": ties}

    result = run.compare(jobs, check=check, over=lambda name: (PEER, name) if name != PEER else None)
    facts = {"batch": batch, "width": width, "options": options, "path": ours.path, **result.checked}
    return {**facts, **result.to_json()}


def _scores(theirs: Any, tokens: Tensor, width: int) -> Tensor:
    if width > 1:
        return theirs.sequences_scores.view(-1, width)
    # Logits: their greedy search takes the mass of barred symbols off before the softmax.
    steps = torch.stack(theirs.logits, dim=1).log_softmax(dim=2)
    return steps.gather(2, tokens[:, 0].unsqueeze(2)).squeeze(2).sum(1, keepdim=True)


def cells(run: Run) -> Facts:
    """Every family, batch size and width, and one with blocked trigrams."""
    size, found = TINY if run.args.quick else Size(), []
    run.found({PEER: run.shared.__version__}, [])
    for name in run.args.families:
        torch.manual_seed(0)
        model = FAMILIES[name](run.shared, size).to(run.args.device).eval()
        cases = [(batch, width, {}) for batch in run.args.batches for width in run.args.widths]
        for batch, width, options in [*cases, (run.args.batches[-1], run.args.widths[-1], RULED)]:
            print(f" {name}, B = {batch}, width {width} {options or ''}", flush=True)
            found.append({"family": name, **compared(run, model, size, batch, width, options)})
    return {"cells": found, "size": vars(size)}


def label(cell: Facts) -> list[str]:
    """What a row is of."""
    method = "greedy" if cell["width"] == 1 else f"beam {cell['width']}"
    return [cell["family"], f"{method}{', no trigram twice' if cell['options'] else ''}", str(cell["batch"])]


def report(facts: Facts) -> list[str]:
    """The table for people."""
    size, worst = facts["size"], max(cell["difference"] for cell in facts["cells"])
    paths = dict.fromkeys((cell["family"], cell["path"].split(" (")[0]) for cell in facts["cells"])
    return [
        f"# Pretrained encoder-decoders on {facts['machine']['title']}",
        "",
        *heading(facts),
        f"{size['layers']}+{size['layers']} layers, {size['width']} wide, feed-forward {size['feedforward']}, "
        f"{size['heads']} heads, vocabulary {size['vocabulary']:,}, sources of {size['source'] // 2} to "
        f"{size['source']} symbols, answers of {size['steps']}; float32, milliseconds a call, median and quartiles, in "
        "bold how many times faster than transformers. Symbols are equal "
        f"({sum(cell['ties'] for cell in facts['cells'])} times two hypotheses as good changed places); scores differ "
        f"by at most {worst:.1g}. Chosen by itself: {'; '.join(f'{family}: {path}' for family, path in paths)}.",
        "",
        *comparison(facts["cells"], ["", "", "B"], label),
    ]


def options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    add("--batches", type=int, nargs="+", default=[1, 32])
    add("--widths", type=int, nargs="+", default=[1, 4], help="1 is greedy")


BENCHMARK = Benchmark(parts={"cells": cells}, begin=begin, report=report, options=options, rounds=5, budget=30.0)
