"""A weight of a module in its stored form: where its parts are, and how it is multiplied."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from offplan.capabilities.table import Recoding
from offplan.errors import PlanError
from offplan.forms.form import Component, Form, Kind
from offplan.kernel_sizes import (
    CODES_ROWS,
    KERNEL_TYPES,
    PACKED_ROWS,
    are_grouped,
    expert_scratch,
)
from offplan.runtime.forms.operands import operands_of
from offplan.runtime.forms.reference import Components, expand, gather_rows
from offplan.transformers_private import INITIALISED

UNUSED = frozenset((Component.SHAPE, Component.INPUT_SCALE, Component.STATE))
"""Parts that no value is computed with: what a STATE says is applied once it is loaded."""
KERNEL_DTYPES = tuple(getattr(torch, name) for name in KERNEL_TYPES)
"""Types of inputs that the kernels multiply."""


def component_name(name: str, part: Component) -> str:
    """Name the parameter that holds a part of the weight called ``name``.

    Never the weight's own name: code that looks for its values fails instead of reading codes.
    """
    return f"{name}_{'codes' if part is Component.WEIGHT else part.value}"


@dataclass(frozen=True)
class StoredWeight:
    """A weight, or those of all experts in one, that its module holds by parts."""

    name: str
    """The weight's own name in the module: ``weight``, ``gate_up_proj``."""
    form: Form
    components: tuple[Component, ...]

    def of(self, module: nn.Module) -> Components:
        """Return the parts that the module holds at present."""
        return {part: getattr(module, component_name(self.name, part)) for part in self.components}

    def expand(self, module: nn.Module, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight's values, [..., out, in], in ``dtype``, on the module's device."""
        parts = self.of(module)
        if not parts[Component.WEIGHT].is_cuda or dtype not in KERNEL_DTYPES:
            return expand(self.form, parts, dtype)
        from offplan.runtime.forms import operators  # needs triton

        return operators.expand(self.form, parts, dtype)


def _make_values(module: Any) -> torch.Tensor:
    """Return the values of a stored weight, for code that reads more of it than its products."""
    values: torch.Tensor = module.stored.expand(module, module.dtype_of_values)
    return values


class StoredLinear(nn.Linear):
    """A linear layer whose weight is stored in another form than its values."""

    stored: StoredWeight
    scratch: torch.Tensor | None = None
    """Flat memory that its values are made in for many rows, where it shares one with others."""
    weight = property(_make_values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, [..., in], times the weight: [..., out].

        Few rows multiply its codes, which are read once, where they lie; for many it is expanded.
        """
        if not x.is_cuda or x.dtype not in KERNEL_DTYPES:
            return linear(x, self.stored.expand(self, x.dtype), self.bias)
        from offplan.runtime.forms import operators  # needs triton

        form, parts = self.stored.form, self.stored.of(self)
        is_cheap = form.kind is Kind.PACKED and self.scratch is not None
        if x.numel() > (PACKED_ROWS if is_cheap else CODES_ROWS) * x.shape[-1]:
            return operators.linear(form, parts, x, self.bias, self.scratch)
        made = operators.multiply(form, parts, x.flatten(0, -2))
        made = made.unflatten(0, x.shape[:-1])
        return made if self.bias is None else made + self.bias


class PackedRows:
    """Stands for the values of an embedding's weight: for their type and device, and single rows.

    It is no tensor. An operator that is given all of it raises PlanError.
    """

    def __init__(self, embedding: "StoredEmbedding") -> None:
        self._embedding, self.dtype = embedding, embedding.dtype_of_values
        self.device = next(embedding.parameters()).device

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return a row by its number, or the columns of it that are named behind."""
        row, *columns = index if isinstance(index, tuple) else (index,)
        if not isinstance(row, int):
            raise _refuse_all()
        # filled on the device: a captured pass may copy nothing from the host
        return self._embedding.gather(torch.full((1,), row, device=self.device))[0][(*columns,)]

    @classmethod
    def __torch_function__(cls, *called: object) -> None:
        raise _refuse_all()


setattr(PackedRows, INITIALISED, True)


def _refuse_all() -> PlanError:
    return PlanError(
        "the plan holds the input embedding packed with the head that is tied to it, and the model "
        f"reads more of it than rows: plan with {Recoding.leave(['output_head'])}"
    )


class StoredEmbedding(nn.Embedding):
    """An embedding of packed rows, by which the head that is tied to it multiplies."""

    stored: StoredWeight
    dtype_of_values: torch.dtype
    weight = property(PackedRows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows numbered by ``x``, int64 of [...], bit for bit: [..., in]."""
        return self.gather(x.reshape(-1)).unflatten(0, x.shape)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows by their numbers, int64 of [rows]: [rows, in]."""
        parts = self.stored.of(self)
        if not rows.is_cuda:
            return gather_rows(parts, rows).to(self.dtype_of_values)
        from offplan.runtime.forms import products  # needs triton

        return products.gather_rows(self.stored.form, parts, rows).to(self.dtype_of_values)


@cache
def _store_class(own: Any) -> Any:
    """Return the class of a module of codes; one of a forward of its own keeps that."""
    if own in (nn.Linear, nn.Embedding):
        return StoredLinear if own is nn.Linear else StoredEmbedding
    if issubclass(own, nn.Embedding):  # its forward asks the next class for rows
        return type(f"Stored{own.__name__}", (own, StoredEmbedding), {})
    return type(f"Stored{own.__name__}", (own,), {"weight": property(_make_values)})


def leave_part(module: nn.Module, name: str, unread: Component) -> None:
    """Have a part of a weight read no more, which says what holds without it."""
    is_linear = isinstance(module, nn.Linear)
    holder, key = (vars(module), "stored") if is_linear else (vars(module)["stored_experts"], name)
    parts = tuple(part for part in holder[key].components if part is not unread)
    holder[key] = replace(holder[key], components=parts)


def multiplies_values(experts: Any, num_pairs: int) -> bool:
    """Return True if so many pairs multiply the values of these experts' codes group by group."""
    kinds = [stored.form.kind.value for stored in experts.stored_experts.values()]
    return are_grouped(num_pairs, experts.num_experts, kinds)


class SharedScratch:
    """One memory in which stored linear layers and experts of a model make their values.

    They run one after another, and each value is read before the next one is made. On the CPU,
    and in types that no kernel multiplies, each is made in memory of its own.
    """

    def __init__(self, parent: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Take memory for the linear layers of ``parent``; experts may need more."""
        self._dtype, self._device = dtype, device
        self._sizes: dict[nn.Module, int] = {}
        self._memory: torch.Tensor | None = None
        if device.type != "cuda" or dtype not in KERNEL_DTYPES:
            return
        self._sizes = {each: size for each in parent.modules() if (size := scratch_size(each))}
        self.make_room(0)

    def make_room(self, num_pairs: int) -> None:
        """Have memory for passes in which so many pairs of a token and an expert meet experts.

        It is smaller where so few multiply codes. The device must be idle, and no pass captured.
        """
        sizes = {
            module: size
            for module, size in self._sizes.items()
            if isinstance(module, StoredLinear) or multiplies_values(module, num_pairs)
        }
        most = max(sizes.values(), default=0)
        if self._memory is None or most != len(self._memory):
            self.close()
            self._memory = torch.empty(most, dtype=self._dtype, device=self._device)
        # also where the most is a linear layer's: experts may not have had any yet
        for module in sizes:
            vars(module)["scratch"] = self._memory

    def close(self) -> None:
        """Give the memory back."""
        for module in self._sizes:
            vars(module).pop("scratch", None)
        self._memory = None


def scratch_size(module: nn.Module) -> int:
    """Return the values that a module makes at a time of its codes in the shared scratch."""
    if isinstance(module, StoredLinear):
        return module.in_features * module.out_features
    coded: dict[str, StoredWeight] = vars(module).get("stored_experts", {})
    weights = [operands_of(stored.form, stored.of(module)) for stored in coded.values()]
    values = ((each.num_experts, each.num_out * each.length * each.pack) for each in weights)
    return max((expert_scratch(*each) for each in values), default=0)


def weight_of(module: nn.Linear, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a linear layer's weight, [out, in], expanded if it holds codes."""
    if isinstance(module, StoredLinear):
        return module.stored.expand(module, dtype)
    return module.weight


def hold_stored(
    module: nn.Module, name: str, form: Form, parts: Mapping[Component, nn.Parameter]
) -> None:
    """Have a module hold a weight by its parts, on the meta device, in place of its values."""
    used = [part for part in parts if part not in UNUSED]
    if Component.NESTED_SCALE in parts:
        used.append(Component.NESTED_OFFSET)  # which is known once the parts are loaded
    stored = StoredWeight(name, form, tuple(used))
    dtype = module.get_parameter(name).dtype
    del module._parameters[name]
    for part, value in parts.items():
        module.register_parameter(component_name(name, part), value)
    if isinstance(module, nn.Linear | nn.Embedding):
        own: Any = type(module)
        module.__class__ = _store_class(own)
        vars(module).update(stored=stored, dtype_of_values=dtype)
    else:
        vars(module).setdefault("stored_experts", {})[name] = stored
