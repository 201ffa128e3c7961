"""What a figure depends on besides the code: the machine and the versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import thalweg


def machine(device: str) -> dict[str, Any]:
    """The processor by name and number of cores, the operating system, how busy it is, and a title for tables."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    # Work by others slows the side with more threads and processes most, so a ratio needs a quiet machine.
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: the load is {load:.1f} before the start; ratios from a busy machine do not count")
    title = torch.cuda.get_device_name() if device == "cuda" else f"{name} ({os.cpu_count()} cores)"
    system = f"{platform.system()} {platform.machine()}"
    return {"cpu": name, "cores": os.cpu_count(), "system": system, "load_before": load, "title": title}


def version_of(package: str, module: Any = None) -> str:
    """The version by the package's metadata or its module; `unknown` where neither tells."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(module, "__version__", getattr(module, "version", "unknown")))


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of Thalweg, torch, Python, and of those of the packages that are installed."""
    found = {"thalweg": thalweg.__version__, "torch": torch.__version__, "python": platform.python_version()}
    others = {package: version_of(package) for package in packages}
    return found | {package: version for package, version in others.items() if version != "unknown"}
