"""The results as Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.declaration import Facts
from benchmarks.harness.report import heading, mebibytes, number, spread, table, times
from benchmarks.hopfield.sides import ATTENTION, KERNEL, MEMORY, PEER, TOLERANCE


def _floor(facts: Facts, cell: dict[str, Any]) -> float:
    """Milliseconds of the two products of every step that a query makes, at the rate measured in the run."""
    Q, N, D = cell["size"]
    return 1e3 * 2 * Q * N * D * cell["steps"]["mean"] / facts["multiply_adds"]


def retrieval(facts: Facts) -> list[str]:
    """Milliseconds of every side and how many times faster than hflayers each is."""
    rows = []
    for cell in facts["retrieval"]:
        taken = cell["ms"]
        row = [" x ".join(map(str, cell["size"])), cell["kind"], str(cell["asked"] or "until rest")]
        row.append(f"{cell['steps']['mean']:.1f}")
        for name in (KERNEL, MEMORY):
            row.append(spread(taken[name]) + times(cell["ratios"].get(name)))
        row.append(spread(taken[PEER]) if PEER in taken else "")
        row.append(number(_floor(facts, cell)))
        worst = max(away for name, away in cell["differences_from_float64"].items() if name != PEER)
        theirs = cell["differences_from_float64"].get(PEER)
        row.append(f"{worst:.0e}" + (f", {theirs:.0e}" if theirs is not None else ""))
        rows.append(row)
    head = ["Q x N x D", "beta for", "steps", "made (mean)", KERNEL, f"{MEMORY}.retrieve", PEER, "floor", "off"]
    return [
        "## Retrieval, ms a call",
        "",
        "Median and quartiles; in bold how many times faster than hflayers. Patterns have normal entries, queries are "
        "patterns with half as much noise; beta = 1/sqrt(D) mixes many patterns, 4/sqrt(D) finds one. Where a number "
        "of steps is given all sides make it, unless nothing changes at all before; until rest, ours stops each query "
        f"when it moves by {TOLERANCE:g} or less, hflayers all of them when all weights together change by "
        f"{TOLERANCE:g} or less (norm), both after 100 steps at most. Thalweg's times include the energy of every "
        "query at every step, which hflayers does not compute. The floor is two products of Q N D multiply-adds for "
        f"every step that was made, at {facts['multiply_adds']:.3g} a second (measured); `off` is the largest "
        "difference from float64, ours and hflayers', in units of the largest entry.",
        "",
        *table(head, rows),
    ]


def one_step(facts: Facts) -> list[str]:
    """One association beside torch's attention."""
    names = [name for name in facts["one_step"][0]["ms"] if name != ATTENTION]
    rows = []
    for cell in facts["one_step"]:
        row = [" x ".join(map(str, cell["size"])), spread(cell["ms"][ATTENTION])]
        for name in names:
            row.append(f"{spread(cell['ms'][name])}, **{cell['ratios'][name]['median']:.2f}**")
        rows.append(row)
    return [
        "## One step, ms a call",
        "",
        f"In bold the share of the time of torch's scaled_dot_product_attention ({ATTENTION}); below 1 is faster.",
        "",
        *table(["Q x N x D", ATTENTION, *names], rows),
    ]


def million(facts: Facts) -> list[str]:
    """Calls among a million patterns."""
    kinds = ("associate", "settle", "nearest 10")
    rows = [
        [str(cell["queries"]), mebibytes(cell["weights_bytes"])]
        + [f"{spread(cell[kind]['ms'])} ms, {mebibytes(cell[kind]['bytes'])} MiB" for kind in kinds]
        for cell in facts["million"]
    ]
    head = ["queries", "all weights, MiB", *kinds]
    return [
        f"## {facts['million'][0]['patterns']:,} patterns of 64 features",
        "",
        "Milliseconds a call, and the highest memory above that of patterns, queries and first call.",
        "",
        *table(head, rows),
    ]


def report(facts: Facts) -> list[str]:
    """All parts that were measured."""
    lines = heading(facts, ", float32; every result is compared with float64 first")
    for part in (retrieval, one_step, million):
        if facts.get(part.__name__):
            lines += part(facts)
    return lines
