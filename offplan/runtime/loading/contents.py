"""Changes that the contents of stored parts make once they are loaded: headers do not say it."""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from offplan.forms.form import NESTED_BLOCK, Component, Kind, WordOrder
from offplan.runtime.forms.stored import component_name, leave_part
from offplan.runtime.loading.codes import list_coded
from offplan.runtime.loading.rows import lay_out_rows, order_of
from offplan.runtime.loading.target import Codes, Target
from offplan.runtime.refusal import refuse


def apply_contents(
    skeleton: PreTrainedModel,
    targets: Mapping[str, Target],
    loaded: Mapping[str, torch.Tensor],
    device: torch.device,
    dtype: str,
    *,
    is_random: bool,
) -> None:
    """Check group indices and bitsandbytes' states, keep what is added to nested scales, lay out
    in rows what is stored by columns.

    ``loaded`` are the parts by parameter name, ``dtype`` is what is computed with, as torch names
    it. Raises CheckpointError for contents that are not executed; ``is_random`` ones say nothing.
    """
    coded = list_coded(targets)
    orders: dict[str, torch.Tensor] = {}
    for name, target in targets.items():
        codes = target.codes
        if codes is None or codes.part not in (Component.GROUP_INDEX, Component.STATE):
            continue
        path, _, attribute = codes.weight.rpartition(".")
        if codes.part is Component.GROUP_INDEX:
            _, scales = coded[codes.weight][Component.SCALE]
            _, size = codes.form.block or (1, codes.shape[-1])
            order = order_of(name, loaded[name], scales.shape[-1], size)
            if order is None:
                leave_part(skeleton.get_submodule(path), attribute, Component.GROUP_INDEX)
            else:
                orders[codes.weight] = order
                loaded[name].copy_(order.view(loaded[name].shape))
        elif codes.form.kind is Kind.BNB8:
            if not is_random and loaded[name].any():
                raise refuse(f"{codes.weight} is stored in another order than rows")
        else:
            parts = {part: each for part, (_, each) in coded[codes.weight].items()}
            offset = 0.0 if is_random else _read_state(parts, loaded[name], dtype)
            skeleton.get_submodule(path).register_buffer(
                component_name(attribute, Component.NESTED_OFFSET),
                torch.tensor([offset], dtype=torch.float32, device=device),
                persistent=False,
            )
    if not is_random:
        lay_out_rows(targets, loaded, orders, device)
        _leave_middles(skeleton, targets, loaded)


def _leave_middles(
    skeleton: PreTrainedModel, targets: Mapping[str, Target], loaded: Mapping[str, torch.Tensor]
) -> None:
    """Have codes of zero in words read no more where all are the middle one, as without any."""
    for name, target in targets.items():
        codes = target.codes
        if codes is None or codes.part is not Component.ZERO:
            continue
        middles = 0x88 if codes.form.kind is Kind.W4A16 else 0x80
        is_words = codes.form.word_order is WordOrder.COMPRESSED_TENSORS
        if is_words and bool((loaded[name].view(torch.uint8) == middles).all()):
            path, _, attribute = codes.weight.rpartition(".")
            leave_part(skeleton.get_submodule(path), attribute, Component.ZERO)


def _read_state(parts: Mapping[Component, Codes], state: torch.Tensor, dtype: str) -> float:
    """Return what is added to the scales of a weight of bitsandbytes' 4 bits, 0 if nothing is.

    Raises CheckpointError where its state says something else than was taken from headers.
    Source: bitsandbytes 0.49, ``QuantState.as_dict``.
    """
    codes, scales = parts[Component.WEIGHT], parts[Component.SCALE]
    weight = codes.weight
    try:
        said: dict[str, Any] = dict(json.loads(bytes(state.tolist())))
    except (TypeError, ValueError):
        raise refuse(f"{weight} has a state that is no JSON object") from None
    columns = 2 * codes.shape[1]
    expected: dict[str, Any] = {
        "quant_type": codes.form.kind.value,
        "blocksize": columns // scales.shape[1],
        "shape": [codes.shape[0], columns],
        "dtype": dtype,  # values are rounded to it
    }
    if Component.NESTED_SCALE in parts:
        expected |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
    for key, value in expected.items():
        if said.get(key) != value:
            raise refuse(f"{weight} has the {key} {said.get(key)}, expected {value}")
    offset = said.get("nested_offset") if Component.NESTED_SCALE in parts else 0.0
    if not isinstance(offset, float) or not math.isfinite(offset):
        raise refuse(f"{weight} has the nested_offset {offset}")
    return offset
