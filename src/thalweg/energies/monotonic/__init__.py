"""Transducers that read one source position for each target symbol, never going back; all readings are summed."""
