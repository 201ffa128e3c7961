"""Learning on real pairs: slow, run by `make test-all`."""

import pytest

from thalweg.tasks import SearchConfig, apply_overrides, build_config, evaluate, train


@pytest.mark.slow
def test_three_epochs_of_ar2en(shared_data, tmp_path):
    words = ["train=ar2en:train", "dev=ar2en:dev", "epochs=3", "device=cpu"]
    result = train(build_config(apply_overrides({}, words)), tmp_path / "run", root=shared_data)
    assert result.best["accuracy"] > 0.18
    assert result.best["cer"] < 0.26
    found = {
        search: evaluate(
            tmp_path / "run", "ar2en:test", how=SearchConfig(search=search), name=search, root=shared_data
        ).scores
        for search in ("greedy", "beam")
    }
    assert found["beam"]["accuracy"].value > 0.17
    assert found["beam"]["wer@5"].value < found["beam"]["wer@3"].value < found["greedy"]["wer"].value


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "gru", "gru-reset-before"])
@pytest.mark.parametrize("attention", ["none", "dot"])
def test_every_cell_learns_a_small_language(shared_data, tmp_path, cell, attention):
    words = ["train=g2p/low/ita:train", "dev=g2p/low/ita:dev", "epochs=30", "device=cpu", "hidden=64"]
    config = build_config(apply_overrides({}, [*words, f"cell={cell}", f"attention={attention}"]))
    seen = []
    train(config, tmp_path / "run", root=shared_data, listener=seen.append)
    rates = [event["dev"]["cer"] for event in seen if event["event"] == "epoch"]
    # 800 words through one vector are learnt slowly; with attention Italian spelling is easy.
    assert min(rates) < (0.2 if attention == "dot" else 0.6 * rates[0])
