"""The results of ``chain.py`` as Markdown."""

from __future__ import annotations

from typing import Any

from chain_growth import TITLES
from chain_sides import CHAIN, MODULE


def number(value: float) -> str:
    """Three figures, no exponent."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def spread(facts: dict[str, float]) -> str:
    return f"{number(facts['median'])} [{number(facts['low'])}, {number(facts['high'])}]"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def mebibytes(count: float) -> str:
    return number(count / 2**20)


def comparison(facts: dict[str, Any], kind: str) -> list[str]:
    """Milliseconds of every side, and how many times faster Thalweg is."""
    cells = facts[kind]
    names = list(dict.fromkeys(name for cell in cells for name in cell["jobs"]))
    peers = [name for name in names if name not in (CHAIN, MODULE)]
    rows = []
    for cell in cells:
        row = [f"({', '.join(map(str, cell['size']))})"]
        for name in names:
            job = cell["jobs"].get(name, {})
            if "ms" not in job:
                row.append(job.get("note") or "none")
                continue
            text = spread(job["ms"]) + (f" ({job['note']})" if job["note"] else "")
            ratio = cell["ratios"].get(name)
            row.append(text + (f", **{number(ratio['median'])}x**" if ratio else ""))
        rows.append(row)
    door = f"pytorch-crf is compared with `{MODULE.split()[1]}` (the same call), the others with `{CHAIN.split()[1]}`."
    if kind == "viterbi":
        door += (
            f" `{CHAIN.split()[1]}.mode` is a tensor of labels, `{MODULE.split()[1]}.decode` lists as pytorch-crf's."
        )
    notes = [f"- {name}: {facts['peers'][name]['note']}." for name in peers if name in facts["peers"]]
    return [
        f"## {TITLES[kind].capitalize()}, ms",
        "",
        f"Median and quartiles. {door}",
        "",
        *table(["(B, T, C)", *names], rows),
        *notes,
        "",
    ]


def accuracy(facts: dict[str, Any]) -> list[str]:
    """How far the gradients of each side are from those in float64."""
    cells = facts.get("nll", [])
    names = list(dict.fromkeys(name for cell in cells for name in cell["differences_from_float64"]))
    if not names:
        return []
    rows = []
    for cell in cells:
        found = cell["differences_from_float64"]
        worst = [f"{found[name]['gradients']:.1g}" if name in found else "" for name in names]
        rows.append([f"({', '.join(map(str, cell['size']))})", *worst])
    return [
        "Largest difference of a gradient from float64, relative to the largest entry of its kind (at least 1); "
        "hmmlearn computes in float64.",
        "",
        *table(["(B, T, C)", *names], rows),
    ]


def floors(facts: dict[str, Any]) -> list[str]:
    """The floor of each size and the distance of the measured time from it."""
    rows = []
    for kind in TITLES:
        for cell in facts.get(kind, []):
            if "floor" not in cell or "ms" not in cell["jobs"][CHAIN]:
                continue
            bound, kernel = cell["floor"], cell.get("kernel_ms")
            measured = cell["jobs"][CHAIN]["ms"]["median"]
            row = [TITLES[kind], f"({', '.join(map(str, cell['size']))})"]
            row += [f"{bound['operations']:.3g}", f"{bound['bytes']:.3g}", f"{bound['steps']:,}"]
            row += [number(bound["ms"][name]) for name in ("operations", "bytes", "steps")]
            row += [f"{number(measured)} = {number(measured / bound['floor_ms'])}x"]
            row += [f"{number(kernel)} = {number(kernel / bound['floor_ms'])}x" if kernel else ""]
            rows.append(row)
    if not rows:
        return []
    head = ["", "(B, T, C)", "operations", "bytes", "steps", "operations, ms", "bytes, ms", "steps, ms"]
    rates = facts["rates"]
    return [
        "## Distance from the floor",
        "",
        f"Measured in the same run: {rates['multiply_adds']:.3g} float32 multiply-adds a second in a matrix product; "
        f"copies of the bytes of each size at {min(rates['copies'].values()) / 1e9:,.0f} to "
        f"{max(rates['copies'].values()) / 1e9:,.0f} GB/s; a dependent reduction over C values in "
        f"{1e9 * min(rates['steps'].values()):,.0f} to {1e9 * max(rates['steps'].values()):,.0f} ns. The floor is the "
        "largest of the three times.",
        "",
        *table([*head, "call, ms and times the floor", "kernels alone"], rows),
    ]


def crfsuite(facts: dict[str, Any]) -> list[str]:
    if not facts.get("crfsuite"):
        return []
    rows = [
        [f"({', '.join(map(str, cell['size']))})"]
        + [spread(cell["ms"][f"{kind}/{side}"]) for kind in ("tag", "nll") for side in ("ours", "peer")]
        + [f"{number(cell['ratios'][kind]['median'])}x" for kind in ("tag", "nll")]
        for cell in facts["crfsuite"]
    ]
    return [
        "## CRFsuite, ms",
        "",
        "Both on CRFsuite's features (one attribute of 50 at each position) and the weights that it learnt. Tagging: "
        "its `Tagger.tag` on prepared item sequences, Thalweg's lookup of the emissions and `mode`. Training: one "
        "evaluation of likelihood and gradient over all chains inside its L-BFGS; the same with Thalweg.",
        "",
        *table(
            [
                "(B, T, C)",
                "tag, Thalweg",
                "tag, CRFsuite",
                "evaluation, Thalweg",
                "evaluation, CRFsuite",
                "tag",
                "evaluation",
            ],
            rows,
        ),
    ]


def memory(facts: dict[str, Any]) -> list[str]:
    if not facts.get("memory"):
        return []
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
        *table(["(B, T, C)", "", "MiB beyond the inputs", "emissions' sizes beyond gradients", "seconds"], rows),
    ]


def others(facts: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    if growth := facts.get("growth"):
        slopes = [
            f"{TITLES[kind]} {growth[grown]['slope_of_larger_half'][kind]:.2f} in {grown}"
            for grown in ("B", "T")
            for kind in TITLES
        ]
        lines += [
            "## Growth",
            "",
            f"Slope of time on logarithmic axes over the larger half (1 is in proportion): {', '.join(slopes)}.",
            "",
        ]
    if quantities := facts.get("quantities"):
        size = ", ".join(map(str, quantities["size"]))
        rows = [
            [f"`{name}`", spread(row["ms"]), f"{row['relative']:.2f}"]
            for name, row in quantities["rows"].items()
            if "ms" in row
        ]
        lines += [f"## Other quantities at ({size}), ms", ""]
        lines += table(["", "median and quartiles", "relative to log Z with gradient"], rows)
    if sparse := facts.get("sparse"):
        size = ", ".join(map(str, sparse["size"]))
        rows = [
            [
                TITLES[kind],
                *(spread(sparse["rows"][f"{kind}/{how}"]["ms"]) for how in ("sparse", "dense")),
                f"{number(ratio['median'])}x",
            ]
            for kind, ratio in sparse["ratios"].items()
        ]
        lines += [f"## A band of {sparse['band']} diagonals at ({size}), ms", ""]
        lines += table(["", "`SparseTransitions`", "dense with -inf", "faster"], rows)
    return lines + first_use(facts)


def first_use(facts: dict[str, Any]) -> list[str]:
    """First calls of new processes, beside a second one."""
    cells = facts.get("first_use")
    if not cells:
        return []
    if isinstance(cells, dict):  # of a file that an earlier version wrote
        names = [name for name in cells["compiling"] if name != "import"]
        rows = [[how, *(number(1e3 * row[name]) for name in names)] for how, row in cells.items()]
        return ["## First calls in a new process, ms", "", *table(["", *names], rows)]
    hows = ("compiling", "from the cache")
    rows = [
        [TITLES[cell["kind"]], f"({', '.join(map(str, cell['size']))})"]
        + [number(1e3 * cell[how]["first"]) for how in hows]
        + [number(1e3 * cell["from the cache"]["second"])]
        for cell in cells
    ]
    return [
        "## First calls in a new process, ms",
        "",
        "Each in a process of its own, with torch and Thalweg imported and nothing else: first without any compiled "
        "kernel on the disk, then with those that were left there.",
        "",
        *table(["", "(B, T, C)", *hows, "second call"], rows),
    ]


def markdown(facts: dict[str, Any]) -> str:
    """All parts that were measured."""
    versions = ", ".join(f"{name} {found}" for name, found in facts["versions"].items())
    lines = [
        f"{facts['machine']['title']}, {facts['threads']} threads. {versions}. "
        + ("One run" if facts["one_run"] else "Parts from several runs, sides of a table from one")
        + f", alternating rounds (up to {facts['rounds']}), float32; every result is checked against the others first.",
        "",
        *(f"- {line}" for line in facts["left_out"]),
        "",
    ]
    for kind in TITLES:
        if facts.get(kind):
            lines += comparison(facts, kind) + (accuracy(facts) if kind == "nll" else [])
    lines += floors(facts) + crfsuite(facts) + memory(facts) + others(facts)
    return "\n".join(lines).rstrip() + "\n"
