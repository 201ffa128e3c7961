"""What a decoding step on the GPU is made of, under one roof: the model's part and the search's."""

from thalweg.kernels.gpu.decode_attention import attend_past, attend_places, attend_source
from thalweg.kernels.gpu.decode_beam import Beam, advance, fits, start, trace
from thalweg.kernels.gpu.decode_products import Halves, multiply, normalise, suits

__all__ = [
    "Beam",
    "Halves",
    "advance",
    "attend_past",
    "attend_places",
    "attend_source",
    "fits",
    "multiply",
    "normalise",
    "start",
    "suits",
    "trace",
]
