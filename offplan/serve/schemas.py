"""JSON schemas: what their patterns mean, and the parameters that a call has on their own."""

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from offplan.checkpoint.jsontext import shorten

_MOST_OPTIONS = 64
"""Schemas that a parameter's schema may be one of."""
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}

_ASCII = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_MULTIPLE = re.compile(r'"multipleOf": (\d[\d.]{0,15}(?:e[+-]\d\d?)?)(?=[,}])')
_EMBEDDED = re.compile(r"%json\s*")
_OF_ROOT = re.compile(r'"\$ref": "#(?!/(?:\$defs|definitions)/)')
_MOST_REMAINDERS = 10_000
_DATA = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose values are no schemas."""
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose values have schemas by name."""
_NOTES = frozenset({"type", "title", "description", "default", "examples"})
"""Keywords that leave texts as they are, beside the type of a text."""
_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)
"""Formats that llguidance knows. Source: llguidance 1.9.1, ``json/formats.rs``."""
_ANY_TEXT = frozenset({"binary", "directory-path", "file-path", "password", "path", "unknown"})
"""Formats by which a program treats a text, which may be any. Source: OpenAPI, pydantic."""
_BASE64 = r"^(?:[0-9A-Za-z+/]{4})*(?:[0-9A-Za-z+/]{2}==|[0-9A-Za-z+/]{3}=)?$"
_SPELT = {"base64": _BASE64, "byte": _BASE64}
"""Formats that a pattern says. Source: RFC 4648, section 4."""


def check_multiples(schema: Any) -> None:
    """Raise ValueError for numbers that are multiples of something large.

    llguidance remembers each remainder that there may be: for a million it takes minutes.
    """
    found = {Decimal(each) for each in _MULTIPLE.findall(json.dumps(schema))}
    places = max((-int(each.as_tuple().exponent) for each in found), default=0)
    whole = [int(each.scaleb(max(0, places))) for each in found]
    if math.lcm(*whole) > _MOST_REMAINDERS:
        raise ValueError(
            f"multipleOf leaves more than {_MOST_REMAINDERS} remainders: take a smaller number"
        )


def check_embedded(grammar: str) -> None:
    """Raise ValueError for a Lark grammar with a schema that ``check_multiples`` refuses."""
    for found in _EMBEDDED.finditer(grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, found.end())
        except ValueError:  # llguidance says what is wrong with it
            continue
        check_multiples(schema)


def is_bound_to_root(schema: Any) -> bool:
    """Return True if a schema refers to what is at another place once it stands alone."""
    return bool(_OF_ROOT.search(json.dumps(schema)))


def spell_out(pattern: str) -> str:
    """Return a pattern whose digits and letters are those of ASCII, as in JavaScript and xgrammar.

    llguidance reads Rust's patterns, where ``\\d`` is a digit of any script.
    """
    return _ESCAPE.sub(lambda found: _ASCII.get(found[1], found[0]), pattern)


