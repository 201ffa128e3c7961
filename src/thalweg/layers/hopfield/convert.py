"""Hopfield layers from the weights of other libraries: hflayers, and torch's multi-head attention."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError
from thalweg.layers.hopfield.layer import Hopfield, HopfieldOptions
from thalweg.layers.hopfield.learned import HopfieldLookup, HopfieldPooling

# How many associations stand for the endless ones of hflayers, which stop by their tolerance alone.
_ENDLESS = 1000

_NORMS = {"stored": "norm_stored_pattern", "state": "norm_state_pattern", "values": "norm_pattern_projection"}


def from_attention(attention: nn.MultiheadAttention) -> Hopfield:
    """The Hopfield layer of one step that equals multi-head attention: ``layer(k, q, v)`` is ``attention(q, k, v)``.

    >>> attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8)
    >>> torch.allclose(from_attention(attention)(x), attention(x, x, x)[0], atol=1e-6)
    True
    """
    if attention.bias_k is not None:
        raise ConfigError("attention with `add_bias_kv` has no Hopfield layer; build it without")
    weights = {name: tensor for name, tensor in attention.state_dict().items() if not name.startswith("out_proj")}
    weights = {f"association_core.{name}": tensor for name, tensor in weights.items()}
    weights |= {f"association_core.out_proj.{name}": part for name, part in attention.out_proj.state_dict().items()}
    layer = from_hflayers(
        weights,
        heads=attention.num_heads,
        zero_pattern=attention.add_zero_attn,
        dropout=attention.dropout,
        batch_first=attention.batch_first,
    )
    assert isinstance(layer, Hopfield)
    return layer.train(attention.training)


def from_hflayers(
    source: nn.Module | Mapping[str, Tensor], **options: Unpack[HopfieldOptions]
) -> Hopfield | HopfieldPooling | HopfieldLookup:
    """A layer with the weights and answers of a ``Hopfield``, ``HopfieldPooling`` or ``HopfieldLayer`` of hflayers.

    Args:
        source: the module, which knows its settings, or its state dict, which does not know all of them: give ``heads``
            where there are several, ``beta`` where it is not 1/sqrt(hidden), ``steps`` (``update_steps_max`` + 1), and
            ``static``, ``values``, ``connected`` and ``zero_pattern`` where they are used. Layer norms without weights
            are not in a state dict either: name all norms in ``normalise``.
        options: of :class:`Hopfield`; they go before what the module says. Widths are read from the weights.

    An input that is one tensor becomes ``layer(x)``; three, ``layer(stored, state, values)``. The answers are equal
    where hflayers does what its arguments say, and its number of steps is fixed. The differences:

    - ``update_steps_max=n`` becomes n + 1 steps without a tolerance. hflayers also stops a head once its weights, over
      all queries, change by less than ``update_steps_eps`` for every item of the batch; with ``update_steps_max=None``
      only then, and here each query stops by itself, by the distance it moves.
    - ``scaling`` with a number for each head is laid by hflayers across features (feature j gets number j mod H), not
      across heads: an error here unless all are equal or ``beta`` is given.
    - Static patterns in several heads: hflayers mixes the items of a batch; equal for batches of one.
    - ``concat_bias_pattern`` has no effect in hflayers, and its weights are left out.
    - ``association_activation`` is for the caller to apply.

    A pooling without ``batch_first`` answers ``(queries, B * output)`` as it does there, which our own does not.

    >>> weights = {"in_proj_weight": torch.randn(24, 8), "out_proj.weight": torch.eye(8)}
    >>> layer = from_hflayers({f"association_core.{name}": weight for name, weight in weights.items()}, heads=2)
    >>> layer.hidden, layer.normalise
    (4, frozenset())
    """
    if isinstance(source, nn.Module):
        options = cast(HopfieldOptions, {**_settings(source, options), **options})
        epsilons = _epsilons(source)
        weights = source.state_dict()
    else:
        weights, epsilons = dict(source), {}
    inner = {name.removeprefix("hopfield."): tensor.detach() for name, tensor in weights.items()}
    found = _Weights(inner, options)
    states, stored, targets = (inner.get(f"{name}_weights") for name in ("pooling", "lookup", "target"))
    layer: Hopfield | HopfieldPooling | HopfieldLookup
    if states is not None:
        kind = HopfieldPooling if options.get("batch_first", True) else _PlacesFirstPooling
        layer = kind(found.size, queries=states[..., 0].numel(), **found.options)
    elif stored is not None:
        count = stored[..., 0].numel()
        layer = HopfieldLookup(found.size, patterns=count, separate=targets is not None, **found.options)
    else:
        layer = Hopfield(found.size, **found.options)
    layer = layer.to(found.like)
    for name, given in (("queries", states), ("patterns", stored), ("targets", targets)):
        if given is not None:
            getattr(layer, name).data.copy_(given.flatten(0, 1))
    found.fill(layer if isinstance(layer, Hopfield) else layer.hopfield, epsilons)
    return layer.train(source.training) if isinstance(source, nn.Module) else layer


class _PlacesFirstPooling(HopfieldPooling):
    """Pooling with the readings of a learned state in a row, all items of the batch after one another."""

    def forward(self, *inputs: Tensor | None, **masks: Tensor | None) -> Tensor:  # type: ignore[override]
        """``stored (N, B, stored)`` -> ``(queries, B * output)``."""
        found = super().forward(*inputs, **masks)  # type: ignore[arg-type]
        return found.unflatten(1, (len(self.queries), -1)).transpose(0, 1).flatten(1)


class _Weights:
    """Matrices and sizes out of a state dict in the naming of hflayers."""

    def __init__(self, weights: dict[str, Tensor], options: HopfieldOptions):
        self.weights = weights
        self.core = {name.removeprefix("association_core."): tensor for name, tensor in weights.items()}
        self.static = set(options.get("static", ()))
        self.connected, heads = options.get("connected", False), options.get("heads", 1)
        out = self.core.get("out_proj.weight")
        self.static |= {"output"} if out is None else set()
        self.query, self.key, self.value = self._projections()
        learned = next((weights[name] for name in ("pooling_weights", "lookup_weights") if name in weights), None)
        self.like = next((part for part in (self.query, self.key, self.value, out, learned) if part is not None), None)
        if self.like is None:
            raise ConfigError("found no hflayers weights to convert; a layer without any is built by `Hopfield(...)`")
        across = self._across(options, learned)
        if across % heads:
            raise ConfigError(f"weights for {across} features cannot serve `heads` = {heads}; give the right number")
        hidden = across // heads
        size = hidden if self.query is None else self.query.size(1)
        stored = hidden if self.key is None else self.key.size(1)
        if out is not None or self.value is not None:
            pattern = (out.size(1) if out is not None else self.value.size(0)) // heads  # type: ignore[union-attr]
        else:  # nothing but the norm and the module say how wide static values are that nothing maps
            norm = weights.get("norm_pattern_projection.weight")
            pattern = options.get("values") or (size if norm is None else norm.numel())
        values = pattern if self.value is None else stored if self.connected else self.value.size(1)
        self.size = size
        self.options = cast(
            HopfieldOptions,
            {
                "bias": "in_proj_bias" in self.core or "out_proj.bias" in self.core,
                "normalise": self._norms(),
                **options,
                "stored": stored,
                "values": values,
                "hidden": hidden,
                "pattern": pattern,
                "static": tuple(self.static),
                "output": None if out is None else out.size(0),
            },
        )

    def _projections(self) -> tuple[Tensor | None, ...]:
        names = ("state", "stored", "values")
        present = [name for name in names if name not in self.static]
        whole = self.core.get("in_proj_weight")
        if whole is None:
            parts = {name: self.core.get(f"{letter}_proj_weight") for name, letter in zip(names, "qkv", strict=True)}
            missing = [name for name in names if (parts[name] is None) != (name in self.static)]
            if missing and any(part is not None for part in parts.values()):
                raise ConfigError(
                    f"`static` must name what has no weights and nothing else, got a contradiction at {missing}"
                )
            self.static |= {name for name in names if parts[name] is None}
            return tuple(parts[name] for name in names)
        if not present or whole.size(0) % len(present):
            raise ConfigError(f"in_proj_weight has {whole.size(0)} rows, not equal ones for {present}; mend `static`")
        pieces = dict(zip(present, whole.chunk(len(present)), strict=True))
        return tuple(pieces.get(name) for name in names)

    def _across(self, options: HopfieldOptions, learned: Tensor | None) -> int:
        """Width of all heads together."""
        alike = self.value if "in_proj_weight" in self.core else None  # one matrix: values are as wide as the others
        for part in (self.query, self.key, alike):
            if part is not None:
                return part.size(0)
        width = options.get("hidden") or (None if learned is None else learned.size(2))
        if width is None:
            raise ConfigError("static states and stored patterns say nothing of their width; give `hidden`")
        return width * options.get("heads", 1)

    def _norms(self) -> tuple[str, ...]:
        found = [ours for ours, theirs in _NORMS.items() if f"{theirs}.weight" in self.weights]
        return (*found, *(["space"] if "p_norm_weight" in self.core else []))

    @torch.no_grad()
    def fill(self, layer: Hopfield, epsilons: Mapping[str, float]) -> None:
        """Put the weights where they belong."""
        bias, start = self.core.get("in_proj_bias"), 0
        for linear, weight in ((layer.query, self.query), (layer.key, self.key), (layer.value, self.value)):
            if linear is None or weight is None:
                continue
            linear.weight.copy_(weight)
            if linear.bias is not None and bias is not None:
                linear.bias.copy_(bias[start : start + len(weight)])
                start += len(weight)
        if layer.out is not None:
            layer.out.weight.copy_(self.core["out_proj.weight"])
            if layer.out.bias is not None and "out_proj.bias" in self.core:
                layer.out.bias.copy_(self.core["out_proj.bias"])
        for name, prefix in {**_NORMS, "space": "association_core.p_norm"}.items():
            norm = getattr(layer, f"{name}_norm")
            if norm is None:
                continue
            norm.eps = epsilons.get(name, norm.eps)
            for part in ("weight", "bias"):
                given = self.weights.get(f"{prefix}_{part}" if name == "space" else f"{prefix}.{part}")
                if given is not None:
                    getattr(norm, part).copy_(given)


def _settings(module: Any, given: HopfieldOptions) -> HopfieldOptions:
    """What an hflayers module knows of itself."""
    hopfield = getattr(module, "hopfield", module)
    core = getattr(hopfield, "association_core", None)
    if core is None:
        raise ConfigError(f"expected a Hopfield module of hflayers, got {type(module).__name__}")
    if hopfield.association_activation is not None:
        raise ConfigError("`association_activation` does not convert; set it to None and apply it to the answers")
    flags = {"stored": core.key_as_static, "state": core.query_as_static, "values": core.value_as_static}
    options: dict[str, Any] = {
        "heads": core.num_heads,
        "static": tuple(name for name, static in flags.items() if static),
        "normalise": tuple(_norms_of(hopfield)),
        "connected": core.value_as_connected,
        "zero_pattern": core.add_zero_attn,
        "dropout": core.dropout,
        "batch_first": hopfield.batch_first,
    }
    options |= {} if core.head_dim is None else {"hidden": core.head_dim}
    options |= {"values": core.vdim} if core.value_as_static and core.vdim else {}
    if "beta" not in given:
        options["beta"] = _alike("scaling", hopfield.scaling)
    if "steps" not in given:
        most = _alike("update_steps_max", hopfield.update_steps_max)
        options["steps"] = _ENDLESS if most is None else int(most) + 1
        options |= {"tolerance": _alike("update_steps_eps", hopfield.update_steps_eps)} if most is None else {}
    return cast(HopfieldOptions, options)


def _norms_of(hopfield: Any) -> Collection[str]:
    found = [ours for ours, theirs in _NORMS.items() if getattr(hopfield, theirs) is not None]
    return [*found, *(["space"] if hopfield.association_core.normalize_pattern else [])]


def _epsilons(module: Any) -> dict[str, float]:
    hopfield = getattr(module, "hopfield", module)
    found = {ours: getattr(hopfield, theirs).eps for ours, theirs in _NORMS.items() if getattr(hopfield, theirs)}
    return {**found, "space": hopfield.association_core.normalize_pattern_eps}


def _alike(name: str, given: Any) -> Any:
    """One number for all heads."""
    if not isinstance(given, Tensor):
        return given
    each = given.flatten().tolist()
    if len(set(each)) > 1:
        raise ConfigError(
            f"`{name}` of hflayers must be one number to convert, got {each}; see `from_hflayers` on its meaning there"
        )
    return each[0]
