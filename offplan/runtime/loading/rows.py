"""Whole numbers that GPTQ and AWQ store by columns are laid out in rows, where they were read to.

They take as many bytes so: words of codes along inputs, and zeros along outputs, both in order.
"""

from collections.abc import Callable, Mapping

import torch

from offplan.forms.form import BITS, Component, Form, WordOrder
from offplan.runtime.forms.reference import ONES
from offplan.runtime.loading.target import Target
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
