"""Where device and backend are looked at, and nowhere else."""

from thalweg.kernels.dispatch import on_cpu

__all__ = ["on_cpu"]
