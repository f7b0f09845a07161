"""Grammars of calls: whatever follows one comes apart as calls of the tools that were asked for."""

# ruff: noqa: RUF001  # marks of DeepSeek have letters that look like others

import json
import random
from copy import deepcopy
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import AddedToken

from offplan.runtime.masks import Matcher, RowMask
from offplan.serve.answers import CallParser, TokenNames
from offplan.serve.errors import ApiError
from offplan.serve.formats import FORMATS, Format, list_hidden
from offplan.serve.grammars import Grammars
from offplan.serve.requests import ChatRequest, CompletionRequest, parse_request
from offplan.serve.schemas import fit_keywords, name_types, spell_out_patterns
from tests.serve import END
from tests.serve.conftest import Tiny

pytest.importorskip("llguidance")

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 20},
        "unit": {"enum": ["c", "f", 3, None]},
        "place": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
PIECES = (
    *('"', "}", "]", "</parameter>", "</arg_value>", "</｜DSML｜parameter>", "</think>"),
    *("[/THINK]", " 3 ", "true", "null", "Kö ln", "\n"),
)
BY_NAME = {each.name: each for each in reversed(FORMATS) if each.writes}


def make(
    tiny: Tiny, found: Format | None, *, thinks: bool = False, tokenizer: Any = None
) -> Grammars:
    return Grammars(tokenizer or tiny.tokenizer, {END}, END + 1, found, thinks)


def ask(choice: Any = "required", **fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": choice}
    return parse_request(ChatRequest, {**body, **fields})


def draw(matcher: Matcher, tokens: dict[bytes, int], seed: int) -> str:
    """Draw what a grammar allows, parts of which are what may end something."""
    drawn, mask = random.Random(seed), RowMask(matcher, torch.device("cpu"), 0)
    made, queue = list[bytes](), list[bytes]()
    while len(made) < 3000:
        scores = mask(torch.zeros(1, len(made)), torch.zeros(1, END + 1))[0]
        allowed = [each for each, token in tokens.items() if scores[token] > -torch.inf]
        assert allowed or scores[END] > -torch.inf
        if not allowed or (scores[END] > -torch.inf and drawn.random() < 0.5):
            break
        if not queue and len(allowed) > 20:
            queue = [bytes([byte]) for byte in drawn.choice(PIECES).encode()]
        byte = queue.pop(0) if queue else drawn.choice(allowed)
        if byte not in allowed:
            queue, byte = (
                [],
                drawn.choice([b for b in allowed if b[0] in range(33, 127)] or allowed),
            )
        made.append(byte)
        mask.follow(len(made) - 1, tokens[byte])
        assert mask.error is None
        if mask.is_over:
            break
        mask.refresh(len(made))
    return b"".join(made).decode()


@pytest.fixture(scope="module")
def tokens(tiny: Tiny) -> dict[bytes, int]:
    names = TokenNames(tiny.tokenizer)
    return {names.find_bytes(token): token for token in range(END)}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_what_follows_a_grammar_are_calls(tiny: Tiny, tokens: dict[bytes, int], name: str) -> None:
    found, num_whole = BY_NAME[name], 0
    parsed = [
        {
            "function": {
                **each["function"],
                "parameters": name_types(each["function"].get("parameters")),
            }
        }
        for each in TOOLS
    ]
    for seed in range(4):
        one = {"type": "function", "function": {"name": "get_weather"}}
        request = ask(one if seed % 2 else "required")
        (matcher,) = make(tiny, found).list_matchers(request, "x", 1)
        text = draw(matcher, tokens, seed)
        message = CallParser(found.template, "x", parsed).feed(text, is_last=True)
        calls = message.get("tool_calls", [])
        num_whole += bool(calls)
        assert calls or len(text.encode()) >= 3000, text
        assert not message.get("content", "").strip(), text
        for call in calls:
            schema = WEATHER if call["function"]["name"] == "get_weather" else {}
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
        assert len(calls) <= 1 or request.tool_choice == "required"
    assert num_whole


def test_marks_are_tokens_where_the_tokenizer_has_them(tiny: Tiny) -> None:
    tokenizer = deepcopy(tiny.tokenizer)
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in marks])
    grammars = Grammars(tokenizer, {END}, END + 9, BY_NAME["hermes"], True)
    (matcher,) = grammars.list_matchers(ask(), "x", 1)
    said = '<think>a < b</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    made = tokenizer(said).input_ids
    assert sum(token > END for token in made) == 4
    for token in made:
        assert matcher.consume_token(token), said
    # the prompt may have begun the thoughts, or ended them
    for prompt, rest in (
        ("<think>\n", said[7:]),
        ("<think>\n\n</think>\n\n", said.partition("\n\n")[2]),
    ):
        (matcher,) = grammars.list_matchers(ask(), prompt, 1)
        assert all(map(matcher.consume_token, tokenizer(rest).input_ids))
    assert not grammars.list_matchers(ask(), prompt, 1)[0].consume_token(made[0])


