"""The kernels' own tests once more, by extensions that watch their memory, their arithmetic and their threads."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "thalweg"
# By sanitizers: the library that must be there before Python, and how it is told to stop at what it finds.
WATCHES = {
    "address,undefined": ("libasan.so", "ASAN_OPTIONS", "detect_leaks=0:halt_on_error=1"),
    "thread": ("libtsan.so", "TSAN_OPTIONS", "ignore_noninstrumented_modules=1:die_after_fork=0:halt_on_error=1"),
}
TESTS = (
    *("test_extension.py", "test_entry_points.py", "test_cpu_chain.py", "test_segments.py", "test_cpu_lattice.py"),
    *("test_memory.py", "test_sparse_maps.py", "test_decoding.py"),
)


def compiled(sanitizers: str, folder: Path) -> None:
    """This package as links, with an extension of its own."""
    package = folder / "thalweg"
    package.mkdir()
    for entry in PACKAGE.iterdir():
        if not entry.name.startswith("_kernels."):
            (package / entry.name).symlink_to(entry)
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import build_backend
    finally:
        sys.path.pop(0)
    name = "sanitized-" + sanitizers.replace(",", "-")
    build_backend.compile_in_place(f"-DTHALWEG_SANITIZE={sanitizers}", place=package, name=name)


def library_of(name: str) -> Path:
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip())


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("g++"), reason="needs g++ on Linux")
@pytest.mark.parametrize("sanitizers", WATCHES)
def test_nothing_is_found(sanitizers: str, tmp_path: Path) -> None:
    library, options, settings = WATCHES[sanitizers]
    # Python itself is not C++: a watcher that is there before the library cannot see its exceptions.
    before = [library_of(library), library_of("libstdc++.so.6")]
    if not all(path.is_file() for path in before):
        pytest.skip(f"g++ has no {library}")
    compiled(sanitizers, tmp_path)
    environment = os.environ | {
        "LD_PRELOAD": " ".join(str(path.resolve()) for path in before),
        "PYTHONPATH": str(tmp_path),
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "OMP_NUM_THREADS": "1",  # torch's own threads are not what is watched
        "PYTHONMALLOC": "malloc",
        options: settings,
    }
    # Addresses in their usual places: the older watchers know no others.
    command = ["setarch", platform.machine(), "-R"] if shutil.which("setarch") else []
    command += [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--capture=sys"]
    if sanitizers == "thread":
        command += ["-k", "not fork"]  # it cannot follow new threads in the child of a process that had some
    command += [str(Path(__file__).parent / test) for test in TESTS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    assert "Sanitizer" not in ended.stdout + ended.stderr
