"""Pictures of score spaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from thalweg.energies.mixture.model import GaussianMixture
from thalweg.energies.score_space import ScoreSpace
from thalweg.recipes.experiments.findings import Picture
from thalweg.recipes.experiments.plots import COLOURS, MUTED, canvas, tidy, to_png


def draw_accuracies(figures: dict[str, Any]) -> Picture:
    """Accuracy against the number of components, and with those chosen on dev, with intervals."""
    figure, axes = canvas(1, 2, (9.6, 3.7), width_ratios=(1.25, 1))
    left, right = axes[0]
    names = list(figures["by components"])
    for place, name in enumerate(names):
        ends = figures["by components"][name]
        if name.endswith("all"):
            continue
        sizes, middle = [int(size) for size in ends], np.array(list(ends.values()))
        colour = COLOURS[place]
        left.fill_between(sizes, middle[:, 1], middle[:, 2], color=colour, alpha=0.15, linewidth=0)
        left.plot(sizes, middle[:, 0], "o-", color=colour, markersize=4, label=_words(name))
    ticks = sorted({int(size) for ends in figures["by components"].values() for size in ends})
    left.set_xscale("log", base=2)
    left.set_xticks(ticks, [str(size) for size in ticks])
    left.minorticks_off()
    left.set(xlabel="components of each digit's mixture", ylabel="accuracy on test digits")
    left.legend(fontsize=8, loc="lower right")
    for place, name in enumerate(names):
        middle, low, high = figures["methods"][name]["accuracy"]
        spot = len(names) - place
        right.plot([low, high], [spot, spot], color=COLOURS[place], linewidth=2.5, solid_capstyle="round")
        right.plot(middle, spot, "o", color=COLOURS[place], markersize=6)
        right.annotate(f"{middle:.3f}", (middle, spot), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    right.set_yticks(range(len(names), 0, -1), [_words(name) for name in names])
    right.set(xlabel="accuracy, components chosen", ylim=(0.5, len(names) + 0.7))
    tidy(left)
    tidy(right)
    right.grid(axis="x", color="#dfe5e3", linewidth=0.8)
    caption = (
        "Digits as lists of dark pixels. Left: in the derivatives of ten mixtures a linear machine finds more than "
        "Bayes' rule does with the mixtures themselves, and second derivatives tell more than the first ones of the "
        "same mixtures. Right: mixtures alone with the components that are best on dev, score spaces with those "
        "that BIC chose. Bands and bars are 95 % intervals."
    )
    return Picture("accuracies", caption, to_png(figure))


def draw_pulls(
    digits: Sequence[tuple[np.ndarray, int]], models: Sequence[GaussianMixture], others: Sequence[int]
) -> Picture:
    """Digits under their own mixture and under another: ellipses, and derivatives in the means as arrows."""
    from matplotlib.patches import Ellipse

    figure, axes = canvas(2, len(digits), (2.5 * len(digits), 5.2), sharex=True, sharey=True)
    for column, ((points, label), other) in enumerate(zip(digits, others, strict=True)):
        for ax, which in zip(axes[:, column], (label, other), strict=True):
            model = models[which]
            ax.scatter(points[:, 1], points[:, 0], s=42, marker="s", color="#c9d2d0", linewidths=0)
            pulls = ScoreSpace(model).fit_transform([points]).reshape(-1, 2)
            means, variances = (each.detach().numpy() for each in (model.means_, model.covariances_))
            for place, (mean, variance, pull) in enumerate(zip(means, variances, pulls, strict=True)):
                colour = COLOURS[place % len(COLOURS)]
                size = 2 * np.sqrt(variance)
                ax.add_patch(Ellipse((mean[1], mean[0]), size[1], size[0], fill=False, edgecolor=colour, linewidth=1.3))
                ax.annotate(
                    "",
                    (mean[1] + pull[1] / 4, mean[0] + pull[0] / 4),
                    (mean[1], mean[0]),
                    arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0},
                )
            word = "its own mixture" if which == label else f"the mixture of {which}s"
            ax.set_title(f"a {label} under {word}", fontsize=8, color=MUTED)
            ax.set(aspect="equal", xlim=(-4.6, 4.6), ylim=(4.6, -4.6), xticks=[], yticks=[])
            ax.spines[:].set_color("#c9d2d0")
    caption = (
        "Derivatives in the means: where each component would have to go for the digit to be more probable. They are "
        "short under the mixture of the digit's own class and long where the mixture expects other strokes; the "
        "machine sees those of all ten. Ellipses are one standard deviation."
    )
    return Picture("pulls", caption, to_png(figure))


def _words(name: str) -> str:
    return name if name.startswith("mixtures") else f"score space, {name}"
