"""Compiled kernels for the CPU: Numba around explicit vector code. Imported only where they are used."""

__all__: list[str] = []
