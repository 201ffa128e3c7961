r"""Checkpoints of Hugging Face (BART, mBART, Marian, T5, ByT5, mT5, BERT-to-BERT) as our own Transformer.

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

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thalweg.energies.transformer.cache import TransformerState
from thalweg.energies.transformer.checkpoints import bart, bert, t5
from thalweg.energies.transformer.checkpoints.files import Names, read_json, read_weights
from thalweg.energies.transformer.generation import GenerationRules, one_symbol, read_rules
from thalweg.energies.transformer.model import Transformer
from thalweg.errors import CheckpointError, ConfigError
from thalweg.layers.padded import Padded

_FAMILIES = {"bart": bart, "marian": bart, "mbart": bart, "t5": t5, "mt5": t5, "encoder-decoder": bert}


class ConvertedTransformer(Transformer):
    """A :class:`Transformer` under the rules of a Hugging Face generation config.

    Only :meth:`step`, and so every search, follows the rules; ``forward``, ``log_prob`` and ``energy`` are the bare
    model's. Until :attr:`rules` is set there are none.

    Attributes:
        rules: see :class:`GenerationRules`.
        last_step: the step (from 1) at which ``rules.last`` is forced, ``max_length`` of the search; None: nowhere.

    >>> from thalweg.energies import TransformerConfig
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
    path = "converted to our Transformer"  # what computes a step, in words

    @property
    def ruled(self) -> bool:
        """Whether a rule changes what :meth:`step` of the bare model gives; else a search may go round it."""
        return self.rules.bind(self.last_step)

    @property
    def barred(self) -> tuple[int, ...] | None:
        """Symbols that are barred at every step, where there is no other rule; None where there is."""
        self.rules.check(self.vocab_size)
        return self.rules.forbidden if not replace(self.rules, forbidden=()).bind(self.last_step) else None

    def begin(self, inputs: Padded) -> TransformerState:
        """Start B targets, one per source; what is said is kept where a rule looks back."""
        self.rules.check(self.vocab_size)
        state = super().begin(inputs)
        return replace(state, said=state.items.new_empty((inputs.size, 0))) if self.rules.look_back else state

    def step(self, tokens: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        """Feed ``tokens (R,)``; log-probabilities ``(R, V)`` of the next symbols under the rules, and the state."""
        if state.said is not None:
            state = replace(state, said=torch.cat((state.said, tokens.unsqueeze(1)), dim=1))
        log_probs, after = super().step(tokens, state)
        return self.rules.apply(log_probs, after.length, self.last_step, state.said), after


def from_huggingface(source: Any, *, bos: int | None = None) -> ConvertedTransformer:
    r"""A Hugging Face BART, mBART, Marian, T5, ByT5, mT5 or BERT-to-BERT with its weights, evaluating in float32.

    Args:
        source: a directory with ``config.json`` and ``model.safetensors`` (or its shards and their index;
            ``generation_config.json`` is read where it is there), or a loaded ``transformers`` model. A directory
            needs the package safetensors alone. Pickled weights (``pytorch_model.bin``) are refused.
        bos: symbol that starts the decoder; from the checkpoint by default. mBART's is its target language.
    Returns:
        A :class:`ConvertedTransformer` with

        .. math:: p(y_t \mid y_{<t}, x) = \mathrm{softmax}(E\, h_t + b)_{y_t}

        as in the checkpoint: E the output matrix (tied or not), b ``final_logits_bias`` where there is one. What T5
        does not have is 0 here (biases) or made up for in the weights next to it (scales). Sources are id sequences as
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
        config, generation = read_json(folder / "config.json"), {}
        if (folder / "generation_config.json").exists():
            generation = read_json(folder / "generation_config.json")
        weights = read_weights(folder)
    # Older checkpoints have the settings of the search among those of the model.
    told = {**config, **{key: value for key, value in generation.items() if value is not None}}
    start = told.get("decoder_start_token_id") if bos is None else bos
    if start is None:
        raise ConfigError("config.json: `decoder_start_token_id` must be a symbol, got none; pass `bos`")
    names, kind = Names(weights), config.get("model_type")
    if kind not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise ConfigError(f"config.json: `model_type` must be one of {known}, got {kind!r}; others have no converter")
    family = _FAMILIES[kind]
    try:
        shape = family.shape(config, names)
    except KeyError as error:
        raise ConfigError(f"config.json: `{error.args[0]}` must be given for {kind}, got none; set it there") from None
    ends, tensors = one_symbol(told, "eos_token_id"), dict(family.tensors(shape, config, names))
    model = ConvertedTransformer(
        shape,
        source_size=tensors["source_embedding.weight"].size(0),
        target_size=tensors["target_embedding.weight"].size(0),
        unk=None,
        pad=one_symbol(told, "pad_token_id"),
        bos=start,
        eos=ends,
        forbidden=(),
    )
    model.rules = read_rules(told, ends)
    return _load(model, tensors, names)


def _load(model: ConvertedTransformer, tensors: dict[str, Tensor], names: Names) -> ConvertedTransformer:
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
