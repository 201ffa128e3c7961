"""Every function of the extension, given in the place of each argument what it must not follow.

Sanitizers run this file too (``test_sanitizers.py``): what is taken touches no memory but its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from thalweg.errors import ShapeError

kernels: Any = pytest.importorskip("thalweg._kernels", reason="the extension is not compiled")

REFUSED = (ShapeError, TypeError)
WITHOUT_ARRAYS = {"best_level", "level", "set_level", "set_least_operations"}
B, T, C, K, M, D, N = 2, 5, 4, 3, 3, 6, 7


def given(x: np.ndarray) -> np.ndarray:
    """What is read and never written to."""
    x.flags.writeable = False
    return x


def f4(*shape: int) -> np.ndarray:
    return given(np.random.default_rng(sum(shape)).random(shape, np.float32))


def f8(*shape: int) -> np.ndarray:
    return given(f4(*shape).astype(np.float64))


def i8(*values: Any) -> np.ndarray:
    return given(np.array(values, np.int64))


def out(kind: Any, *shape: int) -> np.ndarray:
    return np.zeros(shape, kind)


def chain(transitions: np.ndarray | None = None, edges: np.ndarray | None = None) -> tuple[Any, ...]:
    return f4(B, T, C), f4(1, 1, C, C) if transitions is None else transitions, edges, f4(C), f4(C), i8(2, 5)


def segments() -> tuple[Any, ...]:
    return f8(B, T, 2, C), f8(1, K, C), f8(1, C, C), i8(5, 2)


def grid() -> tuple[Any, ...]:
    return f4(B, 3, 4, M), i8((1, 1), (1, 0), (0, 1)), i8(2, 1), i8(3, 2), None, 1, -1


def emitting() -> tuple[Any, ...]:
    return f4(1, B, 3, 5), i8((1, 0), (1, 1)), i8(3, 2), i8(3, 2), i8((0, 1, 0, 4), (0, 2, 0, 3)), 2, 1


def linear(outer: int, inner: int) -> Any:
    return kernels.Linear(f4(outer, inner), f4(outer))


def norm() -> Any:
    return kernels.Norm(f4(D), f4(D), 1e-5, True)


def cell() -> Any:
    return kernels.Cell(input=linear(12, D), past=linear(12, 3), candidate=None)


def request() -> dict[str, Any]:
    sizes = {"width": 2, "k": 2, "max_length": 3, "min_length": 1, "penalty": 0.5, "bos": 1, "eos": 2, "threads": 1}
    return {**sizes, "mask": f4(N), "barred": given(np.zeros(N, np.float32))}


def recurrent() -> dict[str, Any]:
    parts = {"cell": "lstm", "source_embedding": f4(9, D), "target_embedding": f4(N, D), "encoder": [[cell(), cell()]]}
    parts |= {"decoder": [cell()], "bridge": [linear(3, 6), linear(3, 6)], "own": linear(3, 3), "values": linear(3, 6)}
    return parts | {"keys": linear(3, 6), "query": linear(3, 3), "folded": False, "output": linear(N, 3)}


def monotonic(walks: bool = False) -> dict[str, Any]:
    parts = {"cell": "lstm", "target_embedding": f4(N, D), "decoder": [cell()], "join": linear(3, 3)}
    parts |= {"pull": linear(2 if walks else 1, 3), "jumps": None if walks else linear(2, 3), "output": linear(N, 3)}
    return parts | {"walks": walks}


def places() -> dict[str, Any]:
    return {"request": kernels.Request(**request()), "lengths": i8(3, 2), "memory": f4(5, 3), "never": f4(N)}


def block() -> dict[str, Any]:
    parts = {"project": linear(3 * D, D), "out": linear(D, D), "attention_norm": norm(), "up": linear(8, D)}
    parts |= {"gate": linear(8, D), "down": linear(D, 8), "feedforward_norm": norm()}
    return parts | {"query": linear(D, D), "cross_out": linear(D, D), "cross_norm": norm()}


def transformer(encoder: bool = True) -> dict[str, Any]:
    own = {"encoder": [kernels.Block(**block())], "encoder_first": norm(), "memory": [linear(2 * D, D)]}
    own = own if encoder else {"encoder": [], "encoder_first": None, "memory": []}
    own |= {"heads": 2, "activation": "geglu", "decoder": [kernels.Block(**block())], "decoder_first": norm()}
    own |= {"embedding": f4(N, D), "scale": 1.0, "embedding_norm": norm(), "head": linear(D, D), "head_norm": norm()}
    return own | {"output": linear(N, D)}


def sources(encoder: bool = True) -> dict[str, Any]:
    own: dict[str, Any] = {"inputs": f4(5, D), "memories": [], "positions": i8(0, 1, 2, 0, 1)}
    own = own if encoder else {"inputs": None, "memories": [f4(5, 2 * D)], "positions": None}
    own |= {"request": kernels.Request(**request()), "lengths": i8(3, 2), "vectors": f4(3, D), "cosines": f4(3, 1)}
    return own | {"sines": f4(3, 1), "distances": f4(2, 3)}


def words() -> dict[str, Any]:
    asked = kernels.Request(**request())
    return {"request": asked, "lengths": i8(3, 2), "tokens": i8(0, 1, 2, 0, 8), "weights": f4(3)}


def slopes(kind: Any, *shapes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    return tuple(out(kind, *shape) for shape in shapes)


REAL, WIDE, WHOLE = np.float32, np.float64, np.int64
CHAIN, SEGMENTS = ((B, T, C), (1, 1, C, C), (C,), (C,)), ((B, T, 2, C), (B, K, C), (B, C, C))
# What is called, and with what: sound arguments in order, or by name.
CALLS: dict[str, Callable[[], Any]] = {
    "exp": lambda: [f4(9), out(REAL, 9)],
    "log": lambda: [f8(9), out(WIDE, 9)],
    "softmax": lambda: [f4(9), out(REAL, 9)],
    "share_test": lambda: [out(WHOLE, 3), 2, -1],
    "chain_likelihood": lambda: [chain(), i8([1] * T, [3] * T), f4(B), out(REAL, B), slopes(REAL, *CHAIN), 1],
    "chain_likelihood by edges": lambda: [
        chain(f4(1, 1, 1, 3), i8((0, 1, 2), (1, 1, 3))),
        None,
        f4(B),
        out(REAL, B),
        None,
        1,
    ],
    "chain_viterbi": lambda: [chain(), out(REAL, B), out(WHOLE, B, T), 1],
    "chain_top_k": lambda: [chain(), out(REAL, B, K), out(WHOLE, B, K, T), 1],
    "chain_sample": lambda: [chain(), f4(K, B, T), out(WHOLE, K, B, T), 1],
    "associate": lambda: [f4(B, D), f4(N, D), f4(N, C), 1.0, out(REAL, B, C), out(REAL, B), 1],
    "settle": lambda: [
        f4(B, D),
        f4(N, D),
        1.0,
        0.1,
        out(REAL, B, D),
        out(REAL, B, K),
        out(WHOLE, B),
        out(np.bool_, B),
        1,
    ],
    "entmax": lambda: [f8(B, N), given(f8(B) + 1), i8(0, 6), out(WIDE, B, N), out(WIDE, B), 1],
    "entmax_vjp": lambda: [f8(B, N), f8(B, N), given(f8(B) + 1), out(WIDE, B, N), 1],
    "segments_likelihood": lambda: [segments(), out(WIDE, B), slopes(WIDE, *SEGMENTS), 1],
    "segments_viterbi": lambda: [segments(), out(WHOLE, B, T), 1],
    "segments_sample": lambda: [segments(), f8(K, B, T, 2), out(WHOLE, K, B, T), 1],
    "lattice_value": lambda: [grid(), out(REAL, B), out(REAL, B, 3, 4, M), 1],
    "lattice_value of rows": lambda: [emitting(), out(REAL, B), out(REAL, 1, B, 3, 4), 1],
    "lattice_emitted": lambda: [f4(B, 3, 4), i8((0, 1, 0, 4), (0, 2, 0, 3)), f4(B), out(REAL, B, 3, 5), 1],
    "lattice_sample": lambda: [grid(), f4(K, B, 7), out(REAL, B), out(WHOLE, K, B, 5), 1],
    "lattice_best": lambda: [grid(), out(REAL, B, K), out(WHOLE, B, K, 5), 1],
    "Linear": lambda: [f4(3, 2), f4(3), f4(3)],
    "Linear.__call__": lambda: [f4(B, 2), out(REAL, B, 3), 1],
    "Norm": lambda: [f4(3), f4(3), 1e-5, True],
    "Cell": lambda: {"input": linear(8, 3), "past": linear(8, 2), "candidate": None},
    "Request": request,
    "Recurrent": recurrent,
    "Recurrent.search": words,
    "Monotonic": monotonic,
    "Monotonic of a reader who walks": lambda: monotonic(walks=True),
    "Monotonic.search": places,
    "Block": block,
    "Transformer": transformer,
    "Transformer.search": sources,
    "Transformer.search without an encoder": lambda: sources(encoder=False),
}
METHODS: dict[str, Callable[[], Any]] = {
    "Linear.__call__": lambda: kernels.Linear(f4(3, 2)),
    "Recurrent.search": lambda: kernels.Recurrent(**recurrent()).search,
    "Monotonic.search": lambda: kernels.Monotonic(**monotonic()).search,
    "Transformer.search": lambda: kernels.Transformer(**transformer()).search,
    "Transformer.search without an encoder": lambda: kernels.Transformer(**transformer(encoder=False)).search,
}
Path = tuple[Any, ...]


def leaves(arguments: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Everything that is no tuple, list or dict, and where it stands."""
    if isinstance(arguments, tuple | list | dict):
        for key, value in arguments.items() if isinstance(arguments, dict) else enumerate(arguments):
            yield from leaves(value, (*path, key))
    else:
        yield path, arguments


