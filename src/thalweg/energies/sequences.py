"""What every energy of a target sequence given a source shares: its special symbols, and how logits become it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thalweg.layers.padded import Padded


class SequenceEnergy(nn.Module):
    r"""E(x, y) = -log p(y | x) of a model that gives the logits of each target symbol after those before it.

    .. math:: \log p(y \mid x) = \sum_t \log \mathrm{softmax}(\mathrm{logits}(y_{<t}, x))_{y_t}

    A subclass defines :meth:`forward`, whose logits are -inf where ``never`` is.

    Args:
        target_size: number of target symbols, special ones included.
        unk: id of the unknown symbol, never produced; None where there is no such rule.
        pad, bos, eos: ids of the other special symbols.
        forbidden: target symbols that never stand anywhere; None means pad and bos.

    >>> class Even(SequenceEnergy):
    ...     def forward(self, source, target, *, teacher_forcing=1.0, items=None):
    ...         return torch.zeros(*target.tokens.shape, self.vocab_size) + self.never
    >>> target = Padded(torch.tensor([[4, 3]]), torch.tensor([2]), torch.ones(1, 2, dtype=torch.bool))
    >>> Even(7).energy(target, target).exp()
    tensor([16.])
    """

    def __init__(
        self,
        target_size: int,
        *,
        unk: int | None = 0,
        pad: int = 1,
        bos: int = 2,
        eos: int = 3,
        forbidden: Sequence[int] | None = None,
    ):
        super().__init__()
        self.vocab_size = target_size
        self.unk, self.pad, self.bos, self.eos = unk, pad, bos, eos
        never, unread = torch.zeros(target_size), torch.zeros(target_size)
        never[list((pad, bos) if forbidden is None else forbidden)] = -torch.inf
        if unk is not None:
            unread[unk] = -torch.inf
        self.never: Tensor  # -inf where no symbol may ever stand
        self.unread: Tensor  # -inf at the unknown symbol
        self.register_buffer("never", never, persistent=False)
        self.register_buffer("unread", unread, persistent=False)

    @abstractmethod
    def forward(
        self, source: Padded, target: Padded, *, teacher_forcing: float = 1.0, items: Tensor | None = None
    ) -> Tensor:
        """Logits ``(B, T, V)`` of each target position.

        With ``items (N,)`` there are N targets, of which target n belongs to source ``items[n]``: a source with
        several targets is read once, with one draw of dropout, and the result is ``(N, T, V)``.

        Each position is fed the true previous symbol with probability ``teacher_forcing``, otherwise the model's own
        best guess. Coins come from torch's global generator.
        """

    def fed(self, target: Padded) -> Tensor:
        """``(B, T)`` the symbol before each of the target's: bos, and all but its last."""
        first = target.tokens.new_full((target.size, 1), self.bos)
        return torch.cat((first, target.tokens[:, :-1]), dim=1)

    def normalise(self, logits: Tensor) -> Tensor:
        """Log-probabilities of what :meth:`forward` gave; the unknown symbol, a reading aid, takes none of them."""
        return (logits + self.unread).log_softmax(dim=-1)

    def log_prob(self, source: Padded, target: Padded) -> Tensor:
        """``(B,)`` log p(y | x); targets end with eos. A target with an unknown symbol has probability 0."""
        log_probs = self.normalise(self(source, target))
        chosen = log_probs.gather(2, target.tokens.unsqueeze(2)).squeeze(2)
        return chosen.masked_fill(~target.mask, 0.0).sum(dim=1)

    def energy(self, source: Padded, target: Padded) -> Tensor:
        """``(B,)`` E(x, y) = -log p(y | x)."""
        return -self.log_prob(source, target)
