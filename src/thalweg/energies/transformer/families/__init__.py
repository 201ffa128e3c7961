"""Families of Hugging Face checkpoints: the shape of each in our words, and its tensors under our names."""
