"""What published checkpoints store beside, or under other names than, transformers' modules."""

import re
from collections.abc import Mapping
from typing import Any

from offplan.checkpoint.built_cache import BuiltTensors
from offplan.checkpoint.config import read_count
from offplan.checkpoint.quantise import Use
from offplan.checkpoint.tensors import TensorInfo

_COMPRESSED = re.compile(r"\.(compressor|indexer)\.")


def as_published(built: BuiltTensors, config: Mapping[str, Any]) -> BuiltTensors:
    """Return the tensors of a model as its makers publish them, of DeepSeek-V4 alone others.

    Its names have no ``model.``, and ``mtp.0`` is one more layer, without compressed keys.
    Source: the names in the index of deepseek-ai/DeepSeek-V4-Flash.
    """
    if config.get("model_type") != "deepseek_v4":
        return built
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
