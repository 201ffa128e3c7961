"""Wheels on machines of every kind: with a compiler, without one, and where nothing can be compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[1]
# All that a build may call besides Python and what it installs: no compiler is among them.
TOOLS = ("sh", "env", "uname", "cat", "ls", "mkdir", "rm", "cp", "mv", "sed", "grep")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.name == "nt" or not (ROOT / "CMakeLists.txt").is_file(), reason="builds from a checkout"),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The sources alone: nothing that this checkout has built."""
    copy = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    shutil.copytree(ROOT / "tools", copy / "tools", ignore=ignored)
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def wheel_of(source: Path, **environment: str) -> ZipFile:
    out = source.parent / "wheels"
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--wheel-dir", str(out), str(source)]
    ended = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    print((ended.stdout + ended.stderr)[-6000:])  # shown where a test fails
    assert ended.returncode == 0
    return ZipFile(next(out.glob("thalweg-*.whl")))


def extensions(wheel: ZipFile) -> list[str]:
    return [name for name in wheel.namelist() if name.startswith("thalweg/_kernels.") and not name.endswith(".pyi")]


def hidden_compilers(folder: Path) -> str:
    """A PATH without a compiler."""
    folder.mkdir()
    for tool in TOOLS:
        if found := shutil.which(tool):
            (folder / tool).symlink_to(found)
    return str(folder)


def answers(wheel: ZipFile, folder: Path) -> subprocess.CompletedProcess[str]:
    """What a program prints that finds this wheel before any other."""
    wheel.extractall(folder)
    code = (
        "import torch, thalweg\n"
        "from thalweg.inference import LinearChain\n"
        "print(thalweg.__file__, LinearChain(torch.zeros(2, 3, 2), torch.zeros(2, 2)).mode.tolist())\n"
    )
    environment = os.environ | {"PYTHONPATH": str(folder)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split()[0] == str(folder / "thalweg" / "__init__.py")
    assert ended.stdout.endswith("[[0, 0, 0], [0, 0, 0]]\n")
    return ended


def test_without_a_compiler_one_comes_from_pypi(source: Path, tmp_path: Path) -> None:
    wheel = wheel_of(source, PATH=hidden_compilers(tmp_path / "bin"), CXX="")
    assert extensions(wheel) == [f"thalweg/_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"]
    assert not answers(wheel, tmp_path / "site").stderr


def test_where_nothing_can_be_compiled_the_reference_answers(source: Path, tmp_path: Path) -> None:
    wheel = wheel_of(source, CXX=shutil.which("false") or "false")
    assert not extensions(wheel)
    assert wheel.filename is not None
    assert wheel.filename.endswith("py3-none-any.whl")
    said = answers(wheel, tmp_path / "site").stderr.splitlines()
    assert len(said) == 1
    assert said[0].startswith("thalweg: the compiled kernels are missing")


def test_wheels_have_the_extension_and_data_and_no_sources_in_c(source: Path, tmp_path: Path) -> None:
    (source / "src" / "thalweg" / "_kernels.cpython-39-other.so").write_bytes(b"left by an editable installation")
    wheel = wheel_of(source)
    names = wheel.namelist()
    assert extensions(wheel) == [f"thalweg/_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"]
    assert not answers(wheel, tmp_path / "site").stderr
    assert not [name for name in names if name.endswith((".cpp", ".h"))]
    code, data = {".py", ".pyi", ".typed"}, {".yaml", ".json", ".jsonl", ".safetensors"}
    page, licences = {".html", ".js", ".mjs", ".css", ".svg"}, {".LICENSE", ".txt"}
    tracked = {
        f"thalweg/{path.relative_to(ROOT / 'src' / 'thalweg')}"
        for path in (ROOT / "src" / "thalweg").rglob("*")
        if path.suffix in code | data | page | licences and "csrc" not in path.parts
    }
    assert {"thalweg/serve/page/vendor/preact.LICENSE", "thalweg/tasks/boxed/english/LICENCE.txt"} <= tracked
    assert tracked <= set(names)


def test_an_editable_installation_gives_way_to_pythonpath(source: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    command = [python, "-m", "pip", "install", "--no-deps", "--config-settings=kernels=later", "-e", source]
    subprocess.run(command, check=True, capture_output=True)
    code = "import thalweg; print(thalweg.__file__)"
    for environment, tree in (({}, source), ({"PYTHONPATH": str(ROOT / "src")}, ROOT)):
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
        ended = subprocess.run(
            [python, "-c", code], env=clean, capture_output=True, text=True, check=True, cwd=tmp_path
        )
        assert ended.stdout.strip() == str(tree / "src" / "thalweg" / "__init__.py")
