"""Grammars that answers follow: requests' schemas, patterns and calls as llguidance reads them."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from offplan.checkpoint.jsontext import shorten
from offplan.runtime.masks import Matcher
from offplan.serve.errors import ApiError
from offplan.serve.formats import Format, Writing
from offplan.serve.requests import ChatRequest, NamedTool, Request, Tool
from offplan.serve.schemas import (
    check_embedded,
    check_multiples,
    fit_keywords,
    is_any_text,
    is_bound_to_root,
    list_options,
    may_be_text,
    spell_out,
    spell_out_patterns,
)

_SPACE = r"(\x20|\n[\x20\t]{0,32})?"
"""Space between the parts of JSON, in a line or indented: models that are lost would write nothing
else without a bound."""
_JSON_OPTIONS: Any = {
    "whitespace_pattern": _SPACE,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
"""Options of schemas, all that change answers: the schema itself could name others."""
_MOST_TOLD = 300
"""Characters of llguidance's errors that a client sees."""
_TEXT = "/(?s:.+)/"
_IN_PARAMETERS = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
    | {"title", "description", "default", "examples", "strict"}
)
"""Keywords of a function's parameters where each stands on its own, and not in JSON."""
_OF_TEXT = frozenset({"type", "title", "description", "default", "examples", "enum", "const"})
_THINKS = (("<think>", "</think>"),)

Kind = Literal["json", "regex", "choice", "grammar"]
_FIELDS: Mapping[str, Kind] = {
    "guided_json": "json",
    "json_schema": "json",
    "guided_regex": "regex",
    "regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "ebnf": "grammar",
}


class Shape(NamedTuple):
    """The form that a request wants its answer in."""

    kind: Kind
    value: Any
    field: str
    """Field that says so."""


def find_shape(request: Request) -> Shape | None:
    """Return the form that a request's answer is to have; raises ApiError where it names two."""
    found = [*_list_shapes(request)]
    if len(found) > 1:
        names = " and ".join(each.field for each in found)
        raise ApiError(400, f"{names} name several forms of one answer", param=found[1].field)
    return found[0] if found else None


def _list_shapes(request: Request) -> Iterator[Shape]:
    if (form := request.response_format) is not None and form.type != "text":
        named = form.json_schema and form.json_schema.schema_
        place = "response_format.json_schema.schema"
        if form.type == "json_object":
            named, place = form.schema_, "response_format.schema"
            named = {"type": "object"} if named is None else named
        if named is None:
            raise ApiError(400, f"{place}: it is missing", param=place)
        yield Shape("json", named, place)
    for name, kind in _FIELDS.items():
        if (value := getattr(request, name)) not in (None, "", []):
            yield Shape(kind, value, name)
    if (asked := request.structured_outputs) is not None:
        if asked.json_object:
            yield Shape("json", {"type": "object"}, "structured_outputs.json_object")
        of_kind: dict[Kind, Any] = {
            "json": asked.json_,
            "regex": asked.regex,
            "choice": asked.choice,
            "grammar": asked.grammar,
        }
        for kind, value in of_kind.items():
            if value not in (None, "", []):
                yield Shape(kind, value, f"structured_outputs.{kind}")


def must_call(request: Request) -> bool:
    """Return True if an answer is to be calls of tools, and nothing else."""
    choice = request.tool_choice if isinstance(request, ChatRequest) else None
    return choice == "required" or isinstance(choice, NamedTool)


def has_grammar(request: Request) -> bool:
    """Return True if an answer is to follow a grammar; raises ApiError for two forms."""
    return find_shape(request) is not None or must_call(request)


@dataclass
class _Rules:
    """Rules of a grammar, in llguidance's Lark."""

    marks: Mapping[str, int]
    """Tokens that are no text to the grammar, by what is written for them."""
    rules: list[str] = field(default_factory=list)
    grammars: list[dict[str, Any]] = field(default_factory=list)
    """Grammars that rules name, in llguidance's JSON."""

    @cached_property
    def _mark(self) -> "re.Pattern[str]":
        longest_first = sorted(self.marks, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def literal(self, text: str) -> str:
        """Return what matches a text, its marks as tokens."""
        parts = [part for part in self._mark.split(text) if part]
        return " ".join(
            f"<[{self.marks[part]}]>" if part in self.marks else _quote(part) for part in parts
        )

    def until(self, end: str) -> str:
        """Return what matches any text up to ``end``, and ``end``."""
        if found := self._mark.search(end):
            return f"({_TEXT})? {self.literal(end[found.start() :])}"
        name = f"u{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: /(?s:.*){_escape(end)}/")
        return name

    def add(self, grammar: str) -> str:
        """Return what matches a grammar, in llguidance's JSON or in Lark."""
        named: dict[str, Any] = {"lark_grammar": grammar}
        if grammar.startswith("{"):
            (named,) = json.loads(grammar)["grammars"]
        named["name"] = f"g{len(self.grammars)}"
        self.grammars.append(named)
        return f"@{named['name']}"

    def write(self, start: str) -> str:
        """Return the whole grammar, in llguidance's JSON."""
        lark = "\n".join([f"start: {start}", *self.rules])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self.grammars]})


