"""The results as Markdown."""

from __future__ import annotations

from benchmarks.harness.declaration import Facts

TITLES = {
    "training": "training, pairs per second (batch 32)",
    "greedy": "greedy prediction, words per second",
    "beam": "beam-5 prediction with five answers, words per second",
    "beam-best": "the same where Thalweg gives the best answer alone",
}


def report(facts: Facts) -> list[str]:
    """Ratios for people; the figures they come from are in the JSON file."""
    versions, sizes = facts["versions"], facts["parameters"]
    lines = [
        f"Thalweg {versions['thalweg']} over yoyodyne {versions['yoyodyne']} on {facts['data']['name']}, torch "
        f"{versions['torch']}, {facts['machine']['cpu']}, {facts['threads']} threads; the same run, "
        f"{facts['rounds']} alternating rounds. {sizes['ours']:,} and {sizes['peer']:,} parameters.",
        "",
        "| | ratio of medians | from quartiles |",
        "|---|---|---|",
    ]
    for name, ratio in facts["ratios"].items():
        kind, _, batch = name.partition(" batch ")
        title = TITLES[kind] + (f" (yoyodyne at batch {batch})" if batch else "")
        lines.append(f"| {title} | {ratio['median']:.1f}x | {ratio['low']:.1f}x to {ratio['high']:.1f}x |")
    growth = facts["memory"]["growth"]
    first, *_, last = map(int, facts["memory"]["mebibytes"])
    lines += [
        "",
        f"Memory of Thalweg's training from step {first} to step {last:,}: {growth['now']:+.1%} resident, "
        f"{growth['peak']:+.1%} at its peak.",
    ]
    if accuracy := facts.get("accuracy"):
        extra = f" Thalweg with {', '.join(accuracy['overrides'])}." if accuracy["overrides"] else ""
        lines += [
            "",
            f"Test word accuracy after {accuracy['epochs']} epochs (weights of the best dev epoch), "
            f"seed {accuracy['seed']}.{extra}",
            "",
            "| | greedy | beam 5 |",
            "|---|---|---|",
            *(
                f"| {name} | {accuracy[key]['greedy']:.4f} | {accuracy[key]['beam']:.4f} |"
                for name, key in (("yoyodyne", "peer"), ("Thalweg", "ours"))
            ),
        ]
    return lines
