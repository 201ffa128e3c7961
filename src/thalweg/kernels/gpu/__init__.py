"""Triton kernels, one module for each structure. Importing one needs Triton: `kernels.dispatch` does it when asked."""

__all__: list[str] = []
