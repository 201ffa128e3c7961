"""Encoder-decoders of Hugging Face: loaded or built, trained and searched like any other energy."""
