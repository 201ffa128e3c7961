"""Training and prediction beside yoyodyne: same architecture family, sizes, batch, data and threads, in one run.

    python benchmarks/training.py --data-root DATA --peer-python peer/bin/python --write

Both models are a bidirectional LSTM encoder and an LSTM decoder with additive attention, one layer each, 128 wide.
Rounds alternate (peer, Thalweg, peer, ...). Answers are checked before anything is timed; a wrong one ends the run.
"""

from __future__ import annotations

import argparse
import math
import platform
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from common import Spread, WrongAnswerError, machine, version_in, write_results
from sides import PEER, PROBE_WORDS, SIZES, Data, Ours, Peer, complete, our_config, prepare

import thalweg
from thalweg.data import pad
from thalweg.data.text.alphabet import EOS
from thalweg.errors import ThalwegError
from thalweg.tasks import SearchConfig, Transducer, load, train

PEER_PIP = "pip install -c constraints.txt yoyodyne==0.5.27"
GREEDY, BEAM = SearchConfig(search="greedy"), SearchConfig(search="beam", width=5)
TOLERANCE = 1e-4
MEMORY_STEPS = (1000, 2000, 3000)


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
