r"""BART, mBART and Marian checkpoints of Hugging Face as a :class:`~thalweg.energies.transformer.model.Transformer`.

Weights are copied, so that logits are equal, and so are the answers of a search where both are set alike:

==============================================  =================================================================
``generate`` of transformers 5                  here
==============================================  =================================================================
``num_beams=1, do_sample=False``                ``greedy(model, source, ...)``
``num_beams=W, num_return_sequences=k``         ``beam_search(model, source, width=W, k=k, ...)``
``max_new_tokens=n`` (``max_length=n + 1``)     ``max_length=n``: the decoder's start symbol is not counted
``length_penalty=p`` (1.0 unless given)         ``length_penalty=p`` (0.0 unless given)
``sequences_scores``                            ``scores / lengths**p``: eos is counted, the start symbol is not
``early_stopping="never"``                      always so: an item ends when no live row can overtake its k-th
``early_stopping=False``, p = 0                 the same
``early_stopping=False``, p > 0; or ``True``    nothing: may stop before the better hypothesis is found
``forced_eos_token_id=None``                    ``last_step=None``, the default
``forced_eos_token_id=eos``                     ``model.last_step = n``
``forced_bos_token_id``                         ``model.rules.first``, taken over
``bad_words_ids``, ``suppress_tokens``          ``model.rules.forbidden`` and ``words``, taken over
``begin_suppress_tokens``                       ``model.rules.not_first``, taken over
``no_repeat_ngram_size=n``                      ``model.rules.no_repeat``, taken over
``min_length=m`` (``min_new_tokens=m - 1``)     ``min_length=m``, in ``model.rules.settings()``
==============================================  =================================================================

Forced symbols cost nothing (log-probability 0) and forbidden ones give up their mass without the others gaining it:
``generate`` masks log-probabilities after the softmax in its beam search, and so does the model made here. (In its
greedy search it masks logits, which gives the same symbols.) ``generate`` ranks hypotheses that the length limit cut
among the finished ones; here they follow them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thalweg.energies.transformer.cache import TransformerState
from thalweg.energies.transformer.generation import GenerationRules, one_symbol, read_rules
from thalweg.energies.transformer.model import Transformer, TransformerConfig
from thalweg.errors import CheckpointError, ConfigError, MissingDependencyError
from thalweg.layers.padded import Padded
from thalweg.layers.transformer import Activation

__all__ = ["ConvertedTransformer", "from_huggingface"]

_FAMILIES = ("bart", "marian", "mbart")
_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "relu": "relu", "swish": "silu", "silu": "silu"}


class ConvertedTransformer(Transformer):
    """A :class:`Transformer` under the rules of a Hugging Face generation config.

    Only :meth:`step`, and so every search, follows the rules; ``forward``, ``log_prob`` and ``energy`` are the bare
    model's. Until :attr:`rules` is set there are none.

    Attributes:
        rules: see :class:`GenerationRules`.
        last_step: the step (from 1) at which ``rules.last`` is forced, ``max_length`` of the search; None: nowhere.

    >>> small = TransformerConfig(width=8, heads=2, feedforward=8, encoder_layers=1, decoder_layers=1)
    >>> model = ConvertedTransformer(small, source_size=9, target_size=9, unk=None, forbidden=()).eval()
    >>> model.rules = GenerationRules(forbidden=(1,), first=5)
    >>> from thalweg.inference import greedy
    >>> source = Padded(torch.tensor([[4, 5, 6]]), torch.tensor([3]), torch.ones(1, 3, dtype=torch.bool))
    >>> int(greedy(model, source, max_length=4).tokens[0, 0, 0])
    5
    """

    rules = GenerationRules()
    last_step: int | None = None

    @property
    def ruled(self) -> bool:
        """Whether a rule changes what :meth:`step` of the bare model gives; else a search may go round it."""
        return self.rules.bind(self.last_step)

    def begin(self, inputs: Padded) -> TransformerState:
        """Start B targets, one per source; what is said is kept where a rule looks back."""
        state = super().begin(inputs)
        return replace(state, said=state.items.new_empty((inputs.size, 0))) if self.rules.look_back else state

    def step(self, tokens: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        """Feed ``tokens (R,)``; log-probabilities ``(R, V)`` of the next symbols under the rules, and the state."""
        if state.said is not None:
            state = replace(state, said=torch.cat((state.said, tokens.unsqueeze(1)), dim=1))
        log_probs, after = super().step(tokens, state)
        return self.rules.apply(log_probs, after.length, self.last_step, state.said), after


def from_huggingface(source: Any, *, bos: int | None = None) -> ConvertedTransformer:
    r"""A Hugging Face BART, mBART or Marian with its weights, in evaluation mode and float32.

    Args:
        source: a directory with ``config.json`` and ``model.safetensors`` (or its shards and their index;
            ``generation_config.json`` is read where it is there), or a loaded ``transformers`` model. A directory
            needs the package safetensors alone. Pickled weights (``pytorch_model.bin``) are refused.
        bos: symbol that starts the decoder; from the checkpoint by default. mBART's is its target language.
    Returns:
        A :class:`ConvertedTransformer` with

        .. math:: p(y_t \mid y_{<t}, x) = \mathrm{softmax}(E\, h_t + b)_{y_t}

        as in the checkpoint: E the output matrix (tied or not), b ``final_logits_bias``. Sources are id sequences as
        the checkpoint's tokeniser gives them, its special symbols included, padded at the end.

    The weights are copied once: time and memory O(parameters). See the head of this module for settings that make
    the searches equal.

    >>> from_huggingface("absent")
    Traceback (most recent call last):
    thalweg.errors.CheckpointError: absent/config.json: expected a Hugging Face checkpoint, got no such file; ...
    """
    if hasattr(source, "state_dict") and hasattr(source, "config"):
        config, weights = source.config.to_dict(), dict(source.state_dict())
        generation = getattr(source, "generation_config", None)
        generation = generation.to_dict() if generation is not None else {}
    else:
        folder = Path(source)
        config, generation = _read_json(folder / "config.json"), {}
        if (folder / "generation_config.json").exists():
            generation = _read_json(folder / "generation_config.json")
        weights = _read_weights(folder)
    # Older checkpoints have the settings of the search among those of the model.
    told = {**config, **{key: value for key, value in generation.items() if value is not None}}
    start = told.get("decoder_start_token_id") if bos is None else bos
    if start is None:
        raise ConfigError("config.json: `decoder_start_token_id` must be a symbol, got none; pass `bos`")
    names = _Names(weights)
    shape = _shape(config, names)
    ends = one_symbol(told, "eos_token_id")
    model = ConvertedTransformer(
        shape,
        source_size=names.embedding("encoder").size(0),
        target_size=names.embedding("decoder").size(0),
        unk=None,
        pad=one_symbol(told, "pad_token_id"),
        bos=start,
        eos=ends,
        forbidden=(),
    )
    model.rules = read_rules(told, ends)
    return _load(model, names)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: expected a Hugging Face checkpoint, got no such file; give the directory that "
            "`save_pretrained` or `hf download` wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected a JSON object, got {error}; write or download it anew") from None


def _read_weights(folder: Path) -> dict[str, Tensor]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        files = [single]
    elif index.exists():
        files = [folder / name for name in sorted(set(_read_json(index).get("weight_map", {}).values()))]
    elif any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{folder}: expected model.safetensors, got pytorch_model.bin alone, a pickle, which can run code; if you "
            "trust it, load it with transformers and `save_pretrained` it, which writes safetensors"
        )
    else:
        raise CheckpointError(f"{single}: expected the weights, got no such file; download it beside config.json")
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise MissingDependencyError(
            "a Hugging Face checkpoint needs the package safetensors; run: pip install safetensors"
        ) from None
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: expected a safetensors file, got {error}; download it anew") from None
    return weights


def _shape(config: Mapping[str, Any], names: _Names) -> TransformerConfig:
    """The checkpoint's shape in our words; what has none is an error that names the key."""
    family = config.get("model_type")
    if family not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise ConfigError(f"config.json: `model_type` must be one of {known}, got {family!r}; others have no converter")
    for key in ("attention_heads", "ffn_dim"):
        encoder, decoder = config[f"encoder_{key}"], config[f"decoder_{key}"]
        if encoder != decoder:
            raise ConfigError(
                f"config.json: `decoder_{key}` must equal `encoder_{key}` = {encoder}, got {decoder}; no other is built"
            )
    activation = config.get("activation_function", "gelu")
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ConfigError(f"config.json: `activation_function` must be one of {known}, got {activation!r}")
    pre = family == "mbart"
    # Of old configs; transformers itself no longer reads these keys and computes what the family stands for.
    usual = {"normalize_before": pre, "add_final_layer_norm": pre, "normalize_embedding": family != "marian"}
    for key, value in {**usual, "static_position_embeddings": family == "marian"}.items():
        if bool(config.get(key, value)) != value:
            raise ConfigError(
                f"config.json: `{key}` must be {value} for {family}, got {config[key]}; no other is built"
            )
    return TransformerConfig(
        kind="encoder-decoder",
        width=config["d_model"],
        heads=config["encoder_attention_heads"],
        feedforward=config["encoder_ffn_dim"],
        encoder_layers=config["encoder_layers"],
        decoder_layers=config["decoder_layers"],
        norm="pre" if pre else "post",
        positions="sinusoidal" if family == "marian" else "learned",
        activation=_ACTIVATIONS[activation],
        dropout=float(config.get("dropout") or 0.0),
        attention_dropout=float(config.get("attention_dropout") or 0.0),
        tied=bool(config.get("tie_word_embeddings", True)),
        shared=names.shared,
        embedding_norm=family != "marian",
        embedding_scale=bool(config.get("scale_embedding", False)),
        max_positions=config.get("max_position_embeddings", 1024),
        output_bias=True,
    )


