"""The least time a chain can take on this machine, by its own measured rates, and how far a measured time is from it.

For B chains of T positions and C labels, the floor is the largest of

- operations over rate: 3 B T C^2 multiply-adds for likelihood and gradient (one product with the transitions in the
  forward recursion, one in the backward, one for the expected transitions), B T C^2 additions and as many maxima for
  Viterbi. The rate is that of a float32 matrix product in the same run; a maximum and an addition count as one
  multiply-add each.
- bytes over bandwidth: inputs read, outputs written, and the forward messages (Viterbi: one byte a back-pointer up to
  256 labels, else two) written and read once. The bandwidth is that of a copy of as many bytes.
- sequential steps: T times the time of one reduction over C values that waits for the last one. The backward
  recursion does not wait for the forward one, so T steps, not 2 T, are the bound.

Exponentials, logarithms, launches and the interpreter are not in it: no program reaches the floor.
"""

from __future__ import annotations

from typing import Any

from benchmarks.chain.problem import Size
from benchmarks.harness.rates import Rates, bound


def floor(size: Size, kind: str, rates: Rates) -> dict[str, Any]:
    """Operations, bytes, steps, the milliseconds that each takes at least, and which of them binds."""
    B, T, C = size
    scores = 4 * (B * T * C + C * C + 2 * C)
    if kind == "nll":
        operations, moved = 3 * B * T * C * C, 2 * scores + 2 * 4 * B * T * C + 8 * B * T
    else:
        operations, moved = 2 * B * T * C * C, scores + 2 * B * T * C * (1 if C <= 256 else 2) + 8 * B * T
    times = {
        "operations": 1e3 * operations / rates.multiply_adds,
        "bytes": 1e3 * moved / rates.copy(moved),
        "steps": 1e3 * T * rates.step(C),
    }
    return {"operations": operations, "bytes": moved, "steps": T, **bound(times)}
