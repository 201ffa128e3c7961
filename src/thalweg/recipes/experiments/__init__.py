"""Experiments that train no transducer: each is settings and a function from them to tables and pictures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thalweg.errors import ConfigError, nearest
from thalweg.files import write_atomically, write_text
from thalweg.recipes.experiments.autoencoder import AutoencoderSettings, run_autoencoder
from thalweg.recipes.experiments.capacity import CapacitySettings, run_capacity
from thalweg.recipes.experiments.decay import DecaySettings, run_decay
from thalweg.recipes.experiments.densities import DensitiesSettings, run_densities
from thalweg.recipes.experiments.digits import DigitsSettings, run_digits
from thalweg.recipes.experiments.findings import Findings, Say, Table
from thalweg.recipes.experiments.instances import InstancesSettings, run_instances
from thalweg.recipes.experiments.landscape import LandscapeSettings, run_landscape
from thalweg.recipes.experiments.large_margin import LargeMarginSettings, run_large_margin
from thalweg.recipes.experiments.losses import LossesSettings, run_losses
from thalweg.recipes.experiments.mixtures import MixturesSettings, run_mixtures
from thalweg.recipes.experiments.page import experiment_page
from thalweg.recipes.experiments.plots import house_style
from thalweg.recipes.experiments.score_space import ScoreSpaceSettings, run_score_space
from thalweg.recipes.experiments.tagging import TaggingSettings, run_tagging
from thalweg.tasks.config import config_from
from thalweg.tasks.yaml_text import parse_word

__all__ = ["EXPERIMENTS", "Experiment", "Order", "build_settings", "perform"]


@dataclass(frozen=True)
class Experiment:
    """A kind of settings, and what is done with them on the given seeds.

    ``reads_data``: the function takes the folder of known data sets as ``root`` too.

    >>> EXPERIMENTS["digits"].settings().stored
    100
    """

    settings: type
    run: Callable[..., Findings]
    reads_data: bool = False


# What a recipe may name as its `experiment`.
EXPERIMENTS: dict[str, Experiment] = {
    "autoencoder": Experiment(AutoencoderSettings, run_autoencoder),
    "capacity": Experiment(CapacitySettings, run_capacity),
    "decay": Experiment(DecaySettings, run_decay),
    "densities": Experiment(DensitiesSettings, run_densities),
    "digits": Experiment(DigitsSettings, run_digits),
    "instances": Experiment(InstancesSettings, run_instances),
    "landscape": Experiment(LandscapeSettings, run_landscape),
    "large-margin": Experiment(LargeMarginSettings, run_large_margin),
    "losses": Experiment(LossesSettings, run_losses),
    "mixtures": Experiment(MixturesSettings, run_mixtures),
    "score_space": Experiment(ScoreSpaceSettings, run_score_space),
    "tagging": Experiment(TaggingSettings, run_tagging, reads_data=True),
}


@dataclass(frozen=True)
class Order:
    """An experiment to be performed: which, under what name and title, with which settings and seeds.

    >>> Order("demo", "landscape", "A landscape", "", EXPERIMENTS["landscape"].settings(), (0,)).results.name
    'results-demo.json'
    """

    name: str
    experiment: str
    title: str
    note: str
    settings: Any
    seeds: tuple[int, ...]
    words: tuple[str, ...] = ()

    @property
    def results(self) -> Path:
        """Where the figures go, in the folder of the experiment."""
        return Path(f"results-{self.name}.json")

    @property
    def plain(self) -> dict[str, Any]:
        """The settings as JSON has them: lists for tuples, strings for keys."""
        return json.loads(json.dumps(dataclasses.asdict(self.settings)))

    def command(self, out: Path, seeds: int | None) -> list[str]:
        """The words that perform it again."""
        chosen = ["--seeds", str(seeds)] if seeds else []
        return ["thalweg", "recipe", "run", self.name, "--out", out.as_posix(), *chosen, *self.words]


def build_settings(experiment: str, raw: Mapping[str, Any], overrides: Sequence[str], *, where: str) -> Any:
    """Checked settings of an experiment, ``key=value`` words laid over them; values are YAML.

    >>> build_settings("digits", {"stored": 50}, ["noise=[0.5, 1]"], where="recipe x").noise
    (0.5, 1.0)
    >>> build_settings("digits", {}, ["storde=50"], where="recipe x")
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: recipe x: `storde` is not a setting; did you mean `stored`?
    """
    if experiment not in EXPERIMENTS:
        raise ConfigError(f"{where}: experiment `{experiment}` is not known; {nearest(experiment, EXPERIMENTS)}")
    given = dict(raw)
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{where}: expected `key=value`, got `{word}`")
        given[key.strip()] = parse_word(value)
    return config_from(given, EXPERIMENTS[experiment].settings, where=where)


def perform(
    order: Order,
    out: Path,
    *,
    seeds: int | None = None,
    fresh: bool = False,
    say: Say = lambda line: None,
    root: Path | None = None,
) -> tuple[Path, list[Table], list[Path]]:
    """Perform an experiment into a folder, unless the same one is already there.

    The folder ``out`` gets ``NAME-PICTURE.png``, the page ``NAME.html`` and, when all else is written,
    ``results-NAME.json``; ``root`` is the folder of known data sets.

    Returns:
        The page, the tables and the pictures' paths.
    """
    results = out / order.results
    if fresh:
        results.unlink(missing_ok=True)
    record = _record(results, order)
    if record is None:
        with house_style():
            chosen = EXPERIMENTS[order.experiment]
            found = chosen.run(order.settings, order.seeds, say, **{"root": root} if chosen.reads_data else {})
        for picture in found.pictures:
            write_atomically(_place(out, order, picture.name), picture.png)
        facts = {"seeds": list(order.seeds)} | {key.replace("_", " "): value for key, value in order.plain.items()}
        page = experiment_page(order.title, order.note, facts, found.tables, found.pictures, order.command(out, seeds))
        write_text(out / f"{order.name}.html", page)
        record = {
            "recipe": order.name,
            "experiment": order.experiment,
            "settings": order.plain,
            "seeds": list(order.seeds),
            "tables": [dataclasses.asdict(table) for table in found.tables],
            "pictures": [{"name": picture.name, "caption": picture.caption} for picture in found.pictures],
            "figures": found.figures,
        }
        write_text(results, json.dumps(record, indent=2) + "\n")
    tables = [Table(**table) for table in record["tables"]]
    return out / f"{order.name}.html", tables, [_place(out, order, picture["name"]) for picture in record["pictures"]]


def _place(out: Path, order: Order, picture: str) -> Path:
    return out / f"{order.name}-{picture}.png"


def _record(results: Path, order: Order) -> dict[str, Any] | None:
    """What an earlier run left, if it is the one asked for and whole; an error if it is another."""
    if not results.is_file():
        return None
    try:
        record = json.loads(results.read_text(encoding="utf-8"))
        before = {**record["settings"], "seeds": record["seeds"]}
        files = [results.parent / f"{order.name}.html"]
        files += [_place(results.parent, order, picture["name"]) for picture in record["pictures"]]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{results} is damaged; use --fresh to run it again or choose another --out") from None
    for key, value in {**order.plain, "seeds": list(order.seeds)}.items():
        if before.get(key) != value:
            raise ConfigError(
                f"{results.parent} was run with {key}={before.get(key)}, got {value}; use --fresh to run it again or "
                "choose another --out"
            )
    return record if all(file.is_file() for file in files) else None