def test_harmony_thinks_then_answers_or_calls(tiny: Tiny, tokens: dict[bytes, int]) -> None:
    grammars = make(tiny, BY_NAME["harmony"], thinks=True)
    form = {"type": "json_object", "schema": {"const": {}}}
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    asked = ask("auto", response_format=form), "<|end|><|start|>assistant", 1
    for text in (thought + said + call, thought + "<|channel|>final<|message|>{}"):
        (matcher,) = grammars.list_matchers(*asked)
        assert all(matcher.consume_token(tokens[bytes([byte])]) for byte in text.encode())


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        (
            {"properties": {"a": {"type": "string", "pattern": "a+"}}},
            "parameters.properties.a: pattern",
        ),
        ({"properties": {}, "minProperties": 1}, "parameters: minProperties"),
        ({"properties": {"a": {"items": {"$ref": "#"}, "type": "array"}}}, "properties.a: a .ref"),
        ({"properties": {"a": {"type": "objekt"}}}, "tools.0.function.parameters: Invalid type"),
    ],
)
def test_what_a_format_cannot_keep_is_refused(tiny: Tiny, parameters: Any, why: str) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(ApiError, match=why):
        make(tiny, BY_NAME["qwen3-coder"]).list_matchers(ask(tools=[tool]), "x", 1)
    tool["function"]["name"] = "a b"
    with pytest.raises(ApiError, match="other than letters"):
        make(tiny, BY_NAME["hermes"]).list_matchers(ask(tools=[tool]), "x", 1)


def test_other_special_tokens_are_hidden(tiny: Tiny) -> None:
    tokenizer = deepcopy(tiny.tokenizer)
    added = ["<|im_end|>", "<|fim|>", "<tool_call>", "<arg_key>", "</arg_value>", "<|channel|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    hidden = {
        name: {*tokenizer.convert_ids_to_tokens(sorted(list_hidden(tokenizer, found.template)))}
        for name, found in BY_NAME.items()
    }
    end = tokenizer.convert_ids_to_tokens(END)
    assert hidden["glm"] == {end, "<|fim|>", "<|channel|>"}
    assert hidden["hermes"] == {end, "<|fim|>", "<|channel|>", "<arg_key>", "</arg_value>"}
    assert not list_hidden(tokenizer, None)


def test_digits_are_those_of_ascii(tiny: Tiny) -> None:
    schema = {
        "properties": {"pattern": {"type": "string", "pattern": r"^\d[\w.]\\d$"}},
        "patternProperties": {r"\W": {"const": {"pattern": r"\d"}}},
    }
    assert spell_out_patterns(schema) == {
        "properties": {"pattern": {"type": "string", "pattern": r"^[0-9][[0-9A-Za-z_].]\\d$"}},
        "patternProperties": {"[^0-9A-Za-z_]": {"const": {"pattern": r"\d"}}},
    }
    for form in ({"regex": r"\d[\w.]\D"}, {"json_schema": {"pattern": r"^\d[\w.]\D$"}}):
        quote = '"' if "json_schema" in form else ""
        for text, allowed in (("1.x", True), ("1ax", True), ("\u0663ax", False), ("123", False)):
            request = parse_request(
                ChatRequest, {"messages": [{"role": "user", "content": "a"}], **form}
            )
            (matcher,) = make(tiny, None).list_matchers(request, "x", 1)
            said = tiny.tokenizer(f"{quote}{text}{quote}").input_ids
            assert all(map(matcher.consume_token, said)) is allowed, text


