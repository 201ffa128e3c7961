"""The tree a beam search grew: what it looked at, kept, finished and dropped, as data and as a picture."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from thalweg.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


FINISHED, DROPPED = -1, -2  # fates of candidates that became no row


class Layer(NamedTuple):
    """Candidates of one step of A items, best first; score -inf where there are fewer.

    >>> Layer._fields[-1]
    'fate'
    """

    step: int
    items: Tensor  # (A,)
    parent: Tensor  # (A, C) which of the item's rows is continued
    symbol: Tensor  # (A, C)
    score: Tensor  # (A, C) log-probabilities
    fate: Tensor  # (A, C) the row it became, or FINISHED or DROPPED


class Node(NamedTuple):
    """One candidate: a partial sequence the beam looked at.

    >>> Node((), None, 0.0, "kept").tokens
    ()
    """

    tokens: tuple[int, ...]
    """Symbols from the first; empty at the root."""
    parent: int | None
    """Number of the node it continues."""
    score: float
    """Log-probability."""
    fate: str
    """``kept``, ``finished`` or ``dropped``."""


@dataclass(frozen=True)
class BeamTree:
    """What a beam search looked at; given by ``beam_search(..., return_tree=True).tree``.

    At each step an item's best candidates are recorded, up to 2 width + 1 (for each group of a diverse
    beam), so that the best of what was dropped can be seen beside what was kept.

    Attributes:
        layers: one :class:`Layer` for each step, of the items not yet done; with pieces, those of each piece.

    >>> import torch
    >>> from thalweg.inference import TableModel, beam_search
    >>> model = TableModel({(): {1: -0.5, 2: -1.0}, (1,): {1: -9.0, 2: -0.7}}, vocab_size=3, bos=0, eos=2)
    >>> found = beam_search(model, torch.tensor([0]), width=1, max_length=4, return_tree=True)
    >>> for node in found.tree.nodes(0):
    ...     print(node.tokens, node.parent, round(node.score, 1), node.fate)
    () None 0.0 kept
    (1,) 0 -0.5 kept
    (2,) 0 -1.0 dropped
    (1, 2) 1 -1.2 finished
    (1, 1) 1 -9.5 kept
    """

    layers: tuple[Layer, ...]

    def nodes(self, item: int) -> list[Node]:
        """Every candidate of one batch item, step by step, best first; the root comes first of all."""
        result = [Node((), None, 0.0, "kept")]
        rows = {0: 0}  # row -> its node
        for layer in self.layers:
            place = (layer.items == item).nonzero()
            if place.numel() == 0:
                continue
            columns = (part[int(place)].tolist() for part in layer[2:])
            before, rows = rows, {}
            for parent, symbol, score, fate in zip(*columns, strict=True):
                if score == -math.inf:
                    continue
                if fate >= 0:
                    rows[fate] = len(result)
                above = before[parent]
                name = "finished" if fate == FINISHED else "dropped" if fate == DROPPED else "kept"
                result.append(Node((*result[above].tokens, symbol), above, score, name))
        if len(result) == 1:
            raise ConfigError(f"`item` must be one of the batch's items, got {item!r}, of which nothing is recorded")
        return result

    def to_dot(self, item: int = 0, symbols: Sequence[str] | None = None, *, dropped: int | None = None) -> str:
        """The tree in Graphviz's language; arguments as for :meth:`draw`.

        >>> import torch
        >>> row = torch.tensor([[0]])
        >>> tree = BeamTree((Layer(1, row[0], row, row, torch.tensor([[-0.5]]), row),))
        >>> print(tree.to_dot(0, ["a"]))
        digraph beam {
          rankdir=LR; node [shape=box, style=rounded];
          n0 [label="", color="#1f5fa8", penwidth=2];
          n1 [label="a\\n-0.50", color="#1f5fa8", penwidth=2];
          n0 -> n1 [color="#1f5fa8", penwidth=2];
        }
        """
        nodes = _thinned(self.nodes(item), dropped)
        best = _best_path(nodes)
        lines = ["digraph beam {", "  rankdir=LR; node [shape=box, style=rounded];"]
        for number, node in enumerate(nodes):
            colour = _BEST if number in best else _COLOURS[node.fate]
            style = f'color="{colour}"' + (", penwidth=2" if number in best else "")
            style += ", peripheries=2" if node.fate == "finished" else ""
            name = _name(node, symbols).replace("\\", "\\\\").replace('"', '\\"')
            label = f"{name}\\n{node.score:.2f}" if node.tokens else ""
            lines.append(f'  n{number} [label="{label}", {style}];')
            if node.parent is not None:
                dashed = ", style=dashed" if node.fate == "dropped" else ""
                style = style.replace(", peripheries=2", "") + dashed
                lines.append(f"  n{node.parent} -> n{number} [{style}];")
        return "\n".join([*lines, "}"])

    def draw(
        self,
        item: int = 0,
        symbols: Sequence[str] | None = None,
        path: str | Path | None = None,
        *,
        dropped: int | None = None,
    ) -> Figure:
        """A picture of one item's tree: steps from left to right, siblings with the better above.

        Solid boxes lived on, double ones are finished hypotheses, grey dashed ones were dropped; the best finished
        hypothesis (of highest log-probability; where none finished, the best row of the last step) stands out.
        Needs matplotlib.

        Args:
            item: which batch item.
            symbols: the name of each symbol; numbers without it.
            path: where to save it, in the format its ending says.
            dropped: most dropped candidates shown for each step; None shows all that were recorded.

        >>> import torch
        >>> row = torch.tensor([[0]])
        >>> tree = BeamTree((Layer(1, row[0], row, row, torch.tensor([[-0.5]]), row),))
        >>> len(tree.draw(0, ["ə"]).axes)
        1
        """
        from matplotlib.figure import Figure

        nodes = _thinned(self.nodes(item), dropped)
        depth = max(len(node.tokens) for node in nodes)
        height = _heights(nodes)
        longest = max(len(_name(node, symbols)) for node in nodes)
        wide = (depth + 0.7) * (0.9 + 0.09 * min(longest, 24))
        figure = Figure(figsize=(min(wide, 100), min(0.38 * (max(height) + 1) + 0.5, 100)), layout="constrained")
        axes = figure.add_subplot()
        _paint(axes, nodes, height, symbols)
        axes.set_xlim(-0.25, depth + 0.5)
        axes.set_ylim(max(height) + 0.7, -0.7)
        axes.set_xticks(range(1, depth + 1), [f"step {t}" for t in range(1, depth + 1)])
        axes.set_yticks([])
        axes.tick_params(length=0, labelcolor=_COLOURS["dropped"])
        axes.spines[:].set_visible(False)
        if path is not None:
            figure.savefig(path, dpi=160)
        return figure


_BEST = "#1f5fa8"
_COLOURS = {"kept": "#333333", "finished": "#333333", "dropped": "#9a9a9a"}
# Scripts that the first font lacks are taken from those of the others that are installed.
_FONTS = (
    "DejaVu Sans",
    "Noto Sans",
    "Noto Sans CJK JP",
    "Noto Sans Devanagari",
    "Noto Sans Arabic",
    "Arial Unicode MS",
)


def _name(node: Node, symbols: Sequence[str] | None) -> str:
    if not node.tokens:
        return ""
    if symbols is None:
        return str(node.tokens[-1])
    text = symbols[node.tokens[-1]].replace(" ", "\N{OPEN BOX}")
    # A mark that combines with what stands before it would sit on the box's edge.
    return f"\N{DOTTED CIRCLE}{text}" if text and unicodedata.combining(text[0]) else text


def _thinned(nodes: list[Node], dropped: int | None) -> list[Node]:
    """The nodes with at most ``dropped`` dropped ones for each step, numbered anew."""
    if dropped is None:
        return nodes
    seen: Counter[int] = Counter()
    number: dict[int, int] = {}
    result: list[Node] = []
    for old, node in enumerate(nodes):
        if node.fate == "dropped":
            seen[len(node.tokens)] += 1
            if seen[len(node.tokens)] > dropped:
                continue
        number[old] = len(result)
        result.append(node if node.parent is None else node._replace(parent=number[node.parent]))
    return result


def _best_path(nodes: list[Node]) -> set[int]:
    """Numbers of the best hypothesis' nodes, from the root."""
    finished = [n for n, node in enumerate(nodes) if node.fate == "finished"]
    if not finished:
        depth = max(len(node.tokens) for node in nodes)
        finished = [n for n, node in enumerate(nodes) if node.fate == "kept" and len(node.tokens) == depth] or [0]
    number: int | None = max(finished, key=lambda n: nodes[n].score)
    path = set()
    while number is not None:
        path.add(number)
        number = nodes[number].parent
    return path


