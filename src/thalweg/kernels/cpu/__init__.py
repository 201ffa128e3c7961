"""CPU kernels: C++ in ``csrc/``, compiled into ``thalweg._kernels``, and its face; imported where it is used."""

__all__: list[str] = []