def test_names_and_formats_are_said_in_other_words() -> None:
    """What zod and pydantic write for dictionaries and texts, and llguidance does not read."""
    number, letters = {"type": "number"}, {"type": "string", "pattern": "^a+$"}
    root = {"$defs": {"Kind": {"title": "Kind", "enum": ["a", "b"], "type": "string"}}}
    for names, said in (
        ({"type": "string"}, {"additionalProperties": number}),
        ({"type": "string", "enum": ["a"]}, {"properties": {"a": number}}),
        ({"$ref": "#/$defs/Kind"}, {"properties": {"a": number, "b": number}}),
        ({**letters, "format": "x"}, {"patternProperties": {"^a+$": number}}),
    ):
        schema = {"type": "object", "propertyNames": names, "additionalProperties": number}
        closed = {"type": "object", "additionalProperties": False, **said}
        assert fit_keywords(schema, root) == closed
        assert fit_keywords({"properties": {"propertyNames": schema}}, root) == {
            "properties": {"propertyNames": closed}
        }
    for stays in (
        {"propertyNames": {"type": "string", "maxLength": 3}},
        {"propertyNames": {"type": "string", "enum": ["a"]}, "properties": {"b": number}},
        {"type": "string", "format": "date"},
        {"type": "integer", "format": "int32"},
        {"const": {"format": "x"}},
        {"properties": {"format": {"type": "string"}}},
    ):
        assert fit_keywords(stays, root) == stays
    assert fit_keywords({"format": "cuid", **letters}, root) == letters
    assert fit_keywords({"type": "string", "format": "password"}, root) == {"type": "string"}
    assert "pattern" in fit_keywords({"type": ["string", "null"], "format": "byte"}, root)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"propertyNames": {"type": "string"}}, '{"a":1}', "[]"),
        ({"propertyNames": {"enum": ["a", "b"]}, "required": ["b"]}, '{"b":1}', '{"c"'),
        ({"propertyNames": {"pattern": r"^\d$"}, "minProperties": 1}, '{"1":1}', '{"a"'),
        ({"type": "string", "format": "base64"}, '"YQ=="', '"Y="'),
        ({"type": "string", "format": "nanoid", "pattern": "^[a-z]$"}, '"a"', '"ab'),
    ],
)
def test_other_words_hold_the_same_answers(tiny: Tiny, schema: Any, right: str, wrong: str) -> None:
    schema = {"type": "object", **schema}
    messages = [{"role": "user", "content": "a"}]
    request = parse_request(ChatRequest, {"messages": messages, "json_schema": schema})
    for text, allowed in ((right, True), (wrong, False)):
        (matcher,) = make(tiny, None).list_matchers(request, "x", 1)
        assert all(map(matcher.consume_token, tiny.tokenizer(text).input_ids)) is allowed, text


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "string", "format": "jwt"}, "there is no format 'jwt' here: name a pattern, or"),
        ({"propertyNames": {"maxLength": 3}}, '"propertyNames"]: leave them out'),
    ],
)
def test_what_no_other_words_say_is_refused(tiny: Tiny, schema: Any, why: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    request = parse_request(ChatRequest, {"messages": messages, "json_schema": schema})
    with pytest.raises(ApiError) as refused:
        make(tiny, None).list_matchers(request, "x", 1)
    assert why in refused.value.message


@pytest.mark.parametrize(
    ("multiples", "is_right"),
    [
        *(([3], True), ([0.25], True), ([9973], True), ([1e-9], True), ([97, 101], True)),
        *(([99999989], False), ([1e22], False), ([0.123456789], False), ([997, 991], False)),
        *(([0.25, 3], True), ([1e-9, 3], False)),
    ],
)
def test_multiples_of_what_is_large_are_refused(
    tiny: Tiny, multiples: list[float], *, is_right: bool
) -> None:
    schema = {"allOf": [{"type": "number", "multipleOf": each} for each in multiples]}
    request = parse_request(
        ChatRequest, {"messages": [{"role": "user", "content": "a"}], "json_schema": schema}
    )
    embedded = request.model_copy(
        update={"json_schema": None, "grammar": f"start: %json {json.dumps(schema)}"}
    )
    for each in (request, embedded):
        if is_right:
            assert make(tiny, None).list_matchers(each, "x", 1)
        else:
            with pytest.raises(ApiError, match="multipleOf"):
                make(tiny, None).list_matchers(each, "x", 1)


def test_choices_may_be_many_and_of_any_characters(tiny: Tiny) -> None:
    choices = ['\x7f\n\u2028"', *map(str, range(5000))]
    request = parse_request(CompletionRequest, {"prompt": "a", "guided_choice": choices})
    for matcher, choice in zip(
        make(tiny, None).list_matchers(request, "x", 5001), choices, strict=True
    ):
        assert all(map(matcher.consume_token, tiny.tokenizer(choice).input_ids))
        assert matcher.is_accepting()  # type: ignore[attr-defined]


@pytest.mark.parametrize("leaf", [{"anyOf": []}, {"type": "string"}, {"$ref": "#/$defs/0"}])
def test_references_are_followed_once(leaf: Any) -> None:
    """A walk of each path through these would have 2**2000 ends."""
    named = {
        str(number): {"anyOf": [{"$ref": f"#/$defs/{number + 1}"}] * 2} for number in range(2000)
    }
    parameters = {
        "properties": {"a": {"$ref": "#/$defs/0"}, "b": {"type": ["null", "integer"]}},
        "$defs": {**named, "2000": leaf},
    }
    types = name_types(parameters)["properties"]
    assert types["a"]["type"] == (["string"] if leaf.get("type") else [])
    assert types["b"]["type"] == ["null", "integer"]


@pytest.mark.parametrize("size", [1, 10**6])
def test_calls_before_one_that_is_cut_off_are_calls(size: int) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    text = f"<think>Hm.</think>{call}\n{call}\n{call[:30]}"
    parser = CallParser(BY_NAME["hermes"].template, "x", TOOLS)
    made: dict[str, Any] = {}
    for begin in range(0, len(text), size):
        end = begin + size
        for key, value in parser.feed(text[begin:end], is_last=end >= len(text)).items():
            made[key] = made[key] + value if key in made else value
    assert [each["function"]["name"] for each in made["tool_calls"]] == ["now", "now"]
    assert made["reasoning_content"] == "Hm."
    assert made["content"].strip().removeprefix("<tool_call>").strip() == call[12:30]
