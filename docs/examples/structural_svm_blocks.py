"""How the size of blocks and the corrections change learning: python structural_svm_blocks.py."""

import time

import torch

from thalweg.energies import LinearTagger
from thalweg.learning import StructuralSVM
from thalweg.recipes.experiments.tagged_sentences import Corpus, made_sentences

torch.set_num_threads(1)
sentences = made_sentences(300, 0)
corpus = Corpus.of(sentences)
for size, corrections in ((1, 0), (8, 3), (32, 0), (32, 3)):
    tagger = LinearTagger(len(corpus.indicators), len(corpus.tags))
    svm = StructuralSVM(
        tagger, regularisation=5 / 300, tol=0.1, passes=60, gap_every=2, corrections=corrections, averaged=False
    )
    began = time.process_time()
    svm.fit(corpus.batches(sentences, size))
    last, seconds = svm.gap_curve[-1], time.process_time() - began
    gap = last.gap / last.primal
    print(f"blocks of {size}, {corrections} corrections: gap {gap:.1%} after {last.passes} passes, {seconds:.1f} s")