def _heights(nodes: list[Node]) -> list[float]:
    """Where each node stands, counted downwards: leaves one under the other, a parent in the middle of its children."""
    children: list[list[int]] = [[] for _ in nodes]
    for number, node in enumerate(nodes):
        if node.parent is not None:
            children[node.parent].append(number)
    height = [0.0] * len(nodes)
    stack, leaves = [0], 0
    while stack:
        number = stack.pop()
        if not children[number]:
            height[number], leaves = float(leaves), leaves + 1
        stack.extend(sorted(children[number], key=lambda n: nodes[n].score))
    for number in reversed(range(len(nodes))):  # children come after their parent
        if children[number]:
            height[number] = (height[children[number][0]] + height[children[number][-1]]) / 2
    return height


def _paint(axes: Axes, nodes: list[Node], height: list[float], symbols: Sequence[str] | None) -> None:
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    fonts = [name for name in _FONTS if name in installed]
    best = _best_path(nodes)
    for number, node in enumerate(nodes):
        x, y, dropped = len(node.tokens), height[number], node.fate == "dropped"
        colour = _BEST if number in best else _COLOURS[node.fate]
        if node.parent is not None:
            ends = (x - 1, x - 0.45, x), (height[node.parent], y, y)
            width, line = (2.6 if number in best else 0.9 if dropped else 1.4), "--" if dropped else "-"
            axes.plot(*ends, color=colour, linewidth=width, linestyle=line, zorder=2 if number in best else 1)
        box = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": colour}
        box |= {"linestyle": "--" if dropped else "-", "linewidth": 2 if number in best else 1}
        label = f"{_name(node, symbols)}  \N{MINUS SIGN}{abs(node.score):.2f}" if node.tokens else "start"
        settings = {"ha": "center", "va": "center", "fontsize": 9, "family": fonts, "parse_math": False}
        settings["weight"] = "bold" if number in best else "normal"
        if node.fate == "finished":
            outer = box | {"boxstyle": "round,pad=0.52", "facecolor": "white"}
            axes.text(x, y, label, color="none", bbox=outer, zorder=3, **settings)
        axes.text(x, y, label, color=colour, bbox=box, zorder=4, **settings)
