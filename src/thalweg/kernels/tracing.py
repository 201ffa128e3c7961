"""Who follows what PyTorch does: transforms that a compiled kernel cannot serve, and a compiler that must keep out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import isfunction
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

Class = TypeVar("Class", bound=type)

_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", None)


def traced() -> bool:
    """Whether ``torch.func`` or forward-mode differentiation follows each operation, which ends at a compiled kernel.

    >>> traced(), torch.func.vmap(lambda x: x + traced())(torch.zeros(1))
    (False, tensor([1.]))
    """
    # No public question exists; without these names plain PyTorch answers, slowly and rightly.
    return _transforms_active is None or _transforms_active() or getattr(forward_ad, "_current_level", 0) >= 0


def derived(ctx: Any, first: int, function: Callable[..., Sequence[Tensor]], cotangents: Sequence[Tensor]) -> Any:
    """What autograd wants of a backward pass: the derivative of the reference's ``function`` of the saved tensors.

    They are the arguments from number ``first`` on; the function gives what a kernel gave.
    """
    again, needs = torch.is_grad_enabled(), ctx.needs_input_grad[first:]
    with torch.enable_grad():
        # The same tensors under new names: one that serves twice gets the derivative of each use by itself.
        inputs = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in ctx.saved_tensors]
        wanted = [x for x, needed in zip(inputs, needs, strict=True) if needed]
        pairs = [(x, weight) for x, weight in zip(function(*inputs), cotangents, strict=True) if x.requires_grad]
        if pairs:
            values, weights = zip(*pairs, strict=True)
            settings: dict[str, Any] = {"create_graph": again, "materialize_grads": True, "allow_unused": True}
            found = iter(torch.autograd.grad(values, wanted, weights, **settings))
        else:  # a chain of one label is linear in its scores: its gradient depends on nothing
            found = iter([torch.zeros_like(x) for x in wanted])
    return (*[None] * first, *(next(found) if needed else None for needed in needs))


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*arguments: Any, **settings: Any) -> Any:
        if torch.compiler.is_compiling():  # asked for here: `disable` itself imports the compiler, for a second
            return torch.compiler.disable(function)(*arguments, **settings)
        return function(*arguments, **settings)

    return call


def uncompiled(kind: Class) -> Class:
    """A class whose public methods and properties ``torch.compile`` calls as they are, between the graphs it makes.

    What they do is compiled already, and what they look at (lengths, labels, results kept) is no part of a graph.
    """
    for name, member in list(vars(kind).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isfunction(member):
            setattr(kind, name, _outside(member))
        elif isinstance(member, property) and member.fget is not None:
            setattr(kind, name, property(_outside(member.fget), member.fset, member.fdel, member.__doc__))
    return kind
