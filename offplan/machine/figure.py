"""A number of a machine profile, and where it comes from."""

from typing import Generic, TypeVar

from pydantic import Field

from offplan.records import Basis, Record

Value = TypeVar("Value")


class Figure(Record, Generic[Value]):
    """A number, how it was obtained and where it comes from."""

    value: Value
    """The median, where it was measured several times."""
    basis: Basis
    source: str = Field(min_length=1)
    samples: int | None = Field(None, ge=1)
    """How many times it was measured; of a table, each of its entries."""
    spread: float | None = Field(None, ge=0)
    """(largest - smallest) / median of the samples; of a table, each entry has its own."""
