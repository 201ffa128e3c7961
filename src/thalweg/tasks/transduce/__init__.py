"""Strings to strings: everything about transduction."""
