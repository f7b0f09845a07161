"""Changes of stored codes once they are loaded: their contents or the order of rows ask for it."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from offplan.forms.form import BITS, NESTED_BLOCK, Component, Form, Kind, WordOrder
from offplan.runtime.forms.reference import ONES
from offplan.runtime.forms.stored import component_name, leave_part
from offplan.runtime.loading.fill import Codes, Target, list_coded
from offplan.runtime.refusal import refuse

RUN_BYTES = 2**26
"""Bytes of matrices that are laid out at once, if one is not larger: it takes some five times as
many of memory."""
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of the code of each of its columns. Source: AutoAWQ, ``AWQ_REVERSE_ORDER``."""


def lay_out_rows(
    targets: Mapping[str, Target],
    loaded: Mapping[str, torch.Tensor],
    orders: Mapping[str, torch.Tensor],
    device: torch.device,
) -> None:
    """Lay out in rows what was ``loaded`` as the checkpoint stores it, by parameter name.

    ``orders`` are what ``order_of`` found, by weight. ``device`` lays out what lies in host memory.
    """
    for name, target in targets.items():
        codes = target.codes
        if (
            codes is None
            or codes.part is Component.GROUP_INDEX
            or not target.stored_form.is_by_columns
        ):
            continue
        matrices = loaded[name].view(-1, *target.pieces[0].tensor.shape)
        order = orders.get(codes.weight) if codes.part is Component.WEIGHT else None
        step = max(1, RUN_BYTES // matrices[0].nbytes)
        for start in range(0, len(matrices), step):
            place = matrices[start : start + step]
            stored = place if place.is_cuda else place.to(device, non_blocking=True)
            own = None if order is None else order[start : start + step].to(stored.device)
            made = in_rows(target.stored_form, codes.part, stored, own)
            place.view(-1).copy_(made.reshape(-1), non_blocking=True)
    if device.type == "cuda":
        for used in {device, *(value.device for value in loaded.values() if value.is_cuda)}:
            torch.cuda.synchronize(used)
        torch.cuda.empty_cache()


def order_of(name: str, index: torch.Tensor, num_groups: int, size: int) -> torch.Tensor | None:
    """Return the inputs in the order of their groups, [matrices, in]; None if that is theirs.

    ``index``, called ``name``, has the group of each, [..., in]. Raises CheckpointError for groups
    that have no scales or are not of ``size`` inputs, the last of what is left.
    """
    found = index.cpu().flatten(0, -2)
    if not 0 <= int(found.min()) <= int(found.max()) < num_groups:
        raise refuse(f"{name} has groups beyond the {num_groups} that have scales")
    in_order = torch.arange(found.shape[-1]) // size
    if bool((found == in_order).all()):
        return None
    order = found.argsort(dim=-1, stable=True)
    if bool((found.gather(-1, order) != in_order).any()):
        raise refuse(f"{name} has groups of other than {size} inputs")
    return order.int()


def in_rows(
    form: Form, part: Component, stored: torch.Tensor, order: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a part of matrices that are stored by columns, [matrices, ...], laid out in rows.

    Inputs come in the ``order`` of each matrix, [matrices, in], if there is one.
    """
    bits, is_awq = BITS[form.kind], form.word_order is WordOrder.AWQ
    if is_awq and part is Component.ZERO:
        stored = _pack(lambda place: _codes(stored, 4 * AWQ_NIBBLES[place]), 4)
    elif is_awq and part is Component.WEIGHT:
        shifts = 4 * torch.tensor(AWQ_NIBBLES, dtype=torch.int32, device=stored.device)
        of_words = stored.unflatten(1, (-1, 8)).unsqueeze(-1)  # the inputs of a word
        stored = _pack(lambda place: _codes(of_words[:, :, place], shifts), 4).flatten(2)
    elif form.word_order is WordOrder.GPTQ and part is Component.ZERO:
        stored = stored + ONES[bits]
    rows = stored.mT
    if order is None:
        return rows
    per = 32 // bits

    def take(place: int) -> torch.Tensor:
        inputs = order[:, None, place::per].expand(-1, rows.shape[1], -1)
        return _codes(rows.gather(-1, (inputs // per).long()), bits * (inputs % per), bits)

    return _pack(take, bits)


def _codes(words: torch.Tensor, shift: int | torch.Tensor, bits: int = 4) -> torch.Tensor:
    return (words >> shift) & ((1 << bits) - 1)


def _pack(code: Callable[[int], torch.Tensor], bits: int) -> torch.Tensor:
    """Return words of the codes for each of their places, the first in the lowest bits."""
    words = code(0)
    for place in range(1, 32 // bits):
        words |= code(place) << (bits * place)
    return words


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
