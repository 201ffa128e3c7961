"""On an accelerator losses are looked at now and then: the same figures, and a broken loss is still found in time."""

from __future__ import annotations

import pytest
import torch
from tiny_regression import Data, make, same_files, squares

from thalweg.errors import ThalwegError
from thalweg.learning import trainer as module
from thalweg.learning.checkpoint import load_checkpoint


@pytest.mark.parametrize("every", [1, 2, 50])
def test_looking_now_and_then_changes_nothing(tmp_path, monkeypatch, every):
    monkeypatch.setattr(module, "LOOK_EVERY", every)
    events = {"at once": [], "lazy": []}
    for name, found in events.items():
        trainer = make(tmp_path / name, listener=found.append, clip=1.0, average=0.9)
        trainer._lazy = name == "lazy"
        trainer.fit(Data())
    same_files(tmp_path / "at once", tmp_path / "lazy")
    one, other = ([event for event in found if event["event"] == "epoch"] for found in events.values())
    for key in ("loss", "gradient_norm"):
        assert [event[key] for event in one] == pytest.approx([event[key] for event in other], rel=1e-12)


def test_a_broken_loss_is_found_before_it_is_saved(tmp_path):
    calls = []

    def breaks(model, batch, moment):
        calls.append(None)
        total, terms = squares(model, batch, moment)
        return total * (torch.nan if len(calls) == 5 else 1.0), terms

    trainer = make(tmp_path, loss=breaks, checkpoint_every=100)
    trainer._lazy = True
    with pytest.raises(ThalwegError, match="the loss became nan"):
        trainer.fit(Data())
    kept = load_checkpoint(tmp_path / "last.safetensors")
    assert kept.meta["progress"]["epoch"] == 1
    assert all(torch.isfinite(value).all() for value in kept.part("model.").values())
