"""Matrices of which a token needs a few rows, so that they may lie on the host."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from offplan.checkpoint.architecture import Architecture
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import Tensors

INPUT_EMBEDDINGS = frozenset(
    ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings", "embed")
)
"""Names that models give to the module of their input embedding."""


@dataclass(frozen=True)
class Table:
    """A matrix of which a token needs some rows."""

    name: str
    """The module that reads it: ``model.embed_tokens``."""
    parameters: tuple[Parameter, ...]
    """Its rows, stored in one or in several."""
    rows_per_token: int = 1
    """Rows that a pass reads for each token."""

    @property
    def short_name(self) -> str:
        """The last part of its name: ``embed_tokens``."""
        return self.name.rpartition(".")[2]

    @property
    def is_input(self) -> bool:
        """True if it is the input embedding."""
        return self.short_name in INPUT_EMBEDDINGS

    @property
    def tensors(self) -> Tensors:
        """The stored tensors that its rows are in."""
        return tuple(tensor for each in self.parameters for tensor in each.tensors)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def num_rows(self) -> int:
        """Rows of all tensors."""
        return sum(tensor.shape[0] for tensor in self.tensors)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of the rows that a token needs."""
        return self.rows_per_token * (self.nbytes // max(1, self.num_rows))

    def share(self, num_tokens: int) -> float:
        """Return the part of its rows that so many tokens need at most."""
        return min(1.0, num_tokens * self.rows_per_token / self.num_rows)

    def of(self, held: Iterable[Parameter]) -> "Table | None":
        """Return the table as a GPU holds it; None where it holds none of it."""
        names = {each.name for each in self.parameters}
        parameters = tuple(each for each in held if each.name in names)
        return replace(self, parameters=parameters) if parameters else None


def group_rows(
    architecture: Architecture, parameters: Iterable[Parameter], inputs: Iterable[Parameter]
) -> tuple[Table, ...]:
    """Group parameters into tables, ``inputs`` first, each of which is one by itself."""
    parts: defaultdict[tuple[str, int], list[Parameter]] = defaultdict(list)
    for parameter in inputs:
        parts[parameter.segment, 1].append(parameter)
    for parameter in parameters:
        if (found := architecture.find_table(parameter.name)) is not None:
            parts[found].append(parameter)
    return tuple(Table(name, tuple(of), rows) for (name, rows), of in parts.items())


def describe_tables(tables: Iterable[Table]) -> str:
    """Name tables in a sentence: the input embedding first, others by their modules."""
    ordered = sorted(tables, key=lambda table: not table.is_input)
    names = ["the input embedding" if each.is_input else each.short_name for each in ordered]
    return " and ".join(dict.fromkeys(names))
