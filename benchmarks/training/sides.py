"""The two sides: the same pairs, Thalweg through its public interface, yoyodyne in its process."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.declaration import Run, WrongAnswerError
from benchmarks.harness.process import Worker
from thalweg.data import PairFile, guess_symbols, list_datasets, load_dataset
from thalweg.tasks import SearchConfig, TrainResult, Transducer, build_config, train

PEER = "yoyodyne"
SIZES = {"embedding": 128, "hidden": 128, "dropout": 0.2, "batch_size": 32, "learning_rate": 3e-3}
PROBE_WORDS = 200
GREEDY, BEAM = SearchConfig(search="greedy"), SearchConfig(search="beam", width=5)


@dataclass(frozen=True)
class Data:
    """The same pairs for both systems, as files; test words are distinct, so that no cache can help."""

    name: str
    folder: Path
    pairs: int
    references: dict[str, list[str]]
    longest: int
    separators: tuple[str, str]

    @property
    def words(self) -> list[str]:
        """The distinct test sources."""
        return list(self.references)

    @property
    def facts(self) -> dict[str, Any]:
        """For the result file."""
        return {"name": self.name, "pairs": self.pairs, "words": len(self.words)}

    @property
    def max_length(self) -> int:
        """Symbols of an answer at most, end included: Thalweg's default, given to the peer too."""
        return 2 * self.longest + 10

    def path(self, part: str) -> str:
        """The file of a part."""
        return str(self.folder / f"{part}.tsv")

    def symbols(self, text: str) -> int:
        """Length of a target."""
        return len(text.split(" ")) if self.separators[1] else len(text)

    def accuracy(self, answers: dict[str, str]) -> float:
        """Share of the test pairs whose target is the answer to their source."""
        right = sum(targets.count(answers[word]) for word, targets in self.references.items())
        return right / sum(map(len, self.references.values()))


def prepare(run: Run, words: int = 0) -> Data:
    """Write the parts of ar2en, or of a sample of CMUdict of its size where ar2en is not at hand.

    Options say how many pairs and test words; ``words`` holds where none does, and 0 is for all.
    """
    folder, root = run.folder, run.args.data_root
    pairs, words = (2000, 40) if run.args.quick else (run.args.pairs, run.args.words or words)
    there = any(info.name == "ar2en" and info.available for info in list_datasets(root))
    name = "ar2en" if there else "cmudict"
    parts = {split: load_dataset(name, split, root=root) for split in ("train", "dev", "test")}
    limits = {"train": pairs, "dev": 0, "test": words}
    if not there:
        print("ar2en is not under --data-root or THALWEG_DATA; a sample of CMUdict takes its place")
        limits = {"train": pairs or 12_877, "dev": 1_431, "test": words or 1_590}
    source, target = guess_symbols(parts["train"].sources()), guess_symbols(parts["train"].targets())

    def rows(part: PairFile, limit: int) -> list[tuple[str, str]]:
        # The peer reads CSV with quotes, and does not normalise: both get text on which that cannot matter.
        clean = [
            (source.join(source.split(pair.source)), target.join(target.split(pair.target)))
            for pair in part.pairs
            if '"' not in pair.source + pair.target
        ]
        return random.Random(0).sample(clean, limit) if 0 < limit < len(clean) else clean

    written = {split: rows(part, limits[split]) for split, part in parts.items()}
    references: dict[str, list[str]] = {}
    for word, answer in written["test"]:
        references.setdefault(word, []).append(answer)
    written["words"] = [(word, answers[0]) for word, answers in references.items()]
    written["probe"] = random.Random(0).sample(written["words"], min(PROBE_WORDS, len(references)))
    for part, lines in written.items():
        text = "".join(f"{word}\t{answer}\n" for word, answer in lines)
        (folder / f"{part}.tsv").write_text(text, encoding="utf-8")
    separators = tuple(" " if side.kind == "spaced" else "" for side in (source, target))
    longest = 1 + max(len(target.split(answer)) for _, answer in written["train"])
    print(f"data: {name}, {len(written['train']):,} training pairs, {len(references):,} test words", flush=True)
    return Data(name, folder, len(written["train"]), references, longest, (separators[0], separators[1]))


