"""ONNX graphs put together operation by operation; the constants are a model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, MissingDependencyError

EXTRA = "pip install 'thalweg[onnx]'"
OPSET = 17
"""The operations that are used; onnxruntime has them since 1.12."""

FLOAT, INT, BOOL = "FLOAT", "INT64", "BOOL"
"""Types of tensors, as ONNX calls them."""

Shape = Sequence[int | str]
"""Of a tensor; a word stands for a number that is known later."""


def package(name: str) -> Any:
    """A package of the extra ``[onnx]``.

    >>> package("no_such_package")
    Traceback (most recent call last):
    ...
    thalweg.errors.MissingDependencyError: ONNX needs the package no_such_package; run: pip install 'thalweg[onnx]'
    """
    try:
        return import_module(name)
    except ImportError:
        raise MissingDependencyError(f"ONNX needs the package {name}; run: {EXTRA}") from None


def array(tensor: Tensor) -> np.ndarray:
    """A weight as NumPy has it: float32, on the CPU.

    >>> array(torch.ones(2)).dtype
    dtype('float32')
    """
    return tensor.detach().to("cpu", torch.float32).numpy()


class Graph:
    """A graph that grows: every method adds operations and returns the name of what they give.

    >>> graph = Graph("twice")
    >>> x = graph.input("x", FLOAT, ["N"])
    >>> graph.output("y", graph.op("Add", x, x), FLOAT, ["N"])
    >>> [node.op_type for node in graph.model().graph.node]
    ['Add', 'Identity']
    """

    def __init__(self, name: str):
        self.name, self.onnx = name, package("onnx")
        self._nodes: list[Any] = []
        self._constants: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._count = 0

    def _new(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _told(self, name: str, kind: str, shape: Shape) -> Any:
        return self.onnx.helper.make_tensor_value_info(name, getattr(self.onnx.TensorProto, kind), list(shape))

    def input(self, name: str, kind: str, shape: Shape) -> str:
        """Something that is given."""
        self._inputs.append(self._told(name, kind, shape))
        return name

    def output(self, name: str, value: str, kind: str, shape: Shape) -> None:
        """A value that is given back, by that name."""
        self._nodes.append(self.onnx.helper.make_node("Identity", [value], [name]))
        self._outputs.append(self._told(name, kind, shape))

    def constant(self, value: Any) -> str:
        """An array; a tensor as float32, whole numbers as int64."""
        data = array(value) if isinstance(value, Tensor) and value.is_floating_point() else np.asarray(value)
        data = data.astype(np.int64) if data.dtype.kind in "iu" else data
        data = data.astype(np.float32) if data.dtype.kind == "f" else data
        name = self._new()
        self._constants.append(self.onnx.numpy_helper.from_array(np.array(data, order="C"), name))
        return name

    def ops(self, kind: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        """An operation that gives several values; an empty input is one that is left out."""
        names = [self._new() for _ in range(outputs)]
        self._nodes.append(self.onnx.helper.make_node(kind, list(inputs), names, **attributes))
        return names

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """An operation that gives one value."""
        return self.ops(kind, *inputs, outputs=1, **attributes)[0]

    def linear(self, x: str, weight: Tensor, bias: Tensor | None = None) -> str:
        """x W' + b."""
        product = self.op("MatMul", x, self.constant(weight.t()))
        return product if bias is None else self.op("Add", product, self.constant(bias))

    def layer(self, x: str, layer: nn.Linear) -> str:
        """A linear layer."""
        return self.linear(x, layer.weight, layer.bias)

    def shaped(self, x: str, *sizes: int) -> str:
        """Reshaped; 0 keeps a dimension, -1 is what is left."""
        return self.op("Reshape", x, self.constant(sizes))

    def turned(self, x: str, *order: int) -> str:
        """With its dimensions in another order."""
        return self.op("Transpose", x, perm=list(order))

    def squeezed(self, x: str, *axes: int) -> str:
        """Without dimensions of size 1."""
        return self.op("Squeeze", x, self.constant(axes))

    def unsqueezed(self, x: str, *axes: int) -> str:
        """With more dimensions of size 1."""
        return self.op("Unsqueeze", x, self.constant(axes))

    def cut(self, x: str, first: int, last: int, axis: int) -> str:
        """Entries ``first`` to ``last`` - 1 of a dimension."""
        return self.op("Slice", x, *(self.constant([n]) for n in (first, last, axis)))

    def size(self, x: str, axis: int) -> str:
        """One dimension's size, a number."""
        return self.op("Gather", self.op("Shape", x), self.constant(axis))

    def numbers(self, count: str) -> str:
        """0, 1 ... count - 1."""
        return self.op("Range", self.constant(0), count, self.constant(1))

    def masked(self, scores: str, mask: str) -> str:
        """Scores, -inf where the mask is false."""
        return self.op("Where", mask, scores, self.constant(-np.inf))

    def log_sum_exp(self, scores: str, axis: int) -> str:
        """log sum exp over a dimension, which goes; of finite scores, however low."""
        top = self.op("ReduceMax", scores, axes=[axis], keepdims=1)
        parts = self.op("Exp", self.op("Sub", scores, top))
        total = self.op("Log", self.op("ReduceSum", parts, self.constant([axis]), keepdims=1))
        return self.squeezed(self.op("Add", total, top), axis)

    def mask(self, tokens: str, lengths: str) -> str:
        """``(B, S)``, true at real positions."""
        places = self.unsqueezed(self.numbers(self.size(tokens, 1)), 0)
        return self.op("Less", places, self.unsqueezed(lengths, 1))

    def norm(self, x: str, norm: nn.Module) -> str:
        """A normalisation that looks at one position alone."""
        inner = getattr(norm, "layer", norm)
        if isinstance(inner, nn.LayerNorm):
            weights = (self.constant(part) for part in (inner.weight, inner.bias))
            return self.op("LayerNormalization", x, *weights, axis=-1, epsilon=inner.eps)
        if isinstance(inner, nn.RMSNorm):
            square = self.op("ReduceMean", self.op("Mul", x, x), axes=[-1], keepdims=1)
            root = self.op("Sqrt", self.op("Add", square, self.constant(float(inner.eps or 0.0))))
            return self.op("Mul", self.op("Div", x, root), self.constant(inner.weight))
        if isinstance(inner, nn.BatchNorm1d) and inner.running_mean is not None and inner.running_var is not None:
            scale = torch.rsqrt(inner.running_var + inner.eps) * inner.weight
            away = self.op("Sub", x, self.constant(inner.running_mean))
            return self.op("Add", self.op("Mul", away, self.constant(scale)), self.constant(inner.bias))
        if isinstance(inner, nn.Identity):
            return x
        raise ConfigError("instance norm looks at all positions, which ONNX graphs here do not; export another model")

    def model(self) -> Any:
        """The whole, checked."""
        graph = self.onnx.helper.make_graph(self._nodes, self.name, self._inputs, self._outputs, self._constants)
        opset = self.onnx.helper.make_opsetid("", OPSET)
        # The version of the file format that came with these operations, so that old runtimes read it.
        whole = self.onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8, producer_name="thalweg")
        self.onnx.checker.check_model(whole)
        return whole
