"""Layers that are alike, of which one stands for all: it is run, built or loaded."""

import json
from collections.abc import Container, Sequence
from dataclasses import replace

from torch import nn
from transformers import PreTrainedConfig

from offplan.checkpoint.model import Layer
from offplan.checkpoint.transformers_config import build_config
from offplan.held.stage import Stage


def list_kinds(layers: Sequence[Layer], config: PreTrainedConfig) -> list[object]:
    """Name what makes two layers run alike: their parameters, and what the config lists of each.

    ``layers`` are all that a model has, and ``config`` is that of its text.
    """
    if len({len(layer.prefix.rpartition(".")[0]) for layer in layers}) > 1:
        return [*range(len(layers))]
    values = config.to_dict().values()
    lists = [v for v in values if isinstance(v, (list, tuple)) and len(v) == len(layers)]
    return [
        (layer.key, *(json.dumps(each[layer.index], default=str) for each in lists))
        for layer in layers
    ]


def shorten(stage: Stage) -> Stage:
    """Leave out a stage's last layers as far as each is like an earlier one.

    offplan's own runtime can run the rest where it can run the whole: it builds, maps and probes
    layers of one kind alike.
    """
    model = stage.model
    config = build_config(model.config, model.source).get_text_config()
    kinds = list_kinds(stage.layers, config)
    count = 1 + max(kinds.index(kind) for kind in {*kinds})
    short = replace(model, layers=model.layers[:count])
    return replace(stage, model=short, layers=stage.layers[:count])


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
