"""The Hopfield layer: states associate with stored patterns and read values."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal, TypedDict, get_args

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, ShapeError, nearest
from thalweg.kernels.memory import attend
from thalweg.layers.hopfield.core import Association, merge_masks
from thalweg.layers.hopfield.separation_maps import Separation, Softmax
from thalweg.layers.hopfield.separation_maps import separation as named_separation

Normalised = Literal["stored", "state", "values", "space"]
"""What a layer norm is put on: an input before its projection, or (``space``) states and patterns after theirs."""

Static = Literal["stored", "state", "values", "output"]
"""What is used as it is, without a projection."""


class HopfieldOptions(TypedDict, total=False):
    """The keyword arguments that :class:`Hopfield`, :class:`HopfieldPooling` and :class:`HopfieldLookup` share.

    >>> sorted(HopfieldOptions.__optional_keys__)[:3]
    ['batch_first', 'beta', 'bias']
    """

    stored: int | None
    values: int | None
    hidden: int | None
    pattern: int | None
    output: int | None
    heads: int
    beta: float | Sequence[float] | None
    learn_beta: bool
    steps: int
    tolerance: float | None
    separation: str | float | Separation
    normalise: Collection[Normalised]
    static: Collection[Static]
    connected: bool
    zero_pattern: bool
    bias: bool
    dropout: float
    batch_first: bool


class Hopfield(nn.Module):
    r"""States associate with stored patterns, as in a Hopfield network, and read values (Ramsauer et al., 2021).

    .. math:: q = W_q\, \mathrm{norm}(r), \quad k_i = W_k\, \mathrm{norm}(y_i), \quad v_i = W_v\, \mathrm{norm}(z_i)

    .. math:: q \leftarrow \sum_i p_i k_i \ (\text{steps} - 1 \text{ times}), \quad o = W_o \sum_i p_i v_i, \quad
              p = \hat y_\Omega(\beta K q)

    in each of H heads. With ``steps=1``, softmax and ``normalise=()`` it is multi-head attention, and runs through
    ``scaled_dot_product_attention``, or a kernel of our own where nothing else is asked for, no gradient either. Values
    are read after the last step.

    Args:
        size: width of state patterns r.
        stored, values: widths of stored patterns y and of what their values are made from z; ``size`` unless given.
        hidden: D, the width of one head's states and patterns; ``size / heads`` unless given, or the width of what is
            static. pattern: E, that of one head's values; ``hidden`` unless given.
        output: width of the output; ``size`` unless given.
        heads: H.
        beta: inverse temperature, one number or one a head; 1/sqrt(hidden) unless given.
        learn_beta: each head's beta is trained, as exp(``log_beta``).
        steps: number of associations, at most that many with a ``tolerance``: then every query of every head rests by
            itself as soon as a step moves it by no more (Euclidean norm), so that a batch gives what its items give
            alone.
        separation: ``softmax``, ``sparsemax``, ``entmax15``, an alpha, or any
            :class:`~thalweg.layers.hopfield.separation_maps.Separation`.
        normalise: layer norms: of the inputs ``stored``, ``state`` and ``values`` before their projections, and with
            ``space`` one of each head's states and patterns, before the first step.
        static: what has no projection. A static input is seen by every head as it is and has that head's width; a
            static ``output`` is the H readings in a row, H * E wide.
        connected: values pass W_k (with its bias) before W_v.
        zero_pattern: a pattern of zeros with value zero is stored too, so that a query may find nothing.
        bias: projections have one; dropout: probability that a weight is dropped while training.
        batch_first: inputs and output are (B, T, ...), otherwise (T, B, ...).

    >>> layer = Hopfield(8, heads=2, steps=3)
    >>> layer(torch.randn(4, 6, 8)).shape  # six patterns associate with one another
    torch.Size([4, 6, 8])
    >>> layer(torch.randn(4, 6, 8), torch.randn(4, 1, 8)).shape  # one state among six patterns
    torch.Size([4, 1, 8])
    """

    def __init__(
        self,
        size: int,
        *,
        stored: int | None = None,
        values: int | None = None,
        hidden: int | None = None,
        pattern: int | None = None,
        output: int | None = None,
        heads: int = 1,
        beta: float | Sequence[float] | None = None,
        learn_beta: bool = False,
        steps: int = 1,
        tolerance: float | None = None,
        separation: str | float | Separation = "softmax",
        normalise: Collection[Normalised] = ("stored", "state", "values"),
        static: Collection[Static] = (),
        connected: bool = False,
        zero_pattern: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        batch_first: bool = True,
    ):
        super().__init__()
        self.size, self.heads, self.steps, self.tolerance = size, heads, steps, tolerance
        self.stored, self.values = stored or size, values or size
        self.normalise, self.static = _chosen("normalise", normalise, Normalised), _chosen("static", static, Static)
        self.connected, self.zero_pattern = connected, zero_pattern
        self.dropout, self.batch_first = dropout, batch_first
        self.hidden = hidden or self._natural_width()
        self.pattern = pattern or (self.values if "values" in self.static else self.hidden)
        self.output = heads * self.pattern if "output" in self.static else output or size
        self._check(output)
        self.separation = named_separation(separation)
        self._build_norms()
        self._build_projections(bias)
        self._build_beta(beta, learn_beta)
        # Nothing but one attention: what surrounds it would take longer than a small one itself.
        parts = (self.stored_norm, self.state_norm, self.values_norm, self.space_norm)
        parts += (self.query, self.key, self.value, self.out)
        plain = type(self.separation) is Softmax and (heads, dropout) == (1, 0.0)
        self._bare = plain and batch_first and self._scale is not None and not zero_pattern and parts == (None,) * 8

    def _natural_width(self) -> int:
        if "stored" in self.static or "state" in self.static:
            return self.stored if "stored" in self.static else self.size
        if self.heads < 1 or self.size % self.heads:
            raise ConfigError(f"`size` must be a multiple of `heads` = {self.heads}, got {self.size}; or give `hidden`")
        return self.size // self.heads

    def _check(self, output: int | None) -> None:
        for name in ("size", "stored", "values", "hidden", "pattern", "output", "heads", "steps"):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int) or given < 1:
                raise ConfigError(f"`{name}` must be an integer of at least 1, got {given!r}")
        if self.tolerance is not None and not self.tolerance >= 0:
            raise ConfigError(f"`tolerance` must be None or at least 0, got {self.tolerance}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"`dropout` must be in [0, 1), got {self.dropout}")
        if output and "output" in self.static and output != self.output:
            raise ConfigError(f"a static output is heads * pattern = {self.output} wide, got `output` = {output}")
        if self.connected and (self.static & {"stored", "values"} or self.values != self.stored):
            raise ConfigError(
                "`connected` values pass the projection of stored patterns: both need one, and one width, got "
                f"static {sorted(self.static)} and widths {self.values} and {self.stored}"
            )
        widths = {"stored": (self.stored, self.hidden), "state": (self.size, self.hidden)}
        widths["values"] = (self.values, self.pattern)
        for name, (given, needed) in widths.items():
            if name in self.static and given != needed:
                what = "pattern" if name == "values" else "hidden"
                raise ConfigError(f"static {name} must have the width `{what}` = {needed} of a head, got {given}")

    def _build_norms(self) -> None:
        def norm(name: Normalised, width: int) -> nn.LayerNorm | None:
            return nn.LayerNorm(width) if name in self.normalise else None

        self.stored_norm, self.state_norm = norm("stored", self.stored), norm("state", self.size)
        self.values_norm, self.space_norm = norm("values", self.values), norm("space", self.hidden)

    def _build_projections(self, bias: bool) -> None:
        def linear(name: Static, inner: int, outer: int) -> nn.Linear | None:
            if name in self.static:
                return None
            layer = nn.Linear(inner, outer, bias=bias)
            nn.init.xavier_uniform_(layer.weight)
            if bias:
                nn.init.zeros_(layer.bias)
            return layer

        hidden, pattern = self.heads * self.hidden, self.heads * self.pattern
        self.query, self.key = linear("state", self.size, hidden), linear("stored", self.stored, hidden)
        self.value = linear("values", hidden if self.connected else self.values, pattern)
        self.out = linear("output", pattern, self.output)

    def _build_beta(self, beta: float | Sequence[float] | None, learned: bool) -> None:
        each = [self.hidden**-0.5] if beta is None else [beta] if isinstance(beta, int | float) else list(beta)
        if len(each) not in (1, self.heads) or not all(0 < float(one) < math.inf for one in each):
            raise ConfigError(f"`beta` must be a number above 0, or one for each of {self.heads} heads, got {beta}")
        each = [float(one) for one in each]
        self._scale = each[0] if len(set(each)) == 1 and not learned else None
        start = torch.tensor(each if len(each) == self.heads else each * self.heads)
        self.log_beta = nn.Parameter(start.log()) if learned else None
        self.register_buffer("_betas", None if learned else start, persistent=False)

    @property
    def beta(self) -> Tensor:
        """The inverse temperature of each head, ``(H,)``.

        >>> Hopfield(16, heads=4).beta
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
        """
        if self.log_beta is not None:
            return self.log_beta.exp()
        betas = self.get_buffer("_betas")
        return betas if self._scale is None else betas.new_full((self.heads,), self._scale)

    def forward(
        self,
        stored: Tensor,
        state: Tensor | None = None,
        values: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """What the states find, ``(B, T, output)``.

        Args:
            stored: ``(B, N, stored)``.
            state: ``(B, T, size)``; the stored patterns unless given.
            values: ``(B, N, values)``; the stored patterns unless given.
            key_padding_mask: ``(B, N)`` bool, true on patterns that are not there, which may hold anything; one
                query that sees no pattern reads 0.
            attention_mask: ``(T, N)``, ``(B * H, T, N)`` or ``(B, H, T, N)``: bool, true where a state may not see a
                pattern, or numbers that are added to the scores. Both masks are as in ``nn.MultiheadAttention``.

        A batch of 1 serves any batch on the other side. Time O(B H T N D) a step; memory O(B H (T + N) D) with the
        softmax, and O(B H T N) more with other separations.
        """
        if self._bare and state is not None and values is key_padding_mask is attention_mask is None:
            kept, asked = stored.shape, state.shape
            fits = len(kept) == len(asked) == 3 and kept[0] == asked[0] and kept[2] == asked[2] == self.size
            if fits and stored.dtype is state.dtype and stored.is_floating_point() and self.steps == 1:
                return attend(state, stored, self._scale)  # type: ignore[arg-type]
        start, read = self._associate(stored, state, values, key_padding_mask, attention_mask)
        found = start.settle(self.steps - 1, self.tolerance).read(read, self.dropout if self.training else 0.0)
        found = found.transpose(1, 2).flatten(2)
        found = found if self.out is None else self.out(found)
        return found if self.batch_first else found.transpose(0, 1)

    def associations(
        self,
        stored: Tensor,
        state: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The weights p of the last step, ``(B, H, T, N)``, without dropout; arguments as in :meth:`forward`.

        With ``zero_pattern`` there is one more column, the last, for it.

        >>> Hopfield(8, heads=2).associations(torch.randn(1, 5, 8), torch.randn(1, 3, 8)).shape
        torch.Size([1, 2, 3, 5])
        """
        start, _ = self._associate(stored, state, None, key_padding_mask, attention_mask, valued=False)
        return start.settle(self.steps - 1, self.tolerance).weights()

    def energy(
        self,
        stored: Tensor,
        state: Tensor | None = None,
        *,
        after: int = 0,
        key_padding_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        r"""Energy of each state in each head after so many steps, ``(B, H, T)``; it never rises with ``after``.

        .. math:: E(q) = -\tfrac1\beta \Omega^*(\beta K q) + \tfrac1\beta \Omega^*(0)
                  + \tfrac12 q^\top q + \tfrac12 M^2, \quad M = \max_i \|k_i\|

        over the patterns that the state sees; with the softmax, -lse + (1/beta) log N + .... Others as in
        :meth:`forward`.

        >>> layer, patterns = Hopfield(8), torch.randn(1, 5, 8)
        >>> bool((layer.energy(patterns, after=1) <= layer.energy(patterns) + 1e-6).all())
        True
        """
        start, _ = self._associate(stored, state, None, key_padding_mask, attention_mask, valued=False)
        return start.settle(after).energy()

    def _associate(
        self,
        stored: Tensor,
        state: Tensor | None,
        values: Tensor | None,
        padding: Tensor | None,
        attention: Tensor | None,
        *,
        valued: bool = True,
    ) -> tuple[Association, Tensor]:
        """States and patterns of each head, and the values ``(B, H, N, E)``; the keys where no values are asked for."""
        state, values = stored if state is None else state, stored if values is None else values
        inputs = {"stored": (stored, self.stored), "state": (state, self.size)}
        inputs |= {"values": (values, self.values)} if valued else {}
        B, T, N = self._sizes(inputs)
        if not self.batch_first:
            stored, state, values = (part.transpose(0, 1) for part in (stored, state, values))
        shape, mask = (B, self.heads, T, N), None
        if padding is not None or attention is not None:
            mask = merge_masks(padding, attention, shape, state.dtype)
        if padding is not None:
            # Whatever stands on padding, NaN included, must reach neither value nor gradient.
            absent = padding.unsqueeze(2)
            same, stored = values is stored, stored.masked_fill(absent, 0.0)
            values = stored if same else values.masked_fill(absent, 0.0) if valued else values
        queries = self._split(self.query, _normed(self.state_norm, state), self.hidden)
        keys = self._split(self.key, _normed(self.stored_norm, stored), self.hidden)
        queries, keys = _normed(self.space_norm, queries), _normed(self.space_norm, keys)
        read = keys
        if valued:
            read = _normed(self.values_norm, values)
            read = read if self.key is None or not self.connected else self.key(read)
            read = self._split(self.value, read, self.pattern)
        if self.zero_pattern:
            keys, read = (nn.functional.pad(part, (0, 0, 0, 1)) for part in (keys, read))
            mask = (
                None
                if mask is None
                else nn.functional.pad(mask.expand(-1, -1, -1, N), (0, 1), value=mask.dtype == torch.bool)
            )
        queries, keys, read = (part.expand(B, self.heads, -1, -1) for part in (queries, keys, read))
        beta = self.beta.to(queries.dtype).view(-1, 1, 1) if self._scale is None else self._scale
        return Association(queries, keys, beta, self.separation, mask), read

    def _split(self, layer: nn.Linear | None, x: Tensor, width: int) -> Tensor:
        """``(B, T, inner)`` -> ``(B, H, T, width)``, or ``(B, 1, T, width)`` where there is no projection."""
        return x.unsqueeze(1) if layer is None else layer(x).unflatten(2, (self.heads, width)).transpose(1, 2)

    def _sizes(self, inputs: dict[str, tuple[Tensor, int]]) -> tuple[int, int, int]:
        batch, place = (0, 1) if self.batch_first else (1, 0)
        layout = "(B, {}, {})" if self.batch_first else "({}, B, {})"
        for name, (x, width) in inputs.items():
            if not isinstance(x, Tensor) or not x.is_floating_point():
                got = x.dtype if isinstance(x, Tensor) else type(x).__name__
                raise ShapeError(f"`{name}` must be a tensor of floating point, got {got}")
            if x.dim() != 3 or x.size(2) != width:
                expected = layout.format("T" if name == "state" else "N", width)
                raise ShapeError(f"`{name}` must be {expected}, got {tuple(x.shape)}")
        shapes = {name: (x.size(batch), x.size(place)) for name, (x, _) in inputs.items()}
        if "values" in shapes and shapes["values"][1] != shapes["stored"][1]:
            raise ShapeError(
                f"`values` must be as many as `stored`, got {shapes['values'][1]} and {shapes['stored'][1]}"
            )
        sizes = {size for size, _ in shapes.values()} - {1} or {1}
        if len(sizes) > 1:
            raise ShapeError(f"inputs must have one batch size (or 1), got {[size for size, _ in shapes.values()]}")
        return sizes.pop(), shapes["state"][1], shapes["stored"][1]

    def extra_repr(self) -> str:
        """The settings that shape the layer."""
        parts = [f"{name}={getattr(self, name)}" for name in ("heads", "hidden", "pattern", "steps")]
        parts += [] if self.tolerance is None else [f"tolerance={self.tolerance}"]
        return ", ".join([str(self.size), *parts])


def _chosen(name: str, given: Collection[str], kind: object) -> frozenset[str]:
    choices = get_args(kind)
    given = [given] if isinstance(given, str) else given
    for one in given:
        if one not in choices:
            raise ConfigError(f"`{name}` cannot hold `{one}`; {nearest(str(one), choices)}")
    return frozenset(given)


def _normed(norm: nn.LayerNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
