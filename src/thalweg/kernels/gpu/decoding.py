"""What a decoding step on the GPU is made of, under one roof: the model's part and the search's."""

from thalweg.kernels.gpu.decode_attention import attend_past, attend_source, rotate
from thalweg.kernels.gpu.decode_beam import Beam, advance, fits, start, trace
from thalweg.kernels.gpu.decode_layer import Rooms, Weights, cut, layer
from thalweg.kernels.gpu.decode_linear import Norm, embed, linear, project

__all__ = [
    "Beam",
    "Norm",
    "Rooms",
    "Weights",
    "advance",
    "attend_past",
    "attend_source",
    "cut",
    "embed",
    "fits",
    "layer",
    "linear",
    "project",
    "rotate",
    "start",
    "trace",
]
