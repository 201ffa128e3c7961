"""Small Hugging Face checkpoints of each architecture, in the real format, with tokenizers trained on the spot.

Nothing is downloaded: shapes are tiny, weights random, and every folder is what ``save_pretrained`` writes. Imports
nothing from Thalweg.
"""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import transformers

    # Imported by attribute; what that warns of is not ours.
    _CLASSES = {
        name: getattr(transformers, name)
        for name in (
            *("T5Config", "T5ForConditionalGeneration", "MT5Config", "MT5ForConditionalGeneration"),
            *("BartConfig", "BartForConditionalGeneration", "MBartConfig", "MBartForConditionalGeneration"),
            *("MarianConfig", "MarianMTModel", "BertConfig", "BertForMaskedLM", "BertModel", "EncoderDecoderModel"),
            *("T5Tokenizer", "ByT5Tokenizer", "BartTokenizer", "MBartTokenizer", "MarianTokenizer", "BertTokenizer"),
        )
    }
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

__all__ = ["ARCHITECTURES", "PAIRS", "transformers", "write_bert", "write_checkpoint", "write_pairs"]

WORDS = ("cat", "dog", "sun", "tree", "bird", "fish", "stone", "river", "house", "night")
PAIRS = tuple((f"the {a} sees the {b}", f"le {a[::-1]} voit le {b[::-1]}") for a in WORDS for b in WORDS[:4])
"""Forty pairs of short sentences."""

TEXTS = tuple(text for pair in PAIRS for text in pair)
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
_BART = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "max_position_embeddings": 64,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}
_BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}


def write_pairs(path: Path, pairs: Iterable[tuple[str, str]] = PAIRS) -> Path:
    """The pairs as a TSV file."""
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    return path


def write_checkpoint(name: str, folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """A checkpoint of one of :data:`ARCHITECTURES` with its tokenizer; ``config`` overrides its shape."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ARCHITECTURES[name](folder, config)
    return folder


def write_bert(folder: Path, *, seed: int = 0, texts: Iterable[str] = TEXTS, **config: Any) -> Path:
    """A BERT encoder with its masked-LM head and a word-piece tokenizer: one half of a pair."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = _word_pieces(texts)
        shape = _CLASSES["BertConfig"](**{**_BERT, "vocab_size": len(tokenizer), "pad_token_id": 0, **config})
        _CLASSES["BertForMaskedLM"](shape).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def _word_pieces(texts: Iterable[str] = TEXTS) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return _CLASSES["BertTokenizer"](vocab=tokenizer.get_vocab())


def _unigram(special: list[str]) -> list[tuple[str, float]]:
    """The pieces of a Unigram model with their scores, special ones first."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return [(piece, float(score)) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]]


def _save(folder: Path, model: str, config: str, tokenizer: Any, shape: dict[str, Any]) -> None:
    shape = {"vocab_size": len(tokenizer), **shape}
    _CLASSES[model](_CLASSES[config](**shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _t5(folder: Path, more: dict[str, Any]) -> None:
    tokenizer = _CLASSES["T5Tokenizer"](vocab=_unigram(["<pad>", "</s>", "<unk>"]), extra_ids=0)
    task = {"num_beams": 4, "max_length": 30, "early_stopping": True, "prefix": "translate English to French: "}
    tasks = {"task_specific_params": {"translation_en_to_fr": task}}
    shape = {**_T5, **tasks, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, **more}
    _save(folder, "T5ForConditionalGeneration", "T5Config", tokenizer, shape)


def _mt5(folder: Path, more: dict[str, Any]) -> None:
    tokenizer = _CLASSES["T5Tokenizer"](vocab=_unigram(["<pad>", "</s>", "<unk>"]), extra_ids=0)
    shape = {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0}
    _save(folder, "MT5ForConditionalGeneration", "MT5Config", tokenizer, {**shape, **more})


def _byt5(folder: Path, more: dict[str, Any]) -> None:
    shape = {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0}
    _save(folder, "T5ForConditionalGeneration", "T5Config", _CLASSES["ByT5Tokenizer"](), {**shape, **more})


def _bart(folder: Path, more: dict[str, Any]) -> None:
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(TEXTS, vocab_size=320, special_tokens=special, show_progress=False)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]
    tokenizer = _CLASSES["BartTokenizer"](vocab=model["vocab"], merges=merges)
    _save(folder, "BartForConditionalGeneration", "BartConfig", tokenizer, {**_BART, **more})


def _mbart(folder: Path, more: dict[str, Any]) -> None:
    pieces = _unigram(["<s>", "<pad>", "</s>", "<unk>"])
    tokenizer = _CLASSES["MBartTokenizer"](vocab=pieces, src_lang="en_XX", tgt_lang="fr_XX")
    start = tokenizer.convert_tokens_to_ids("fr_XX")
    shape = {**_BART, "decoder_start_token_id": start, **more}
    _save(folder, "MBartForConditionalGeneration", "MBartConfig", tokenizer, shape)


def _marian(folder: Path, more: dict[str, Any]) -> None:
    import sentencepiece

    folder.mkdir(parents=True, exist_ok=True)
    pieces: dict[str, int] = {"</s>": 0, "<unk>": 1}
    for side, name in enumerate(("source", "target")):
        written = io.BytesIO()
        texts = iter([pair[side] for pair in PAIRS])
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=texts, model_writer=written, vocab_size=50, hard_vocab_limit=False, minloglevel=2
        )
        (folder / f"{name}.spm").write_bytes(written.getvalue())
        model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
        for number in range(model.get_piece_size()):
            pieces.setdefault(model.id_to_piece(number), len(pieces))
    pieces["<pad>"] = len(pieces)
    (folder / "vocab.json").write_text(json.dumps(pieces), encoding="utf-8")
    spm = {f"{name}_spm": str(folder / f"{name}.spm") for name in ("source", "target")}
    tokenizer = _CLASSES["MarianTokenizer"](**spm, vocab=str(folder / "vocab.json"))
    pad = pieces["<pad>"]
    ends = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0, "forced_eos_token_id": 0}
    shape = {**_BART, **ends, "scale_embedding": True, "activation_function": "swish", **more}
    _save(folder, "MarianMTModel", "MarianConfig", tokenizer, {"decoder_vocab_size": len(tokenizer), **shape})


def _bert2bert(folder: Path, more: dict[str, Any]) -> None:
    half = write_bert(folder / "half", **more)
    model = _CLASSES["EncoderDecoderModel"].from_encoder_decoder_pretrained(str(half), str(half))
    model.config.decoder_start_token_id, model.config.eos_token_id, model.config.pad_token_id = 2, 3, 0
    model.generation_config.decoder_start_token_id, model.generation_config.eos_token_id = 2, 3
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    _word_pieces().save_pretrained(folder)


ARCHITECTURES: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "t5": _t5,
    "mt5": _mt5,
    "byt5": _byt5,
    "bart": _bart,
    "mbart": _mbart,
    "marian": _marian,
    "bert2bert": _bert2bert,
}
"""What writes each architecture's checkpoint, by name."""
