"""Profiles of gradients while a model trains."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.diagnostics.gradient_flow import keep_output, named_sites, norms_by_time
from thalweg.diagnostics.layer_names import Naming, layer_of, naming_of
from thalweg.errors import ConfigError
from thalweg.layers.recurrent import Recurrent
from thalweg.layers.recurrent_blocks import RecurrentBlock
from thalweg.layers.transformer import TransformerLayer


class GradientWatch:
    """Profiles of gradients while a model trains, every so many steps; the training is not changed by it.

    A step that is watched has hooks on embeddings, recurrent stacks and layers, of an image network on the layers of
    :func:`~thalweg.diagnostics.layer_names.map_layers`, and takes norms of all gradients, weights and updates, with a
    copy of the weights; all others cost nothing. What arrives at the outputs of a fused recurrent stack leaves out what
    its own later positions send back: its embedding's row shows what is left of both depth and time.

    Args:
        every: steps from one profile to the next.

    >>> watch, net = GradientWatch(every=1), nn.Linear(2, 1)
    >>> optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> watch.begin(net)
    >>> net(torch.ones(4, 2)).square().mean().backward()
    >>> watch.gradients()
    >>> optimiser.step()
    >>> sorted(watch.finish()), watch.finish() == {}
    (['gradient', 'layers', 'sites'], True)
    """

    def __init__(self, every: int = 50):
        if every < 1:
            raise ConfigError(f"`every` must be at least 1 step, got {every}")
        self.every = every
        self._model: nn.Module | None = None
        self._handles: list[Any] = []
        self._sites: dict[str, list[Tensor | None]] = {}
        self._norms: list[Tensor] = []
        self._named: list[tuple[str, nn.Parameter]] = []
        self._before: list[Tensor] = []
        self._scale = 1.0
        self._naming: Naming = layer_of

    def begin(self, model: nn.Module) -> None:
        """Before the step's first call of the model."""
        self._release()
        self._model, self._sites, self._naming = model, {}, naming_of(model)
        kinds = (nn.Embedding, Recurrent, RecurrentBlock, TransformerLayer)
        parts = {name: part for name, part in model.named_modules() if isinstance(part, kinds)}
        for name, part in (parts or named_sites(model)).items():
            # Inside a block the layer itself is one more `Recurrent`; the block's output is what goes on.
            if not (isinstance(part, Recurrent) and ".blocks." in name):
                self._handles.append(part.register_forward_hook(self._watch(self._label(name))))

    def _watch(self, name: str) -> Any:
        slots = self._sites.setdefault(name, [])

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            kept: list[tuple[str, Tensor]] = []
            keep_output(kept, name, output)
            for _, tensor in kept:
                place = len(slots)
                slots.append(None)

                def arrive(gradient: Tensor, place: int = place) -> None:
                    slots[place] = norms_by_time(gradient.detach())

                tensor.register_hook(arrive)

        return hook

    def gradients(self, scale: float = 1.0) -> None:
        """After the backward pass, before clipping; ``scale`` is what the loss was multiplied by."""
        if self._model is None:
            return
        self._scale = scale
        self._named = [(self._naming(n), p) for n, p in self._model.named_parameters() if p.grad is not None]
        own = [p.detach() for _, p in self._named]
        slopes = [p.grad.detach() for _, p in self._named if p.grad is not None]
        self._before = [p.clone() for p in own]
        self._norms = [*map(torch.linalg.vector_norm, (*slopes, *own))]

    def finish(self) -> dict[str, Any]:
        """After the optimiser's step: plain numbers for a log, with four digits.

        ``layers``: by layer the norms of its gradient and weights, and the relative length of its step; ``sites``: by
        module the norm of the gradient at each position of its output, one number for maps; ``gradient``: norm of
        the whole.
        """
        if self._model is None or not self._norms:
            self._release()
            return {}
        moved = [p.detach() - before for (_, p), before in zip(self._named, self._before, strict=True)]
        norms = [*self._norms, *map(torch.linalg.vector_norm, moved)]
        # One transfer for all: a norm at a time would wait for the device each time.
        norms = torch.stack([norm.float() for norm in norms]).cpu().tolist()
        count = len(self._named)
        squares: dict[str, list[float]] = {}
        for n, (name, _) in enumerate(self._named):
            sums = squares.setdefault(name, [0.0, 0.0, 0.0])
            for place in range(3):
                sums[place] += norms[place * count + n] ** 2
        layers = {}
        for name, (slope, weight, step) in squares.items():
            ratio = math.sqrt(step / weight) if weight else 0.0
            layers[name] = [_short(math.sqrt(slope) / self._scale), _short(math.sqrt(weight)), _short(ratio)]
        whole = math.sqrt(sum(norm**2 for norm in norms[:count])) / self._scale
        sites = {}
        for name, slots in self._sites.items():
            there = [slot for slot in slots if slot is not None]
            if there:
                sites[name] = [_short(value / self._scale) for value in torch.cat(there).cpu().tolist()]
        self._release()
        return {"gradient": _short(whole), "layers": layers, "sites": sites}

    def _label(self, name: str) -> str:
        """What a module is called in a log: layers of a stack by number."""
        return self._naming(f"{name}.x") if name else "model"

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._model, self._norms = [], None, []
        self._named, self._before = [], []


def _short(value: float) -> float | None:
    """Four digits; JSON has no word for what is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
