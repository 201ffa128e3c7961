"""The results as Markdown."""

from __future__ import annotations

from benchmarks.chain.growth import TITLES
from benchmarks.chain.sides import CHAIN, MODULE
from benchmarks.harness.declaration import Facts
from benchmarks.harness.report import comparison, heading, mebibytes, number, sizes, spread, table

HEAD = "(B, T, C)"


def compared(facts: Facts, kind: str) -> list[str]:
    """Milliseconds of every side, and how many times faster Thalweg is."""
    chain, module = CHAIN.split()[1], MODULE.split()[1]
    door = f"pytorch-crf is compared with `{module}` (the same call), the others with `{chain}`."
    if kind == "viterbi":
        door += f" `{chain}.mode` is a tensor of labels, `{module}.decode` lists as pytorch-crf's."
    names = dict.fromkeys(name for cell in facts[kind] for name in cell["jobs"])
    return [
        f"## {TITLES[kind].capitalize()}, ms",
        "",
        f"Median and quartiles. {door}",
        "",
        *comparison(facts[kind], [HEAD], lambda cell: [sizes(cell["size"])]),
        *(f"- {name}: {facts['peers'][name]['note']}." for name in names if name in facts["peers"]),
        "",
    ]


def accuracy(facts: Facts) -> list[str]:
    """How far the gradients of each side are from those in float64."""
    names = list(dict.fromkeys(name for cell in facts["nll"] for name in cell["differences_from_float64"]))
    rows = []
    for cell in facts["nll"]:
        found = cell["differences_from_float64"]
        worst = [f"{found[name]['gradients']:.1g}" if name in found else "" for name in names]
        rows.append([sizes(cell["size"]), *worst])
    return [
        "Largest difference of a gradient from float64, relative to the largest entry of its kind (at least 1); "
        "hmmlearn computes in float64.",
        "",
        *table([HEAD, *names], rows),
    ]


def floors(facts: Facts) -> list[str]:
    """The floor of each size and the distance of the measured time from it."""
    rows = []
    for kind in TITLES:
        for cell in facts.get(kind, []):
            if "floor" not in cell or "ms" not in cell["jobs"][CHAIN]:
                continue
            bound, kernel = cell["floor"], cell.get("kernel_ms")
            measured = cell["jobs"][CHAIN]["ms"]["median"]
            row = [TITLES[kind], sizes(cell["size"])]
            row += [f"{bound['operations']:.3g}", f"{bound['bytes']:.3g}", f"{bound['steps']:,}"]
            row += [number(bound["ms"][name]) for name in ("operations", "bytes", "steps")]
            row += [f"{number(measured)} = {number(measured / bound['floor_ms'])}x"]
            row += [f"{number(kernel)} = {number(kernel / bound['floor_ms'])}x" if kernel else ""]
            rows.append(row)
    if not rows:
        return []
    head = ["", HEAD, "operations", "bytes", "steps", "operations, ms", "bytes, ms", "steps, ms"]
    rates = facts["rates"]
    copies, steps = rates["copies"].values(), rates["steps"].values()
    return [
        "## Distance from the floor",
        "",
        f"Measured in the same run: {rates['multiply_adds']:.3g} float32 multiply-adds a second in a matrix product; "
        f"copies of the bytes of each size at {min(copies) / 1e9:,.0f} to {max(copies) / 1e9:,.0f} GB/s; a dependent "
        f"reduction over C values in {1e9 * min(steps):,.0f} to {1e9 * max(steps):,.0f} ns. The floor is the largest "
        "of the three times.",
        "",
        *table([*head, "call, ms and times the floor", "kernels alone"], rows),
    ]


def crfsuite(facts: Facts) -> list[str]:
    rows = [
        [sizes(cell["size"])]
        + [spread(cell["ms"][f"{kind}/{side}"]) for kind in ("tag", "nll") for side in ("ours", "peer")]
        + [f"{number(cell['ratios'][kind]['median'])}x" for kind in ("tag", "nll")]
        for cell in facts["crfsuite"]
    ]
    sides = [f"{what}, {side}" for what in ("tag", "evaluation") for side in ("Thalweg", "CRFsuite")]
    return [
        "## CRFsuite, ms",
        "",
        "Both on CRFsuite's features (one attribute of 50 at each position) and the weights that it learnt. Tagging: "
        "its `Tagger.tag` on prepared item sequences, Thalweg's lookup of the emissions and `mode`. Training: one "
        "evaluation of likelihood and gradient over all chains inside its L-BFGS; the same with Thalweg.",
        "",
        *table([HEAD, *sides, "tag", "evaluation"], rows),
    ]


