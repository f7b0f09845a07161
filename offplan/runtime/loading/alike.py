"""Layers that are alike, of which one is loaded: what to time a model's passes takes."""

from collections.abc import Container

from torch import nn

from offplan.held.stage import Stage


def find_owners(
    layers: nn.ModuleList, module: nn.Module, stage: Stage, names: Container[str]
) -> dict[str, str]:
    """Find whose weights a layer can read in place of its own: those of the first one like it.

    Returns the first layer's parameter for each one of a later layer, of those in ``names``.
    """
    paths = {id(part): path for path, part in module.named_modules()}
    first: dict[str, nn.Module] = {}
    owners: dict[str, str] = {}
    for layer, block in zip(stage.layers, layers, strict=True):
        owner = first.setdefault(layer.key, block)
        if owner is block:
            continue
        for name in block.state_dict():
            here, there = (f"{paths[id(each)]}.{name}" for each in (block, owner))
            if here in names and there in names:
                owners[here] = there
    return owners
