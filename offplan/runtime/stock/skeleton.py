"""The transformers model as it is, without its weights, for transformers' own passes."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from offplan.checkpoint.model import Model
from offplan.checkpoint.own_code import MODEL_CLASS, load_own_class
from offplan.checkpoint.transformers_config import build_config_of, cannot_build, runs_own_code
from offplan.runtime.loading.skeleton import (
    check_read,
    find_auto_class,
    name_layers,
    remove_towers,
    set_types,
)
from offplan.runtime.refusal import refuse
from offplan.runtime.stock.bounded import bound_by_blocks
from offplan.transformers_private import asks_for_decoders, build_own, on_meta, rename


def build_stock(model: Model) -> PreTrainedModel:
    """Build the model as transformers does, with every tensor on the meta device.

    Nothing in it is replaced but what ``bound_by_blocks`` bounds. Raises CheckpointError for an
    architecture that transformers does not generate with from a prompt of text alone. Raises it too
    for layers that weights cannot be moved for.
    """
    auto_class = find_auto_class(model)
    config, is_own = build_config_of(model), runs_own_code(model)
    if not is_own:
        check_read(config, model)
    if (
        getattr(config, "is_decoder", None) is False
        and not is_own
        and asks_for_decoders(auto_class, config)
    ):
        raise refuse(
            f"{model.source} is an encoder (is_decoder is false in its config): it sees what "
            "follows a token"
        )
    text = config.get_text_config()
    both = getattr(text, "use_bidirectional_attention", None)
    if both in (True, "all") or getattr(text, "is_causal", None) is False:
        raise refuse(f"{model.source} attends to both sides by its config: it is an encoder")
    if model.stores_head:  # it is used, whatever the config says
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    try:
        with on_meta():
            skeleton = _build(model, auto_class, config)
    except Exception as error:
        raise cannot_build(model.source, error) from error
    if model.architecture.is_multimodal and not is_own:
        remove_towers(skeleton)
    name_layers(skeleton, find_layers(skeleton, model))
    set_types(skeleton, model)
    bound_by_blocks(skeleton)
    return skeleton.eval().requires_grad_(False)


def _build(model: Model, auto_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    dtype = getattr(torch, model.dtype)
    if runs_own_code(model):
        return build_own(load_own_class(model, MODEL_CLASS), config, dtype)
    built: PreTrainedModel = auto_class.from_config(config, dtype=dtype)
    return built


def find_layers(skeleton: PreTrainedModel, model: Model) -> list[nn.Module]:
    """Find the block of each of the checkpoint's layers: where its first tensor goes.

    A block is an element of an outermost module list. Raises CheckpointError for a layer without.
    """
    names = [
        f"{layer.prefix}.{layer.parameters[0].tensors[0].name[len(layer.prefix) + 1 :]}"
        for layer in model.layers
    ]
    renamed = [name for name, _, _ in rename(skeleton, names)]
    layers = [
        _find_block(skeleton, path, stored, model)
        for path, stored in zip(renamed, names, strict=True)
    ]
    if len(set(map(id, layers))) < len(layers):
        raise refuse(f"{model.source} stores several layers that are one in {type(skeleton)}")
    return layers


def _find_block(skeleton: PreTrainedModel, path: str, stored: str, model: Model) -> nn.Module:
    module: nn.Module = skeleton
    for part in path.split("."):
        is_list = isinstance(module, nn.ModuleList)
        found = getattr(module, part, None) if not is_list else module._modules.get(part)
        if not isinstance(found, nn.Module):
            break
        module = found
        if is_list:
            return module
    raise refuse(
        f"{model.source}: {stored} belongs to no block of a module list in "
        f"{type(skeleton).__name__}, so that no weights can be moved around its calls"
    )
