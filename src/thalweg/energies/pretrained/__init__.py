"""Pretrained encoder-decoders of Hugging Face."""
