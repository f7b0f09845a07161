"""Parts of plans and machine profiles: YAML, checked records, quantities with units."""

import difflib
import json
import re
import reprlib
from collections.abc import Callable, Collection
from functools import cache
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError
from typing_extensions import Self, TypeAliasType

from offplan import units
from offplan.errors import InputError
from offplan.files import StrPath

Basis = Literal["measured", "reported", "datasheet", "estimated"]
"""Way in which a figure was obtained, the most certain way first."""
_WITH_UNITS = {"with units": True}
"""Context in which quantities are dumped with units instead of as plain numbers."""
_MOST_ERRORS = 20
"""Errors of one file that are told; the others are counted."""
_MOST_SHOWN = 160
"""Characters of a file's own text, or of a library's, in an error."""


class Record(BaseModel):
    """Base of all records: frozen, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False
    )

    def dump_with_units(self) -> dict[str, Any]:
        """Return what a YAML file says of the record: its keys there, and quantities with units."""
        return self.model_dump(mode="json", by_alias=True, context=_WITH_UNITS)

    @classmethod
    def from_arguments(cls, **values: Any) -> Self:
        """Make the record of arguments; those that are None are left out. Raises InputError."""
        try:
            return cls(**{key: value for key, value in values.items() if value is not None})
        except ValidationError as error:
            wrong = (f"{where}: {why}" if where else why for where, why in explain(error))
            raise InputError("; ".join(wrong)) from None

    @classmethod
    def check(
        cls, data: Any, name: str, whole: str, error: type[InputError], context: object = None
    ) -> Self:
        """Make the record of a file's data; its validators are given ``context``.

        Raises ``error``, which says ``name`` and, for each key that is wrong (else ``whole``), why.
        """
        try:
            return cls.model_validate(data, context=context)
        except ValidationError as refused:
            wrong = explain(refused, _known_keys(cls))
            told = [f"{where or whole}: {why}" for where, why in wrong[:_MOST_ERRORS]]
            if more := len(wrong) - len(told):
                told.append(f"and {more} more")
            raise error(f"{name}: {'; '.join(told)}") from None


@cache
def _known_keys(record: type[Record]) -> set[str]:
    """Return the keys that a file of this record may have, at any depth."""
    schema = record.model_json_schema()
    sections = [schema, *schema.get("$defs", {}).values()]
    return {key for section in sections for key in section.get("properties", ())}


def _read(parse: Callable[[Any], float], quantity: units.Quantity) -> BeforeValidator:
    def read(value: Any) -> float:
        try:
            return parse(value)
        except InputError as error:  # pydantic reports the field's path with it
            raise ValueError(str(error)) from None

    number, text = Field(ge=0), Field(pattern=quantity.pattern, description=quantity.described)
    written = TypeAliasType(quantity.name, Annotated[float, number] | Annotated[str, text])  # type: ignore[misc]
    return BeforeValidator(read, json_schema_input_type=written)


def _show(show: Callable[[Any], str]) -> PlainSerializer:
    return PlainSerializer(lambda value, info: show(value) if info.context else value)


_read_bytes = _read(units.parse_bytes, units.SIZE)
Bytes = Annotated[int, _read_bytes, _show(units.format_bytes), Field(ge=0)]
"""A size: four significant digits in a plan."""
ExactBytes = Annotated[int, _read_bytes, _show(units.format_bytes_exact), Field(ge=0)]
"""A size that must read back as it was written."""
_read_rate = _read(units.parse_rate, units.RATE)
Rate = Annotated[float, _read_rate, _show(units.format_rate), Field(gt=0)]
_read_flops = _read(units.parse_flops, units.ARITHMETIC_RATE)
Flops = Annotated[float, _read_flops, _show(units.format_flops), Field(gt=0)]
_read_seconds = _read(units.parse_seconds, units.TIME)
Seconds = Annotated[float, _read_seconds, _show(units.format_seconds), Field(ge=0)]
ExactSeconds = Annotated[float, _read_seconds, _show(units.format_seconds_exact), Field(ge=0)]
"""A duration that must read back as it was written."""


class _Loader(yaml.SafeLoader):
    """Reads plain values: numbers as JSON has them, no key twice, no aliases, nothing unprintable.

    YAML's own loader takes the last of a key's values without a word, and ``1:30`` for 90. An alias
    lets a short text stand for gigabytes.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not read: write out what they stand for")
        return super().compose_node(parent, index)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        text = str(super().construct_scalar(node))
        if not text.replace("\n", "").isprintable():
            shown = reprlib.repr(text)
            raise yaml.MarkedYAMLError(None, None, f"{shown} cannot be printed", node.start_mark)
        return text

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                twice = f"the key {reprlib.repr(key.value)} is given twice"
                raise yaml.MarkedYAMLError(None, None, twice, key.start_mark)
            seen.add(key.value)
        return mapping


