"""Searching a pretrained encoder-decoder, step by step over its own cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.layers.padded import Padded

__all__ = ["PretrainedDecoder", "PretrainedState"]


class PretrainedState(NamedTuple):
    """Rows of a search: what the encoder gave, its mask, and the model's cache."""

    memory: Tensor
    mask: Tensor
    cache: Any


class PretrainedDecoder:
    """A transformers encoder-decoder as an :class:`~thalweg.inference.Autoregressive` model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        told, generation = model.config, model.generation_config
        start = told.decoder_start_token_id if hasattr(told, "decoder_start_token_id") else None
        self.bos = start if start is not None else generation.decoder_start_token_id
        self.eos = told.eos_token_id if told.eos_token_id is not None else generation.eos_token_id
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self.forbidden = list(getattr(generation, "suppress_tokens", None) or ())

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    def begin(self, inputs: Padded) -> PretrainedState:
        """Read the sources."""
        mask = inputs.mask.long()
        memory = self.model.get_encoder()(input_ids=inputs.tokens, attention_mask=mask).last_hidden_state
        return PretrainedState(memory, mask, None)

    @torch.no_grad()
    def step(self, tokens: Tensor, state: PretrainedState) -> tuple[Tensor, PretrainedState]:
        """Feed one symbol a row."""
        from transformers.modeling_outputs import BaseModelOutput

        out = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=state.memory),
            attention_mask=state.mask,
            decoder_input_ids=tokens[:, None],
            past_key_values=state.cache,
            use_cache=True,
        )
        log_probs = out.logits[:, -1].float().log_softmax(-1)
        if self.forbidden:
            log_probs[:, self.forbidden] = -torch.inf
        return log_probs, PretrainedState(state.memory, state.mask, out.past_key_values)

    def select(self, state: PretrainedState, rows: Tensor) -> PretrainedState:
        """Rows of the state."""
        cache = state.cache
        if cache is not None:
            cache.reorder_cache(rows)
        return PretrainedState(state.memory[rows], state.mask[rows], cache)
