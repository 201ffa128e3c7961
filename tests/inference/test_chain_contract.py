"""Linear chains under the laws of all structures, and proof that each law and each oracle can fail."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from contracts.structure import Case, StructureContract
from oracles import chains as oracle
from thalweg.inference import LinearChain, SparseTransitions

INF = math.inf
KINDS = ("shared", "per item", "per step", "sparse")
BACKENDS = ("reference", "scan", "cpu", *(["gpu"] if torch.cuda.is_available() else []))
CASES = [(kind, backend) for kind in KINDS for backend in BACKENDS if (kind, backend) != ("sparse", "gpu")]

LENGTHS = (4, 1, 3)
SIZE = 3
EDGES = [(0, 1), (2, 2), (0, 0), (1, 2), (1, 0), (2, 0)]  # in no order; three of the nine moves are left out


class TestLinearChain(StructureContract):
    oracle = oracle
    part_scores = "emissions"
    kind, backend = "shared", "reference"

    @pytest.fixture(autouse=True, params=CASES, ids=lambda case: "-".join(case).replace(" ", "_"))
    def _choose(self, request: pytest.FixtureRequest) -> None:
        self.kind, self.backend = request.param
        self.device = "cuda" if self.backend == "gpu" else "cpu"

    def case(self, seed: int = 0, *, dtype: torch.dtype = torch.float64, constrained: bool = False) -> Case:
        generator = torch.Generator().manual_seed(seed)
        batch, steps = len(LENGTHS), max(LENGTHS)
        moves = {
            "shared": (SIZE, SIZE),
            "per item": (batch, SIZE, SIZE),
            "per step": (batch, steps - 1, SIZE, SIZE),
            "sparse": (len(EDGES),),
        }
        shapes = {"emissions": (batch, steps, SIZE), "transitions": moves[self.kind], "start": (SIZE,), "end": (SIZE,)}
        scores = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        if constrained:
            scores["emissions"][0, 1, 2] = scores["emissions"][2, 0, 0] = scores["end"][1] = -INF
            if self.kind == "sparse":
                scores["transitions"][1] = -INF
            else:
                scores["transitions"][..., 2, 2] = scores["transitions"][..., 0, 1] = -INF
        scores = {name: tensor.to(self.device, dtype) for name, tensor in scores.items()}
        return Case(scores, torch.tensor(LENGTHS, device=self.device))

    def make(self, case: Case):
        scores = dict(case.scores)
        if self.kind == "sparse":
            sources, targets = map(list, zip(*EDGES, strict=True))
            scores["transitions"] = SparseTransitions.of_edges(sources, targets, scores["transitions"], size=SIZE)
        return LinearChain(**scores, lengths=case.lengths, backend=self.backend)

    def enumerate(self, case: Case):
        scores = {name: tensor.detach().tolist() for name, tensor in case.scores.items()}
        if self.kind == "sparse":
            known = dict(zip(EDGES, scores["transitions"], strict=True))
            scores["transitions"] = [[known.get((i, j), -INF) for j in range(SIZE)] for i in range(SIZE)]
        return [oracle.paths(item) for item in oracle.items(**scores, lengths=case.lengths.tolist())]

    def parts(self, y):
        return oracle.labels_at(y)

    def structure(self, row: Tensor):
        assert row.dtype == torch.int64
        labels = row.tolist()
        length = labels.index(-1) if -1 in labels else len(labels)
        assert labels[length:] == [-1] * (len(labels) - length)
        return tuple(labels[:length]) or None

    def tensor(self, case: Case, structures):
        steps = max(LENGTHS)
        return torch.tensor([[*y, *[-1] * (steps - len(y))] for y in structures], device=self.device)

    def per_item(self, name: str) -> bool:
        return name == "emissions" or (name == "transitions" and self.kind in ("per item", "per step"))

    def padding(self, case: Case):
        emissions, transitions = case.scores["emissions"], case.scores["transitions"]
        outside = torch.arange(emissions.shape[1], device=self.device) >= case.lengths.unsqueeze(1)
        masks = {"emissions": outside.unsqueeze(-1).expand_as(emissions)}
        if self.kind == "per step":
            masks["transitions"] = outside[:, 1:, None, None].expand_as(transitions)
        return masks

    def shifted(self, case: Case, constant: float):
        return case.map(lambda name, tensor: tensor + constant if name == "start" else tensor)

    def infeasible(self, case: Case, item: int):
        emissions = case.scores["emissions"].clone()
        emissions[item, 0] = -INF
        return case.map(lambda name, tensor: emissions if name == "emissions" else tensor)


# The twins: each is wrong in one way, and the law beside it must say so.


class Twin:
    """A chain with some attributes replaced: `changes[name](chain)` instead of `chain.name`."""

    def __init__(self, chain: LinearChain, changes) -> None:
        self.chain, self.changes = chain, changes

    def __getattr__(self, name: str):
        return self.changes[name](self.chain) if name in self.changes else getattr(self.chain, name)


class Checked(TestLinearChain):
    """The contract outside pytest, with something broken."""

    __test__ = False

    def __init__(self, changed_oracle=None, structure=None, spoil=None) -> None:
        self.oracle = SimpleNamespace(**{**vars(oracle), **(changed_oracle or {})})
        self.changes, self.spoil = structure, spoil or (lambda case: case)

    def make(self, case: Case):
        chain = super().make(self.spoil(case))
        return Twin(chain, self.changes) if self.changes else chain


def fails(law: str, checked: Checked, *arguments) -> bool:
    """Whether a law that holds for the sound one rejects the broken one, and not by accident."""
    getattr(Checked(), law)(*arguments)
    try:
        getattr(checked, law)(*arguments)
    except (AssertionError, GradcheckError):
        return True
    except pytest.fail.Exception:  # `pytest.raises` saw nothing raised
        return True
    return False


def half_of(weighted):
    return weighted[: len(weighted) // 2 + 1]


ORACLE_TWINS = {
    "tempered": ("test_temperature_divides_scores", lambda w, t: [(y, s * t) for y, s in w]),
    "log_partition": ("test_log_partition_equals_enumeration", lambda w: max(s for _, s in w)),
    "log_probabilities": ("test_log_prob_normalises", lambda w: {y: s - max(s for _, s in w) for y, s in w}),
    "entropy": ("test_entropy_is_the_mean_of_minus_log_prob", lambda w: oracle.entropy(half_of(w))),
    "cross_entropy": ("test_divergence_and_cross_entropy", lambda w, v: oracle.cross_entropy(v, w)),
    "kl_divergence": ("test_divergence_and_cross_entropy", lambda w, v: oracle.kl_divergence(v, w)),
    "top_k": ("test_top_k_is_sorted_distinct_and_equals_enumeration", lambda w, k: sorted(w, key=lambda p: p[1])[:k]),
    "modes": ("test_mode_attains_max_score", lambda w, slack: [min(w, key=lambda p: p[1])[0]]),
    "marginals": (
        "test_marginals_are_the_gradient_of_log_partition",
        lambda w, parts: oracle.marginals(half_of(w), parts),
    ),
    "covariance": (
        "test_second_derivatives_are_covariances_of_parts",
        lambda w, parts: {pair: 1.01 * value for pair, value in oracle.covariance(w, parts).items()},
    ),
    "total_variation": (
        "test_samples_follow_the_distribution",
        lambda counts, p: oracle.total_variation(counts, dict(zip(p, reversed(p.values()), strict=True))),
    ),
    "variation_bound": ("test_samples_follow_the_distribution", lambda draws, outcomes: 1 / draws),
    "frequency_bound": ("test_samples_follow_the_distribution", lambda draws, events: 1 / draws),
}


@pytest.mark.parametrize("name", ORACLE_TWINS)
def test_a_broken_oracle_is_noticed(name):
    law, broken = ORACLE_TWINS[name]
    assert fails(law, Checked({name: broken}))


MODULE_TWINS = {
    "items": ("log_partition_equals_enumeration", lambda items: lambda **scores: items(**{**scores, "lengths": None})),
    "paths": ("log_prob_normalises", lambda paths: lambda item: paths(item)[:-1]),
    "labels_at": (
        "marginals_are_the_gradient_of_log_partition",
        lambda _: lambda y: [(t, y[t - 1]) for t in range(len(y))],
    ),
    "expectation": ("divergence_and_cross_entropy", lambda _: lambda w, f: sum(f(y) for y, _ in w) / len(w)),
}


@pytest.mark.parametrize("name", MODULE_TWINS)
def test_a_broken_enumeration_is_noticed(name, monkeypatch):
    law, broken = MODULE_TWINS[name]
    monkeypatch.setattr(oracle, name, broken(getattr(oracle, name)))
    with pytest.raises(AssertionError):
        getattr(Checked(), f"test_{law}")()


def rewired(item, forget):
    """An item that lost some of its scores."""
    blank = {
        "start": [0.0] * SIZE,
        "end": [0.0] * SIZE,
        "moves": [[list(column) for column in zip(*move, strict=True)] for move in item.moves],
        "emissions": item.emissions[::-1],
    }
    return item._replace(**{forget: blank[forget]})


@pytest.mark.parametrize("forget", ["start", "end", "moves", "emissions"])
def test_broken_scores_are_noticed(forget, monkeypatch):
    score = oracle.score
    monkeypatch.setattr(oracle, "score", lambda item, labels: score(rewired(item, forget), labels))
    for law in (Checked().test_log_partition_equals_enumeration, Checked().test_log_prob_normalises):
        with pytest.raises(AssertionError):
            law()


def independent(chain: LinearChain):
    """Samples with the right marginals, but each position drawn by itself."""

    def sample(shape=(), generator=None):
        drawn = torch.distributions.Categorical(probs=chain.marginals + 1e-30).sample(shape)
        return torch.where(chain.mode >= 0, drawn, -1)

    return sample


def repeated(chain: LinearChain):
    """A second best that is the best again."""

    def top_k(k):
        scores, labels = chain.top_k(k)
        return scores, labels[:, [0, *range(k - 1)]] if k > 1 else labels

    return top_k


def spoil_in_place(case: Case) -> Case:
    with torch.no_grad():
        case.scores["start"] += 1.0
    return case


def stretched(case: Case) -> Case:
    return case._replace(lengths=torch.full_like(case.lengths, max(LENGTHS)))


def leaking(chain: LinearChain) -> Tensor:
    return chain.log_partition + 0 * chain.potentials.emissions.sum((1, 2))


def rounded(chain: LinearChain) -> Tensor:
    single = chain.log_partition.dtype == torch.float32
    return chain.log_partition.bfloat16().float() if single else chain.log_partition


BATCH = torch.arange(3.0, dtype=torch.float64)
STRUCTURE_TWINS = {
    "uniform marginals": (
        "marginals_are_the_gradient_of_log_partition",
        {"marginals": lambda p: p.marginals * 0 + 1 / 3},
    ),
    "log Z by halves": ("gradcheck", {"log_partition": lambda p: p.log_partition.detach() / 2 + p.log_partition / 2}),
    "no second derivative": (
        "gradgradcheck",
        {"log_partition": lambda p: (p.potentials.emissions * p.marginals.detach()).sum((1, 2))},
    ),
    "graph lost": ("an_earlier_look_takes_no_gradient_away", {"log_partition": lambda p: p.log_partition.detach()}),
    "depends on the batch": ("batch_equals_loop", {"log_partition": lambda p: p.log_partition + len(p.lengths)}),
    "depends on the place": (
        "permuting_the_batch_permutes_the_answer",
        {"entropy": lambda p: lambda: p.entropy() + BATCH},
    ),
    "second best for best": ("mode_attains_max_score", {"mode": lambda p: p.top_k(2)[1][:, 1]}),
    "score of the second": ("mode_attains_max_score", {"max_score": lambda p: p.top_k(2)[0][:, 1]}),
    "one twice": ("top_k_is_sorted_distinct_and_equals_enumeration", {"top_k": repeated}),
    "positions drawn alone": ("samples_follow_the_distribution", {"sample": independent}),
    "always the mode": (
        "samples_follow_the_distribution",
        {"sample": lambda p: lambda n, generator: p.mode.expand(*n, 3, 4)},
    ),
    "deaf to the seed": (
        "seeds_repeat_and_differ",
        {"sample": lambda p: lambda n, generator=None: p.mode.expand(*n, 3, 4)},
    ),
    "log_prob is the score": ("log_prob_normalises", {"log_prob": lambda p: p.score}),
    "energy is the score": ("log_prob_normalises", {"energy": lambda p: p.score}),
    "entropy of the marginals": (
        "entropy_is_the_mean_of_minus_log_prob",
        {"entropy": lambda p: lambda: -torch.special.xlogy(p.marginals, p.marginals).sum((1, 2))},
    ),
    "temperature forgotten": ("temperature_divides_scores", {"tempered": lambda p: lambda temperature: p}),
    "log Z not shifted": ("a_constant_shifts_log_partition_alone", {"log_partition": lambda p: p.entropy()}),
    "half precision": ("float32_is_close_to_float64", {"log_partition": rounded}),
    "infeasible unnoticed": (
        "an_item_without_structures_is_named",
        {"log_partition": lambda p: p.score(p.lengths[:, None].expand(3, 4) * 0)},
    ),
    "no distribution": ("it_is_a_distribution", {"mean": lambda p: p.mean}),
}


@pytest.mark.parametrize("name", STRUCTURE_TWINS)
def test_a_broken_structure_is_noticed(name):
    law, changes = STRUCTURE_TWINS[name]
    assert fails(f"test_{law}", Checked(structure=changes))


def test_broken_padding_and_writing_are_noticed():
    assert fails("test_padding_is_inert", Checked(structure={"log_partition": leaking}), math.nan)
    assert fails("test_padding_is_inert", Checked(spoil=stretched), math.nan)
    assert fails("test_the_callers_tensors_are_unchanged", Checked(spoil=spoil_in_place))
