"""What published checkpoints store otherwise than transformers' modules: names, shapes, more."""

import re
from collections.abc import Mapping
from typing import Any

from offplan.checkpoint.built_cache import BuiltTensors
from offplan.checkpoint.config import read_count
from offplan.checkpoint.quantise import Use
from offplan.checkpoint.tensors import TensorInfo

_COMPRESSED = re.compile(r"\.(compressor|indexer)\.")


def as_published(built: BuiltTensors, config: Mapping[str, Any]) -> BuiltTensors:
    """Return the tensors of a model as its makers publish them."""
    model_type = config.get("model_type")
    if model_type == "deepseek_v4":
        return _as_deepseek(built, config)
    return _with_turned_experts(built) if model_type == "qwen3_vl_moe" else built


def _with_turned_experts(built: BuiltTensors) -> BuiltTensors:
    """Turn fused experts round, to [experts, in, out].

    Source: the conversion of Qwen3-VL's experts in transformers 5.23, which turns them when it
    loads, and not when it saves.
    """

    def turn(tensor: TensorInfo) -> TensorInfo:
        count, rows, columns = tensor.shape
        return tensor._replace(shape=(count, columns, rows))

    return [
        (turn(tensor) if use is Use.PRODUCT and len(tensor.shape) == 3 else tensor, use)
        for tensor, use in built
    ]


def _as_deepseek(built: BuiltTensors, config: Mapping[str, Any]) -> BuiltTensors:
    """Name DeepSeek-V4's tensors, and add those of the layers that predict further tokens.

    Its names have no ``model.``, and ``mtp.0`` is one more layer, without compressed keys.
    Source: the names in the index of deepseek-ai/DeepSeek-V4-Flash.
    """
    named = [(t._replace(name=t.name.removeprefix("model.")), use) for t, use in built]
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
            (tensor._replace(name=f"{start}hc_head_{tensor.name.rpartition('hc_')[2]}"), use)
            for tensor, use in named
            if tensor.name.startswith("hc_head")
        ]
        for name, shape, use in (
            *((f"{each}_proj", (hidden, hidden), Use.PRODUCT) for each in "eh"),
            *((each, (hidden,), Use.OTHER) for each in ("enorm", "hnorm", "norm")),
        ):
            more.append((TensorInfo(f"{start}{name}.weight", named[0][0].dtype, shape), use))
    return named + more
