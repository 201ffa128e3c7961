"""Training and prediction beside yoyodyne: same architecture family, sizes, batch, data and threads, in one run.

    python benchmarks/training.py --data-root DATA --peer-python peer/bin/python --write

Both models are a bidirectional LSTM encoder and an LSTM decoder with additive attention, one layer each, 128 wide.
Rounds alternate (peer, Thalweg, peer, ...). Answers are checked before anything is timed; a wrong one ends the run.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from common import Spread, Worker, WrongAnswerError, machine, version_in, write_results

import thalweg
from thalweg.data import PairFile, guess_symbols, list_datasets, load_dataset, pad
from thalweg.data.alphabet import EOS
from thalweg.errors import ThalwegError
from thalweg.tasks import (
    SearchConfig,
    TrainResult,
    TransduceConfig,
    Transducer,
    apply_overrides,
    build_config,
    load,
    train,
)

PEER = "yoyodyne"
PEER_PIP = "pip install -c constraints.txt yoyodyne==0.5.27"
DRIVER = Path(__file__).resolve().parent / "peers" / "yoyodyne_run.py"
SIZES = {"embedding": 128, "hidden": 128, "dropout": 0.2, "batch_size": 32, "learning_rate": 3e-3}
GREEDY, BEAM = SearchConfig(search="greedy"), SearchConfig(search="beam", width=5)
TOLERANCE = 1e-4
PROBE_WORDS = 200
MEMORY_STEPS = (200, 700, 1200)


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


def prepare(folder: Path, root: Path | None, pairs: int, words: int) -> Data:
    """Write the parts of ar2en, or of a sample of CMUdict of its size where ar2en is not at hand."""
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
    return Data(name, folder, len(written["train"]), references, longest, (separators[0], separators[1]))


def our_config(data: Data, *, epochs: int, seed: int, overrides: Sequence[str] = ()) -> TransduceConfig:
    """The peer's settings in our words: plain Adam, no clipping, true previous symbols throughout."""
    raw = {
        "data": {"train": data.path("train"), "dev": data.path("dev")},
        "model": {
            "cell": "lstm",
            "attention": "additive",
            "embedding": SIZES["embedding"],
            "hidden": SIZES["hidden"],
            "dropout": SIZES["dropout"],
        },
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
    return build_config(apply_overrides(raw, overrides))


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
        config = our_config(self.data, epochs=self.epochs, seed=self.seed)
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

    def __init__(self, data: Data, python: str, folder: Path, seed: int, threads: int):
        self.data, self.worker = data, Worker(python, DRIVER, threads=threads)
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


def check_parameters(ours: int, peer: int) -> None:
    print(f"parameters: thalweg {ours:,}, {PEER} {peer:,}")
    if abs(ours - peer) > 0.15 * min(ours, peer):
        raise WrongAnswerError(f"expected models within 15 % of each other, got {ours:,} and {peer:,} parameters")


def check_scores(transducer: Transducer, words: Sequence[str]) -> float:
    """Largest difference between the scores of the search and :meth:`Seq2Seq.log_prob` of the same answers."""
    worst = 0.0
    for prediction in transducer.predict(words, k=5, how=BEAM):
        answers = prediction.answers
        sources = pad([transducer.source.encode(prediction.source)] * len(answers))
        ids = [transducer.target.alphabet.encode(answer.symbols) for answer in answers]
        # One that the length limit cut has no end symbol.
        ends = [[EOS] if answer.finished else [] for answer in answers]
        targets = pad([[*word, *end] for word, end in zip(ids, ends, strict=True)])
        with torch.no_grad():
            scores = transducer.model.log_prob(sources, targets).tolist()
        worst = max([worst, *(abs(a.log_prob - b) for a, b in zip(answers, scores, strict=True))])
        if not worst <= TOLERANCE:
            raise WrongAnswerError(
                f"beam search: expected the model's log-probabilities, got {worst:.2g} beside them "
                f"for `{prediction.source}`"
            )
    return worst


def check_lengths(data: Data, name: str, answers: dict[str, str]) -> float:
    """Mean length of the answers, which must be near that of the references."""
    gold = sum(data.symbols(targets[0]) for targets in data.references.values()) / len(data.references)
    found = sum(data.symbols(text) for text in answers.values()) / len(answers)
    if not gold / 2 <= found <= gold * 2:
        raise WrongAnswerError(f"{name}: expected answers of about {gold:.1f} symbols, got {found:.1f} on average")
    return found


def check_like_lengths(checks: dict[str, Any]) -> None:
    """Prediction costs by the symbol: neither side may have the easier work."""
    lengths = [checks[side]["mean_length"] for side in ("ours", "peer")]
    if max(lengths) > 1.25 * min(lengths):
        raise WrongAnswerError(f"expected answers of like length from both, got means of {lengths}")


def agreement(a: dict[str, str], b: dict[str, str]) -> float:
    """Share of equal answers among the words that both answered."""
    both = a.keys() & b.keys()
    return sum(a[word] == b[word] for word in both) / len(both)


def check_ours(ours: Ours, transducer: Transducer) -> dict[str, Any]:
    """The answers are those of the model, and beam search of width 1 is greedy search."""
    worst = check_scores(transducer, ours.data.words[:: max(1, len(ours.data.words) // PROBE_WORDS)])
    _, plain = ours.predict(transducer, GREEDY)
    _, narrow = ours.predict(transducer, SearchConfig(search="beam", width=1))
    # Batches are not alike, so near-ties may fall the other way.
    if agreement(plain, narrow) < 0.99:
        raise WrongAnswerError("expected beam search of width 1 to equal greedy search, got other answers")
    return {"score_difference": worst, "mean_length": check_lengths(ours.data, "thalweg", plain)}


def check_peer(peer: Peer) -> dict[str, Any]:
    """Plausible greedy answers, alike in both batch sizes; beam search at the batch size that is faster for it."""
    _, small = peer.predict(batch=32, width=1)
    _, large = peer.predict(batch=256, width=1)
    if agreement(small, large) < 0.99:
        raise WrongAnswerError(f"{PEER}: expected the same answers at batches of 32 and 256, got others")
    single, alone = peer.predict(batch=1, width=5, part="probe")
    batched, together = peer.predict(batch=32, width=5, part="probe")
    alike = agreement(alone, together)
    best = 32 if batched > single and alike >= 0.98 else 1
    print(f"{PEER} beam 5: {single:,.0f} words/s at batch 1, {batched:,.0f} at batch 32; batch {best} is timed")
    return {
        "mean_length": check_lengths(peer.data, PEER, small),
        "beam_batch": best,
        "beam_probe": {"batch_1": single, "batch_32": batched, "agreement": alike},
    }


def alternate(rounds: int, jobs: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Every job once a round, in turn."""
    values: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(1, rounds + 1):
        for name, job in jobs.items():
            values[name].append(job())
            print(f"  round {number}: {name} {values[name][-1]:,.0f}", flush=True)
    return values


def measure(args: argparse.Namespace, ours: Ours, peer: Peer | None) -> dict[str, Any]:
    """Time training, then check the models, then time prediction."""
    print("training, pairs per second")
    jobs: dict[str, Callable[[], float]] = {"training/peer": peer.train} if peer else {}
    values = alternate(args.rounds, {**jobs, "training/ours": ours.train})
    transducer = load(ours.run, device="cpu")
    checks: dict[str, Any] = {"ours": check_ours(ours, transducer)}
    greedy: dict[str, Callable[[], float]] = {}
    beam: dict[str, Callable[[], float]] = {}
    if peer:
        check_parameters(ours.parameters, peer.facts["parameters"])
        checks["peer"] = check_peer(peer)
        check_like_lengths(checks)
        predict, batch = peer.predict, checks["peer"]["beam_batch"]
        for size in (32, 256):
            greedy[f"greedy/peer batch {size}"] = lambda size=size: predict(batch=size, width=1)[0]
        beam[f"beam/peer batch {batch}"] = lambda: predict(batch=batch, width=5)[0]
    greedy["greedy/ours"] = lambda: ours.predict(transducer, GREEDY)[0]
    # The peer always gives all five answers; asked for the best alone, Thalweg may stop earlier.
    beam["beam/ours"] = lambda: ours.predict(transducer, BEAM, k=5)[0]
    beam["beam-best/ours"] = lambda: ours.predict(transducer, BEAM)[0]
    print("prediction, words per second")
    values |= alternate(args.rounds, {**greedy, **beam})
    return {"values": values, "checks": checks}


def resident() -> dict[str, float]:
    """MiB of this process now (where /proc tells) and at most so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    status = Path("/proc/self/statm")
    if not status.exists():
        return {"now": peak, "peak": peak}
    return {"now": int(status.read_text().split()[1]) * resource.getpagesize() / 2**20, "peak": peak}


def memory_growth(data: Data, run: Path, threads: int) -> dict[str, dict[str, float]]:
    """Memory after so many training steps, in a process that does nothing else."""
    torch.set_num_threads(threads)
    seen: dict[str, dict[str, float]] = {}
    steps = 0

    def listener(event: dict[str, Any]) -> None:
        nonlocal steps
        steps += event["event"] == "step"
        if event["event"] == "step" and steps in MEMORY_STEPS:
            seen[str(steps)] = resident()

    epochs = math.ceil(MEMORY_STEPS[-1] / math.ceil(data.pairs / SIZES["batch_size"]))
    train(our_config(data, epochs=epochs, seed=0), run, listener=listener)
    return seen


def measure_memory(data: Data, run: Path, threads: int) -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        seen = pool.submit(memory_growth, data, run, threads).result()
    first, last = seen[str(MEMORY_STEPS[0])], seen[str(MEMORY_STEPS[-1])]
    print(
        "memory of training: "
        + ", ".join(f"{row['now']:.1f} MiB (peak {row['peak']:.1f}) after {n} steps" for n, row in seen.items())
    )
    return {"mebibytes": seen, "growth": {key: last[key] / first[key] - 1 for key in first}}


def measure_accuracy(args: argparse.Namespace, data: Data, folder: Path, peer: Peer | None) -> dict[str, Any]:
    """Train both from the start for the same number of epochs; test accuracy of the epoch best on the dev data."""
    results: dict[str, Any] = {"epochs": args.epochs, "seed": args.seed, "overrides": args.ours}
    if peer:
        facts = peer.worker.ask("full", epochs=args.epochs)
        beam = peer.predict(batch=1, width=5)[1]
        found = {"greedy": peer.predict(batch=32, width=1)[1], "beam": beam}
        results["peer"] = facts | {how: data.accuracy(answers) for how, answers in found.items()}
        print(f"accuracy of {PEER}: {results['peer']}")
    ours = Ours(data, folder / "full", args.seed)
    config = our_config(data, epochs=args.epochs, seed=args.seed, overrides=args.ours)
    done = complete(train(config, ours.run))
    transducer = load(ours.run, device="cpu")
    parameters = sum(p.numel() for p in transducer.model.parameters())
    if peer:
        check_parameters(parameters, peer.facts["parameters"])
    found = {"greedy": ours.predict(transducer, GREEDY)[1], "beam": ours.predict(transducer, BEAM)[1]}
    results["ours"] = {
        "seconds": done.seconds,
        "best_epoch": done.best_epoch,
        "dev_accuracy": done.best["accuracy"],
        **{how: data.accuracy(answers) for how, answers in found.items()},
    }
    print(f"accuracy of thalweg: {results['ours']}")
    return results


def ratios(spreads: dict[str, Spread]) -> dict[str, dict[str, float]]:
    """Ours over the peer's, for each thing measured."""
    found = {}
    for name, spread in spreads.items():
        kind, _, who = name.partition("/")
        if who.startswith("peer"):
            for ours in (kind, f"{kind}-best"):
                if f"{ours}/ours" in spreads:
                    found[ours + who.removeprefix("peer")] = spreads[f"{ours}/ours"].over(spread)
    return found


def markdown(facts: dict[str, Any]) -> str:
    """Ratios for people; the figures they come from are in the JSON file."""
    titles = {
        "training": "training, pairs per second (batch 32)",
        "greedy": "greedy prediction, words per second",
        "beam": "beam-5 prediction with five answers, words per second",
        "beam-best": "the same where Thalweg gives the best answer alone",
    }
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
        title = titles[kind] + (f" (yoyodyne at batch {batch})" if batch else "")
        lines.append(f"| {title} | {ratio['median']:.1f}x | {ratio['low']:.1f}x to {ratio['high']:.1f}x |")
    growth = facts["memory"]["growth"]
    first, last = MEMORY_STEPS[0], MEMORY_STEPS[-1]
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
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--peer-python", default=sys.executable, help="Python that has yoyodyne; this one by default")
    add("--data-root", type=Path, help="folder that holds ar2en/; THALWEG_DATA by default")
    add("--threads", type=int, default=torch.get_num_threads(), help="torch threads of each side")
    add("--rounds", type=int, default=4, help="repeats of each measurement")
    add("--pairs", type=int, default=0, help="use so many training pairs only")
    add("--words", type=int, default=0, help="use so many test words only")
    add("--accuracy", action="store_true", help="also train both for --epochs and compare test accuracy (slow)")
    add("--epochs", type=int, default=15, help="of --accuracy")
    add("--seed", type=int, default=0)
    add("--ours", nargs="*", default=[], metavar="KEY=VALUE", help="settings of Thalweg's --accuracy training")
    add("--write", action="store_true", help="write benchmarks/results/training.json and .md")
    args = parser.parse_args()
    if args.rounds < 1 or args.threads < 1 or args.epochs < 1:
        parser.error("--rounds, --threads and --epochs must be at least 1")
    return args


def gather(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure everything that was asked for."""
    data = prepare(folder, args.data_root, args.pairs, args.words)
    print(f"data: {data.name}, {data.pairs:,} training pairs, {len(data.words):,} test words")
    facts: dict[str, Any] = {
        "machine": machine(),
        "threads": args.threads,
        "rounds": args.rounds,
        "settings": {**SIZES, "max_length": data.max_length, "optimiser": "Adam", "beam_width": BEAM.width},
        "data": {"name": data.name, "pairs": data.pairs, "words": len(data.words)},
    }
    versions = {
        "thalweg": thalweg.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    peer, found = None, version_in(args.peer_python, PEER)
    if found is None:
        print(f"{PEER} is not importable there and is left out; run: {PEER_PIP}, or give --peer-python")
    else:
        peer = Peer(data, args.peer_python, folder, args.seed, args.threads)
        if (built := peer.facts["versions"]["torch"]) != versions["torch"]:
            print(f"note: {PEER} runs on torch {built}, Thalweg on {versions['torch']}")
    try:
        ours = Ours(data, folder / "run", args.seed)
        measured = measure(args, ours, peer)
        spreads = {name: Spread.of(values) for name, values in measured["values"].items()}
        facts |= {
            "versions": {**versions, PEER: found, "peer": peer.facts["versions"] if peer else None},
            "parameters": {"ours": ours.parameters, "peer": peer.facts["parameters"] if peer else None},
            "checks": measured["checks"],
            "per_second": {name: spread.to_json() for name, spread in spreads.items()},
            "rounds_per_second": measured["values"],
            "ratios": ratios(spreads),
            "memory": measure_memory(data, folder / "memory", args.threads),
        }
        if args.accuracy:
            facts["accuracy"] = measure_accuracy(args, data, folder, peer)
    finally:
        if peer:
            peer.worker.close()
    print("\nper second, median [quartiles]")
    for name, spread in spreads.items():
        print(f"  {name:<24} {spread}")
    return facts


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    try:
        with tempfile.TemporaryDirectory() as folder:
            facts = gather(args, Path(folder))
    except WrongAnswerError as error:
        sys.exit(f"wrong answer, nothing is reported: {error}")
    except ThalwegError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted, nothing is reported")
    if not facts["ratios"]:
        print(f"\nwithout {PEER} there is no comparison" + (" to write" if args.write else ""))
        return
    text = markdown(facts)
    print("\n" + text)
    if args.write:
        write_results("training", facts, text)


if __name__ == "__main__":
    main()
