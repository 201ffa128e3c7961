"""The tests of Triton kernels on a machine without a GPU: through Triton's interpreter, in processes of their own.

The interpreter must be chosen before Triton is imported, which other tests may have done already. A process takes
seconds to start, so files share one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.triton_kernels import needs_triton, outside, run_in_the_interpreter

pytestmark = needs_triton

TESTS = Path(__file__).parents[1]
FILES = (
    "kernels/test_gpu_chain.py",
    "kernels/test_gpu_chain_calls.py",
    "kernels/test_gpu_memory.py",
    "kernels/test_gpu_sparse_maps.py",
    "kernels/test_gpu_segments.py",
    "kernels/test_gpu_lattice.py",
    "kernels/test_gpu_beam.py",
    "kernels/test_gpu_decoding.py",
    "energies/test_transformer_fixed.py",
    "inference/test_graph_replay.py",
)
STRUCTURES = ("inference/test_alignment.py", "inference/test_ctc.py", "inference/test_semi_markov_contract.py")


@outside
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(FILES)


@outside
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", STRUCTURES)
def test_structures_in_the_interpreter(file: str) -> None:
    """Every law of structures, with values and gradients by the kernels."""
    run_in_the_interpreter((file,), "-k", "gpu")


def test_no_file_is_left_out() -> None:
    texts = {path: path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__)}
    marked = {path for path, text in texts.items() if "@here_only" in text or "if RUNS else" in text}
    assert marked == {TESTS / file for file in FILES + STRUCTURES}
