"""The compiled extension: functions of arrays, called by `thalweg.kernels.cpu` alone, which gives them their types."""

from typing import Any

def __getattr__(name: str) -> Any: ...
