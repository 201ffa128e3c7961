"""Hopfield layers and the maps that separate their patterns."""
