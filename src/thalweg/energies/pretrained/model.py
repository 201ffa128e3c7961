"""A pretrained encoder-decoder as an energy of target sequences given a source sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from thalweg.energies.pretrained import adapting
from thalweg.energies.pretrained.config import PretrainedConfig
from thalweg.energies.pretrained.decoding import decoder_of, halves_of, positions_of, settings_of
from thalweg.energies.pretrained.hub import package, quietly
from thalweg.energies.pretrained.loading import set_dropout
from thalweg.energies.transformer.generation import one_symbol
from thalweg.errors import ConfigError
from thalweg.layers.padded import Padded


class Pretrained(nn.Module):
    r"""E(x, y) = -log p(y | x) of a transformers encoder-decoder.

    .. math:: \log p(y \mid x) = \sum_t \log \mathrm{softmax}(\mathrm{logits}(y_{<t}, x))_{y_t}

    The decoder starts from the symbol that the model's own config names, and ends with its end symbol. Implements
    :class:`thalweg.inference.Autoregressive` by :func:`~thalweg.energies.pretrained.decoding.decoder_of`: the first
    search after a change of weights or mode makes the decoder that the following ones use.

    Args:
        network: as :func:`~thalweg.energies.pretrained.loading.load_network` gives it.
        config: which parts are trained, and how.

    Attributes:
        network: the transformers model itself, with adapters where there are some.

    >>> from thalweg.energies.pretrained.loading import build_network
    >>> shape = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    >>> config = PretrainedConfig(architecture="t5", shape=shape)
    >>> model = Pretrained(build_network(config, 9, {"unk": 0, "pad": 1, "bos": 2, "eos": 3}), config)
    >>> source = Padded(torch.tensor([[4, 5, 6]]), torch.tensor([3]), torch.ones(1, 3, dtype=torch.bool))
    >>> target = Padded(torch.tensor([[4, 3]]), torch.tensor([2]), torch.ones(1, 2, dtype=torch.bool))
    >>> model(source, target).shape
    torch.Size([1, 2, 9])
    """

    def __init__(self, network: Any, config: PretrainedConfig):
        super().__init__()
        self.config, self.network = config, network
        if config.dropout is not None and not config.fresh:
            set_dropout(network, config.dropout)
        if config.lora:
            adapting.add_adapters(network, config)
        if config.freeze:
            adapting.freeze(network, config.freeze)
        if config.gradient_checkpointing:
            network.gradient_checkpointing_enable()
        told = settings_of(network)
        self.bos, self.eos, self.pad = (
            one_symbol(told, f"{name}_token_id") for name in ("decoder_start", "eos", "pad")
        )
        self.vocab_size: int = network.get_output_embeddings().weight.size(0)
        self.reach = reach_of(network.config)
        self._decoder: list[Any] = []  # a list hides it from the modules: it may hold the same network

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.network.device

    @property
    def decoder(self) -> Any:
        """What is searched."""
        if not self._decoder:
            whole = adapting.merged(self.network) if self.config.lora else self.network
            # A conversion starts from random weights, which it replaces: training must not see that they were drawn.
            with quietly(), torch.random.fork_rng(devices=[]):
                self._decoder.append(decoder_of(whole.eval() if self.config.lora else whole))
        return self._decoder[0]

    @property
    def path(self) -> str:
        """How a step of a search is computed, in words: converted to our Transformer, or why not."""
        return self.decoder.path

    def train(self, mode: bool = True) -> Pretrained:
        """Training or evaluation mode; weights may change in the one, so that the other decodes anew."""
        self._decoder.clear()
        return super().train(mode)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """As that of any module."""
        self._decoder.clear()
        return super().load_state_dict(*args, **options)

    def _apply(self, *args: Any, **options: Any) -> Pretrained:
        self._decoder.clear()
        return super()._apply(*args, **options)

    def forward(
        self, source: Padded, target: Padded, *, teacher_forcing: float = 1.0, items: Tensor | None = None
    ) -> Tensor:
        """Logits ``(N, T, V)`` of each symbol of known targets, given those before it.

        Args:
            items: ``(N,)`` the source of each target; None: one each.
        """
        if teacher_forcing < 1:
            raise ConfigError(
                f"training.teacher_forcing must be 1 for pretrained models, which are fed what is right, "
                f"got {teacher_forcing:g}"
            )
        mask = source.mask.long()
        memory = self.network.get_encoder()(input_ids=source.tokens, attention_mask=mask).last_hidden_state
        if items is not None:
            memory, mask = memory[items], mask[items]
        first = target.tokens.new_full((target.tokens.size(0), 1), self.bos)
        outputs = package("transformers.modeling_outputs")
        return self.network(
            encoder_outputs=outputs.BaseModelOutput(last_hidden_state=memory),
            attention_mask=mask,
            decoder_input_ids=torch.cat((first, target.tokens[:, :-1]), dim=1),
            use_cache=False,
        ).logits

    def begin(self, inputs: Padded) -> Any:
        """State of B rows before the first symbol is fed."""
        return self.decoder.begin(inputs)

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Log-probabilities ``(R, V)`` of the next symbols, and the state."""
        return self.decoder.step(tokens, state)

    def select(self, state: Any, rows: Tensor) -> Any:
        """The state's rows, reordered, repeated or dropped."""
        return self.decoder.select(state, rows)

    def attention_weights(self, source: Padded, target: Padded) -> None:
        """None: these models keep no single map of where they look."""
        return None

    def depths(self) -> dict[str, int]:
        """How far below the top each parameter is, for rates that fall with depth."""
        return {f"network.{name}": depth for name, depth in adapting.depths(self.network).items()}


def reach_of(config: Any) -> int | None:
    """Most symbols of a source or target that the model has positions for; None where they are relative.

    >>> from types import SimpleNamespace
    >>> reach_of(SimpleNamespace(model_type="bart", max_position_embeddings=1024))
    1024
    """
    return min((most for most in map(positions_of, halves_of(config)) if most is not None), default=None)
