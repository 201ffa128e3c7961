"""The sides: one checkpoint on disk, read by transformers, by CTranslate2 and by Thalweg.

The checkpoint is a BART with random weights, written here in the format of ``save_pretrained`` without transformers.
Its end symbol has a bias of -10,000, so that no side can end a hypothesis and all make the same number of steps.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.machine import version_of
from benchmarks.harness.timing import Job
from thalweg.energies.transformer.huggingface import ConvertedTransformer, from_huggingface
from thalweg.inference import Hypotheses, beam_search, greedy
from thalweg.layers.padded import Padded

OURS, PEER, INT = "Thalweg", "transformers", "CTranslate2 int8"
BOS, PAD, EOS, UNK = 0, 1, 2, 3


@dataclass(frozen=True)
class Shape:
    """Size of the model and of its work."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    feedforward: int = 1024
    vocabulary: int = 100
    source: int = 12
    steps: int = 20


TINY = Shape(layers=1, width=16, heads=2, feedforward=32, vocabulary=30, source=5, steps=6)


@dataclass(frozen=True)
class Answers:
    """Symbols ``(B, K, T)`` and log-probabilities ``(B, K)``, best first, on the CPU."""

    tokens: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Side:
    """One program: ``job(source, width)`` is what is timed, ``answers(source, width)`` what is compared."""

    name: str
    version: str
    job: Callable[[Tensor, int], Job]
    answers: Callable[[Tensor, int], Answers]
    exact: bool = True
    """Its answers must equal the others'; false for reduced precision, of which agreement is reported."""


def _weights(shape: Shape, draw: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    def normal(*size: int, std: float) -> Tensor:
        return std * torch.randn(*size, generator=draw)

    def linear(name: str, inputs: int, outputs: int) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", normal(outputs, inputs, std=inputs**-0.5)
        yield f"{name}.bias", normal(outputs, std=0.1)

    D = shape.width
    yield "model.shared.weight", normal(shape.vocabulary, D, std=0.3)
    for side in ("encoder", "decoder"):
        yield f"model.{side}.embed_positions.weight", normal(shape.source + shape.steps + 2, D, std=0.3)
        norms = [f"model.{side}.layernorm_embedding"]
        for layer in range(shape.layers):
            at = f"model.{side}.layers.{layer}"
            for attention in ("self_attn", "encoder_attn")[: 1 if side == "encoder" else 2]:
                for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    yield from linear(f"{at}.{attention}.{part}", D, D)
                norms.append(f"{at}.{attention}_layer_norm")
            yield from linear(f"{at}.fc1", D, shape.feedforward)
            yield from linear(f"{at}.fc2", shape.feedforward, D)
            norms.append(f"{at}.final_layer_norm")
        for norm in norms:
            # With a tied output matrix, a scale of one sign would let every symbol follow itself for ever.
            last = side == "decoder" and norm == norms[-1]
            yield f"{norm}.weight", normal(D, std=1.0) if last else 1 + normal(D, std=0.1)
            yield f"{norm}.bias", normal(D, std=0.1)
    bias = normal(1, shape.vocabulary, std=0.1)
    bias[0, EOS] = -1e4
    yield "final_logits_bias", bias


def write_checkpoint(folder: Path, shape: Shape, *, seed: int = 0) -> Path:
    """``config.json``, ``model.safetensors`` and a vocabulary, which CTranslate2's converter asks for."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    sides = {
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in (("layers", shape.layers), ("attention_heads", shape.heads), ("ffn_dim", shape.feedforward))
    }
    config = {
        "architectures": ["BartForConditionalGeneration"],
        "model_type": "bart",
        "d_model": shape.width,
        **sides,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.source + shape.steps,
        "activation_function": "gelu",
        "normalize_before": False,  # CTranslate2's converter reads it
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "is_encoder_decoder": True,
        "bos_token_id": BOS,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "decoder_start_token_id": EOS,
        "forced_eos_token_id": None,
    }
    generation = {key: config[key] for key in config if key.endswith("token_id")}
    vocabulary = {"<s>": BOS, "<pad>": PAD, "</s>": EOS, "<unk>": UNK}
    vocabulary |= {f"t{n}": n for n in range(len(vocabulary), shape.vocabulary)}
    files = {
        "config.json": config,
        "generation_config.json": generation,
        "vocab.json": vocabulary,
        "tokenizer_config.json": {"tokenizer_class": "BartTokenizer"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    weights = dict(_weights(shape, torch.Generator().manual_seed(seed)))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def padded(source: Tensor, device: str) -> Padded:
    """Sources (B, S) of one length as our models take them."""
    B, S = source.shape
    return Padded(source, torch.full((B,), S), torch.ones(B, S, dtype=torch.bool)).to(device)


class Ours:
    """Thalweg through ``from_huggingface``."""

    def __init__(self, model: ConvertedTransformer, device: str, steps: int):
        self.model, self.device, self.steps = model.to(device), device, steps

    def search(self, source: Tensor, width: int) -> Hypotheses:
        """All hypotheses of the beam; greedy at width 1."""
        inputs = padded(source, self.device)
        if width == 1:
            return greedy(self.model, inputs, max_length=self.steps)
        return beam_search(self.model, inputs, width=width, max_length=self.steps)

    def answers(self, source: Tensor, width: int) -> Answers:
        """The same, to compare."""
        found = self.search(source, width)
        return Answers(found.tokens.cpu(), found.scores.cpu())

    def log_probs(self, source: Tensor, tokens: Tensor) -> Tensor:
        """(B, K) the same by one pass over the whole target, which no search takes part in."""
        B, K, T = tokens.shape
        target = padded(tokens.reshape(B * K, T), self.device)
        with torch.no_grad():
            found = self.model.log_prob(padded(source.repeat_interleave(K, 0), self.device), target)
        return found.view(B, K).cpu()

    def side(self) -> Side:
        """What is timed and compared."""

        def job(source: Tensor, width: int) -> Job:
            return Job(OURS, lambda: self.search(source, width), compiles=True)

        return Side(OURS, version_of("thalweg"), job, self.answers)


def hugging_face(folder: Path, device: str, shape: Shape) -> Side:
    """transformers: ``generate`` with the settings of the table in ``thalweg.energies.transformer.huggingface``."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model: Any = transformers.BartForConditionalGeneration.from_pretrained(folder, local_files_only=True)
    model = model.to(device).eval()

    def generate(source: Tensor, width: int, **options: Any) -> Any:
        inputs = source.to(device)
        if width > 1:
            options |= {"num_return_sequences": width, "length_penalty": 0.0, "early_stopping": "never"}
        with torch.no_grad():
            return model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                num_beams=width,
                do_sample=False,
                max_new_tokens=shape.steps,
                **options,
            )

    def answers(source: Tensor, width: int) -> Answers:
        found = generate(source, width, return_dict_in_generate=True, output_scores=True)
        tokens = found.sequences[:, 1:].view(len(source), width, -1).cpu()
        if width > 1:
            return Answers(tokens, found.sequences_scores.view(len(source), width).cpu())
        steps = torch.stack(found.scores, dim=1).log_softmax(dim=2).cpu()
        return Answers(tokens, steps.gather(2, tokens[:, 0].unsqueeze(2)).squeeze(2).sum(1, keepdim=True))

    def job(source: Tensor, width: int) -> Job:
        return Job(PEER, lambda: generate(source, width))

    return Side(PEER, transformers.__version__, job, answers)