def spell_out_patterns(schema: Any) -> Any:
    """Return a schema whose patterns, which JSON Schema takes from JavaScript, are spelt out."""
    if isinstance(schema, list):
        return [spell_out_patterns(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: value if key in _DATA else spell_out_patterns(value) for key, value in schema.items()
    }
    if isinstance(pattern := found.get("pattern"), str):
        found["pattern"] = spell_out(pattern)
    if isinstance(properties := found.get("patternProperties"), dict):
        found["patternProperties"] = {spell_out(key): value for key, value in properties.items()}
    return found


def fit_keywords(schema: Any, root: Any) -> Any:
    """Return a schema that says the same in what llguidance reads of names and formats.

    ``root`` has what references are to. Raises ValueError for a format that nothing else says.
    Names that no other keyword can say stay, and llguidance refuses them.
    """
    if isinstance(schema, list):
        return [fit_keywords(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = dict[str, Any]()
    for key, value in schema.items():
        if key in _DATA:
            found[key] = value
        elif key in _MAPS and isinstance(value, dict):
            found[key] = {name: fit_keywords(each, root) for name, each in value.items()}
        else:
            found[key] = fit_keywords(value, root)
    _fit_format(found)
    _fit_names(found, root)
    return found


def _fit_format(schema: dict[str, Any]) -> None:
    name, kinds = schema.get("format"), schema.get("type", "string")
    may_be = "string" in (kinds if isinstance(kinds, list) else [kinds])
    if not isinstance(name, str) or name in _FORMATS or not may_be:
        return
    if name not in _ANY_TEXT and "pattern" not in schema:
        if name not in _SPELT:
            raise ValueError(
                f"there is no format {shorten(name, 64)!r} here: name a pattern, or one of "
                f"{', '.join(sorted(_FORMATS))}"
            )
        schema["pattern"] = _SPELT[name]
    del schema["format"]


def _fit_names(schema: dict[str, Any], root: Any) -> None:
    """Say the names of an object's properties by the properties, as of a dictionary."""
    options = list_options(schema.get("propertyNames"), root)
    if len(options) != 1 or not isinstance(options[0], dict) or not may_be_text(options[0]):
        return
    of_names = options[0].keys() - _NOTES
    if of_names and (schema.get("properties") or schema.get("patternProperties")):
        return
    value = schema.get("additionalProperties", True)
    if of_names == {"pattern"}:
        said: dict[str, Any] = {"patternProperties": {options[0]["pattern"]: value}}
    elif of_names in ({"enum"}, {"const"}):
        names = [each for each in _list_values(options[0]) if isinstance(each, str)]
        said = {"properties": dict.fromkeys(names, value)}
    elif of_names:
        return
    else:
        said = {"additionalProperties": value}
    del schema["propertyNames"]
    schema |= {"additionalProperties": False, **said}


def list_options(schema: Any, root: Mapping[str, Any]) -> list[Any]:
    """Return the schemas that a value may be of, one of them or several.

    ``root`` has what references are to. A reference is followed once: paths through several could
    be more than can be walked.
    """
    waiting, seen, options = [schema], set[str](), list[Any]()
    while waiting and len(options) < _MOST_OPTIONS:
        each = waiting.pop()
        if not isinstance(each, dict):
            options.append(each)
            continue
        reference, all_of = each.get("$ref"), each.get("allOf")
        any_of = each["anyOf"] if isinstance(each.get("anyOf"), list) else each.get("oneOf")
        if isinstance(reference, str) and reference.startswith("#/"):
            found: Any = root
            for name in reference[2:].split("/"):
                found = found.get(name) if isinstance(found, dict) else None
            if found is None:
                options.append(each)
            elif reference not in seen:
                waiting.append(found)
            seen.add(reference)
        elif isinstance(all_of, list) and len(all_of) == 1:
            waiting += all_of
        elif isinstance(any_of, list):
            waiting += reversed(any_of)
        elif isinstance(kinds := each.get("type"), list) and not _list_values(each):
            options += [{**each, "type": kind} for kind in kinds]
        else:
            options.append(each)
    return options or [schema]


def may_be_text(schema: Mapping[str, Any]) -> bool:
    """Return True if a schema, of those of ``list_options``, allows texts."""
    return bool(schema.get("type", "string") == "string")


def is_any_text(schema: Any) -> bool:
    """Return True if a value may be a text that the schema does not list."""
    if not isinstance(schema, dict):
        return True
    is_other = any(key in schema for key in ("$ref", "allOf", "anyOf", "oneOf"))
    return may_be_text(schema) and not is_other and not _list_values(schema)


def _list_values(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema lists; none if it lists none."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return values if isinstance(values, list) else []


def name_types(parameters: Any) -> dict[str, Any]:
    """Return a function's parameters, each with its types alone, as a parser of texts reads them.

    transformers' parser follows no reference, and takes a list of numbers for texts.
    """
    root = parameters if isinstance(parameters, dict) else {}
    properties = root.get("properties")
    named = {}
    for key, schema in properties.items() if isinstance(properties, dict) else ():
        options = [each for each in list_options(schema, root) if isinstance(each, dict)]
        types = [each["type"] for each in options if isinstance(each.get("type"), str)]
        for each in options:
            if "type" not in each:
                types += [_TYPES.get(type(value), "object") for value in _list_values(each)]
        named[key] = {"type": types}
    return {"type": "object", "properties": named}
