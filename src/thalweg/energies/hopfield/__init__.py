"""Associative memories and what is known of them."""
