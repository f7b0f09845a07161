"""The names and shapes that published checkpoints store otherwise than transformers' modules."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from offplan.checkpoint.architecture import Architecture, Routing
from offplan.checkpoint.config import read_count
from offplan.checkpoint.quantise import BuiltTensors, Use
from offplan.checkpoint.tensors import TensorInfo, split_expert

_COMPRESSED = re.compile(r"\.(compressor|indexer)\.")
_DEEPSEEK_NAMES = {
    "model.": "",
    "embed_tokens.": "embed.",
    "hc_head.hc_": "hc_head_",
    ".attn.norm.": ".attn.kv_norm.",
}
"""DeepSeek-V4's names for what transformers saves by these parts of names."""
_DEEPSEEK_WIDE = re.compile(r"hc_|\.attn_sink$|\.ape$|\.gate\.bias$")
"""Tells the tensors that DeepSeek-V4 stores in float32."""


def as_published(
    built: BuiltTensors, architecture: Architecture, config: Mapping[str, Any]
) -> BuiltTensors:
    """Return the tensors of a model as its makers publish them."""
    built = _without_idle_experts(architecture.routing, built)
    model_type = config.get("model_type")
    if model_type == "deepseek_v4":
        built = _as_deepseek(built, config)
    elif model_type == "qwen3_vl_moe":
        built = _with_turned_experts(built)
    return _with_published_routers(architecture, built)


def _without_idle_experts(routing: Routing, built: BuiltTensors) -> BuiltTensors:
    """Drop the halves that transformers allocates for LongCat's experts that compute nothing.

    Source: transformers 5.23, ``LongcatFlashExperts``: gate and up for ``n_routed_experts +
    zero_expert_num`` experts, down for the former only; the published checkpoint has the former.
    """
    num_experts = routing.num_experts
    if num_experts is None or not routing.has_idle:
        return built
    indices = (split_expert(tensor.name) for tensor, _ in built)
    return [each for each, at in zip(built, indices, strict=True) if not at or at[0] < num_experts]


def _with_published_routers(architecture: Architecture, built: BuiltTensors) -> BuiltTensors:
    """Return the tensors with routers in the type of the matrices beside them.

    Source: DeepSeek-V2-Lite and DeepSeek-V3. The classes of transformers 5.24 have float32 there.
    """
    types = Counter(tensor.dtype for tensor, use in built if use.is_product)
    if not types:
        return built
    ((main, _),) = types.most_common(1)
    return [
        (tensor._replace(dtype=main) if architecture.is_router(tensor.name) else tensor, use)
        for tensor, use in built
    ]


def _with_turned_experts(built: BuiltTensors) -> BuiltTensors:
    """Turn fused experts round, to [experts, in, out].

    Source: the conversion of Qwen3-VL's experts in transformers 5.23, which turns them when it
    loads, and not when it saves.
    """

    def turn(tensor: TensorInfo) -> TensorInfo:
        count, rows, columns = tensor.shape
        return tensor._replace(shape=(count, columns, rows))

    return [
        (turn(tensor) if use.is_product and len(tensor.shape) == 3 else tensor, use)
        for tensor, use in built
    ]


def _as_deepseek(built: BuiltTensors, config: Mapping[str, Any]) -> BuiltTensors:
    """Name DeepSeek-V4's tensors, and add those of the layers that predict further tokens.

    ``mtp.0`` is one more layer, without compressed keys. Source: the names and types of
    deepseek-ai/DeepSeek-V4-Flash's tensors.
    """
    named = [(_name_deepseek(tensor), use) for tensor, use in built]
    last = f"layers.{(read_count(config, 'num_hidden_layers') or 0) - 1}."
    hidden = read_count(config, "hidden_size") or 0
    more: BuiltTensors = []
    for index in range(read_count(config, "num_nextn_predict_layers") or 0):
        start = f"mtp.{index}."
        more += [
            (tensor._replace(name=start + tensor.name.removeprefix(last)), use)
            for tensor, use in named
            if tensor.name.startswith(last) and not _COMPRESSED.search(tensor.name)
        ]
        more += [
            (tensor._replace(name=start + tensor.name), use)
            for tensor, use in named
            if tensor.name.startswith("hc_head")
        ]
        for name, shape, use in (
            *((f"{each}_proj", (hidden, hidden), Use.PRODUCT) for each in "eh"),
            *((each, (hidden,), Use.OTHER) for each in ("enorm", "hnorm", "norm")),
        ):
            more.append((TensorInfo(f"{start}{name}.weight", named[0][0].dtype, shape), use))
    return named + more


def _name_deepseek(tensor: TensorInfo) -> TensorInfo:
    """Name a tensor of DeepSeek-V4, and give it its type, as its makers do."""
    name = tensor.name
    for ours, theirs in _DEEPSEEK_NAMES.items():
        name = name.replace(ours, theirs)
    is_wide = _DEEPSEEK_WIDE.search(name) is not None
    return tensor._replace(name=name, dtype="F32" if is_wide else tensor.dtype)
