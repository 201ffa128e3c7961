"""Bounds on a likelihood whose sum over latent variables is out of reach, and the expectations they are made of."""
