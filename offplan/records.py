"""What plans and machine profiles are made of: YAML, checked records, quantities with units."""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError
from typing_extensions import Self

from offplan import units
from offplan.errors import InputError

Basis = Literal["measured", "reported", "datasheet", "estimated"]
"""How a figure was obtained, the most certain way first."""
_WITH_UNITS = {"with units": True}
"""Context in which quantities are dumped with units instead of as plain numbers."""


class Record(BaseModel):
    """Base of all records: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def dump_with_units(self) -> dict[str, Any]:
        """Return what a YAML file says of the record: its keys there, and quantities with units."""
        return self.model_dump(mode="json", by_alias=True, context=_WITH_UNITS)

    @classmethod
    def check(cls, data: Any, name: str, whole: str, error: type[InputError]) -> Self:
        """Make the record of a file's data.

        Raises ``error``, which says ``name``, the key that is wrong or else ``whole``, and why.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as refused:
            where, why = explain(refused)
            raise error(f"{name}: {where or whole}: {why}") from None


def _read(parse: Callable[[Any], float]) -> BeforeValidator:
    def read(value: Any) -> float:
        try:
            return parse(value)
        except InputError as error:  # pydantic reports the field's path with it
            raise ValueError(str(error)) from None

    return BeforeValidator(read)


def _show(show: Callable[[Any], str]) -> PlainSerializer:
    return PlainSerializer(lambda value, info: show(value) if info.context else value)


Bytes = Annotated[int, _read(units.parse_bytes), _show(units.format_bytes), Field(ge=0)]
"""A size: four significant digits in a plan."""
ExactBytes = Annotated[int, _read(units.parse_bytes), _show(units.format_bytes_exact), Field(ge=0)]
"""A size that must read back as it was written."""
Rate = Annotated[float, _read(units.parse_rate), _show(units.format_rate), Field(gt=0)]
Flops = Annotated[float, _read(units.parse_flops), _show(units.format_flops), Field(gt=0)]
_read_seconds = _read(units.parse_seconds)
Seconds = Annotated[float, _read_seconds, _show(units.format_seconds), Field(ge=0)]
ExactSeconds = Annotated[float, _read_seconds, _show(units.format_seconds_exact), Field(ge=0)]
"""A duration that must read back as it was written."""


class _Loader(yaml.SafeLoader):
    """Refuses a key given twice, of which YAML's loader takes the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for number, key in enumerate(keys):
            if any(key.value == other.value for other in keys[:number]):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
        return mapping


def load_yaml(text: str) -> Any:
    """Read a document of plain values; raises ValueError, which says in a line what is wrong."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # besides its own, what a value raises that is not of the type that it says
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def explain(error: ValidationError) -> tuple[str, str]:
    """Return the path of the first key that is wrong, empty for the whole record, and why."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    why = first["msg"].removeprefix("Value error, ")
    # in the words of who writes the file: YAML has lists and mappings
    why = re.sub(r"dictionary or instance of \w+", "mapping", why)
    return where, why.replace("a valid tuple", "a list")
