"""Many-to-many alignment of strings, learned from pairs alone."""
