"""The C++ kernels of paths through grids beside plain PyTorch, at every level of instructions, and what they refuse."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch

from contracts.threads import one_thread
from thalweg.errors import ShapeError
from thalweg.inference import CTC, Alignment

kernels = pytest.importorskip("thalweg._kernels")
INF = math.inf
EDITS = np.array([[1, 1], [1, 0], [0, 1]])
SETTINGS = {
    "edits": {},
    "local": {"local": True},
    "banded": {"band": 3},
    "chunks": {"moves": ((1, 1), (3, 1), (1, 4), (2, 2))},
    "rows": {"moves": ((1, 0), (1, 1), (1, 3), (1, 5))},
    "far": {"moves": ((1, 1), (1, 0), (0, 1), (99, 99), (40, 0))},
}


def structures(dtype: torch.dtype, backend: str = "cpu") -> list[Alignment | CTC]:
    """Ragged batches wider than a vector, with constraints and NaN in the padding."""
    draw = torch.Generator().manual_seed(0)
    found: list[Alignment | CTC] = []
    both = {"backend": backend, "validate_args": False}
    for settings in SETTINGS.values():
        kinds = len(settings.get("moves", EDITS))
        scores = torch.randn(4, 9, 22, kinds, generator=draw).double() * 2
        scores[0, 4, 3:15] = -INF
        lengths = {"lengths": [8, 8, 5, 1], "target_lengths": [21, 17, 18, 2]}
        scores = torch.where(Alignment(scores, **lengths, **settings).inside, scores, math.nan)
        found.append(Alignment(scores.to(dtype), **lengths, **settings, **both))
    log_probs = torch.randn(4, 20, 9, generator=draw).double().log_softmax(-1)
    log_probs[0, 3, 2] = -INF
    targets = torch.randint(1, 9, (4, 10), generator=draw)
    targets[1, 2:5] = 7
    lengths = {"lengths": [20, 18, 8, 3], "target_lengths": [10, 9, 0, 9]}
    return [*found, CTC(log_probs.to(dtype), targets, **lengths, **both)]


@cache
@one_thread()
def known() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """What the reference says in float64."""
    return [(p.log_partition, p.marginals, p.max_score) for p in structures(torch.float64, "reference")]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_posteriors_and_best_paths(level: str, dtype: torch.dtype):
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-10}
    for ours, (value, marginals, best) in zip(structures(dtype), known(), strict=True):
        torch.testing.assert_close(ours.log_partition.double(), value, **tolerance)
        torch.testing.assert_close(ours.marginals.double(), marginals, **tolerance)
        torch.testing.assert_close(ours.max_score.double(), best, **tolerance)
        feasible = value > -INF
        torch.testing.assert_close(ours.score(ours.mode)[feasible], ours.max_score[feasible], **tolerance)
        assert torch.equal(ours.log_partition, ours.log_partition)


def test_k_best_and_samples(level: str):
    for ours, (value, marginals, _) in zip(structures(torch.float64), known(), strict=True):
        feasible = value > -INF
        scores, paths = ours.top_k(4)
        assert (scores[:, 1:] <= scores[:, :-1]).all()
        there = scores > -INF
        torch.testing.assert_close(ours.score(paths.transpose(0, 1)).t()[there], scores[there])
        drawn = ours.sample((400,), generator=torch.Generator().manual_seed(1))
        assert ours.score(drawn)[:, feasible].isfinite().all()
        assert (ours.parts_of(drawn)[:, feasible].mean(0) - marginals[feasible]).abs().max() < 0.12


def arguments(**changes):
    """What `lattice_value` takes, sound but for what is changed."""
    given = {
        "scores": np.zeros((2, 3, 4, 3), np.float32),
        "moves": EDITS,
        "rows": np.array([2, 1]),
        "columns": np.array([3, 0]),
        "labels": None,
        "ends": 1,
        "band": -1,
        "values": np.zeros(2, np.float32),
        "gradient": np.zeros((2, 3, 4, 3), np.float32),
        "threads": 1,
    }
    values = list((given | changes).values())
    return [tuple(values[:7]), *values[7:]]


BAD = {
    "rows too many": {"rows": np.array([3, 1])},
    "rows negative": {"rows": np.array([-1, 1])},
    "columns too many": {"columns": np.array([4, 0])},
    "of another batch": {"rows": np.array([1])},
    "moves nowhere": {"moves": np.array([[1, 1], [0, 0], [0, 1]])},
    "moves back": {"moves": np.array([[1, 1], [-1, 0], [0, 1]])},
    "moves of three": {"moves": np.zeros((3, 3), np.int64)},
    "moves of others": {"moves": EDITS[:2]},
    "too many moves": {"moves": np.ones((65, 2), np.int64)},
    "no item": {"scores": np.zeros((0, 3, 4, 3), np.float32)},
    "ends": {"ends": -1},
    "band": {"band": 2**40},
    "values": {"values": np.zeros(3, np.float32)},
    "gradient": {"gradient": np.zeros((2, 3, 4, 2), np.float32)},
    "labels": {"labels": np.zeros((2, 4), np.int64)},
}
EMITTED = {
    "scores": np.zeros((1, 2, 3, 5), np.float32),
    "moves": np.array([[1, 0], [1, 1], [1, 2]]),
    "labels": np.array([[0, 1, 0, 4], [0, 2, 0, 3]]),
    "ends": 2,
    "gradient": np.zeros((1, 2, 3, 4), np.float32),
}
BAD |= {
    "label too high": EMITTED | {"labels": np.full((2, 4), 5)},
    "label negative": EMITTED | {"labels": np.full((2, 4), -1)},
    "rows beyond frames": EMITTED | {"rows": np.array([4, 1])},
    "labels and moves along a row": EMITTED | {"moves": EDITS},
    "gradient of emitted": EMITTED | {"gradient": np.zeros((1, 2, 3, 5), np.float32)},
}


def test_sound_arguments_are_taken():
    kernels.lattice_value(*arguments())
    kernels.lattice_value(*arguments(**EMITTED))


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str):
    with pytest.raises(ShapeError):
        kernels.lattice_value(*arguments(**BAD[name]))


def test_other_functions_refuse_too():
    common = arguments()[0]
    for paths, uniforms in (((5, 2, 4), (5, 2, 5)), ((5, 1, 4), (5, 2, 6))):
        with pytest.raises(ShapeError):
            kernels.lattice_sample(
                common, np.zeros(uniforms, np.float32), np.zeros(2, np.float32), np.zeros(paths, np.int64), 1
            )
    for k, paths in ((0, (2, 0, 4)), (2, (2, 3, 4)), (2, (1, 2, 4))):
        with pytest.raises(ShapeError):
            kernels.lattice_best(common, np.zeros((2, k), np.float32), np.zeros(paths, np.int64), 1)
    cells, labels, weights, out = np.zeros((2, 3, 4)), np.zeros((2, 4), np.int64), np.ones(2), np.zeros((2, 3, 5))
    kernels.lattice_emitted(cells, labels, weights, out, 1)
    for changed in ((cells[:, :2].copy(), labels, weights), (cells, labels + 5, weights), (cells, labels, np.ones(3))):
        with pytest.raises(ShapeError):
            kernels.lattice_emitted(*changed, out, 1)
    for wrong in ({"scores": np.zeros((2, 3, 4, 3), np.int64)}, {"scores": None}, {"rows": None}, {"values": None}):
        with pytest.raises(TypeError):
            kernels.lattice_value(*arguments(**wrong))