def settings(data: Data, *, epochs: int, seed: int = 0, cell: str = "lstm") -> dict[str, Any]:
    """The peer's settings in our words: plain Adam, no clipping, true previous symbols throughout."""
    widths = {key: SIZES[key] for key in ("embedding", "hidden", "dropout")}
    return {
        "data": {"train": data.path("train"), "dev": data.path("dev")},
        "model": {"cell": cell, "attention": "additive", **widths},
        "training": {
            "epochs": epochs,
            "batch_size": SIZES["batch_size"],
            "optimiser": "adam_l2",
            "learning_rate": SIZES["learning_rate"],
            "weight_decay": 0.0,
            "clip": 0.0,
            "metric": "accuracy",
            "seed": seed,
            "device": "cpu",
            "checkpoint_every": 10**9,
        },
    }


def complete(result: TrainResult) -> TrainResult:
    """The result, unless Ctrl-C or a signal ended training early, which ends the benchmark too."""
    if not result.reason:
        raise KeyboardInterrupt
    return result


class Ours:
    """Thalweg through its public interface, timed like the peer."""

    def __init__(self, data: Data, run: Path, seed: int):
        self.data, self.run, self.seed, self.epochs = data, run, seed, 0
        self.parameters = 0

    def train(self) -> float:
        """Pairs per second of one more epoch, from the end of its first batch to the end of its last."""
        stamps: list[float] = []

        def listener(event: dict[str, Any]) -> None:
            if event["event"] == "step":
                stamps.append(time.perf_counter())
            self.parameters = event.get("parameters", self.parameters)

        self.epochs += 1
        config = build_config(settings(self.data, epochs=self.epochs, seed=self.seed))
        complete(train(config, self.run, resume=self.epochs > 1, listener=listener))
        return pairs_per_second(self.data, len(stamps), stamps[-1] - stamps[0])

    def predict(self, transducer: Transducer, how: SearchConfig, *, k: int = 1) -> tuple[float, dict[str, str]]:
        """Words per second with k answers to each, and the best answer to each word."""
        began = time.perf_counter()
        predictions = list(transducer.predict(self.data.words, k=k, how=how))
        seconds = time.perf_counter() - began
        return len(predictions) / seconds, {p.source: p.answers[0].text for p in predictions}


class Peer:
    """Yoyodyne in its own process."""

    def __init__(self, data: Data, python: str, folder: Path, *, threads: int, seed: int = 0, cell: str = "lstm"):
        self.data, self.worker = data, Worker(python, "yoyodyne", threads=threads)
        self.facts = self.worker.ask(
            "setup",
            train=data.path("train"),
            dev=data.path("dev"),
            directory=str(folder),
            source_sep=data.separators[0],
            target_sep=data.separators[1],
            max_length=data.max_length,
            threads=threads,
            seed=seed,
            cell=cell,
            **SIZES,
        )

    def train(self) -> float:
        """Pairs per second of one more epoch."""
        answer = self.worker.ask("train")
        return pairs_per_second(self.data, answer["batches"], answer["seconds"])

    def predict(self, *, batch: int, width: int, part: str = "words") -> tuple[float, dict[str, str]]:
        """Words per second, and the best answer to each word."""
        answer = self.worker.ask("predict", words=self.data.path(part), batch=batch, width=width)
        lines = Path(self.data.path(part)).read_text(encoding="utf-8").splitlines()
        words = [line.partition("\t")[0] for line in lines]
        if len(words) != len(answer["answers"]):
            raise WrongAnswerError(f"{PEER}: expected {len(words)} answers, got {len(answer['answers'])}")
        return len(words) / answer["seconds"], dict(zip(words, answer["answers"], strict=True))


def pairs_per_second(data: Data, batches: int, seconds: float) -> float:
    """The first batch is not timed, so its share of the pairs is not counted."""
    expected = math.ceil(data.pairs / SIZES["batch_size"])
    if batches != expected:
        raise WrongAnswerError(f"expected an epoch of {expected} batches, got {batches}")
    return data.pairs * (batches - 1) / batches / seconds
