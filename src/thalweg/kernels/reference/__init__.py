"""Plain PyTorch that defines what every other backend must give; any device, differentiable to any order."""

__all__: list[str] = []
