"""Where a parameter or a module of a model stands: its stack and its number there, also in networks of images."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from thalweg.diagnostics.unrolling import layer_name
from thalweg.energies.convnet.model import ConvNet

Naming = Callable[[str], str]
"""From the name of a parameter, or of a module and one word more, to that of its layer."""

# Parts of a parameter's path that say nothing about where it stands.
_SILENT = {"core", "blocks", "block", "inner", "layers", "layer", "parametrizations", "original0", "original1"}
# What opens a layer of an image network, and what still belongs to it where the norm and the activation come behind.
_OPENING, _BEHIND = {"convolution", "unit", "hidden", "output"}, {"norm", "activation", "squeeze"}


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to, by its name; layers of a stack are counted from 1.

    >>> [layer_of(name) for name in ("encoder.core.weight_ih_l2_reverse", "decoder.layers.0.attention.out.weight")]
    ['encoder 3', 'decoder 1']
    >>> layer_of("source_embedding.weight"), layer_of("encoder.core.gates_1_0"), layer_of("0.bias")
    ('source_embedding', 'encoder 2', 'layer 1')
    """
    *path, leaf = name.split(".")
    words: list[str] = []
    for word in path:
        if word.isdigit():
            return layer_name(".".join(words), int(word) + 1)
        if word not in _SILENT and not word.startswith(("weight_", "bias_")):
            words.append(word)
    inside = re.search(r"_l(\d+)(?:_reverse)?(?:\.|$)", name) or re.fullmatch(r"[a-z]+_(\d+)_\d+", leaf)
    if inside:
        return layer_name(".".join(words), int(inside[1]) + 1)
    return ".".join(words) or "model"


def place_of(name: str, naming: Naming = layer_of) -> tuple[str, int]:
    """Stack and depth of a module by its name; a module without a number is a stack of one.

    >>> place_of("encoder.layers.2"), place_of("combine"), place_of("0")
    (('encoder', 3), ('combine', 1), ('', 1))
    """
    stack, _, number = naming(f"{name}.weight").rpartition(" ")
    return (stack if stack != "layer" else "", int(number)) if number.isdigit() else (number, 1)


@dataclass(frozen=True)
class MapLayer:
    """One layer of an image network: modules in a row, whose last output is what the next layer reads.

    Attributes:
        stack: ``convolutions`` or ``classifier``; depth: its number there, from 1.
        parts: the modules by their names in the model.

    >>> MapLayer("convolutions", 2, (("blocks.0.convolution2", nn.Identity()),)).name
    'convolutions 2'
    """

    stack: str
    depth: int
    parts: tuple[tuple[str, nn.Module], ...]

    @property
    def name(self) -> str:
        """Stack and number."""
        return layer_name(self.stack, self.depth)

    @property
    def site(self) -> str:
        """The module whose output is the layer's."""
        return self.parts[-1][0]

    def __call__(self, x: Tensor) -> Tensor:
        """What the layer makes of the one before: maps ``(B, C, H, W)`` or vectors ``(B, D)``."""
        for _, part in self.parts:
            x = part(x)
        return x


def map_layers(model: ConvNet) -> tuple[MapLayer, ...]:
    """The layers of a convolutional network, one after the other: run in a row they give the logits, -E.

    The stem, every convolution with its norm and activation, or every unit that has a path round it, are
    ``convolutions``; the hidden layers and the output are the ``classifier``. Pooling, dropout and the head belong to
    the layer that reads what they give.

    >>> from thalweg.energies.convnet.config import ConvNetConfig
    >>> net = ConvNet(ConvNetConfig(channels=(4,), units=2, hidden=(8,)), classes=3, channels=1, size=(8, 8))
    >>> [(layer.name, layer.site) for layer in map_layers(net)][1:]
    [('convolutions 2', 'blocks.0.activation2'), ('classifier 1', 'classifier.activation'), ...]
    """
    post = model.config.order == "post"
    rows: list[list[tuple[str, nn.Module]]] = []
    waiting: list[tuple[str, nn.Module]] = []
    stem = [(f"stem.{name}", part) for name, part in model.stem.named_children()]
    if stem:
        rows.append(stem)
    for number, block in enumerate(model.blocks):
        children = [(f"blocks.{number}.{name}", part) for name, part in block.named_children()]
        more, waiting = _cut([*waiting, *children], behind=_BEHIND if post else {"squeeze"})
        rows += more
    last = [(f"last.{name}", part) for name, part in model.last.named_children()]
    if last:
        rows[-1] += [*waiting, *last]
        waiting = []
    deep = len(rows)
    children = [("head", model.head), *((f"classifier.{name}", p) for name, p in model.classifier.named_children())]
    rows += _cut([*waiting, *children], behind=_BEHIND)[0]
    places = [("convolutions", n + 1) if n < deep else ("classifier", n + 1 - deep) for n in range(len(rows))]
    return tuple(MapLayer(*place, tuple(row)) for place, row in zip(places, rows, strict=True))


def _cut(
    parts: Sequence[tuple[str, nn.Module]], behind: Iterable[str]
) -> tuple[list[list[tuple[str, nn.Module]]], list[tuple[str, nn.Module]]]:
    """Rows of modules, each up to where a layer ends, and what is left over."""
    ends: list[int] = []
    for n, (name, _) in enumerate(parts):
        kind = name.rpartition(".")[2].rstrip("0123456789")
        if kind in _OPENING:
            ends.append(n + 1)
        elif kind in behind and ends:
            ends[-1] = n + 1
    starts = [0, *ends]
    return [list(parts[a:b]) for a, b in zip(starts, ends, strict=False)], list(parts[starts[-1] :])


def naming_of(model: nn.Module) -> Naming:
    """How the layers of a model are called: :func:`layer_of`, or as in :func:`map_layers`.

    >>> from thalweg.energies.convnet.config import ConvNetConfig
    >>> net = ConvNet(ConvNetConfig(channels=(4, 8), hidden=(8,)), classes=3, channels=1, size=(8, 8))
    >>> [naming_of(net)(name) for name in ("blocks.1.convolution.bias", "classifier.output.weight")]
    ['convolutions 2', 'classifier 2']
    """
    if not isinstance(model, ConvNet):
        return layer_of
    table = {part: layer.name for layer in map_layers(model) for part, _ in layer.parts}

    def name_of(name: str) -> str:
        path = name
        while path:
            if path in table:
                return table[path]
            path = path.rpartition(".")[0]
        return layer_of(name)

    return name_of