def _quote(text: str) -> str:
    """Return a text in quotes, with nothing in them that Lark takes for no text."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _escape(text: str) -> str:
    """Return a pattern of a text within slashes; Rust's takes no backslash before ``<``."""
    escaped = {"\n": r"\n", "<": "<", ">": ">"}
    return "".join(
        escaped.get(c, f"\\{c}" if c.isascii() and not (c.isalnum() or c in "_ ") else c)
        for c in text
    )


@dataclass(frozen=True)
class Grammars:
    """Makes what follows the grammars of requests, for one model."""

    tokenizer: Any
    end_tokens: Collection[int]
    vocabulary: int
    """Tokens that logits are of."""
    format: Format | None
    """How the model writes thoughts and calls; None if that is not known."""
    thinks: bool
    """True if the chat template has thoughts."""

    def list_matchers(self, request: Request, prompt: str, num_texts: int) -> list[Matcher]:
        """Return one for each text behind a rendered ``prompt``, of a request that has a grammar.

        The first call takes a second or so, for the tokenizer. Raises ApiError with 400.
        """
        shape = find_shape(request)
        place = shape.field if shape else "tool_choice"
        if request.ignore_eos or request.min_tokens:
            other = "ignore_eos" if request.ignore_eos else "min_tokens"
            raise ApiError(
                400, f"{other}: an answer of a form ends where that is whole", param=other
            )
        tokenizer, llguidance = self._open(place)
        rules = _Rules(self._marks)
        if isinstance(request, ChatRequest):
            start = self._write_chat(rules, request, shape, prompt)
        else:
            assert shape is not None, "completions have no calls"
            start = self._write_shape(rules, shape)
        matcher = llguidance.LLMatcher(tokenizer, rules.write(start), log_level=0)
        matcher.compute_bitmask()  # which finds grammars that no text follows, and too large ones
        if matcher.is_error():
            raise _refuse(place, matcher.get_error())
        return [matcher, *(matcher.deep_copy() for _ in range(num_texts - 1))]

    @cached_property
    def _tokenizer(self) -> Any:
        import llguidance.hf

        return llguidance.hf.from_tokenizer(
            self.tokenizer,
            n_vocab=max(self.vocabulary, len(self.tokenizer), *self.end_tokens),
            eos_token=sorted(self.end_tokens),
        )

    @cached_property
    def _marks(self) -> dict[str, int]:
        added = self.tokenizer.get_added_vocab().items()
        return {
            text: token
            for text, token in added
            if token not in self.end_tokens and self._tokenizer.is_special_token(token)
        }

    def _open(self, place: str) -> tuple[Any, Any]:
        """Return the tokenizer and the package; raises ApiError with 400 for ``place``."""
        try:
            import llguidance
        except ModuleNotFoundError:
            raise ApiError(
                400,
                f"{place} needs the package llguidance on the server: pip install 'offplan[serve]'",
                param=place,
            ) from None
        if not self.end_tokens:
            raise ApiError(400, f"{place} needs a model with an end token", param=place)
        try:
            return self._tokenizer, llguidance
        except ValueError:  # a tokenizer that is not of the package tokenizers
            raise ApiError(
                400, f"{place} needs a model that has a tokenizer.json", param=place
            ) from None

    def _write_chat(
        self, rules: _Rules, request: ChatRequest, shape: Shape | None, prompt: str
    ) -> str:
        """Return what matches a message: thoughts, and behind them calls or an answer."""
        bodies = []
        if shape is not None and not must_call(request):
            answer = self._write_shape(rules, shape)
            for opens in self.format.says if self.format else ("",):
                bodies.append(f"{rules.literal(opens)} {answer}")
        if must_call(request) or (shape is not None and request.shown_tools):
            bodies += self._write_calls(rules, request)
        return f"{self._write_thoughts(rules, prompt)} ({' | '.join(bodies)})"

    def _write_thoughts(self, rules: _Rules, prompt: str) -> str:
        """Return what matches thoughts, where the model may have any behind the prompt."""
        if not self.thinks:
            return ""
        has_channels = self.format is not None and self.format.says != ("",)
        ended, options = prompt.rstrip(), []
        for opens, closes in self.format.thoughts if self.format else _THINKS:
            thought = f"{rules.until(closes)} (/\\n{{1,2}}/)?"
            if ended.endswith(opens):
                return thought
            if not has_channels and ended.endswith(closes):
                return ""
            options.append(f"{rules.literal(opens)} {thought}")
        return f"({' | '.join(options)}){'*' if has_channels else '?'}" if options else ""

    def _write_shape(self, rules: _Rules, shape: Shape) -> str:
        import llguidance

        kind, value, place = shape
        if kind == "json":
            return self._write_json(rules, value, place)
        if kind == "choice":
            # a terminal, since a rule may be one of 2,000 at most
            rules.rules.append(f"CHOICE: {' | '.join(map(_quote, value))}")
            return "CHOICE"
        if kind == "regex":
            return self._check(
                rules, llguidance.LLMatcher.grammar_from_regex(spell_out(value)), place
            )
        if "::=" in value:
            try:
                value = llguidance.grammar_from("gbnf", _mend(value))
            except ValueError as error:
                raise _refuse(place, str(error)) from None
            return self._check(rules, value, place)
        try:
            check_embedded(value)
        except (ValueError, RecursionError) as error:
            raise _refuse(place, str(error)) from None
        return self._check(rules, llguidance.LLMatcher.grammar_from_lark(value), place)

    def _write_json(self, rules: _Rules, schema: Any, place: str) -> str:
        import llguidance

        try:
            schema = json.loads(schema) if isinstance(schema, str) else schema
            check_multiples(schema)
            schema = {} if schema is True else spell_out_patterns(fit_keywords(schema, schema))
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
        except (ValueError, TypeError, RecursionError) as error:
            raise _refuse(place, str(error)) from None
        return self._check(rules, grammar, place)

    def _check(self, rules: _Rules, grammar: str, place: str) -> str:
        """Return what matches a part of a request; raises ApiError for what is wrong with it."""
        import llguidance

        _, told = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        if told:  # a warning is of something that is not followed
            raise _refuse(place, told[0])
        return rules.add(grammar)

    def _write_calls(self, rules: _Rules, request: ChatRequest) -> list[str]:
        choice, tools = request.tool_choice, list(enumerate(request.tools or ()))
        if isinstance(choice, NamedTool):
            tools = [each for each in tools if each[1].function.name == choice.function.name]
        if self.format is None or not self.format.writes:
            place = "tool_choice" if must_call(request) else "tools"
            raise ApiError(
                400,
                f"{place}: offplan does not know how this model writes calls, and can hold it to "
                "none; leave tool_choice out, and name no form of the answer beside tools",
                param=place,
            )
        is_one = isinstance(choice, NamedTool) or request.parallel_tool_calls is False
        written = []
        for writing in self.format.writes:
            calls = [self._write_call(rules, writing, each, number) for number, each in tools]
            call = f"({' | '.join(calls)})"
            if not is_one and writing.between is not None:
                call += f" ({rules.literal(writing.between)} {call})*"
            written.append(f"{rules.literal(writing.opens)} {call} {rules.literal(writing.closes)}")
        return written

    def _write_call(self, rules: _Rules, writing: Writing, tool: Tool, number: int) -> str:
        place = f"tools.{number}.function"
        if not re.fullmatch(r"[\w.\-]+", tool.function.name, re.ASCII):
            raise ApiError(400, f"{place}.name: it has other than letters, digits, _, - and .")
        schema = tool.function.parameters or {"type": "object", "properties": {}}
        place += ".parameters"
        # arguments are an object, whatever else the schema says
        whole = schema if "type" in schema else {"type": "object", **schema}
        parts = []
        for part in re.split(r"(\$name|\$number|\$arguments)", writing.call):
            if part == "$name":
                parts.append(rules.literal(tool.function.name))
            elif part == "$number":
                parts.append("/[0-9]{1,3}/")
            elif part != "$arguments":
                parts.append(rules.literal(part))
            elif writing.parameter:
                self._write_json(_Rules({}), whole, place)  # what is wrong with it
                parts += self._write_parameters(rules, writing.parameter, schema, place)
            else:
                parts.append(self._write_json(rules, whole, place))
        return " ".join(parts)

    def _write_parameters(
        self, rules: _Rules, form: str, schema: Mapping[str, Any], place: str
    ) -> Iterator[str]:
        """Yield what matches each argument of a call, for formats where arguments are no JSON."""
        if others := schema.keys() - _IN_PARAMETERS:
            raise _refuse_keyword(place, min(others))
        properties, required = schema.get("properties", {}), schema.get("required", ())
        for key in [*properties, *(each for each in required if each not in properties)]:
            of_key = f"{place}.properties.{key}"
            one = self._write_parameter(
                rules, form, rules.literal(key), properties.get(key, True), schema, of_key
            )
            yield one if key in required else f"({one})?"
        more = schema.get("additionalProperties", True)
        if not properties and more is not False:
            key = r"/[^<>\"\n]+/"
            yield f"({self._write_parameter(rules, form, key, more, schema, place)})*"

    def _write_parameter(
        self, rules: _Rules, form: str, key: str, of_value: Any, root: Mapping[str, Any], place: str
    ) -> str:
        opens, _, end = form.partition("$value")
        lead, _, behind_key = opens.partition("$key")
        written = []
        for is_text, value in self._write_values(rules, of_value, root, end, place):
            behind = rules.literal(behind_key.replace("$is_text", str(is_text).lower()))
            written.append(f"{rules.literal(lead)} {key} {behind} {value}")
        return f"({' | '.join(written)})"

    def _write_values(
        self, rules: _Rules, schema: Any, root: Mapping[str, Any], end: str, place: str
    ) -> list[tuple[bool, str]]:
        """Return ways to write a value and the ``end`` behind it, each with whether it is text."""
        options = list_options(schema, root)
        if any(is_any_text(each) for each in options):
            for each in options:
                if isinstance(each, dict) and may_be_text(each) and (more := {*each} - _OF_TEXT):
                    raise _refuse_keyword(place, min(more))
            tail = end.strip()
            return [(True, f"{rules.until(tail)} {rules.literal(end.partition(tail)[2])}")]
        written = []
        defined = {key: root[key] for key in ("$defs", "definitions") if key in root}
        for each in options:
            values = each.get("enum", [each["const"]] if "const" in each else [])
            texts = [value for value in values if isinstance(value, str)]
            written += [(True, rules.literal(value + end)) for value in texts]
            if texts:
                each = {"enum": [value for value in values if not isinstance(value, str)]}
            if not texts or each["enum"]:
                if isinstance(each, dict) and is_bound_to_root(each | defined):
                    raise _refuse_keyword(place, "a $ref to other than $defs")
                matched = self._write_json(rules, {**defined, **each}, place)
                written.append((False, f"{matched} {rules.literal(end)}"))
        return written


