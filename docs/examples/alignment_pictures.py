"""The pictures of docs/alignments.md.

python docs/examples/alignment_pictures.py FOLDER
"""

import sys
from pathlib import Path

import torch

from thalweg.data import load_dataset
from thalweg.energies import ChunkAligner
from thalweg.inference import CTC
from thalweg.recipes.experiments.plots import canvas, house_style, to_png


def draw_words(path: Path) -> None:
    """The posterior of each cell of an alignment: how probable it is that a path passes."""
    pairs = [(tuple(p.source), tuple(p.target.split())) for p in load_dataset("cmudict", "dev").pairs[:3000]]
    aligner = ChunkAligner().fit(pairs)
    figure, axes = canvas(1, 3, (9.6, 3.4))
    for axis, (word, sounds) in zip(
        axes[0], (("knight", "N AY T"), ("phoenix", "F IY N IH K S"), ("queue", "K Y UW")), strict=True
    ):
        x, y = tuple(word), tuple(sounds.split())
        paths = aligner.paths([(x, y)])
        through = paths.marginals[0].sum(-1)
        through[0, 0] = 1.0
        axis.imshow(through, cmap="Blues", vmin=0, vmax=1, aspect="equal")
        best = paths.mode[0][paths.mode[0, :, 0] >= 0, :2]
        axis.plot([0, *best[:, 1].tolist()], [0, *best[:, 0].tolist()], color="tab:orange", marker="o", markersize=4)
        axis.set(xticks=range(len(y) + 1), yticks=range(len(x) + 1), xticklabels=["", *y], yticklabels=["", *x])
        axis.set_title(f"{word}, {sounds}", fontsize=9)
        axis.grid(False)
    path.write_bytes(to_png(figure))


def draw_frames(path: Path) -> None:
    """Frames of a spoken word made up: probabilities, and what the target makes of them."""
    frames, labels = 24, ["_", "K", "AE", "T"]
    draw = torch.Generator().manual_seed(3)
    centres = torch.tensor([[0.0], [5.0], [11.0], [18.0]])
    logits = 3 * torch.exp(-((torch.arange(frames) - centres) ** 2) / 6).T + 0.5 * torch.randn(
        frames, 4, generator=draw
    )
    logits[:, 0] = 1.4
    spread = CTC(logits.log_softmax(-1).unsqueeze(0), torch.tensor([[1, 2, 3]]))
    figure, axes = canvas(2, 1, (7.2, 3.2), sharex=True)
    for axis, values, title in (
        (axes[0, 0], logits.softmax(-1), "what the frames say"),
        (axes[1, 0], spread.marginals[0], "posterior, given the target K AE T; orange: forced alignment"),
    ):
        axis.imshow(values.T, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axis.set(yticks=range(4), yticklabels=labels)
        axis.set_title(title, fontsize=9)
        axis.grid(False)
    axes[1, 0].plot(range(frames), spread.mode[0], color="tab:orange", drawstyle="steps-mid")
    axes[1, 0].set_xlabel("frame")
    path.write_bytes(to_png(figure))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with house_style():
        draw_words(folder / "alignments-words.png")
        draw_frames(folder / "alignments-frames.png")
