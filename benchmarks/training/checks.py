"""Nothing is timed that is wrong: scores, widths, lengths and sizes of both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness.declaration import WrongAnswerError, demand
from benchmarks.training.sides import BEAM, GREEDY, PEER, PROBE_WORDS, Data, Ours, Peer
from thalweg.data import pad
from thalweg.data.text.alphabet import EOS
from thalweg.tasks import SearchConfig, Transducer

TOLERANCE = 1e-4


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
        demand(f"beam search for `{prediction.source}`, scores beside the model's log-probabilities", worst, TOLERANCE)
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
