"""What a memory does with the mixture of its patterns: gradients of convex functions, so that an energy exists."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, ShapeError, nearest


class PostTransform(nn.Module):
    r"""A map z -> q that is the gradient of a convex function, and that function's conjugate Psi.

    .. math:: q = \nabla \Psi^*(z) = \arg\max_q \langle z, q \rangle - \Psi(q), \qquad
              \Psi^*(z) = \max_q \langle z, q \rangle - \Psi(q)

    Psi is the convex part of the energy of a :class:`~thalweg.energies.HopfieldMemory`, so a step of CCCP from the
    mixture z = X'p of its patterns is exactly this map. Santos et al. (2024), "Hopfield-Fenchel-Young networks".

    >>> z = torch.tensor([[3.0, 4.0]])
    >>> post_transform("l2")(z), post_transform("layernorm")(z).round()
    (tensor([[0.6000, 0.8000]]), tensor([[-1., 1.]]))
    """

    def forward(self, z: Tensor) -> Tensor:
        """The gradient of Psi* at z, ``(..., D) -> (..., D)``."""
        raise NotImplementedError

    def value(self, q: Tensor) -> Tensor:
        """Psi(q), ``(..., D) -> (...)``; infinite where q is no possible state."""
        raise NotImplementedError

    def conjugate(self, z: Tensor) -> Tensor:
        """Psi*(z), ``(..., D) -> (...)``."""
        raise NotImplementedError


class Identity(PostTransform):
    r"""q = z, with Psi(q) = 1/2 ||q||^2, which is its own conjugate.

    >>> Identity().value(torch.tensor([3.0, 4.0]))
    tensor(12.5000)
    """

    def forward(self, z: Tensor) -> Tensor:
        """The mixture itself."""
        return z

    def value(self, q: Tensor) -> Tensor:
        """1/2 ||q||^2."""
        return q.square().sum(-1) / 2

    def conjugate(self, z: Tensor) -> Tensor:
        """1/2 ||z||^2."""
        return z.square().sum(-1) / 2


class UnitNorm(PostTransform):
    r"""q = z / ||z||, with Psi = 0 on the unit ball and infinite outside it, and Psi*(z) = ||z||.

    At z = 0, where every point of the ball is as good, q = 0 with gradient 0.

    >>> UnitNorm().value(torch.tensor([[0.6, 0.8], [3.0, 4.0]]))
    tensor([0., inf])
    """

    def forward(self, z: Tensor) -> Tensor:
        """The direction of z."""
        return _direction(z)

    def value(self, q: Tensor) -> Tensor:
        """0 in the unit ball, up to rounding; infinite outside."""
        inside = q.detach().norm(dim=-1) <= 1.0 + _rounding(q)
        return torch.where(inside, 0.0, torch.inf).to(q.dtype)

    def conjugate(self, z: Tensor) -> Tensor:
        """||z||."""
        return _norm(z)


class LayerNorm(PostTransform):
    r"""Layer normalisation without an epsilon, by a gain g > 0 (a number) and a bias c (a vector).

    .. math:: q = g \sqrt{D} \frac{z - \bar z}{\|z - \bar z\|} + c, \qquad
              \Psi^*(z) = g \sqrt{D} \, \|z - \bar z\| + \langle c, z \rangle

    Psi is 0 where q - c has mean 0 and norm at most g sqrt(D), and infinite elsewhere. A gain that differs by feature
    would make the map no gradient at all, and then no energy need fall. Where z is constant q = c, with gradient 0.

    Args:
        gain: g, or a tensor of shape () to learn.
        bias: ``(D,)``, or None for 0.

    >>> LayerNorm()(torch.tensor([[1.0, 3.0]])).round()
    tensor([[-1., 1.]])
    """

    def __init__(self, gain: float | Tensor = 1.0, bias: Tensor | None = None) -> None:
        super().__init__()
        gain = gain if isinstance(gain, Tensor) else torch.tensor(float(gain))
        if gain.dim() or not bool(gain > 0):
            raise ConfigError(f"`gain` must be one positive number, got {gain.tolist()}; features share a gain")
        if bias is not None and bias.dim() != 1:
            raise ShapeError(f"`bias` must be (D,), got {tuple(bias.shape)}")
        for name, tensor in (("gain", gain), ("bias", bias)):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self.gain: Tensor
        self.bias: Tensor | None

    def forward(self, z: Tensor) -> Tensor:
        """Layer normalisation of z."""
        q = self._radius(z) * _direction(_centred(z))
        return q if self.bias is None else q + self.bias.to(q.dtype)

    def value(self, q: Tensor) -> Tensor:
        """0 for the centred vectors of norm at most g sqrt(D), moved by c; infinite elsewhere."""
        free = q.detach() if self.bias is None else q.detach() - self.bias.detach().to(q.dtype)
        radius, slack = self._radius(q).detach(), _rounding(q)
        # What is added to and taken from a large bias leaves that bias's rounding behind.
        scale = radius if self.bias is None else radius + self.bias.detach().norm().to(q.dtype)
        off_centre = free.mean(-1).abs() * math.sqrt(q.size(-1))
        inside = (free.norm(dim=-1) <= radius + slack * scale) & (off_centre <= slack * scale)
        return torch.where(inside, 0.0, torch.inf).to(q.dtype)

    def conjugate(self, z: Tensor) -> Tensor:
        """g sqrt(D) ||z - mean|| + <c, z>."""
        value = self._radius(z) * _norm(_centred(z))
        return value if self.bias is None else value + z @ self.bias.to(z.dtype)

    def _radius(self, like: Tensor) -> Tensor:
        return self.gain.to(like.dtype) * math.sqrt(like.size(-1))


def post_transform(post: str | PostTransform) -> PostTransform:
    """A post-transform by name: ``"identity"``, ``"l2"`` or ``"layernorm"``; one that is given passes through.

    >>> post_transform("l2")
    UnitNorm()
    """
    if isinstance(post, PostTransform):
        return post
    made = {"identity": Identity, "l2": UnitNorm, "layernorm": LayerNorm}
    if post not in made:
        raise ConfigError(f"unknown post-transform `{post}`; {nearest(str(post), made)}")
    return made[post]()


def _centred(z: Tensor) -> Tensor:
    centred = z - z.mean(-1, keepdim=True)
    # Once more: the first mean carries rounding that is large beside what is left of a nearly constant z.
    return centred - centred.mean(-1, keepdim=True)


def _norm(z: Tensor) -> Tensor:
    """||z||, ``(..., D) -> (...)``, with gradient 0 at the origin."""
    largest = z.detach().abs().amax(-1, keepdim=True)
    # Scaled, so that the squares neither overflow nor vanish; a tiny z has a direction all the same.
    scale = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    squares = (z / scale).square().sum(-1)
    return torch.where(squares > 0, torch.where(squares > 0, squares, 1.0).sqrt() * scale.squeeze(-1), 0.0)


def _direction(z: Tensor) -> Tensor:
    """z / ||z||; 0, with gradient 0, at the origin."""
    norm = _norm(z).unsqueeze(-1)
    return torch.where(norm > 0, z / torch.where(norm > 0, norm, 1.0), 0.0)


def _rounding(q: Tensor) -> float:
    """The relative error that the norm of a state of D features may have."""
    return 8 * torch.finfo(q.dtype).eps * math.sqrt(q.size(-1))