class _Names:
    """The checkpoint's tensors by name, and which of them were taken."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        # A checkpoint of the bare model lacks the prefix; what is shared is written once or under all its names.
        self.weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
        self.taken: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.weights:
            raise CheckpointError(f"the checkpoint must hold the tensor `{name}`, got none; compare its config.json")
        self.taken.add(name)
        return self.weights[name]

    def get(self, *names: str) -> Tensor:
        """The first of these that is there."""
        return self[next((name for name in names if name in self.weights), names[0])]

    def embedding(self, side: str) -> Tensor:
        """``(V, D)`` symbol vectors of the encoder or decoder."""
        other = {"encoder": "decoder", "decoder": "encoder"}[side]
        own = f"{side}.embed_tokens.weight"
        return self.get(own, "shared.weight", "lm_head.weight", f"{other}.embed_tokens.weight")

    @property
    def shared(self) -> bool:
        """Whether both sides have the same symbol vectors; older checkpoints hold them under every name."""
        one, other = self.embedding("encoder"), self.embedding("decoder")
        return one is other or (one.shape == other.shape and torch.equal(one, other))

    def linear(self, ours: str, *theirs: str) -> Iterator[tuple[str, Tensor]]:
        """Weight and bias of one of our maps, which may be several of theirs on top of one another."""
        for part in ("weight", "bias"):
            yield f"{ours}.{part}", torch.cat([self[f"{name}.{part}"] for name in theirs])


def _load(model: ConvertedTransformer, names: _Names) -> ConvertedTransformer:
    tensors = dict(_translated(model.config, names))
    left = set(names.weights) - names.taken - {"shared.weight", "lm_head.weight", "final_logits_bias"}
    left = {name for name in left if not name.endswith(("embed_tokens.weight", "embed_positions.weight"))}
    if left:
        raise CheckpointError(
            f"the checkpoint must hold known tensors only, got `{min(left)}`; compare its config.json"
        )
    own = model.state_dict()
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape:
            there = tuple(own[name].shape) if name in own else "none"
            raise CheckpointError(
                f"`{name}` must have shape {there}, got {tuple(tensor.shape)} there; compare config.json"
            )
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=True)
    return model.eval()


def _translated(config: TransformerConfig, names: _Names) -> Iterator[tuple[str, Tensor]]:
    """Our names of all parameters, with the checkpoint's values."""
    yield "source_embedding.weight", names.embedding("encoder")
    embedding = names.embedding("decoder")
    yield "target_embedding.weight", embedding
    yield "output.weight", embedding if config.tied else names["lm_head.weight"]
    bias = names.weights.get("final_logits_bias")
    yield "output.bias", embedding.new_zeros(embedding.size(0)) if bias is None else bias.reshape(-1)
    for ours, theirs in (("source", "encoder"), ("target", "decoder")):
        if config.positions == "learned":
            # Two rows before the first position are a relic of the library in which BART was trained.
            yield f"{ours}_positions.weight", names[f"{theirs}.embed_positions.weight"][2:]
        if config.embedding_norm:
            yield from names.linear(f"{ours}_norm", f"{theirs}.layernorm_embedding")
        if config.norm == "pre":
            yield from names.linear(f"{theirs}.norm", f"{theirs}.layer_norm")
    for side, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        for number in range(layers):
            yield from _layer(f"{side}.layers.{number}", names, cross=side == "decoder")


def _layer(at: str, names: _Names, *, cross: bool) -> Iterator[tuple[str, Tensor]]:
    own, other = f"{at}.self_attn", f"{at}.encoder_attn"
    yield from names.linear(f"{at}.attention.project", *(f"{own}.{part}_proj" for part in "qkv"))
    yield from names.linear(f"{at}.attention.out", f"{own}.out_proj")
    yield from names.linear(f"{at}.attention_norm", f"{own}_layer_norm")
    if cross:
        yield from names.linear(f"{at}.cross.query", f"{other}.q_proj")
        yield from names.linear(f"{at}.cross.memory", f"{other}.k_proj", f"{other}.v_proj")
        yield from names.linear(f"{at}.cross.out", f"{other}.out_proj")
        yield from names.linear(f"{at}.cross_norm", f"{other}_layer_norm")
    yield from names.linear(f"{at}.feedforward.up", f"{at}.fc1")
    yield from names.linear(f"{at}.feedforward.down", f"{at}.fc2")
    yield from names.linear(f"{at}.feedforward_norm", f"{at}.final_layer_norm")
