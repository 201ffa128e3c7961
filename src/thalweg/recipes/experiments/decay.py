"""What decay does to the weights of a letter model of English words, under three optimisers."""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.diagnostics.decay import DecayReport, measure_decay
from thalweg.learning.optimisers import OptimiserName, build_optimiser
from thalweg.recipes.experiments.findings import Findings, Picture, Say, Table, check_positive, mean_and_spread
from thalweg.recipes.experiments.plots import COLOURS, MUTED, canvas, tidy, to_png

# Symbols of the letter model: 0 ends a word and fills it up, 1 to 26 are the letters.
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, kw_only=True)
class DecaySettings:
    """Settings of the experiment.

    Attributes:
        words: of the CMU Pronouncing Dictionary, drawn for each seed.
        embedding, hidden: widths of the model, one GRU layer that guesses the next letter.
        batch: words in a step; steps: of training, all measured.
        adam_l2, adamw, sgd: learning rate and decay of each; ``sgd`` has momentum 0.9.

    >>> DecaySettings().adamw
    (0.003, 0.1)
    """

    words: int = 4000
    embedding: int = 16
    hidden: int = 48
    batch: int = 64
    steps: int = 300
    adam_l2: tuple[float, float] = (3e-3, 1e-4)
    adamw: tuple[float, float] = (3e-3, 0.1)
    sgd: tuple[float, float] = (0.3, 1e-4)

    def __post_init__(self) -> None:
        check_positive(self, "words", "embedding", "hidden", "batch", "steps", "adam_l2", "adamw", "sgd")


class LetterModel(nn.Module):
    """Log-probabilities of the next letter of words ``(B, T)``: embedding, GRU, linear layer.

    >>> LetterModel(4, 8)(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 5, 27])
    """

    def __init__(self, embedding: int, hidden: int):
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS) + 1, embedding)
        self.gru = nn.GRU(embedding, hidden, batch_first=True)
        self.output = nn.Linear(hidden, len(LETTERS) + 1)

    def forward(self, words: Tensor) -> Tensor:
        """``(B, T)`` symbols -> ``(B, T, 27)``."""
        return self.output(self.gru(self.embedding(words))[0]).log_softmax(-1)


@functools.cache
def _dictionary() -> tuple[str, ...]:
    from thalweg.data.text.named_pairs import open_pairs

    kept = {word for word in open_pairs("cmudict:train").sources() if set(word) <= set(LETTERS) and len(word) > 1}
    return tuple(sorted(kept))


def letter_words(count: int, seed: int) -> Tensor:
    """So many English words as symbols ``(count, T)``: 0 before the first letter, and after the last one.

    >>> words = letter_words(3, 0)
    >>> bool((words[:, 0] == 0).all()), bool((words[:, -1] == 0).all())
    (True, True)
    """
    known = _dictionary()
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))[:count].tolist()
    drawn = [known[place] for place in order]
    rows = torch.zeros(len(drawn), max(map(len, drawn)) + 2, dtype=torch.long)
    for row, word in zip(rows, drawn, strict=True):
        row[1 : len(word) + 1] = torch.tensor([LETTERS.index(letter) + 1 for letter in word])
    return rows


def measure_letters(settings: DecaySettings, name: OptimiserName, seed: int) -> tuple[DecayReport, Tensor]:
    """Train a letter model and measure its decay; also how often each symbol was read, ``(27,)``.

    >>> small = DecaySettings(words=50, embedding=2, hidden=3, batch=8, steps=2)
    >>> report, counts = measure_letters(small, "adamw", 0)
    >>> report.groups[0].name, round(report.groups[0].measured, 6), len(counts)
    ('matrices', 0.0003, 27)
    """
    words = letter_words(settings.words, seed)
    rate, decay = getattr(settings, name)
    draw = torch.Generator().manual_seed(seed)
    counts = torch.zeros(len(LETTERS) + 1)

    def loss(model: nn.Module) -> Tensor:
        batch = words[torch.randint(len(words), (settings.batch,), generator=draw)]
        batch = batch[:, : int((batch > 0).sum(1).max()) + 2]
        before, after = batch[:, :-1], batch[:, 1:]
        # The first end of a word is guessed too; what follows it is padding.
        real = (torch.cumsum(after == 0, 1) <= 1).float()
        counts.add_(torch.bincount(before[real > 0], minlength=len(counts)))
        picked = model(before).gather(2, after.unsqueeze(2)).squeeze(2)
        return -(picked * real).sum() / real.sum()

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LetterModel(settings.embedding, settings.hidden)
    optimiser = build_optimiser(name, model, learning_rate=rate, weight_decay=decay, momentum=0.9)
    return measure_decay(model, optimiser, loss, steps=settings.steps), counts


