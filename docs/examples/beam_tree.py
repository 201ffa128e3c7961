"""What beams of width 3 and 4 look at in a tree of phrases, drawn: python beam_tree.py [FOLDER]."""

import sys
from pathlib import Path

import torch

from thalweg.inference import TableModel, beam_search

# Joint log-probabilities of the prefixes of three-word phrases.
JOINT = {
    "the": -1.5, "a": -1.8,
    "the red": -4.5, "the green": -4.9, "a blue": -4.3, "a red": -4.6,
    "the red rectangle": -9.1, "the red circle": -9.4,
    "the green rectangle": -8.2, "the green ellipse": -8.5,
    "a blue square": -9.3, "a blue ellipse": -9.7,
    "a red circle": -9.4, "a red square": -9.6,
}  # fmt: skip

folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
words = ["<s>", *sorted({word for phrase in JOINT for word in phrase.split()})]
table: dict[tuple[int, ...], dict[int, float]] = {}
for phrase, value in JOINT.items():
    *before, last = phrase.split()
    prefix = tuple(words.index(word) for word in before)
    table.setdefault(prefix, {})[words.index(last)] = value - JOINT.get(" ".join(before), 0.0)
model = TableModel(table, vocab_size=len(words), bos=0)

for width, name in ((3, "beam-tree.png"), (4, "beam-tree-4.png")):
    found = beam_search(model, torch.zeros(1, dtype=torch.long), width=width, max_length=3, return_tree=True)
    assert found.tree is not None
    found.tree.draw(0, words, folder / name)
    best = " ".join(words[n] for n in found.sequences()[0][0])
    print(f"width {width}: {best} {found.scores[0, 0]:.1f}, proved: {found.optimal[0]}")
