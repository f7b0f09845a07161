"""Sources of a parameter of the model: the stored tensors, and the part that each of them fills."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import TensorInfo
from offplan.forms.form import Component, Form
from offplan.forms.names import part_of
from offplan.transformers_private import WeightConverter, convert


class Source(NamedTuple):
    """A tensor that a GPU holds, and all that is known of it before the model is."""

    tensor: TensorInfo
    parameter: Parameter
    """The checkpoint's parameter that the tensor is of."""
    part: Component
    layer: int | None
    """Index of the layer that it is stored for; None outside the layers."""
    made_of: TensorInfo | None
    """The checkpoint's tensor that this one is made of, where the plan holds it in another form."""
    pattern: str = ""
    """The converter's pattern that it matches; empty without a converter."""

    @property
    def stores_codes(self) -> bool:
        """True if the checkpoint itself has something else than the weight's values."""
        return not self.parameter.form.is_raw and self.made_of is None

    @property
    def name_of_values(self) -> str:
        """The name under which the checkpoint would store the values that it is made for."""
        if self.made_of is not None:
            return self.made_of.name
        return part_of(self.tensor.name)[0] if self.stores_codes else self.tensor.name


@dataclass(frozen=True)
class Piece:
    """One stored tensor and the part of a parameter that it fills."""

    source: Source
    index: tuple[int | slice, ...] = ()
    """Selects the part, as an index of torch does; all of the parameter if left out."""

    def select(self, target: torch.Tensor) -> torch.Tensor:
        """Return the view of ``target`` that this tensor fills."""
        return target[self.index]

    @property
    def tensor(self) -> TensorInfo:
        """The tensor that is held."""
        return self.source.tensor

    @property
    def read(self) -> TensorInfo:
        """The checkpoint's tensor that is read for it."""
        return self.source.made_of or self.source.tensor


@dataclass(frozen=True)
class Conversion:
    """Operations of transformers that make parameters of stored tensors where views will not do."""

    converter: WeightConverter
    skeleton: PreTrainedModel
    name: str
    """The parameter that the tensors are renamed to; the first one where there are several."""
    sources: tuple[Source, ...]

    def convert(self, tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert the sources' values, given in their order; returns values by parameter name."""
        sources = zip((source.pattern for source in self.sources), tensors, strict=True)
        return convert(self.converter, self.skeleton, self.name, sources)


@dataclass(frozen=True)
class Codes:
    """The content of a parameter that is a part of a weight's stored form."""

    weight: str
    """Name of the weight that the part belongs to, in the model as it was built."""
    form: Form
    """Form in which it is held once loaded: in rows what the checkpoint stores by columns."""
    part: Component
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Target:
    """The stored tensors that fill one parameter of the model."""

    pieces: tuple[Piece, ...]
    """Stored tensors that fill it or, with a conversion, that it is made of."""
    conversion: Conversion | None = None
    """Shared by all parameters that are made together; None when the pieces are views."""
    codes: Codes | None = None
    """Codes that the parameter holds in place of values; None if it holds values."""

    @property
    def is_recoded(self) -> bool:
        """True if the plan, and not the checkpoint, chose the form."""
        return self.pieces[0].source.made_of is not None

    @property
    def stored_form(self) -> Form:
        """How the checkpoint stores the weight, or the plan has it packed."""
        return self.pieces[0].source.parameter.form

    def built_name(self, name: str) -> str:
        """Return the name that the parameter called ``name`` had when the model was built."""
        return name if self.codes is None else self.codes.weight