class _Dumper(yaml.SafeDumper):
    """Puts texts in quotes that the loader would take for something else, such as ``58e57``."""


def _construct_plain(loader: _Loader, node: yaml.ScalarNode) -> Any:
    return json.loads(loader.construct_scalar(node).lower())


# dates, merges and numbers to the base of 60 or 8 are no plain values, and stay texts
_Loader.yaml_implicit_resolvers = {}
for _name, _pattern in {
    "null": r"null|~|",
    "bool": r"true|false",
    "int": r"-?(0|[1-9][0-9]*)",
    "float": r"-?(0|[1-9][0-9]*)(\.[0-9]+)?(e[-+]?[0-9]+)?",
}.items():  # Source: YAML 1.2.2, 10.2, the JSON schema
    _tag = f"tag:yaml.org,2002:{_name}"
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(_tag, re.compile(rf"({_pattern})\Z", re.IGNORECASE), None)
    if _name != "null":
        _Loader.add_constructor(_tag, _construct_plain)


def load_yaml(text: str) -> Any:
    """Read a document of plain values; raises ValueError, which says in a line what is wrong."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # besides its own, what a value raises that is not of the type that it says
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(_shorten(" ".join(str(error).split()))) from None


def dump_yaml(value: Any, *, width: int, on_one_line: bool = False) -> str:
    """Write plain values in lines of ``width`` characters: ``load_yaml`` reads them back."""
    return yaml.dump(
        value, Dumper=_Dumper, default_flow_style=on_one_line, sort_keys=False, width=width
    )


def read_text(path: StrPath, what: str, max_bytes: int, error: type[InputError]) -> str:
    """Read a file in UTF-8 of ``max_bytes`` at most.

    Raises ``error``, which names the file, ``what`` it should be (a ``plan``) and what is wrong.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(max_bytes + 1)
        if len(text) > max_bytes:
            most = units.format_bytes(max_bytes)
            raise error(f"{path} is no {what}: it is longer than {most}")
        return text.decode("utf-8")
    except OSError as failed:
        raise error(f"cannot read {what} {path}: {failed.strerror}") from None
    except UnicodeDecodeError as failed:
        raise error(f"{path} is no {what}, which is text in UTF-8: {failed}") from None


def explain(error: ValidationError, known: Collection[str] = ()) -> list[tuple[str, str]]:
    """Return the path of each key that is wrong, empty for the whole record, and why.

    ``known`` are keys that may have been meant by one that there is not.
    """
    wrong = []
    for each in error.errors():
        path = [str(part) for part in each["loc"]]
        why = _IN_YAML.get(each["type"], each["msg"].removeprefix("Value error, "))
        if each["type"] == "extra_forbidden":
            near = difflib.get_close_matches(path[-1][:_MOST_SHOWN], known, 1)
            why += f"; is {near[0]} meant?" if near else ""
        wrong.append((_shorten(".".join(path)), _shorten(why)))
    return wrong


_IN_YAML = {
    "extra_forbidden": "there is no such key",
    "missing": "it is missing",
    "model_type": "it should be a valid mapping",
    "tuple_type": "it should be a list",
}
"""pydantic's errors in the words of who writes the file: YAML has lists and mappings."""


def _shorten(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
