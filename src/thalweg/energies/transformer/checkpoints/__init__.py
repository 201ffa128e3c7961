"""Hugging Face checkpoints: the shape of each kind in our words, and its tensors under our names."""
