"""Where gradients go: their size through depth and time, layer by layer, on a batch or while training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.diagnostics.layer_names import Naming, map_layers, naming_of, place_of
from thalweg.diagnostics.unrolling import LayerTrace, layer_name, unrolled
from thalweg.energies.convnet.model import ConvNet
from thalweg.errors import ConfigError, nearest
from thalweg.layers.recurrent import Recurrent
from thalweg.layers.transformer import TransformerLayer

Loss = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Site:
    """The states of one layer on a batch, and the gradient of the loss in them.

    Attributes:
        name, stack, depth: of the layer; depth counts from 1.
        gradient: norm of dL/dh over the batch, all positions and features.
        by_time: the same at each of T positions; where rows have ended there is nothing to count.
        memory_by_time: the same for the cell states c of an LSTM; else empty.
        activation: root mean square of h.
        spread: root mean square of h less its mean over the batch, relative to ``activation``: how much of the state
            depends on the input at all. NaN for a single row.

    >>> Site("encoder 1", "encoder", 1, 0.5, (0.3, 0.4), (), 0.1, 0.9).gradient
    0.5
    """

    name: str
    stack: str
    depth: int
    gradient: float
    by_time: tuple[float, ...]
    memory_by_time: tuple[float, ...]
    activation: float
    spread: float


@dataclass(frozen=True)
class LayerGradient:
    """The parameters of one layer: how many, root mean squares of gradient and weights, relative length of a step.

    ``update`` is the norm of the step over the norm of the weights; NaN where no step was taken.

    >>> LayerGradient("encoder 1", 64, 0.01, 0.1, 0.001).update
    0.001
    """

    name: str
    size: int
    gradient: float
    weight: float
    update: float = math.nan


@dataclass(frozen=True)
class GradientFlow:
    """A profile of gradients through a model on a batch; ``str`` is a table.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> flow = gradient_flow(net, lambda m: m(torch.ones(4, 2)).square().mean())
    >>> [site.name for site in flow.sites], [layer.name for layer in flow.layers]
    (['layer 1', 'layer 2', 'layer 3'], ['layer 1', 'layer 3'])
    """

    loss: float
    sites: tuple[Site, ...]
    layers: tuple[LayerGradient, ...]

    @property
    def norm(self) -> float:
        """Of the gradient in all parameters."""
        return math.sqrt(sum(layer.gradient**2 * layer.size for layer in self.layers))

    def stacks(self) -> dict[str, tuple[Site, ...]]:
        """Sites by stack, first layer first; directions of one layer side by side."""
        found: dict[str, list[Site]] = {}
        for site in self.sites:
            found.setdefault(site.stack, []).append(site)
        return {name: tuple(sorted(sites, key=lambda site: site.depth)) for name, sites in found.items()}

    def through_depth(self, stack: str) -> float:
        """The gradient at a stack's first layer relative to its last; directions together. NaN for one layer."""
        sites = self.stacks().get(stack, ())
        if not sites or sites[0].depth == sites[-1].depth:
            return math.nan
        first, last = (
            math.hypot(*(s.gradient for s in sites if s.depth == end.depth)) for end in (sites[0], sites[-1])
        )
        return first / last if last else math.nan

    def __str__(self) -> str:
        """A row a site, then a row a layer's parameters."""
        widest = max([len(part.name) for part in (*self.sites, *self.layers)] + [5])
        lines = [
            f"loss {self.loss:.4g}",
            f"{'states':<{widest}}{'gradient':>11}{'first t':>11}{'last t':>11}{'size':>9}{'spread':>9}",
        ]
        for site in self.sites:
            ends = "".join(f"{value:>11.2e}" for value in (site.gradient, site.by_time[0], site.by_time[-1]))
            lines.append(f"{site.name:<{widest}}{ends}{site.activation:>9.2g}{site.spread:>9.2g}")
        lines.append(f"{'parameters':<{widest}}{'gradient':>11}{'weight':>11}{'update':>11}{'numbers':>9}")
        for layer in self.layers:
            ends = "".join(f"{value:>11.2e}" for value in (layer.gradient, layer.weight, layer.update))
            lines.append(f"{layer.name:<{widest}}{ends}{layer.size:>9,}")
        return "\n".join(lines)


