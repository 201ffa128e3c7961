"""The results as Markdown."""

from __future__ import annotations

from benchmarks.decoding.sides import INT, OURS
from benchmarks.harness.declaration import Facts
from benchmarks.harness.report import comparison, heading, number, spread, table, times
from benchmarks.training.sides import PEER as YOYODYNE


def method(width: int) -> str:
    """The search of a width, in words."""
    return "greedy" if width == 1 else f"beam {width}"


def search(facts: Facts) -> list[str]:
    """Milliseconds of every side, and how many times faster Thalweg is."""
    cells, shape = facts["search"], facts["shape"]
    checks = [cell["checks"] for cell in cells]
    worst = max((check["worst"] for check in checks if check["worst"] is not None), default=0.0)
    lines = [
        "## The same weights, ms a call",
        "",
        f"BART with {shape['layers']}+{shape['layers']} layers, {shape['width']} wide, feed-forward "
        f"{shape['feedforward']}, {shape['heads']} heads, vocabulary {shape['vocabulary']}, source {shape['source']}, "
        f"{shape['steps']} forced steps; every hypothesis of a beam is asked for. Median "
        "and quartiles; in bold how many times faster Thalweg is.",
        "",
        *comparison(cells, ["", "B"], lambda cell: [method(cell["width"]), f"{cell['batch']:,}"]),
        "Before the timing, scores of the search are compared with one teacher-forced pass (largest difference "
        f"{max(check['own'] for check in checks):.1g}) and with each peer at float32 "
        f"(largest difference {worst:.1g}; "
        f"{sum(sum(check['differing'].values()) for check in checks)} items with another hypothesis at a near-tie).",
        "",
    ]
    agreements = [(cell, name, share) for cell in cells for name, share in cell["checks"]["agreement"].items()]
    if agreements:
        parts = [f"{method(cell['width'])} B = {cell['batch']}: {name} {share:.1%}" for cell, name, share in agreements]
        lines += [f"Best answers of reduced precision that equal float32's. {'; '.join(parts)}.", ""]
    if any(INT in cell["jobs"] for cell in cells):
        lines += ["CTranslate2 takes and gives strings; turning ids into strings is not timed.", ""]
    return lines + floors(facts)


def floors(facts: Facts) -> list[str]:
    """Least work and time of each call, and launches of a step."""
    rows = []
    for cell in facts["search"]:
        bound = cell.get("floor")
        if not bound or "ms" not in cell["jobs"][OURS]:
            continue
        measured = cell["jobs"][OURS]["ms"]["median"]
        launches = "; ".join(f"{name} {number(each)}" for name, each in cell["starts_per_step"].items())
        rows.append(
            [
                method(cell["width"]),
                f"{cell['batch']:,}",
                f"{2 * bound['multiply_adds']:.3g}",
                f"{bound['bytes']:.3g}",
                *(number(bound["ms"][kind]) for kind in ("operations", "bytes")),
                f"{number(measured)} = {number(measured / bound['floor_ms'])}x",
                launches,
            ]
        )
    if not rows:
        return []
    rates, weights = facts["rates"], facts["search"][0]["floor"]["step_weight_bytes"]
    what = "launches" if facts["place"] == "gpu" else "torch operators"
    return [
        "## Distance from the floor",
        "",
        f"A step reads {weights / 2**20:,.1f} MiB of weights. Measured in the same run: {rates['multiply_adds']:.3g} "
        f"float32 multiply-adds a second, copies at {max(rates['copies'].values()) / 1e9:,.0f} GB/s. The floor is the "
        "larger of the two times; launches and the interpreter are not in it.",
        "",
        *table(
            ["", "B", "FLOPs", "bytes", "FLOPs, ms", "bytes, ms", "call, ms and times the floor", f"{what} a step"],
            rows,
        ),
    ]


def words(facts: Facts) -> list[str]:
    """Throughput and latency on a word list."""
    part = facts["words"]
    rows = [
        [
            f"{run['run']} ({run['model']}, {run['parameters']:,} parameters)",
            name,
            spread(found["words_per_second"]),
            number(found["p50_ms"]),
            number(found["p95_ms"]),
            number(found["mean_length"]),
        ]
        for run in part["runs"]
        for name, found in run["searches"].items()
    ]
    return [
        "## A trained model on real words",
        "",
        f"{part['words']:,} words of {part['file']}; the best answer is asked for and ends where it ends. Latency is "
        f"of one word alone, over {part['singles']:,} words.",
        "",
        *table(["run", "", "words a second", "p50, ms", "p95, ms", "mean length"], rows),
    ]


def recurrent(facts: Facts) -> list[str]:
    """Words a second of the recurrent models."""
    part = facts["recurrent"]
    names = {YOYODYNE: f"yoyodyne {part['yoyodyne']}", "first": "first version", "ours": "Thalweg"}
    rows = []
    for cell in part["cells"]:
        for kind in ("greedy", "beam"):
            row = [f"{cell['cell'].upper()}, {'beam 5, five answers' if kind == 'beam' else kind}"]
            for key in names:
                found = cell["words_per_second"].get(f"{kind}/{key}")
                row.append(spread(found) + times(cell["ratios"].get(f"{kind}/{key}")) if found else "none")
            rows.append(row)
    return [
        "## Recurrent models, words a second",
        "",
        f"Bidirectional encoder and decoder with additive attention, 128 wide, {part['epochs']} epochs on "
        f"{part['data']['name']}; {part['data']['words']:,} test words. In bold how many times faster Thalweg is.",
        "",
        *(f"- {line}" for line in part["left_out"]),
        *([""] if part["left_out"] else []),
        *table(["", *names.values()], rows),
    ]


def report(facts: Facts) -> list[str]:
    """All parts that were measured."""
    lines = heading(facts)
    for part in (search, words, recurrent):
        if facts.get(part.__name__):
            lines += part(facts)
    return lines
