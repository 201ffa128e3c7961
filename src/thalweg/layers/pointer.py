"""The pointer-generator: a mixture of saying a symbol and copying one from the source."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Below every log-probability, yet finite: the gradient of log-add-exp stays a number.
_NEVER = -1e30


class Pointer(nn.Module):
    r"""Copying in place of generating (See et al., 2017).

    .. math:: p(v) = g \, p_{\mathrm{gen}}(v) + (1 - g) \sum_{s:\, c_s = v} a_s \Big/ \sum_{s:\, c_s \ge 0} a_s,
              \qquad g = \sigma(w [h; z; x] + b)

    with h the decoder's output, z what the last attention to the source gave, x the decoder's input, a the weights
    of that attention and c_s the target symbol that source position s copies to (-1: none). Where nothing of a
    source can be copied g is 1. Computed as log-probabilities: log-add-exp of log-sigmoids, exact for any gate.

    Args:
        width: D of h, z and x.

    >>> pointer = Pointer(4)
    >>> uniform = torch.full((1, 1, 3), 1 / 3).log()
    >>> parts = torch.zeros(3, 1, 1, 4)
    >>> copies = torch.tensor([[2, -1]])
    >>> weights = torch.tensor([[[0.5, 0.5]]])
    >>> pointer(uniform, *parts, weights=weights, copies=copies).exp()  # g = 1/2
    tensor([[[0.1667, 0.1667, 0.6667]]], grad_fn=<ExpBackward0>)
    """

    def __init__(self, width: int):
        super().__init__()
        self.gate = nn.Linear(3 * width, 1)
        nn.init.xavier_uniform_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(
        self, log_probs: Tensor, states: Tensor, contexts: Tensor, inputs: Tensor, *, weights: Tensor, copies: Tensor
    ) -> Tensor:
        """Log-probabilities of the mixture, ``(B, T, V)``.

        Args:
            log_probs: ``(B, T, V)`` of generating.
            states, contexts, inputs: ``(B, T, D)`` h, z and x.
            weights: ``(B, T, S)`` a.
            copies: ``(B, S)`` c, -1 where nothing can be copied.
        """
        gate = self.gate(torch.cat((states, contexts, inputs), dim=2)).to(log_probs.dtype)
        usable = copies >= 0
        mass = weights.to(log_probs.dtype) * usable.unsqueeze(1)
        index = copies.clamp(min=0).unsqueeze(1).expand_as(mass)
        share = torch.zeros_like(log_probs).scatter_add(2, index, mass)
        total = mass.sum(dim=2, keepdim=True)
        met = share > 0
        # Zeros are replaced before the logarithm, so that no gradient is 0 times infinity.
        copied = torch.where(met, share, 1.0).log() - torch.where(total > 0, total, 1.0).log()
        log_sigmoid = nn.functional.logsigmoid
        copied = torch.where(met, log_sigmoid(-gate) + copied, _NEVER)
        said = torch.where(total > 0, log_sigmoid(gate), 0.0) + log_probs
        return torch.logaddexp(said, copied)
