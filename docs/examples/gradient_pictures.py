"""The pictures of docs/gradients.md.

python docs/examples/gradient_pictures.py FOLDER [NAME=RUN ...]

Without runs the pictures of the theory; with runs, trained with `--watch gradients`, also those of the real case: the
first run is the plain stack, the second the mended one.
"""

import json
import sys
from pathlib import Path

import torch

from thalweg.diagnostics import linear_recurrence, span_spectra, vanishing_bound
from thalweg.recipes.experiments.plots import COLOURS, MUTED, canvas, house_style, tidy, to_png
from thalweg.recipes.resolving import resolve
from thalweg.tasks.diagnosis.measures import diagnose

STEPS = 40


def draw_bound(path: Path) -> None:
    """R2: measured norms of dh_T/dh_0 beside delta^T."""
    draw = torch.Generator().manual_seed(0)
    raw = torch.randn(16, 16, generator=draw, dtype=torch.float64)
    inputs = list(0.3 * torch.randn(STEPS, 8, 16, generator=draw, dtype=torch.float64))
    state = torch.zeros(8, 16, dtype=torch.float64)
    figure, axes = canvas(1, 2, (8.4, 3.0), sharey=True)
    for axis, deltas, title in (
        (axes[0, 0], (0.7, 0.95), "delta < 1: gradients vanish"),
        (axes[0, 1], (1.5, 3.0), "delta > 1: not enough"),
    ):
        for colour, delta in zip(COLOURS, deltas, strict=False):
            W = delta * raw / torch.linalg.matrix_norm(raw, 2)
            report = span_spectra(lambda x, h, W=W: torch.tanh(h @ W.T + x), state, inputs, bound=vanishing_bound(W))
            axis.plot(report.spans, report.bound, ":", color=colour, label=f"delta^T, delta = {delta:g}")
            axis.plot(report.spans, report.largest.median(1).values, color=colour, label="measured")
        axis.set(yscale="log", xlabel="T, steps", title=title, ylim=(1e-16, 1e20))
        tidy(axis)
        axis.legend(fontsize=8)
    axes[0, 0].set_ylabel("norm of dh_T/dh_0")
    path.write_bytes(to_png(figure))


def draw_linear(path: Path) -> None:
    """R3: norms of W^t beside |lambda|^t."""
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    matrices = {
        "rotation, |λ| = 1.05": 1.05 * turn,
        "rotation, |λ| = 1": turn,
        "Jordan block, λ = 0.9": torch.tensor([[0.9, 1.0], [0.0, 0.9]], dtype=torch.float64),
        "far from normal, λ = 0.9, 0.5": torch.tensor([[0.9, 8.0], [0.0, 0.5]], dtype=torch.float64),
        "diagonal, λ = 0.9, 0.5": torch.diag(torch.tensor([0.9, 0.5], dtype=torch.float64)),
    }
    figure, axes = canvas(1, 1, (6.4, 3.0))
    axis = axes[0, 0]
    for colour, (name, W) in zip(COLOURS, matrices.items(), strict=False):
        axis.plot(range(STEPS + 1), linear_recurrence(W).norms(STEPS), color=colour, label=name)
    axis.plot(range(STEPS + 1), [0.9**t for t in range(STEPS + 1)], ":", color=MUTED, label="0.9^t")
    axis.set(yscale="log", xlabel="t, steps", ylabel="norm of W^t")
    tidy(axis)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    path.write_bytes(to_png(figure))


def draw_deep(path: Path, runs: dict[str, Path]) -> None:
    """The real case: gradients and signal at the start, and training before and after."""
    figure, axes = canvas(1, 3, (10.2, 3.0))
    names = list(runs)
    for name, style in ((names[0], "-"), (names[1], "--")):
        flow = diagnose(resolve(runs[name], fresh=True).subject(device="cpu")).flow
        for colour, (stack, sites) in zip(COLOURS, flow.stacks().items(), strict=False):
            label = f"{stack}, {name}"
            depths = [site.depth for site in sites]
            axes[0, 0].plot(depths, [site.gradient for site in sites], style, color=colour, label=label)
            axes[0, 1].plot(depths, [site.spread for site in sites], style, color=colour)
    axes[0, 0].set(yscale="log", xlabel="layer", title="gradient in the states, at the start")
    axes[0, 1].set(yscale="log", xlabel="layer", title="states differ between inputs by")
    axes[0, 0].legend(fontsize=7)
    for colour, (name, run) in zip(COLOURS, runs.items(), strict=False):
        events = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        seen = [event for event in events if event["event"] == "gradients"]
        axes[0, 2].plot([event["step"] for event in seen], [event["loss"] for event in seen], color=colour, label=name)
    axes[0, 2].set(xlabel="step", title="training loss, nats a symbol", ylim=(0, 5.2))
    axes[0, 2].legend(fontsize=7, ncols=2, loc="upper right")
    for axis in axes[0]:
        tidy(axis)
    path.write_bytes(to_png(figure))


def main() -> None:
    """Draw into the folder that is named."""
    folder = Path(sys.argv[1])
    runs = {name: Path(run) for name, _, run in (word.partition("=") for word in sys.argv[2:])}
    with house_style():
        draw_bound(folder / "gradients-bound.png")
        draw_linear(folder / "gradients-linear.png")
        if len(runs) > 1:
            draw_deep(folder / "gradients-deep.png", runs)


if __name__ == "__main__":
    main()