def gradient_flow(model: nn.Module, loss: Loss, *, sites: Sequence[str] | None = None) -> GradientFlow:
    r"""How the gradient of a loss shrinks or grows through the layers and positions of a model.

    Recurrent layers are run step by step (:func:`~thalweg.diagnostics.unrolling.unrolled`), so that
    :math:`\|\partial L / \partial h_t\|` is the total derivative, what later positions send back included. Of a
    Transformer the outputs of its layers are looked at, of a :class:`~thalweg.energies.convnet.model.ConvNet` those of
    :func:`~thalweg.diagnostics.layer_names.map_layers`, of other models those of their innermost modules.

    Args:
        model: in the mode it should be looked at; evaluation mode leaves dropout out. Nothing of it is changed, its
            ``.grad`` included.
        loss: of the model it is called with, one number.
        sites: names of modules whose outputs ``(B, D)``, ``(B, T, D)`` or ``(B, C, H, W)`` to look at instead.

    One pass forward and back, unrolled.

    >>> deep = nn.RNN(2, 3, num_layers=6, batch_first=True)
    >>> flow = gradient_flow(deep, lambda m: m(torch.randn(4, 5, 2))[0][:, -1].sum())
    >>> flow.through_depth("") < 1, len(flow.sites[0].by_time)
    (True, 5)
    """
    value, traces, kept = run_watched(model, loss, sites=sites)
    if value.numel() != 1:
        raise ConfigError(f"`loss` must give one number, got shape {tuple(value.shape)}; take its mean")
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    states = [tensor for trace in traces for tensor in (*trace.hidden, *trace.memory)]
    wanted = [*(p for _, p in named), *states, *(tensor for _, tensor in kept)]
    slopes = [None] * len(wanted)
    if value.requires_grad:
        slopes = torch.autograd.grad(value.sum(), wanted, allow_unused=True)
    found, naming = iter(slopes), naming_of(model)
    own = [(name, p, next(found)) for name, p in named]
    every = [_traced(trace, found) for trace in traces]
    for name, tensor in kept:
        gradient = next(found)
        times = norms_by_time(torch.zeros_like(tensor) if gradient is None else gradient).tolist()
        stack, depth = place_of(name, naming)
        sizes = _sizes(tensor.detach(), None)
        every.append(Site(layer_name(stack, depth), stack, depth, math.hypot(*times), tuple(times), (), *sizes))
    return GradientFlow(float(value.detach().sum()), tuple(every), _layers(own, naming))


def run_watched(
    model: nn.Module, loss: Callable[[nn.Module], Any], *, sites: Sequence[str] | None = None
) -> tuple[Any, list[LayerTrace], list[tuple[str, Tensor]]]:
    """Calls ``loss`` on the model with recurrent layers unrolled; what it gives, their traces, and outputs by module.

    The tensors are in the graph. With ``sites`` those modules' outputs are kept and no traces.

    >>> value, traces, kept = run_watched(nn.Sequential(nn.Linear(1, 1)), lambda m: m(torch.ones(2, 1)).sum())
    >>> [name for name, _ in kept]
    ['0']
    """
    kept: list[tuple[str, Tensor]] = []

    def keep(name: str) -> Any:
        return lambda module, inputs, output: keep_output(kept, name, output)

    handles = [part.register_forward_hook(keep(name)) for name, part in named_sites(model, sites).items()]
    try:
        with torch.enable_grad(), unrolled(model) as traces:
            value = loss(model)
    finally:
        for handle in handles:
            handle.remove()
    return value, [] if sites is not None else traces, kept


