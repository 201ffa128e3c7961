"""How far the tagger of crf_tagger.py can be trusted: python crf_tagger_trust.py FOLDER."""

import runpy
from collections import Counter, defaultdict
from pathlib import Path

import torch

tagger = runpy.run_path(str(Path(__file__).with_name("crf_tagger.py")))
train, dev, gold, mask = (tagger[name] for name in ("train", "dev", "gold", "mask"))

seen = defaultdict(Counter)
for sentence in train:
    for form, tag in zip(sentence.column("form"), sentence.column("upos"), strict=True):
        seen[form][tag] += 1
everywhere = sum(seen.values(), Counter())
pairs = [(f, t) for s in dev for f, t in zip(s.column("form"), s.column("upos"), strict=True)]
right = sum((seen[form] or everywhere).most_common(1)[0][0] == tag for form, tag in pairs)
print(f"most frequent tag of each word: {right / len(pairs):.2%} right")

trust, best = tagger["marginals"].max(-1)
for name, part in (("at least 0.99", trust >= 0.99), ("below 0.99", trust < 0.99)):
    part = part & mask
    print(
        f"marginal {name}: {part.sum() / mask.sum():.1%} of the words, {(best == gold)[part].float().mean():.1%} right"
    )

with torch.no_grad():
    three = tagger["crf"].k_best(tagger["emissions"], 3, mask)
same = ((three.tags == gold.unsqueeze(1)) | ~mask.unsqueeze(1)).all(-1)  # (B, 3)
print(f"whole sentence: {same[:, 0].float().mean():.1%} right at once, {same.any(1).float().mean():.1%} within three")
