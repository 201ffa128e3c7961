"""Recurrent encoder-decoders."""
