"""What plans and machine profiles are made of: YAML, checked records, quantities with units."""

import re
from typing import Annotated, Any

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializationInfo,
    ValidationError,
)

from offplan import units
from offplan.errors import InputError

YAML_CONTEXT = {"human": True}
"""Passed to ``model_dump`` to print quantities with units instead of plain numbers."""


class Record(BaseModel):
    """Base of all records: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


def _quantity(parse: Any, show: Any) -> tuple[BeforeValidator, PlainSerializer]:
    def read(value: Any) -> Any:
        try:
            return parse(value)
        except InputError as error:  # pydantic reports the field's path with it
            raise ValueError(str(error)) from None

    def write(value: float, info: SerializationInfo) -> Any:
        return show(value) if info.context == YAML_CONTEXT else value

    return BeforeValidator(read), PlainSerializer(write)


_read_bytes, _show_bytes = _quantity(units.parse_bytes, units.format_bytes)
_, _show_bytes_exact = _quantity(units.parse_bytes, units.format_bytes_exact)
_read_rate, _show_rate = _quantity(units.parse_rate, units.format_rate)
_read_flops, _show_flops = _quantity(units.parse_flops, units.format_flops)
_read_seconds, _show_seconds = _quantity(units.parse_seconds, units.format_seconds)
_, _show_seconds_exact = _quantity(units.parse_seconds, units.format_seconds_exact)

Bytes = Annotated[int, _read_bytes, _show_bytes, Field(ge=0)]
"""A size: four significant digits in a plan."""
ExactBytes = Annotated[int, _read_bytes, _show_bytes_exact, Field(ge=0)]
"""A size that must read back as it was written."""
Rate = Annotated[float, _read_rate, _show_rate, Field(gt=0)]
Flops = Annotated[float, _read_flops, _show_flops, Field(gt=0)]
Seconds = Annotated[float, _read_seconds, _show_seconds, Field(ge=0)]
ExactSeconds = Annotated[float, _read_seconds, _show_seconds_exact, Field(ge=0)]
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