def run_decay(settings: DecaySettings, seeds: tuple[int, ...], say: Say) -> Findings:
    """Measure the shrinkage under each optimiser, on each seed."""
    names: tuple[OptimiserName, ...] = ("adam_l2", "adamw", "sgd")
    found: dict[str, Any] = {}
    for name in names:
        runs = [measure_letters(settings, name, seed) for seed in seeds]
        found[name] = [_figures(report, counts) for report, counts in runs]
        say(f"{name}: {runs[0][0].advice}")
    rows = [_table_row(settings, name, found[name]) for name in names]
    note = (
        f"A GRU letter model of {settings.words:,} English words, {settings.steps} steps of {settings.batch}, matrices "
        "alone decay. Rates are relative, a step; small and large: the tenth of the weights with the smallest and the "
        "largest gradients."
    )
    pictures = [draw_shrinkage({name: found[name][0] for name in names}), draw_letters(found, LETTERS)]
    return Findings([Table("Shrinkage by decay", rows, note)], pictures, found)


def _figures(report: DecayReport, counts: Tensor) -> dict[str, Any]:
    matrices = report.groups[0]
    rows = report.rates["embedding.weight"].median(dim=1).values
    return {
        "rule": matrices.rule,
        "measured": matrices.measured,
        "small": matrices.small,
        "large": matrices.large,
        "by_gradient": report.by_gradient(24),
        "letters": [
            {"symbol": place, "count": float(counts[place]), "rate": float(rows[place])} for place in range(len(rows))
        ],
    }


def _table_row(settings: DecaySettings, name: str, runs: list[dict[str, Any]]) -> dict[str, str]:
    rate, decay = getattr(settings, name)
    ratios = [run["small"] / run["large"] for run in runs]
    means = {key: statistics.fmean(run[key] for run in runs) for key in ("rule", "measured", "small", "large")}
    return {
        "optimiser": name,
        "learning rate": f"{rate:g}",
        "decay": f"{decay:g}",
        "by rule": f"{means['rule']:.2e}",
        "measured": f"{means['measured']:.2e}",
        "small gradients": f"{means['small']:.2e}",
        "large gradients": f"{means['large']:.2e}",
        "small / large": mean_and_spread(ratios, 2),
    }


_TITLES = {"adam_l2": "Adam, L2 in the gradient", "adamw": "AdamW, decoupled", "sgd": "SGD, momentum 0.9"}


def draw_shrinkage(runs: dict[str, dict[str, Any]]) -> Picture:
    """Shrinkage against gradient size, a line an optimiser; each over its mean, so that shapes compare."""
    figure, axes = canvas(1, 1, (6.4, 3.8))
    ax = axes[0, 0]
    for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
        bins = [(gradient, rate) for gradient, rate in run["by_gradient"] if gradient > 0 and rate > 0]
        if not bins:
            continue
        gradients, rates = zip(*bins, strict=True)
        middle = statistics.median(rates)
        ax.plot(gradients, [rate / middle for rate in rates], "o-", markersize=4, color=colour, label=_TITLES[name])
    ax.set(xscale="log", yscale="log")
    ax.axhline(1.0, color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    ax.set_xlabel("gradient of a weight (root mean square over the run)")
    ax.set_ylabel("shrinkage a step, over its median")
    tidy(ax)
    ax.legend(fontsize=8, loc="upper right", frameon=False)
    caption = (
        "Relative shrinkage by decay against the size of a weight's gradients: Adam with L2 spares large gradients."
    )
    return Picture("shrinkage", caption, to_png(figure))


def draw_letters(found: dict[str, list[dict[str, Any]]], letters: str) -> Picture:
    """Shrinkage of the embedding of each letter against how often it was read, for the two Adams."""
    names = [name for name in ("adam_l2", "adamw") if name in found]
    figure, axes = canvas(1, len(names), (8.4, 3.6), sharex=True, sharey=True)
    for ax, name, colour in zip(axes[0], names, COLOURS, strict=False):
        for place, letter in enumerate(letters, start=1):
            counts = [run["letters"][place]["count"] for run in found[name]]
            rates = [run["letters"][place]["rate"] for run in found[name]]
            if min(counts) <= 0:
                continue
            x, y = statistics.fmean(counts), statistics.fmean(rates)
            ax.plot(x, y, "o", markersize=3, color=colour)
            ax.annotate(letter, (x, y), xytext=(3, 3), textcoords="offset points", color=colour, fontsize=8.5)
        ax.set_xscale("log")
        ax.set_title(_TITLES[name], fontsize=10, loc="left")
        ax.set_xlabel("times the letter was read")
        tidy(ax)
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("shrinkage of its embedding, a step")
    caption = "Rare letters have small gradients: Adam with L2 shrinks their embeddings most, AdamW all alike."
    return Picture("letters", caption, to_png(figure))
