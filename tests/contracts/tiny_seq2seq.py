"""Tiny encoder-decoders of every family with random weights, made by transformers itself, and what `generate` gives."""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from thalweg.layers.padded import Padded

os.environ["HF_HUB_OFFLINE"] = "1"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

    for _name in ("T5", "MT5", "Bart", "MBart", "Marian", "Bert", "Roberta", "EncoderDecoder"):
        getattr(transformers, f"{_name}Config")  # models come by attribute and are imported then
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

V, MAX = 20, 14
PLACES = 24
_T5 = {
    "vocab_size": V,
    "d_model": 16,
    "d_kv": 8,
    "num_heads": 2,
    "d_ff": 24,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
}
_NARROW = {"d_kv": 5, "num_heads": 3, "feed_forward_proj": "gated-gelu"}  # heads that are no part of the width
_BART = {
    "vocab_size": V,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": PLACES,
    "init_std": 0.3,
    "forced_eos_token_id": None,
}
_MARIAN = {"pad_token_id": V - 1, "decoder_start_token_id": V - 1, "eos_token_id": 0}
_BERT = {
    "vocab_size": V,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": PLACES,
    "initializer_range": 0.4,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", _T5),
    "t5-gated": ("T5", {**_T5, **_NARROW, "tie_word_embeddings": False}),
    "byt5": ("T5", {**_T5, **_NARROW, "num_decoder_layers": 1, "tie_word_embeddings": False}),
    "mt5": ("MT5", {**_T5, **_NARROW}),
    "bart": ("Bart", {**_BART, "decoder_start_token_id": 2}),
    "mbart": ("MBart", {**_BART, "decoder_start_token_id": 4}),
    "marian": ("Marian", {**_BART, **_MARIAN}),
    "bert2bert": ("Bert", {}),
    "bert2bert-projected": ("Bert", {"hidden_size": 12}),
    "roberta2bert": ("Roberta", {}),
}


@cache
def build(variant: str) -> Any:
    """The model, in evaluation mode; the same one for every caller."""
    family, options = VARIANTS[variant]
    torch.manual_seed(3)
    model = _paired(family, options) if family in ("Bert", "Roberta") else _plain(family, options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
        _enliven(model, family)
    return model.eval()


def _plain(family: str, options: dict[str, Any]) -> Any:
    config = getattr(transformers, f"{family}Config")(**options)
    name = "MarianMTModel" if family == "Marian" else f"{family}ForConditionalGeneration"
    return getattr(transformers, name)(config)


def _paired(family: str, options: dict[str, Any]) -> Any:
    encoder = {**_BERT, **options}
    if family == "Roberta":
        encoder |= {"max_position_embeddings": PLACES + 2, "pad_token_id": 1, "type_vocab_size": 1}
    encoder = getattr(transformers, f"{family}Config")(**encoder)
    decoder = transformers.BertConfig(**_BERT, is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    symbols = {"decoder_start_token_id": 2, "eos_token_id": 3, "pad_token_id": encoder.pad_token_id}
    for key, value in symbols.items():
        setattr(config, key, value)
    model = transformers.EncoderDecoderModel(config)
    model.generation_config = transformers.GenerationConfig(**symbols)
    return model


def _enliven(model: Any, family: str) -> None:
    """Outputs that depend on what was read and said, and end early and late."""
    eos = model.config.eos_token_id
    if family in ("T5", "MT5"):
        if family == "MT5" or not model.config.scale_decoder_outputs:  # as in T5 1.1 the output matrix is its own
            model.lm_head.weight = torch.nn.Parameter(0.5 * torch.randn_like(model.lm_head.weight))
            model.lm_head.weight[eos] *= 2
        for block in (*model.encoder.block, *model.decoder.block):
            block.layer[0].SelfAttention.q.weight.mul_(4)
        for stack in (model.encoder, model.decoder):
            stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.normal_()
        model.decoder.final_layer_norm.weight.normal_(std=2.0)
    elif family in ("Bart", "MBart", "Marian"):
        # A tied output matrix lets every symbol follow itself; a scale of both signs mixes them.
        model.model.decoder.layers[-1].final_layer_norm.weight.normal_()
        model.final_logits_bias.normal_(std=0.5)
        model.final_logits_bias[0, eos] += 1.0
        if family == "Marian":
            model.generation_config.bad_words_ids = [[model.config.pad_token_id]]
    else:
        head = model.decoder.cls.predictions
        head.transform.LayerNorm.weight.normal_(std=1.5)
        head.bias.normal_(std=0.5)
        head.bias[eos] += 2.0


def sources(model: Any, *, seed: int = 0, items: int = 5) -> tuple[Padded, dict[str, Tensor]]:
    """Ragged sources as both take them."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 8, (items,), generator=draw)
    lengths[0] = 8
    mask = torch.arange(8) < lengths.unsqueeze(1)
    tokens = torch.randint(5, V - 1, (items, 8), generator=draw).where(mask, model.config.pad_token_id)
    return Padded(tokens, lengths, mask), {"input_ids": tokens, "attention_mask": mask.long()}


def generated(
    model: Any, inputs: dict[str, Tensor], *, width: int = 1, k: int = 1, **options: Any
) -> tuple[list[list[list[int]]], Tensor]:
    """Their hypotheses as lists of symbols, item by item, and scores ``(B, k)``, divided by lengths as they do it."""
    settings = {"max_new_tokens": MAX, "early_stopping": "never", **options} if width > 1 else {"max_new_tokens": MAX}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model.generate(
            **inputs,
            **{**settings, **options},
            do_sample=False,
            num_beams=width,
            num_return_sequences=k,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
    B, eos = inputs["input_ids"].size(0), model.config.eos_token_id
    rows = [_cut(row[1:], eos) for row in found.sequences.tolist()]
    if width > 1:
        scores = found.sequences_scores.view(B, k)
    else:
        steps = torch.stack(found.logits, dim=1).log_softmax(dim=2)  # (B, T, V)
        forced = torch.stack(found.scores, dim=1).isinf().sum(dim=2) == V - 1  # cost nothing
        steps = steps.masked_fill(forced.unsqueeze(2), 0.0)
        sums = [sum(steps[b, t, symbol].item() for t, symbol in enumerate(row)) for b, row in enumerate(rows)]
        scores = torch.tensor(sums).unsqueeze(1)
    return [rows[b * k : (b + 1) * k] for b in range(B)], scores


def _cut(row: list[int], eos: int) -> list[int]:
    """Up to and with the first end symbol."""
    return row[: row.index(eos) + 1] if eos in row else row
