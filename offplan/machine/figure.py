"""What the records of a machine profile are made of: the base, and numbers with their units."""

from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from offplan import units
from offplan.errors import InputError


class Record(BaseModel):
    """Base of the profile's records: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _reader(parse: Any) -> BeforeValidator:
    def read(value: Any) -> Any:
        try:
            return parse(value)
        except InputError as error:  # pydantic reports the field's path with it
            raise ValueError(str(error)) from None

    return BeforeValidator(read)


Bytes = Annotated[int, _reader(units.parse_bytes), Field(ge=0)]
Rate = Annotated[float, _reader(units.parse_rate), Field(gt=0)]
Flops = Annotated[float, _reader(units.parse_flops), Field(gt=0)]
Seconds = Annotated[float, _reader(units.parse_seconds), Field(ge=0)]

Value = TypeVar("Value")


class Figure(Record, Generic[Value]):
    """A number, how it was obtained and where it comes from."""

    value: Value
    """The median, where it was measured several times."""
    basis: str = Field(pattern="^(measured|reported|datasheet|estimated)$")
    source: str = Field(min_length=1)
    samples: int | None = Field(None, ge=1)
    """How many times it was measured; of a table, each of its entries."""
    spread: float | None = Field(None, ge=0)
    """(largest - smallest) / median of the samples; of a table, each entry has its own."""