def ctranslate(folder: Path, device: str, shape: Shape, compute: str, threads: int) -> Side:
    """CTranslate2 from the same directory by its own converter; it takes and gives symbols as strings."""
    import ctranslate2
    import transformers

    transformers.logging.disable_progress_bar()
    place = folder / f"ctranslate2-{compute}"
    converter = ctranslate2.converters.TransformersConverter(str(folder))
    converter.convert(str(place), quantization=None if compute == "float32" else compute, force=True)
    translator = ctranslate2.Translator(
        str(place), device=device, compute_type=compute, inter_threads=1, intra_threads=threads
    )
    name = f"CTranslate2 {compute}"

    def translate(words: list[list[str]], width: int, *, scores: bool = False) -> Any:
        return translator.translate_batch(
            words,
            beam_size=width,
            num_hypotheses=width,
            length_penalty=0,
            max_decoding_length=shape.steps,
            return_scores=scores,
            max_batch_size=0,
        )

    def words_of(source: Tensor) -> list[list[str]]:
        return [[f"t{n}" for n in row] for row in source.tolist()]

    specials = {"<s>": BOS, "<pad>": PAD, "</s>": EOS, "<unk>": UNK}

    def answers(source: Tensor, width: int) -> Answers:
        found = translate(words_of(source), width, scores=True)
        tokens = [
            [[specials.get(t, -1) if t in specials else int(t[1:]) for t in row] for row in item.hypotheses]
            for item in found
        ]
        return Answers(torch.tensor(tokens), torch.tensor([item.scores for item in found]))

    def job(source: Tensor, width: int) -> Job:
        words = words_of(source)
        return Job(name, lambda: translate(words, width))

    return Side(name, version_of("ctranslate2"), job, answers, exact=compute == "float32")


def find_sides(folder: Path, device: str, shape: Shape, threads: int) -> tuple[Ours, list[Side], list[str]]:
    """Our model, all sides with ours first, and why a peer is not among them."""
    ours = Ours(from_huggingface(folder), device, shape.steps)
    sides, missing = [ours.side()], []
    if importlib.util.find_spec("transformers") is None:
        missing.append(f"{PEER}: left out, it is not installed")
    else:
        sides.append(hugging_face(folder, device, shape))
    reason = ctranslate_lacks(device)
    if reason:
        missing.append(f"CTranslate2: left out, {reason}")
    else:
        sides += [ctranslate(folder, device, shape, compute, threads) for compute in ("float32", "int8")]
    return ours, sides, missing


def ctranslate_lacks(device: str) -> str | None:
    """Why CTranslate2 cannot run here, or None."""
    for package in ("ctranslate2", "transformers"):  # its converter needs the other
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    import ctranslate2

    if device == "cuda" and not ctranslate2.get_cuda_device_count():
        return "its build sees no GPU"
    return None
