"""Beam search: the search itself, its steps, the answers it keeps, and the tree of what it looked at."""
