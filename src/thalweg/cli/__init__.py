"""The command line: a thin layer of words and tables over ``tasks`` and ``recipes``."""

__all__: list[str] = []