def memory(facts: Facts) -> list[str]:
    rows = []
    for cell in facts["memory"]:
        for side, row in cell["sides"].items():
            name = f"({', '.join(f'{n:,}' for n in cell['size'])})"
            if "bytes" not in row:
                rows.append([name, side, row["note"], "", ""])
                continue
            over = (row["bytes"] - row["gradients"]) / cell["unit"]
            rows.append([name, side, mebibytes(row["bytes"]), number(max(over, 0.0)), number(row["seconds"])])
    return [
        "## Memory of likelihood and gradient",
        "",
        "At the highest point, beyond the inputs, the gradients included. The unit of the second figure is the size of "
        "the emissions, B T C numbers, and the gradients are taken off.",
        "",
        *table([HEAD, "", "MiB beyond the inputs", "emissions' sizes beyond gradients", "seconds"], rows),
    ]


def growth(facts: Facts) -> list[str]:
    slopes = [
        f"{TITLES[kind]} {facts['growth'][grown]['slope_of_larger_half'][kind]:.2f} in {grown}"
        for grown in ("B", "T")
        for kind in TITLES
    ]
    return [
        "## Growth",
        "",
        f"Slope of time on logarithmic axes over the larger half (1 is in proportion): {', '.join(slopes)}.",
        "",
    ]


def quantities(facts: Facts) -> list[str]:
    part = facts["quantities"]
    found = {name: row for name, row in part["rows"].items() if "ms" in row}
    rows = [[f"`{name}`", spread(row["ms"]), f"{row['relative']:.2f}"] for name, row in found.items()]
    head = ["", "median and quartiles", "relative to log Z with gradient"]
    return [f"## Other quantities at {sizes(part['size'])}, ms", "", *table(head, rows)]


def sparse(facts: Facts) -> list[str]:
    part = facts["sparse"]
    rows = [
        [TITLES[kind]]
        + [spread(part["rows"][f"{kind}/{how}"]["ms"]) for how in ("sparse", "dense")]
        + [f"{number(ratio['median'])}x"]
        for kind, ratio in part["ratios"].items()
    ]
    head = ["", "`SparseTransitions`", "dense with -inf", "faster"]
    return [f"## A band of {part['band']} diagonals at {sizes(part['size'])}, ms", "", *table(head, rows)]


def first_use(facts: Facts) -> list[str]:
    """First calls of new processes, beside a second one."""
    cells, title = facts["first_use"], "## First calls in a new process, ms"
    if isinstance(cells, dict):  # of a file that an earlier version wrote
        names = [name for name in cells["compiling"] if name != "import"]
        rows = [[how, *(number(1e3 * row[name]) for name in names)] for how, row in cells.items()]
        return [title, "", *table(["", *names], rows)]
    hows = ("compiling", "from the cache")
    rows = [
        [TITLES[cell["kind"]], sizes(cell["size"])]
        + [number(1e3 * cell[how]["first"]) for how in hows]
        + [number(1e3 * cell["from the cache"]["second"])]
        for cell in cells
    ]
    return [
        title,
        "",
        "Each in a process of its own, with torch and Thalweg imported and nothing else: first without any compiled "
        "kernel on the disk, then with those that were left there.",
        "",
        *table(["", HEAD, *hows, "second call"], rows),
    ]


def report(facts: Facts) -> list[str]:
    """All parts that were measured."""
    lines = heading(facts, ", float32; every result is checked against the others first")
    for kind in TITLES:
        if facts.get(kind):
            lines += compared(facts, kind) + (accuracy(facts) if kind == "nll" else [])
    lines += floors(facts)
    for part in (crfsuite, memory, growth, quantities, sparse, first_use):
        if facts.get(part.__name__):
            lines += part(facts)
    return lines
