"""What the parameters of an image network come from."""

from __future__ import annotations

import dataclasses

import torch

from thalweg.diagnostics.costs import CostTable
from thalweg.energies.convnet.model import ConvNet


def flattening_costs(net: ConvNet, table: CostTable) -> list[str]:
    """What flattening costs: the same network with each channel's mean, which is never run.

    >>> from thalweg.diagnostics.costs import cost_table
    >>> from thalweg.energies.convnet.config import ConvNetConfig
    >>> net = ConvNet(ConvNetConfig(head="average"), classes=2, channels=1, size=(8, 8))
    >>> flattening_costs(net, cost_table(net, (torch.zeros(1, 1, 8, 8),)))
    []
    """
    if net.config.head != "flatten" or not table.rows:
        return []
    with torch.device("meta"):
        pooled = ConvNet(dataclasses.replace(net.config, head="average"), net.classes, net.channels, net.size)
    less = sum(p.numel() for p in pooled.parameters() if p.requires_grad)
    reader = next(row for row in table.rows if row.name.startswith("classifier.") and row.parameters)
    head = next(row for row in table.rows if row.name == "head")
    values, width = head.output[-1], net.config.channels[-1]
    return [
        f"{reader.name} reads all {values:,} values of the flattened maps ({width} channels of {values // width} "
        f"positions), and has weights for each: {reader.parameters:,}. With the mean of each channel (head=average) "
        f"it would read {width}, and the network would have {less:,} parameters, {table.parameters / less:.1f} times "
        "fewer."
    ]
