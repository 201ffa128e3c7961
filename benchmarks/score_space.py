"""Score spaces of ragged batches: Fisher vectors beside scikit-image, and all kinds beside a loop over sequences.

    python -m benchmarks score_space --write                  on this CPU
    python -m benchmarks score_space --device cuda --write    ours on a GPU, scikit-image on the CPU beside it

Part `fisher` needs scikit-image: a mixture with the same parameters on both sides, float64, and vectors that must agree
to 1e-9 (its sign of variances is the opposite one) before anything is timed. Part `batch` times all sequences together
and one after the other, which must agree as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.harness.declaration import Benchmark, Facts, Run, demand
from benchmarks.harness.report import comparison, heading
from benchmarks.harness.timing import Job
from thalweg.energies import HMM, GaussianEmission, GaussianMixture, ScoreSpace, fisher_vector

COUNT, LENGTHS, D, N = 500, (10, 200), 16, 32  # sequences, their shortest and longest, features, components
STATES = 8
TINY = (20, (2, 9), 3, 4)
TOLERANCE = 1e-9
OURS, PEER, LOOP = "Thalweg", "scikit-image, a sequence at a time", "Thalweg, a sequence at a time"


def size(run: Run) -> tuple[int, tuple[int, int], int, int]:
    """Sequences, lengths, features, components."""
    return TINY if run.args.quick else (COUNT, LENGTHS, D, N)


def draw(run: Run, width: int | None = None) -> list[np.ndarray]:
    """Sequences of vectors of lengths spread evenly."""
    count, (shortest, longest), wide, _ = size(run)
    rng = np.random.default_rng(0)
    return [2 * rng.normal(size=(length, width or wide)) for length in rng.integers(shortest, longest + 1, count)]


def mixture(run: Run, components: int, width: int) -> GaussianMixture:
    """Weights, means and variances at random."""
    rng = np.random.default_rng(1)
    return GaussianMixture(
        covariance_type="diagonal",
        weights=rng.dirichlet(np.full(components, 5.0)),
        means=2 * rng.normal(size=(components, width)),
        covariances=rng.uniform(0.5, 2.0, size=(components, width)),
    ).to(run.args.device)


def told(run: Run, sequences: list[np.ndarray], what: str, numbers: int) -> Facts:
    return {
        "what": what,
        "sequences": len(sequences),
        "lengths": [min(map(len, sequences)), max(map(len, sequences))],
        "numbers": numbers,
    }


def rate(cell: Facts) -> str:
    """Numbers a second of all together, from the median."""
    return f"{cell['sequences'] * cell['numbers'] / cell['jobs'][OURS]['ms']['median'] * 1e3:,.0f}"


def fisher(run: Run) -> Facts:
    """Fisher vectors of Perronnin, not improved, beside scikit-image."""
    sequences, model = draw(run), mixture(run, size(run)[3], size(run)[2])
    jobs = [Job(OURS, lambda: fisher_vector(model, sequences, improved=False))]
    try:
        from skimage.feature import fisher_vector as theirs
        from sklearn.mixture import GaussianMixture as Peer
    except ImportError:
        run.found({}, ["scikit-image"])
    else:
        weights, means, variances = (
            each.detach().cpu().double().numpy() for each in (model.weights_, model.means_, model.covariances_)
        )
        peer = Peer(len(weights), covariance_type="diag")
        peer.weights_, peer.means_, peer.covariances_ = weights, means, variances
        peer.precisions_cholesky_ = 1 / np.sqrt(variances)
        jobs.append(Job(PEER, lambda: np.stack([theirs(x, peer) for x in sequences])))

    def check(answers: dict[str, Any]) -> float:
        if PEER not in answers:
            return 0.0
        signs = np.ones(answers[OURS].shape[1])
        signs[-model.means_.numel() :] = -1
        worst = float(np.abs(answers[OURS] * signs - answers[PEER]).max())
        demand("Fisher vectors beside scikit-image", worst, TOLERANCE)
        return worst

    compared = run.compare(
        jobs, check=check, over=lambda name: (PEER, OURS) if name == OURS and len(jobs) > 1 else None
    )
    numbers = model.weights_.numel() + 2 * model.means_.numel()
    return {
        "fisher": {**told(run, sequences, "Fisher vectors", numbers), "difference": compared.checked}
        | compared.to_json()
    }


def batch(run: Run) -> Facts:
    """First and second order of a mixture and of a chain: together, and one sequence after the other."""
    width, states = size(run)[2], min(STATES, size(run)[3])
    sequences, rng = draw(run), np.random.default_rng(2)
    large, small = mixture(run, size(run)[3], width), mixture(run, states, width // 4 or 1)
    narrow = draw(run, width // 4 or 1)

    def chain(wide: int) -> HMM:
        means = 2 * rng.normal(size=(states, wide))
        rows = rng.dirichlet(np.full(states, 2.0), size=states)
        return HMM(np.full(states, 1 / states), rows, GaussianEmission(means)).to(run.args.device)

    cases: dict[str, tuple[ScoreSpace, list[np.ndarray]]] = {
        "mixture, order 1": (ScoreSpace(large, of=("means", "variances", "weights")), sequences),
        "mixture, order 2": (ScoreSpace(small, 2), narrow),
        "HMM, order 1": (ScoreSpace(chain(width), of=("means", "variances", "initial", "transitions")), sequences),
        "HMM, order 2": (ScoreSpace(chain(width // 4 or 1), 2), narrow),
    }
    return {"batch": [compare(run, name, *case) for name, case in cases.items()]}


def compare(run: Run, name: str, space: ScoreSpace, sequences: list[np.ndarray]) -> Facts:
    """One kind of score space."""
    first = space.fit_transform(sequences[:1])

    def check(answers: dict[str, np.ndarray]) -> float:
        worst = float((np.abs(answers[OURS] - answers[LOOP]) / (1 + np.abs(answers[LOOP]))).max())
        demand(f"{name}, together and one by one", worst, TOLERANCE)
        return worst

    jobs = [
        Job(OURS, lambda: space.transform(sequences)),
        Job(LOOP, lambda: np.concatenate([space.transform([x]) for x in sequences])),
    ]
    compared = run.compare(jobs, check=check, over=lambda job: (LOOP, OURS) if job == OURS else None)
    return {**told(run, sequences, name, first.shape[1]), "difference": compared.checked} | compared.to_json()


def report(facts: Facts) -> list[str]:
    """The tables for people."""
    lines = heading(facts, ", float64; results are compared before they are timed")

    def label(cell: Facts) -> list[str]:
        return [
            cell["what"],
            f"{cell['sequences']:,} of {cell['lengths'][0]} to {cell['lengths'][1]}",
            f"{cell['numbers']:,}",
            rate(cell),
        ]

    head = ["what", "sequences", "numbers each", "numbers a second"]
    for part, title in (("fisher", "Fisher vectors, ms"), ("batch", "A ragged batch and a loop, ms")):
        cells = facts.get(part)
        if cells:
            cells = [cells] if part == "fisher" else cells
            lines += [
                f"## {title}",
                "",
                "Median and quartiles; in bold how many times faster than what stands beside it. "
                f"Answers agree to {max(cell['difference'] for cell in cells):.0e}.",
                "",
            ]
            lines += [*comparison(cells, head, label), ""]
    return lines


BENCHMARK = Benchmark(
    parts={"fisher": fisher, "batch": batch}, report=report, budget=20.0, packages=("scikit-image", "scikit-learn")
)
