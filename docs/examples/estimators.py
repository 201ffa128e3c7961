"""Error of estimates from samples with and without replacement, drawn: python estimators.py [FILE]."""

import sys

import matplotlib.pyplot as plt
import torch

from thalweg.inference import TableModel, sample_sequences, stochastic_beam_search

torch.manual_seed(0)
transitions = (2 * torch.randn(4, 4, dtype=torch.float64)).log_softmax(dim=1)
model = TableModel.markov(transitions, bos=0)  # 4 symbols, sequences of 4: 256 of them
items, generator = torch.zeros(4000, dtype=torch.long), torch.Generator().manual_seed(0)


def zeros(found):
    """How often symbol 0 stands in each hypothesis, (B, K)."""
    return (found.tokens == 0).sum(dim=2).double()


everything = stochastic_beam_search(model, items[:1], n=256, max_length=4)
truth = everything.estimate(zeros(everything)).item()
sizes = [2, 4, 8, 16, 32, 64, 128]
errors: dict[str, list[float]] = {"with replacement": [], "without, unbiased": [], "without, normalised": []}
for n in sizes:
    drawn = sample_sequences(model, items, n=n, max_length=4, generator=generator)
    different = stochastic_beam_search(model, items, n=n, max_length=4, generator=generator)
    estimates = [
        zeros(drawn).mean(dim=1),
        different.estimate(zeros(different)),
        different.estimate(zeros(different), normalised=True),
    ]
    for row, estimate in zip(errors.values(), estimates, strict=True):
        row.append((estimate - truth).square().mean().sqrt().item())
    print(n, *(f"{row[-1]:.4f}" for row in errors.values()))

figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
places = {"with replacement": (4, 8, 8), "without, unbiased": (0, 10, 4), "without, normalised": (0, -4, -56)}
for (name, row), mark, colour in zip(errors.items(), "o^s", ("#808080", "#c2622d", "#1f5fa8"), strict=True):
    axes.plot(sizes, row, marker=mark, color=colour)
    at, right, up = places[name]
    axes.annotate(name, (sizes[at], row[at]), xytext=(right, up), textcoords="offset points", color=colour)
axes.set(xscale="log", yscale="log", xlabel="samples n", ylabel="root mean square error")
axes.set_xticks(sizes, [str(n) for n in sizes])
axes.minorticks_off()
axes.spines[["top", "right"]].set_visible(False)
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "estimators.png", dpi=120)