def _traced(trace: LayerTrace, found: Iterator[Tensor | None]) -> Site:
    """The site of a recurrent layer; takes the gradients of its states off ``found``."""
    sides = [[next(found) for _ in part] for part in (trace.hidden, trace.memory)]
    times = [tuple(0.0 if g is None else float(g.norm()) for g in side) for side in sides]
    sizes = _sizes(torch.stack([h.detach() for h in trace.hidden], 1), trace.mask)
    return Site(trace.name, trace.stack, trace.depth, math.hypot(*times[0]), times[0], times[1], *sizes)


def named_sites(model: nn.Module, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Modules whose outputs are looked at besides recurrent layers: those named, or layers, or innermost.

    Layers are those of a Transformer, or of an image network as in
    :func:`~thalweg.diagnostics.layer_names.map_layers`.

    >>> list(named_sites(nn.Sequential(nn.Linear(1, 1), nn.Dropout(), nn.Tanh())))
    ['0', '2']
    """
    every = dict(model.named_modules())
    if names is not None:
        missing = [name for name in names if name not in every]
        if missing:
            raise ConfigError(f"the model has no module `{missing[0]}`; {nearest(missing[0], every)}")
        return {name: every[name] for name in names}
    if isinstance(model, ConvNet):
        return {layer.site: every[layer.site] for layer in map_layers(model)}
    layers: dict[str, nn.Module] = {name: part for name, part in every.items() if isinstance(part, TransformerLayer)}
    if layers or any(isinstance(part, (nn.RNNBase, Recurrent)) for part in every.values()):
        return layers
    leaves = {name: part for name, part in every.items() if not any(True for _ in part.children())}
    return {name: part for name, part in leaves.items() if not isinstance(part, (nn.Dropout, nn.Identity))}


def keep_output(kept: list[tuple[str, Tensor]], name: str, output: Any) -> None:
    """Adds a module's output, or the first of several, where a gradient can reach it.

    >>> kept = []
    >>> keep_output(kept, "x", torch.ones(2, 2)), kept
    (None, [])
    """
    output = output[0] if isinstance(output, tuple) else output
    if isinstance(output, Tensor) and output.is_floating_point() and output.requires_grad and output.dim() > 1:
        kept.append((name, output))


def norms_by_time(gradient: Tensor) -> Tensor:
    """Norms (T,) of (B, T, D), or (1,) of (B, D) and of maps (B, C, H, W), which have no time.

    >>> norms_by_time(torch.ones(2, 3, 2))
    tensor([2., 2., 2.])
    """
    if gradient.dim() != 3:
        return torch.linalg.vector_norm(gradient.flatten()).view(1)
    return torch.linalg.vector_norm(gradient.transpose(0, 1).flatten(1), dim=1)


def _sizes(x: Tensor, mask: Tensor | None) -> tuple[float, float]:
    """Root mean square of real states (B, T, D), and of their difference from the batch's mean relative to it."""
    x = x.unsqueeze(1) if x.dim() == 2 else x.flatten(2)
    real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
    x = torch.where(real.unsqueeze(2), x.double(), 0.0)
    count = real.sum(0).clamp(min=1)[:, None]
    away = torch.where(real.unsqueeze(2), x - x.sum(0) / count, 0.0)
    whole = float(x.square().sum())
    size = math.sqrt(whole / max(1, int(real.sum()) * x.shape[2]))
    return size, math.nan if len(x) < 2 or not whole else math.sqrt(float(away.square().sum()) / whole)


def _layers(own: Sequence[tuple[str, nn.Parameter, Tensor | None]], naming: Naming) -> tuple[LayerGradient, ...]:
    members: dict[str, list[tuple[nn.Parameter, Tensor | None]]] = {}
    for name, p, gradient in own:
        members.setdefault(naming(name), []).append((p, gradient))
    rows = []
    for name, pairs in members.items():
        size = sum(p.numel() for p, _ in pairs)
        gradient = math.sqrt(sum(float(g.double().square().sum()) for _, g in pairs if g is not None) / max(1, size))
        weight = math.sqrt(sum(float(p.detach().double().square().sum()) for p, _ in pairs) / max(1, size))
        rows.append(LayerGradient(name, size, gradient, weight))
    return tuple(rows)
