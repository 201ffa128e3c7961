"""Pretrained encoder-decoders under every search: the model's own modules and cache behind the search protocol.

Encoder and keys and values of the source are computed once. The past of a row is the model's own cache; a search that
reorders rows gathers it, and what belongs to the source is gathered only when the sources of the rows change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thalweg.energies.transformer.generation import GenerationRules, one_symbol, read_rules
from thalweg.energies.transformer.huggingface import ConvertedTransformer, from_huggingface
from thalweg.errors import CheckpointError, ConfigError, ShapeError
from thalweg.layers.low_precision import ReducedLinear
from thalweg.layers.padded import Padded, checked

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_Pairs = tuple[tuple[Tensor, Tensor], ...]  # keys and values (R, H, t, d) of every layer


@dataclass(frozen=True, eq=False)
class PretrainedState:
    """Where R partial targets stand; a value, which no later step changes.

    Attributes:
        hidden: ``(B, S, D)`` the encoder's outputs, of which only the shape counts after the first step.
        mask: ``(B, S)`` int64, 1 on real symbols; None where nothing is padded.
        items: ``(R,)`` the source of each row.
        length: symbols fed so far, t.
        past: keys and values ``(R, H, t, d)`` of every decoder layer.
        read: keys and values ``(B, H, S, d)`` of the sources, from the first step on.
        spread: the same for every row, ``(R, H, S, d)``; None where they must be gathered.
        said: ``(R, t)`` the symbols fed, where a rule looks back at them.
    """

    hidden: Tensor
    mask: Tensor | None
    items: Tensor
    length: int = 0
    past: _Pairs = ()
    read: _Pairs = ()
    spread: _Pairs | None = None
    said: Tensor | None = None


class PretrainedDecoder:
    r"""A Hugging Face encoder-decoder as an :class:`~thalweg.inference.Autoregressive` model.

    .. math:: \log p(y_t \mid y_{<t}, x) = \log\mathrm{softmax}(\mathrm{model}(x, y_{<t}))_{y_t}

    under the rules of its generation config, so that every search gives what ``generate`` gives where both are set
    alike; :mod:`thalweg.energies.transformer.huggingface` says how.

    Args:
        model: a loaded ``EncoderDecoderModel`` (BERT-to-BERT and the like), T5, ByT5, mT5, BART, mBART or Marian, in
            evaluation mode. It is used as it is: what changes in it changes the answers.
        rules: those of the model's configs by default; ``GenerationRules()`` for none.
        bos: symbol that starts the decoder; from the configs by default. mBART's is its target language.
        last_step: ``max_length`` of the search where ``rules.last`` is to be forced there; None: nowhere.

    Attributes:
        bos, eos, pad, vocab_size: of the target side.
        path: what computes a step, in words.

    ``inputs`` of :meth:`begin` is a :class:`Padded` of source ids as the checkpoint's tokeniser gives them. A step
    costs that of the model for R rows of one symbol, and a copy of their past, O(L R t D).

    >>> from transformers import T5Config, T5ForConditionalGeneration
    >>> small = {"d_model": 8, "d_kv": 4, "num_heads": 2, "d_ff": 8, "num_layers": 1, "vocab_size": 9}
    >>> theirs = T5ForConditionalGeneration(T5Config(**small, decoder_start_token_id=0)).eval()
    >>> from thalweg.inference import beam_search
    >>> source = Padded(torch.tensor([[4, 5, 1]]), torch.tensor([3]), torch.ones(1, 3, dtype=torch.bool))
    >>> beam_search(PretrainedDecoder(theirs), source, width=3, max_length=5).scores.shape
    torch.Size([1, 3])
    """

    path = "the model's own modules and cache"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rules: GenerationRules | None = None,
        bos: int | None = None,
        last_step: int | None = None,
    ) -> None:
        told = settings_of(model)
        self.vocab_size = _output_size(model)
        start = told.get("decoder_start_token_id") if bos is None else bos
        if start is None:
            raise ConfigError("config.json: `decoder_start_token_id` must be a symbol, got none; pass `bos`")
        self.model: Any = model
        self.bos = start
        self.eos, self.pad = one_symbol(told, "eos_token_id"), one_symbol(told, "pad_token_id")
        self.rules = read_rules(told, self.eos) if rules is None else rules
        self.last_step = last_step
        for name, symbol in (("bos", self.bos), ("eos", self.eos)):
            if not 0 <= symbol < self.vocab_size:
                raise ConfigError(f"`{name}` must be 0 ... {self.vocab_size - 1} (vocab_size - 1), got {symbol}")
        self.rules.check(self.vocab_size)
        self._paired = self.model.config.model_type == _PAIR
        self._most_source, self._most_target = map(positions_of, halves_of(self.model.config))
        self._source_size = self.model.get_encoder().get_input_embeddings().weight.size(0)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    def begin(self, inputs: Padded) -> PretrainedState:
        """Start B targets, one per source: the encoder runs here, once."""
        source = checked(inputs, self._source_size).to(self.device)
        if self.model.training:
            raise ConfigError(
                "the model must be in evaluation mode, got training mode, where dropout would change every answer; "
                "call model.eval()"
            )
        longest = int(source.lengths.max()) if source.size else 0
        if self._most_source is not None and longest > self._most_source:
            item = int(source.lengths.argmax())
            raise ShapeError(
                f"sources must have at most {self._most_source} symbols, the positions of the encoder, got {longest} "
                f"for item {item}; shorten it, special symbols counted"
            )
        # Lengths live on the CPU: looking at them waits for no device.
        mask = source.mask.long() if source.size and int(source.lengths.min()) < source.tokens.size(1) else None
        hidden = self.model.get_encoder()(input_ids=source.tokens, attention_mask=mask).last_hidden_state
        if self._paired and hasattr(self.model, "enc_to_dec_proj"):
            hidden = self.model.enc_to_dec_proj(hidden)
        items = torch.arange(source.size, device=self.device)
        said = items.new_empty((source.size, 0)) if self.rules.look_back else None
        return PretrainedState(hidden, mask, items, said=said)

    def step(self, tokens: Tensor, state: PretrainedState) -> tuple[Tensor, PretrainedState]:
        """Feed ``tokens (R,)``; log-probabilities ``(R, V)`` of the next symbols under the rules, and the state."""
        if self._most_target is not None and state.length >= self._most_target:
            raise ShapeError(
                f"`max_length` must be at most {self._most_target}, the positions of the decoder, got a target of "
                f"{state.length + 1} symbols; lower it"
            )
        if state.read and state.spread is None:
            spread = tuple((keys[state.items], values[state.items]) for keys, values in state.read)
            state = replace(state, spread=spread)
        logits, past, read = self._decode(tokens, state)
        said = None if state.said is None else torch.cat((state.said, tokens.unsqueeze(1)), dim=1)
        after = replace(state, length=state.length + 1, past=past, said=said)
        if not state.read:  # whatever rows began are the sources from now on
            items = torch.arange(tokens.size(0), device=tokens.device)
            mask = None if state.mask is None else state.mask[state.items]
            after = replace(after, read=read, spread=read, mask=mask, items=items)
        log_probs = torch.log_softmax(logits[:, -1].float(), dim=-1)
        return self.rules.apply(log_probs, after.length, self.last_step, said), after

    def select(self, state: PretrainedState, rows: Tensor) -> PretrainedState:
        """Reorder, repeat or drop rows; keys and values of the sources stay where each row keeps its source."""
        items = state.items[rows]
        kept = items.shape == state.items.shape and torch.equal(items, state.items)
        past = tuple((keys[rows], values[rows]) for keys, values in state.past)
        said = None if state.said is None else state.said[rows]
        return replace(state, items=items, past=past, spread=state.spread if kept else None, said=said)

    def _decode(self, tokens: Tensor, state: PretrainedState) -> tuple[Tensor, _Pairs, _Pairs]:
        """Logits ``(R, 1, V)``, and keys and values of the past and of the sources after the step."""
        from transformers.cache_utils import EncoderDecoderCache
        from transformers.modeling_outputs import BaseModelOutput

        R, mask = tokens.size(0), None if state.mask is None else state.mask[state.items]
        # Once keys and values of the source are there, its vectors are asked for their shape alone.
        hidden = state.hidden[:1].expand(R, -1, -1) if state.read else state.hidden[state.items]
        cache = EncoderDecoderCache(_cache(state.past), _cache(state.spread or ()))
        fed: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        if self._paired:
            fed |= {"input_ids": tokens.unsqueeze(1), "encoder_hidden_states": hidden, "encoder_attention_mask": mask}
            out = self.model.decoder(**fed)
        else:
            fed |= {"decoder_input_ids": tokens.unsqueeze(1), "attention_mask": mask}
            encoded: Any = BaseModelOutput()
            encoded["last_hidden_state"] = hidden
            out = self.model(encoder_outputs=encoded, **fed)
        return out.logits, _pairs(cache.self_attention_cache), _pairs(cache.cross_attention_cache)


def decoder_of(
    model: PreTrainedModel,
    *,
    rules: GenerationRules | None = None,
    bos: int | None = None,
    last_step: int | None = None,
    convert: bool = True,
) -> ConvertedTransformer | PretrainedDecoder:
    """The fastest decoder that gives what the model gives: :func:`from_huggingface` where it can, else its own cache.

    Args:
        model: as in :class:`PretrainedDecoder`, as are ``rules``, ``bos`` and ``last_step``.
        convert: False for its own cache in any case.
    Returns:
        A decoder whose ``path`` says what it is, and why it could not be converted. Converted weights are copies, made
        once: after the model has been trained further, ask again. Models in other types than float32 are not converted,
        for numbers would change.

    >>> from transformers import T5Config, T5ForConditionalGeneration
    >>> small = {"d_model": 8, "d_kv": 4, "num_heads": 2, "d_ff": 8, "num_layers": 1, "vocab_size": 9}
    >>> theirs = T5ForConditionalGeneration(T5Config(**small, decoder_start_token_id=0)).eval()
    >>> decoder_of(theirs).path, decoder_of(theirs, convert=False).path
    ('converted to our Transformer', "the model's own modules and cache")
    """
    why = ""
    settings_of(model)  # raises what it must
    if convert:
        kinds = {str(x.dtype).removeprefix("torch.") for x in model.parameters() if x.is_floating_point()}
        try:
            if kinds != {"float32"}:
                raise ConfigError(f"weights must be float32, got {', '.join(sorted(kinds))}")
            if any(isinstance(part, ReducedLinear) for part in model.modules()):
                raise ConfigError("weights must be float32, got layers in fewer bits")
            converted = from_huggingface(model, bos=bos).to(model.device)
        except (CheckpointError, ConfigError) as error:
            why = f" ({error})"
        else:
            converted.rules = converted.rules if rules is None else rules
            converted.last_step = last_step
            return converted
    own = PretrainedDecoder(model, rules=rules, bos=bos, last_step=last_step)
    own.path += why
    return own


def settings_of(model: PreTrainedModel) -> dict[str, Any]:
    """What the configs of a model say about search: older ones have it among the settings of the model.

    >>> from transformers import T5Config, T5ForConditionalGeneration
    >>> small = {"d_model": 8, "d_kv": 4, "num_heads": 2, "d_ff": 8, "num_layers": 1, "vocab_size": 9}
    >>> settings_of(T5ForConditionalGeneration(T5Config(**small)))["eos_token_id"]
    1
    """
    if not (hasattr(model, "get_encoder") and hasattr(model, "config")):
        raise ConfigError(
            f"the model must be an encoder-decoder that transformers has loaded, got {type(model).__name__}; load it "
            "with AutoModelForSeq2SeqLM or EncoderDecoderModel"
        )
    generation = getattr(model, "generation_config", None)
    told = generation.to_dict() if generation is not None else {}
    return {**model.config.to_dict(), **{key: value for key, value in told.items() if value is not None}}


def _output_size(model: Any) -> int:
    layer = model.get_output_embeddings()
    if layer is None:
        raise ConfigError(
            f"the model must give logits over target symbols, got {type(model).__name__} without an output layer; "
            "load it with AutoModelForSeq2SeqLM or EncoderDecoderModel"
        )
    return layer.weight.size(0)


_PAIR = "encoder-decoder"


def halves_of(config: Any) -> tuple[Any, Any]:
    """The configs of encoder and decoder: two of a pair, else the same one.

    >>> from types import SimpleNamespace
    >>> halves_of(SimpleNamespace(model_type="encoder-decoder", encoder="bert", decoder="gpt"))
    ('bert', 'gpt')
    """
    return (config.encoder, config.decoder) if config.model_type == _PAIR else (config, config)


# Families that number positions from the symbol after padding, as RoBERTa does.
_SHIFTED = ("roberta", "camembert", "xmod", "data2vec-text", "mpnet", "ibert", "longformer")


def positions_of(config: Any) -> int | None:
    """The longest sequence that one side takes; None where there is no end.

    >>> from types import SimpleNamespace
    >>> positions_of(SimpleNamespace(model_type="xlm-roberta", max_position_embeddings=514, pad_token_id=1))
    512
    """
    most, kind = getattr(config, "max_position_embeddings", None), str(getattr(config, "model_type", ""))
    if most is None or "t5" in kind:
        return None
    return most - (config.pad_token_id or 0) - 1 if any(name in kind for name in _SHIFTED) else most


def _cache(pairs: _Pairs) -> Any:
    """Keys and values as transformers holds them, not copied; new ones are put beside them, never into them."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache()
    for keys, values in pairs:
        layer = DynamicLayer()
        layer.keys, layer.values, layer.is_initialized = keys, values, True
        layer.dtype, layer.device = keys.dtype, keys.device
        cache.layers.append(layer)
    return cache


def _pairs(cache: Any) -> _Pairs:
    return tuple((layer.keys, layer.values) for layer in cache.layers)
