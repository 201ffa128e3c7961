"""Strings: symbols, alphabets, files of pairs and of sentences."""
