"""What a decoding step on the GPU is made of, under one roof: the model's part and the search's."""

from thalweg.kernels.gpu.decode_attention import attend_past, attend_places, attend_source, rotate
from thalweg.kernels.gpu.decode_beam import Beam, advance, fits, start, trace
from thalweg.kernels.gpu.decode_linear import Fed, Norm, embed, linear, place, project
from thalweg.kernels.gpu.halved_products import multiply, parts_of, suits
from thalweg.kernels.gpu.halves import Halves, Matrices, normalise

__all__ = [
    "Beam",
    "Fed",
    "Halves",
    "Matrices",
    "Norm",
    "advance",
    "attend_past",
    "attend_places",
    "attend_source",
    "embed",
    "fits",
    "linear",
    "multiply",
    "normalise",
    "parts_of",
    "place",
    "project",
    "rotate",
    "start",
    "suits",
    "trace",
]
