"""Models with continuous latent variables whose posterior is bounded, not computed."""
