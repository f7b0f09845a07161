"""All that the runtime uses of transformers beyond what transformers documents.

Every name in this file was tried with transformers 5.17 and 5.23; try them again before another
version is allowed.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate as Concatenate
from transformers.core_model_loading import MergeModulelist as MergeModulelist
from transformers.core_model_loading import WeightConverter as WeightConverter
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.integrations.moe import ExpertsInterface as ExpertsInterface
from transformers.integrations.moe import use_experts_implementation as use_experts_implementation
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as modeling_deepseek_v2
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts as Llama4TextExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe as Llama4TextMoe


def rename(
    skeleton: PreTrainedModel, names: Iterable[str]
) -> Iterator[tuple[str, str | None, WeightConverter | None]]:
    """Yield the parameter that each stored tensor belongs to, its converter's pattern and that.

    The last two are None where the tensor is renamed and no more.
    """
    transforms = get_model_conversion_mapping(skeleton)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    prefix, state = skeleton.base_model_prefix, skeleton.state_dict()
    for name in names:
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        yield renamed, pattern, None if pattern is None else by_pattern[pattern]


def convert(
    converter: WeightConverter,
    skeleton: PreTrainedModel,
    name: str,
    sources: Iterable[tuple[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Return values by parameter name, made of tensors with the converter's pattern for each."""
    for pattern, tensor in sources:
        converter.collected_tensors[pattern].append(tensor)
    converted = converter.convert(name, model=skeleton, config=skeleton.config)
    # operations return a list where they pass on what they were given
    return {n: v[0] if isinstance(v, list) else v for n, v in converted.items()}


def compute_buffers(model: PreTrainedModel, module: nn.Module) -> None:
    """Give a module of ``model`` the values of its buffers, as after a load from files.

    Source: transformers builds on the meta device too, and recomputes them in ``_init_weights``.
    """
    model._init_weights(module)


def choose_attention(model: PreTrainedModel, name: str) -> None:
    """Have all layers call the attention that is registered under ``name``.

    What ``set_attn_implementation`` does, without looking through all modules each time. Compiled
    layers are guarded by the name.
    """
    if model.config._attn_implementation != name:
        model.config._attn_implementation = name


def let_experts_be_chosen(model: PreTrainedModel) -> None:
    """Have ``set_experts_implementation`` serve a model whose own source does not mention it."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part._can_set_experts_implementation = lambda: True


def apply_gate(experts: Any, made: torch.Tensor) -> torch.Tensor:
    """Return the gated activation of routed experts, [pairs, width], of [pairs, 2 x width]."""
    return experts._apply_gate(made)
