"""Lists of answers whose sources are read once: values and gradients are those of sources read for every answer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thalweg.data import EOS, Batch, pad
from thalweg.energies.seq2seq.model import Seq2Seq, Seq2SeqConfig
from thalweg.energies.transformer.config import TransformerConfig
from thalweg.energies.transformer.model import Transformer
from thalweg.layers.padded import Padded
from thalweg.learning import Moment, TrainingConfig
from thalweg.learning.losses.sequences import LIST_LOSSES, AnswerList, SequenceLoss, list_logits

RECURRENT = {"hidden": 10, "embedding": 8, "dropout": 0.0}
SMALL = {"width": 8, "heads": 2, "feedforward": 12, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
MODELS = {
    "lstm": Seq2SeqConfig(**RECURRENT),
    "gru-additive": Seq2SeqConfig(**RECURRENT, cell="gru", attention="additive", reverse_source=True),
    "no-attention": Seq2SeqConfig(**RECURRENT, attention="none", bidirectional=False, decoder_layers=2),
    "rms-residual": Seq2SeqConfig(**RECURRENT, norm="rms", residual="residual", tied=True),
    "transformer": TransformerConfig(**SMALL),
    "post-rotary": TransformerConfig(**SMALL, norm="post", positions="rotary", activation="swiglu"),
    "instance": TransformerConfig(**SMALL, norm="instance"),
    "pointer": TransformerConfig(**SMALL, pointer=True),
    "sparse": TransformerConfig(**SMALL, attention_map="entmax15"),
    "causal": TransformerConfig(**SMALL, kind="causal"),
    "causal-learned-pointer": TransformerConfig(**SMALL, kind="causal", positions="learned", pointer=True),
    "causal-rotary": TransformerConfig(**SMALL, kind="causal", positions="rotary", norm="rms", attention_map=1.3),
}
SOURCES = [[4, 5, 6, 7], [7], [8, 4]]
# Lists of four, one and two answers: a source may have no other than the right one.
ANSWERS = [[[5, 6, EOS], [5, EOS], [EOS], [6, 6, 6, 6, EOS]], [[7, EOS]], [[EOS], [5, 5, EOS]]]


def build(name: str, *, features: tuple[int, ...] = ()) -> nn.Module:
    torch.manual_seed(0)
    config = MODELS[name]
    if isinstance(config, Seq2SeqConfig):
        return Seq2Seq(config, source_size=9, target_size=9).double()
    copies = torch.tensor([-1, -1, -1, -1, 4, 8, 6, -1, 5]) if config.pointer else None
    return Transformer(config, source_size=9, target_size=9, copies=copies, features=features).double()


def answers() -> AnswerList:
    rows = [[*(one + [-1] * (5 - len(one)) for one in row), *([[-1] * 5] * (4 - len(row)))] for row in ANSWERS]
    tokens = torch.tensor(rows)
    return AnswerList(tokens, (tokens >= 0).sum(2), tokens[:, :, 0] >= 0)


def values_and_gradients(model: nn.Module, shared: bool) -> list[torch.Tensor]:
    logits, target, items = list_logits(model, pad(SOURCES), answers(), shared=shared)
    assert items.tolist() == [0, 0, 0, 0, 1, 2, 2]
    wish = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view(logits.shape)
    real = target.mask.unsqueeze(2) & logits.isfinite()
    (torch.where(real, logits, 0) * wish).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) > 5
    return [torch.where(target.mask.unsqueeze(2), logits.detach(), 0), *gradients]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_repeated_sources(name, training):
    once, again = (values_and_gradients(build(name).train(training), shared) for shared in (True, False))
    assert len(once) == len(again)
    for one, other in zip(once, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["transformer", "causal", "causal-learned-pointer", "causal-rotary"])
def test_with_feature_tags(name):
    once, again = (values_and_gradients(build(name, features=(7, 8)), shared) for shared in (True, False))
    for one, other in zip(once, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["lstm", "transformer", "causal"])
def test_any_order_and_any_number_of_targets(name):
    """Sources without targets, targets out of order, and teacher forcing below 1."""
    model, target = build(name).eval(), pad([[4, 5, 6, 3], [6, 3, 4, 3], [5, 5, 5, 3], [4, 4, 4, 3]])
    items, source = torch.tensor([2, 0, 2, 0]), pad(SOURCES)
    repeated = Padded(source.tokens[items], source.lengths[items], source.mask[items])
    for forcing in (1.0, 0.5):
        torch.manual_seed(1)
        found = model(source, target, teacher_forcing=forcing, items=items)
        torch.manual_seed(1)
        expected = model(repeated, target, teacher_forcing=forcing)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    wrong = model(source, target, items=items.flip(0))
    assert not torch.allclose(wrong, model(repeated, target)), "which source it is must matter"


class Counted(nn.Module):
    """A wrapper that takes anything, as those of several devices do, and counts the sources that are read."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.read = inner, 0
        inner.encoder.register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.read += inputs[0].size(0) if torch.is_grad_enabled() else 0

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("loss", LIST_LOSSES)
@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_a_step_of_training(name, loss):
    """The same loss and gradient as with repeated sources, and each source is read once."""
    batch = Batch(pad(SOURCES), pad([[5, 6], [7, 7, 7], []], end=EOS), (0, 1, 2))
    how = TrainingConfig(loss=loss, epochs=2, loss_after=0, loss_width=4, nll_weight=0.3, label_smoothing=0.1).planned(
        1
    )
    found = []
    for shared in (True, False):
        model = build(name).train()
        with torch.no_grad():
            model.output.bias[0], model.output.bias[EOS] = -40.0, 1.0
        wrapped, objective = Counted(model), SequenceLoss(how, model, max_length=8)
        assert objective.shared
        objective.shared = shared
        total, _ = objective(wrapped, batch, Moment(0, 0, 0.0))
        total.backward()
        assert wrapped.read == 3 if shared else wrapped.read > 6
        found.append([total.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_a_model_that_cannot_share_is_asked_as_before():
    class Plain(nn.Module):
        def forward(self, source, target, *, teacher_forcing=1.0):
            assert source.size == target.size
            return torch.zeros(*target.tokens.shape, 9)

    objective = SequenceLoss(TrainingConfig(loss="risk", epochs=2).planned(1), Plain(), max_length=8)
    assert not objective.shared
    assert list_logits(Plain(), pad(SOURCES), answers())[0].shape == (7, 5, 9)
