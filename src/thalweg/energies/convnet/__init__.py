"""Convolutional networks over images."""
