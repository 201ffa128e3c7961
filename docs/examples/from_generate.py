"""A Hugging Face checkpoint searched by `generate` and here, compared: python from_generate.py FOLDER [WIDTH].

Needs transformers; a width of 2 or more, because greedy `generate` gives no scores.
"""

import sys

import torch
from transformers import AutoModelForSeq2SeqLM

from thalweg.data import pad
from thalweg.energies.transformer.huggingface import from_huggingface
from thalweg.inference import beam_search

folder, width, limit, penalty = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5, 30, 1.0
theirs = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
ours = from_huggingface(folder)
if ours.rules.last is not None:  # an end that is forced at the length limit
    ours.last_step = limit

generator = torch.Generator().manual_seed(0)
symbols = torch.randint(4, theirs.config.vocab_size - 2, (8, 12), generator=generator).tolist()
source = pad([[*row[: 3 + n], ours.eos] for n, row in enumerate(symbols)], pad=ours.pad)

with torch.no_grad():
    before = theirs.generate(
        input_ids=source.tokens,
        attention_mask=source.mask.long(),
        num_beams=width,
        num_return_sequences=1,
        max_new_tokens=limit,
        length_penalty=penalty,
        early_stopping="never",
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
after = beam_search(ours, source, width=width, k=1, max_length=limit, length_penalty=penalty)

same = 0
for (row,), sequence in zip(after.sequences(), before.sequences[:, 1:].tolist(), strict=True):
    same += row == sequence[: len(row)]
scores = after.scores[:, 0] / after.lengths[:, 0] ** penalty
finished = after.finished[:, 0]
difference = (scores - before.sequences_scores)[finished].abs().max() if finished.any() else torch.tensor(0.0)
print(
    f"{same} of {source.size} answers equal, {int(finished.sum())} finished, scores differ by {difference:.1e} at most"
)
