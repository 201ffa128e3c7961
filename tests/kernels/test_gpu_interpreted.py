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
GROUPS = {
    "chains": ("kernels/test_gpu_chain.py", "kernels/test_gpu_chain_calls.py"),
    "memories": (
        "kernels/test_gpu_memory.py",
        "kernels/test_gpu_sparse_maps.py",
        "kernels/test_gpu_segments.py",
        "kernels/test_gpu_lattice.py",
    ),
    "decoding": (
        "kernels/test_gpu_beam.py",
        "kernels/test_gpu_decoding.py",
        "energies/test_transformer_fixed.py",
        "inference/test_graph_replay.py",
    ),
}


@outside
@pytest.mark.parametrize("group", GROUPS)
def test_in_the_interpreter(group: str) -> None:
    run_in_the_interpreter(GROUPS[group])


def test_no_file_is_left_out() -> None:
    marked = {path for path in TESTS.rglob("test_*.py") if "@here_only" in path.read_text()}
    assert marked - {Path(__file__)} == {TESTS / file for files in GROUPS.values() for file in files}
