"""What a look of `--watch gradients` costs: CPU time of training steps with and without it, in turn.

python docs/examples/watch_cost.py
"""

import time
from statistics import median

import torch

from thalweg.data import Batches, Example
from thalweg.diagnostics import GradientWatch
from thalweg.energies import Seq2Seq, Seq2SeqConfig

EVERY, STEPS = 50, 40
SHAPES = {
    "1 + 1 layers of 128": {"hidden": 128, "embedding": 128},
    "2 + 2 layers of 64": {"encoder_layers": 2, "decoder_layers": 2},
    "8 + 8 layers of 64": {"encoder_layers": 8, "decoder_layers": 8},
    "8 + 8 layers of 64, residual, layer norm": {
        "encoder_layers": 8,
        "decoder_layers": 8,
        "residual": "residual",
        "norm": "layer",
    },
}


def main() -> None:
    """Print a line a shape."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(4, 30, (32, 8), generator=draw).tolist()
    batch = next(Batches([Example(tuple(word), tuple(word)) for word in words], size=32).iterate(0))
    for name, shape in SHAPES.items():
        model = Seq2Seq(Seq2SeqConfig(**{"hidden": 64, "embedding": 64} | shape), source_size=30, target_size=30)
        optimiser, watch = torch.optim.AdamW(model.parameters(), fused=True), GradientWatch(EVERY)
        seconds: tuple[list[float], list[float]] = ([], [])
        for step in range(2 * STEPS):
            watched = step % 2 == 1
            began = time.process_time()
            if watched:
                watch.begin(model)
            optimiser.zero_grad(set_to_none=True)
            model.energy(batch.source, batch.target).mean().backward()
            if watched:
                watch.gradients()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            if watched:
                watch.finish()
            seconds[watched].append(time.process_time() - began)
        plain, looked = (median(each[5:]) for each in seconds)
        extra = (looked - plain) / (EVERY * plain)
        costs = f"{1e3 * plain:7.1f} ms a step, {1e3 * looked:7.1f} with a look"
        print(f"{name:<42}{costs}: {extra:.2%} at every {EVERY} steps")


if __name__ == "__main__":
    main()
