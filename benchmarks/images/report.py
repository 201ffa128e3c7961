"""The results as Markdown."""

from __future__ import annotations

from benchmarks.harness.declaration import Facts
from benchmarks.harness.report import number, spread, table


def rates(facts: Facts) -> list[str]:
    """Images per second of every side, and ours over the better of the plain ones."""
    rows = []
    for cell in facts["cells"]:
        rows.append([cell["network"], f"{cell['check']['parameters']:,.0f}", str(cell["batch"]), cell["precision"]])
        rows[-1] += [spread(cell["per_second"][name]) for name in facts["sides"]]
        ratio = cell["ratio"]
        rows[-1].append(f"**{ratio['median']:.2f}x** ({ratio['low']:.2f} to {ratio['high']:.2f})")
    head = ["network", "parameters", "batch", "precision", *facts["sides"], "ours over plain"]
    return [
        "## Images per second of training",
        "",
        "Median and quartiles. Plain is the network of torch's own layers in a loop over a DataLoader that opens, "
        "decodes, crops, flips and normalises file by file (Pillow), with so many workers, the better one compared; "
        "constant is Thalweg's trainer on one batch again and again. Both sides start from the same weights; without "
        "dropout and random changes the losses of the first two steps agree (float64) to "
        f"{max(max(c['check']['first_loss'], c['check']['second_loss']) for c in facts['cells']):.0e}.",
        "",
        *table(head, rows),
    ]


def idle(facts: Facts) -> list[str]:
    """What data cost: the share of a step's time that a constant batch does not take."""
    names = list(facts["cells"][0]["idle"])
    rows = [
        [cell["network"], str(cell["batch"]), cell["precision"], number(cell["constant_ms"])]
        + [f"{cell['idle'][name]['share']:.1%} ({cell['idle'][name]['waited']:.1%})" for name in names]
        for cell in facts["cells"]
    ]
    return [
        "## Share of the time that goes to data",
        "",
        "One minus the time of an epoch with a constant batch over that with real ones, at the medians; in parentheses "
        "the share during which the loop waits for its next batch.",
        "",
        *table(["network", "batch", "precision", "constant, ms a step", *names], rows),
    ]


def report(facts: Facts) -> list[str]:
    """Everything that was measured."""
    versions = ", ".join(f"{name} {found}" for name, found in facts["versions"].items())
    first = facts["decoding"]
    return [
        f"{facts['machine']['title']}, {facts['threads']} threads. {versions}. One run, {facts['rounds']} alternating "
        f"rounds, {facts['images']:,} images of 48 x 48 (intel) an epoch, SGD with momentum.",
        "",
        *rates(facts),
        *idle(facts),
        f"Reading all {first['images']:,.0f} images takes {first['first']:.1f} s the first time (decoding) and "
        f"{first['again']:.2f} s from the cache.",
    ]
