"""Sequence models as ONNX graphs: an encoder, and one step of a decoder."""