_GBNF_PART = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#[^\n]*|\.', re.DOTALL)


def _mend(grammar: str) -> str:
    """Return a GBNF grammar without what llguidance's converter reads otherwise than llama.cpp.

    Source: llguidance 1.9.1, ``gbnf_to_lark.py``; it cuts the zeros of ``\\u0041``, has no end of
    a line in ``.``, and leaves ``&&`` of a class to Rust's patterns.
    """

    def mend(found: "re.Match[str]") -> str:
        part = found[0]
        if part == ".":
            return r"[^\x00]"
        if part.startswith("#"):
            return part
        part = re.sub(r"\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})", _read_escape, part)
        if part.startswith("["):
            if "--" in part:
                raise ValueError(f"the class {part} has two hyphens: write \\x2d for one")
            part = part.replace("&", r"\x26").replace("~", r"\x7e")
        return part

    return _GBNF_PART.sub(mend, grammar)


def _read_escape(found: "re.Match[str]") -> str:
    code = int(found[1] or found[2], 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"there is no character {found[0]}")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _refuse(place: str, why: str) -> ApiError:
    if why.startswith("NoExtension"):
        why = "no text follows it"
    if why.startswith("Unimplemented keys"):
        why += ": leave them out"
    lines = [line.strip() for line in why.partition("\n<state>")[0].splitlines()]
    told = shorten(" ".join(line for line in lines if line), _MOST_TOLD)
    return ApiError(400, f"{place}: {told}", param=place.partition(".")[0])


def _refuse_keyword(place: str, keyword: str) -> ApiError:
    return _refuse(place, f"{keyword} cannot be kept in this model's format of calls: leave it out")
