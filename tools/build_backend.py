"""Builds Thalweg: scikit-build-core, and a compiler from PyPI where the machine has none.

``python tools/build_backend.py`` compiles the extension into ``src/thalweg`` of this tree, and only what has changed;
an editable installation does the same once. A wheel has it inside. Where it cannot be compiled the package is
installed without it and answers by plain PyTorch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

from scikit_build_core import build as backend
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

ROOT = Path(__file__).resolve().parents[1]
ZIG = "ziglang>=0.14"


def has_compiler() -> bool:
    """Whether there is a C++ compiler: the one that CXX names, or one of the usual names."""
    names = [os.environ["CXX"].split()[0]] if os.environ.get("CXX") else ["c++", "g++", "clang++", "cl"]
    return any(shutil.which(name) for name in names)


def use_zig() -> None:
    """Let CMake take the compiler of the package ziglang, if it is installed, for a processor of any age."""
    try:
        import ziglang
    except ImportError:
        return
    os.environ["CXX"] = f"{Path(ziglang.__file__).parent / 'zig'} c++ -mcpu=baseline"


def compile_in_place(*options: str, place: Path = ROOT / "src" / "thalweg", name: str = "") -> None:
    """Compile into ``place``, with further options of CMake and a folder ``name`` of its own for what lies between."""
    if not has_compiler():
        use_zig()
    cmake = shutil.which("cmake", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}")
    ninja = shutil.which("ninja", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}")
    if cmake is None or ninja is None:
        raise FileNotFoundError("cmake and ninja are needed: pip install cmake ninja")
    tag = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    folder = ROOT / "build" / f"{name or 'kernels'}-{tag}"
    own = (f"-DPython_EXECUTABLE={sys.executable}", f"-DTHALWEG_PLACE={place}", f"-DCMAKE_MAKE_PROGRAM={ninja}")
    # With another compiler or interpreter all begins anew; otherwise only what has changed is compiled.
    tools = repr([os.environ.get("CXX"), *map(shutil.which, ("c++", "g++", "clang++", "cl")), cmake, *own, *options])
    told = folder / "tools.txt"
    fresh = [] if told.is_file() and told.read_text() == tools else ["--fresh"]
    subprocess.run([cmake, *fresh, "-G", "Ninja", "-S", ROOT, "-B", folder, *own, *options], check=True)
    told.write_text(tools)
    subprocess.run([cmake, "--build", folder], check=True)


def _requirements(found: list[str]) -> list[str]:
    return found if has_compiler() else [*found, ZIG]


def get_requires_for_build_wheel(config_settings=None):
    """What scikit-build-core asks for, and a compiler where there is none."""
    return _requirements(backend.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings=None):
    """The same."""
    return _requirements(backend.get_requires_for_build_editable(config_settings))


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """A wheel with the extension; without, where it cannot be compiled."""
    if not has_compiler():
        use_zig()
    return backend.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """A wheel that points to ``src``, where the extension is compiled to; ``kernels=later`` leaves that to a caller.

    It adds a path and nothing else: that of scikit-build-core would come before PYTHONPATH.
    """
    settings = dict(config_settings or {})
    if settings.pop("kernels", "now") != "later":
        try:
            compile_in_place()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"the kernels could not be compiled ({error}): installed without, plain PyTorch answers")
    name = backend.build_editable(wheel_directory, settings | {"wheel.cmake": "false", "editable.mode": "inplace"})
    wheel = Path(wheel_directory) / name
    with ZipFile(wheel) as given:
        files = {entry: given.read(entry) for entry in given.namelist()}
    kept = {entry: text for entry, text in files.items() if not entry.startswith("_editable")}
    path = f"{ROOT / 'src'}\n".encode()
    digest = urlsafe_b64encode(sha256(path).digest()).rstrip(b"=").decode()
    record = next(entry for entry in kept if entry.endswith(".dist-info/RECORD"))
    lines = [line for line in kept[record].decode().splitlines() if not line.startswith("_editable")]
    kept[record] = "\n".join([f"_thalweg.pth,sha256={digest},{len(path)}", *lines, ""]).encode()
    with ZipFile(wheel, "w") as fresh:
        for entry, text in {"_thalweg.pth": path, **kept}.items():
            fresh.writestr(entry, text)
    return name


if __name__ == "__main__":
    try:
        if not has_compiler():
            subprocess.run(
                [sys.executable, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), ZIG],
                check=True,
            )
        compile_in_place(*sys.argv[1:])
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the kernels could not be compiled ({error}): plain PyTorch answers")