def changed(arguments: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    parts = dict(arguments) if isinstance(arguments, dict) else list(arguments)
    parts[path[0]] = changed(arguments[path[0]], path[1:], value)
    return tuple(parts) if isinstance(arguments, tuple) else parts


def refuses(name: str, path: Path, value: Any) -> bool:
    """Whether a call with this in the place of a sound argument is refused, whatever it otherwise gives."""
    function = METHODS[name]() if name in METHODS else getattr(kernels, name.partition(" ")[0])
    arguments = changed(CALLS[name](), path, value)
    try:
        function(**arguments) if isinstance(arguments, dict) else function(*arguments)
    except REFUSED:
        return True
    return False


def of_another_kind(x: np.ndarray) -> Iterator[tuple[str, Any]]:
    """The same numbers as no function takes them."""
    yield "one axis more", x[None]
    yield "one axis less", x[0]
    yield "half as wide", x.astype({"f": np.float16, "i": np.int32, "b": np.uint8}[x.dtype.kind])
    yield "another width", x.astype({4: np.float64, 8: np.float32, 1: np.int8}[x.dtype.itemsize])
    yield "not contiguous", np.repeat(x, 2, -1)[..., ::2]
    yield "a list", x.tolist()
    yield "an object", object()
    if x.flags.writeable:
        yield "not to be written to", given(x.copy())


def of_other_sizes(x: np.ndarray) -> Iterator[np.ndarray]:
    for axis, size in enumerate(x.shape):
        for other in {0, size - 1, size + 1, 2 * size} - {size}:
            made = np.resize(x, (*x.shape[:axis], other, *x.shape[axis + 1 :]))
            yield made if x.flags.writeable else given(made)


def with_a_number(x: np.ndarray, value: Any) -> Iterator[np.ndarray]:
    """The first, the last and all of the numbers replaced."""
    for place in (0, -1, slice(None)):
        other = x.copy()
        other.reshape(-1)[place] = value
        yield given(other)


def test_every_function_is_here() -> None:
    there = {name for name in dir(kernels) if not name.startswith("_")} - WITHOUT_ARRAYS
    assert there == {name for name in CALLS if name.isidentifier()}
    methods = {f"{name}.search" for name in there if hasattr(getattr(kernels, name), "search")}
    assert methods | {"Linear.__call__"} == {name for name in METHODS if " " not in name}


@pytest.mark.parametrize("name", CALLS)
def test_sound_arguments_are_taken_and_others_refused(name: str) -> None:
    assert not refuses(name, (), CALLS[name]())
    for path, leaf in leaves(CALLS[name]()):
        if not isinstance(leaf, np.ndarray):
            assert refuses(name, path, object()), path
            continue
        for what, wrong in of_another_kind(leaf):
            assert refuses(name, path, wrong), (path, what)
        # Some sizes are an argument's own affair, as that of a table, but never all.
        others = {refuses(name, path, wrong) for wrong in of_other_sizes(leaf)}
        assert True in others or name == "share_test", path


@pytest.mark.parametrize("name", CALLS)
def test_no_number_leads_astray(name: str) -> None:
    for path, leaf in leaves(CALLS[name]()):
        if isinstance(leaf, np.ndarray) and leaf.dtype == WHOLE and not leaf.flags.writeable:  # something to follow
            for value in (-1, 2**62, -(2**63)):
                for wrong in with_a_number(leaf, value):
                    assert refuses(name, path, wrong), (path, value)
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
            for value in (math.nan, math.inf, -math.inf, np.finfo(leaf.dtype).max, np.finfo(leaf.dtype).tiny):
                for strange in with_a_number(leaf, value):
                    refuses(name, path, strange)
        elif isinstance(leaf, int | float):
            for value in (math.nan, math.inf, -1, 0, 2**31 - 1, 2**62, -(2**63)):
                refuses(name, path, value)
