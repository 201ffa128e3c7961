"""Small computations that the page shows: a memory of digits and a chain of labels."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from thalweg.energies import HopfieldMemory
from thalweg.inference import LinearChain
from thalweg.serve.refusals import RefusedError
from thalweg.serve.requests import Chain, Memory

# A state that moves by no more than this has come to rest.
_REST = 1e-5


@cache
def _digits() -> tuple[Tensor, list[int]]:
    """Digits as pixels from 0 to 16, ``(N, 64)``, in the order 0, 1, ... 9, 0, 1, ..., and what each shows."""
    from thalweg.data.images.digits import load_digit_images

    images, labels = load_digit_images()
    each = [[n for n, label in enumerate(labels) if label == digit][:20] for digit in range(10)]
    order = [each[n % 10][n // 10] for n in range(200)]
    return torch.from_numpy(images[order]).float(), [int(labels[n]) for n in order]


def stored(count: int) -> dict[str, Any]:
    """The digits that a memory of so many stores: one of each of the ten first.

    >>> stored(3)["labels"]
    [0, 1, 2]
    """
    images, labels = _digits()
    return {"patterns": images[:count].tolist(), "labels": labels[:count], "width": 8, "height": 8}


def retrieved(asked: Memory) -> dict[str, Any]:
    """A query's way to rest, state by state: pixels, energies, and how much of each pattern there is in it.

    The mean of the patterns is taken off and each has norm 1, as does the query; pixels are in the scale of the mean
    pattern.

    >>> found = retrieved(Memory(query=stored(10)["patterns"][3], beta=50.0))
    >>> found["labels"][max(range(10), key=found["weights"][-1].__getitem__)]
    3
    """
    images, labels = _digits()
    images = images[: asked.count]
    mean = images.mean(0) if asked.count > 1 else torch.zeros(64)
    centred = images - mean
    scale = centred.norm(dim=1).mean()
    memory = HopfieldMemory(torch.nn.functional.normalize(centred, dim=1), asked.beta, asked.separation)
    query = torch.tensor(asked.query) - mean
    states = [query / query.norm().clamp(min=1e-6)]
    while len(states) <= asked.steps:
        states.append(memory.update(states[-1][None])[0])
        if (states[-1] - states[-2]).norm() <= _REST:
            break
    every = torch.stack(states)
    return {
        "states": (mean + scale * every).tolist(),
        "energies": memory.energy(every).tolist(),
        "weights": memory.weights(every).tolist(),
        "steps": len(states) - 1,
        "converged": len(states) > 1 and bool((states[-1] - states[-2]).norm() <= _REST),
        "patterns": images.tolist(),
        "labels": labels[: asked.count],
    }


def inferred(asked: Chain) -> dict[str, Any]:
    """All that a lattice tells, with some labels forced.

    >>> found = inferred(Chain(emissions=[[0.0, 0.0]] * 3, transitions=[[0.0, 0.0]] * 2, force={"1": 0}))
    >>> round(found["entropy"], 4), found["marginals"][1]
    (1.3863, [1.0, 0.0])
    """
    T, C = len(asked.emissions), len(asked.emissions[0])
    for name in ("emissions", "transitions", "start", "end"):
        given = getattr(asked, name)
        rows = given if name in ("emissions", "transitions") else [given] if given is not None else []
        if any(len(row) != C for row in rows) or (name == "transitions" and len(rows) != C):
            raise RefusedError(422, "invalid", f"{name}: every row must have {C} numbers, as in emissions", name)
    fixed = torch.full((1, T), -1)
    for place, label in asked.force.items():
        if not (place.isascii() and place.isdigit() and len(place) < 5 and int(place) < T and 0 <= label < C):
            raise RefusedError(422, "invalid", f"force must give positions 0 to {T - 1} labels 0 to {C - 1}", "force")
        fixed[0, int(place)] = label
    wide = torch.float64
    start, end = (None if ends is None else torch.tensor(ends, dtype=wide) for ends in (asked.start, asked.end))
    emissions, transitions = torch.tensor([asked.emissions], dtype=wide), torch.tensor(asked.transitions, dtype=wide)
    free = LinearChain(emissions, transitions, start=start, end=end)
    chain = free.given(fixed)
    scores, paths = chain.top_k(asked.k)
    found = scores[0].isfinite()
    draw = torch.Generator().manual_seed(asked.seed)
    drawn = chain.sample((asked.samples,), generator=draw)[:, 0].tolist() if asked.samples else []
    log_z = float(chain.log_partition[0])
    return {
        "log_partition": log_z,
        "free_log_partition": float(free.log_partition[0]),
        "marginals": chain.marginals[0].tolist(),
        "best": [
            {"labels": labels, "score": score, "probability": float(torch.tensor(score - log_z, dtype=wide).exp())}
            for score, labels in zip(scores[0][found].tolist(), paths[0][found].tolist(), strict=True)
        ],
        "samples": drawn,
        "entropy": float(chain.entropy()[0]),
    }
