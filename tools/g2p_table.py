"""Word error rates on the dev data of SIGMORPHON 2021 Task 1: languages x models, means over seeds, ensembles.

    python tools/g2p_table.py --data-root data --out runs/g2p --workers 16
    python tools/g2p_table.py --data-root data --out runs/g2p --levels low --models lstm-attention,monotonic --seeds 0
    python tools/g2p_table.py --data-root data --out runs/g2p --models monotonic,monotonic/dropout=0.3/epochs=60

A model is a preset, with settings after strokes. Each cell is trained as `thalweg train` would, and measured with a
beam of 5; what is done already is not done again, and a run that was cut goes on. The data are fetched as the page on
data says. Writes `table.md` and `table.json` into `--out`, and prints the table. With workers, each has one CPU thread;
`--device cuda` lets them share a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

MODELS = ("auto", "lstm-attention", "monotonic", "monotonic-zeroth", "transformer", "transformer-rotary")


@dataclass(frozen=True)
class Cell:
    """One training: a language of a level, a model as it is written, a seed."""

    level: str
    language: str
    model: str
    seed: int

    def run(self, out: Path) -> Path:
        """Its run directory."""
        return out / self.level / self.language / self.model.replace("/", "_") / f"seed-{self.seed}"


def languages(root: Path, levels: Sequence[str]) -> list[tuple[str, str]]:
    """Level and language of every training file that is there."""
    found = [(level, path) for level in levels for path in sorted((root / "g2p" / level).glob("*_train.tsv"))]
    return [(level, path.name.removesuffix("_train.tsv")) for level, path in found]


def measure(cell: Cell, root: Path, out: Path, device: str) -> tuple[Cell, float, float]:
    """Train and measure one cell: its word error rate, and the seconds that its training took."""
    from thalweg.tasks import apply_overrides, evaluate, train

    run = cell.run(out)
    done = run / "cell.json"
    if not done.exists():
        preset, *words = cell.model.split("/")
        data = {split: f"g2p/{cell.level}/{cell.language}:{split}" for split in ("train", "dev")}
        training = {"seed": cell.seed, "threads": 1, "device": device}
        settings = apply_overrides({"data": data, "model": preset, "training": training}, words)
        result = train(settings, run, resume=True, root=root)
        found = evaluate(run, data["dev"], root=root, device=device).scores["wer"].value
        done.write_text(json.dumps({"wer": found, "seconds": result.seconds}))
    facts = json.loads(done.read_text())
    return cell, facts["wer"], facts["seconds"]


def together(cells: Sequence[Cell], root: Path, out: Path, device: str) -> float:
    """The word error rate of the mean of several seeds' probabilities."""
    from thalweg.tasks import evaluate

    first, *others = [cell.run(out) for cell in cells]
    dev = f"g2p/{cells[0].level}/{cells[0].language}:dev"
    name = f"ensemble-{len(cells)}"
    return evaluate(first, dev, root=root, device=device, ensemble=others, name=name).scores["wer"].value


def lines(rates: dict[Cell, float], joint: dict[Cell, float], models: Sequence[str]) -> Iterator[str]:
    """The table: a row for each language, its mean over seeds by model, and the ensembles' where there are several."""
    heads = [f"{model}{', ensemble' if kind is joint else ''}" for kind in (rates, joint) if kind for model in models]
    yield f"| level | language | {' | '.join(heads)} |"
    yield "|---|---|" + "---|" * len(heads)
    places = list(dict.fromkeys((cell.level, cell.language) for cell in rates))
    rows = [(*place, _row(rates, joint, models, place)) for place in places]
    for level in dict.fromkeys(level for level, _ in places):
        own = [row for row in rows if row[0] == level]
        for _, language, values in own:
            yield f"| {level} | {language} | {' | '.join(f'{value:.3f}' for value in values)} |"
        means = [fmean(row[2][n] for row in own) for n in range(len(heads))]
        yield f"| {level} | **mean of {len(own)}** | {' | '.join(f'**{value:.3f}**' for value in means)} |"


def _row(
    rates: dict[Cell, float], joint: dict[Cell, float], models: Sequence[str], place: tuple[str, str]
) -> list[float]:
    found = []
    for kind in (rates, joint):
        for model in models if kind else ():
            own = [value for cell, value in kind.items() if (cell.level, cell.language, cell.model) == (*place, model)]
            found.append(fmean(own) if own else float("nan"))
    return found


def main() -> None:
    """Train and measure all cells, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--levels", default="low,medium,high")
    parser.add_argument("--languages", default="", help="some of them, by comma; all that are there by default")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    models, seeds = given.models.split(","), [int(seed) for seed in given.seeds.split(",")]
    places = languages(given.data_root, given.levels.split(","))
    places = [place for place in places if not given.languages or place[1] in given.languages.split(",")]
    if not places:
        parser.error(f"{given.data_root}: expected g2p/LEVEL/LANGUAGE_train.tsv, got none; see the page on data")
    shared = (given.data_root, given.out, given.device)
    cells = [Cell(*place, model, seed) for place in places for model in models for seed in seeds]
    rates: dict[Cell, float] = {}
    with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(measure, cell, *shared) for cell in cells]):
            cell, rate, seconds = done.result()
            rates[cell] = rate
            print(f"{len(rates)}/{len(cells)} {cell.run(given.out)} WER {rate:.3f} in {seconds:.0f} s", flush=True)
    rates = {cell: rates[cell] for cell in cells}
    groups = [[Cell(*place, model, seed) for seed in seeds] for place in places for model in models]
    joint = {group[0]: together(group, *shared) for group in groups} if len(seeds) > 1 else {}
    table = list(lines(rates, joint, models))
    (given.out / "table.md").write_text("\n".join(table) + "\n")
    records = [{**vars(cell), "wer": rate} for cell, rate in rates.items()]
    (given.out / "table.json").write_text(json.dumps(records, indent=1) + "\n")
    print("\n".join(table))


if __name__ == "__main__":
    main()
