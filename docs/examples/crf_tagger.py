"""Train a part-of-speech tagger with a CRF and plot what it thinks: python crf_tagger.py FOLDER."""

import sys
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

from thalweg.data import Alphabet, pad, read_conllu
from thalweg.layers import CRF, Recurrent

torch.manual_seed(0)
train, dev = (read_conllu(Path(sys.argv[1]) / f"atis-{part}.conllu") for part in ("train", "dev"))
counts = Counter(word for sentence in train for word in sentence.column("form"))
words = Alphabet([word for word, count in counts.items() if count > 1])  # the others teach what to do with new words
tags = sorted({tag for sentence in train + dev for tag in sentence.column("upos")})

embed, lstm = nn.Embedding(len(words), 64), Recurrent("lstm", 64, 64, bidirectional=True)
project, crf = nn.Linear(lstm.width, len(tags)), CRF(len(tags), batch_first=True)


def batch(sentences):
    """Emissions (B, T, C), gold tags (B, T) and mask (B, T) of some sentences."""
    x = pad([words.encode(sentence.column("form")) for sentence in sentences])
    gold = pad([[tags.index(tag) for tag in sentence.column("upos")] for sentence in sentences])
    return project(lstm(embed(x.tokens), lengths=x.lengths)[0]), gold.tokens, x.mask


optimiser = torch.optim.Adam(nn.ModuleList([embed, lstm, project, crf]).parameters(), lr=3e-3)
for _ in range(6):  # epochs
    for chosen in torch.randperm(len(train)).split(32):
        emissions, gold, mask = batch([train[i] for i in chosen])
        optimiser.zero_grad()
        (-crf(emissions, gold, mask, reduction="token_mean")).backward()
        optimiser.step()

with torch.no_grad():
    emissions, gold, mask = batch(dev)
    chain = crf.distribution(emissions, mask)
    best, marginals = chain.mode, chain.marginals
print(f"dev: {(best == gold)[mask].float().mean():.2%} of {int(mask.sum())} words right")

item = int(marginals.amax(-1).masked_fill(~mask, 1).amin(-1).argmin())  # the sentence with the least certain word
grid = marginals[item][mask[item]].T.numpy()  # (C, T)
figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
figure.colorbar(axes.imshow(grid, cmap="Blues", vmin=0, vmax=1, aspect="auto"), label="p(tag | sentence)")
axes.plot(gold[item][mask[item]].numpy(), "o", color="tab:red", fillstyle="none")  # circles: the gold tags
axes.set_xticks(range(grid.shape[1]), dev[item].column("form"), rotation=45, ha="right")
axes.set_yticks(range(len(tags)), tags)
figure.savefig("marginals.png", dpi=120)
