"""What of a network is trained: all, all but some parts, or low-rank adapters alone; and how deep each part is."""

from __future__ import annotations

import copy
import fnmatch
import re
from typing import Any

from torch import nn

from thalweg.energies.pretrained.config import PretrainedConfig
from thalweg.energies.pretrained.hub import package, quietly
from thalweg.errors import ConfigError

# Queries and values, as each architecture calls them.
_TARGETS = {
    **dict.fromkeys(("t5", "mt5"), ("q", "v")),
    **dict.fromkeys(("bart", "mbart", "marian"), ("q_proj", "v_proj")),
    "encoder-decoder": ("query", "value"),
}


def _tables(network: nn.Module) -> set[int]:
    """The ids of all tables of symbols and positions."""
    return {id(p) for m in network.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}


def freeze(network: nn.Module, parts: tuple[str, ...]) -> int:
    """Leave parts out of training; returns how many parameters that are.

    ``embeddings`` are all tables of symbols and positions (and an output layer that is tied to one), ``encoder`` and
    ``decoder`` the stacks, with their adapters where there are some; anything else is a pattern of parameter names with
    ``*``, as they are without adapters.

    >>> freeze(nn.ModuleDict({"encoder": nn.Linear(2, 3), "decoder": nn.Linear(2, 3)}), ("encoder",))
    9
    """
    tables = _tables(network)
    frozen = 0
    for part in parts:
        found = [
            parameter
            for name, parameter in network.named_parameters()
            if (part == "embeddings" and id(parameter) in tables)
            or (part in ("encoder", "decoder") and part in name.split(".")[:2] and id(parameter) not in tables)
            or fnmatch.fnmatch(name.replace(".base_layer.", "."), part)
        ]
        if not found:
            raise ConfigError(
                f"model.freeze `{part}` names nothing of this model; use embeddings, encoder, decoder or a pattern of "
                f"names such as `{next(iter(dict(network.named_parameters())))}`"
            )
        for parameter in found:
            frozen += parameter.numel() if parameter.requires_grad else 0
            parameter.requires_grad_(False)
    return frozen


def add_adapters(network: Any, config: PretrainedConfig) -> None:
    r"""Put low-rank adapters into linear layers, by peft: W x becomes W x + (alpha / r) B A x, with B = 0 at first.

    All other weights are frozen. Hu et al. (2022).
    """
    peft = package("peft")
    targets = config.lora_targets or _TARGETS.get(network.config.model_type, ())
    if not targets:
        raise ConfigError(f"model.lora_targets must name linear layers of {network.config.model_type}, got none")
    told = peft.LoraConfig(
        r=config.lora,
        lora_alpha=config.lora_alpha or 2 * config.lora,
        lora_dropout=config.lora_dropout,
        target_modules=list(targets),
    )
    try:
        with quietly():
            peft.inject_adapter_in_model(told, network)
    except ValueError as error:
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(f"model.lora_targets must name linear layers, got {', '.join(targets)} ({reason})") from None


def merged(network: Any) -> Any:
    """A copy with its adapters added into the weights, as it was before there were any; one without is copied."""
    whole = copy.deepcopy(network)
    for name, module in list(whole.named_modules()):
        if hasattr(module, "lora_A") and hasattr(module, "get_base_layer"):
            module.merge()
            home, _, leaf = name.rpartition(".")
            setattr(whole.get_submodule(home), leaf, module.get_base_layer())
    if hasattr(whole, "peft_config"):
        del whole.peft_config
    if hasattr(whole, "_hf_peft_config_loaded"):
        whole._hf_peft_config_loaded = False
    return whole


def depths(network: nn.Module) -> dict[str, int]:
    """How far below its stack's top each parameter is: 0 for the last layer and what is above it, most for embeddings.

    >>> layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    >>> stack = nn.ModuleDict({"layers": layers, "embed": nn.Embedding(2, 1)})
    >>> sorted(depths(stack).items())[0], depths(stack)["layers.1.bias"]
    (('embed.weight', 2), 0)
    """
    tables = _tables(network)
    place = re.compile(r"^(.*?)\b(?:layers?|block|h)\.(\d+)\.")
    found = {name: place.match(name) for name, _ in network.named_parameters()}
    tops: dict[str, int] = {}
    for match in found.values():
        if match:
            tops[match[1]] = max(tops.get(match[1], 0), int(match[2]))
    most = max(tops.values(), default=0) + 1
    return {
        name: tops[match[1]] - int(match[2]) if (match := found[name]) else most if id(parameter) in tables else 0
        for name, parameter in network.named_parameters()
    }
