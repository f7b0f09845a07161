"""Answers of a form: schemas, patterns, grammars and calls that a real model is held to.

The tests marked ``engines`` are by clients that others wrote, where they are installed:

    pip install instructor 'pydantic-ai-slim[openai]' langchain-openai
"""

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from copy import copy
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from offplan.runtime.joined import JoinedTexts
from offplan.runtime.rows import Rows
from tests.serve import CONTEXT, NAME, REST, TEMPLATE, Served, serving
from tests.serve.conftest import Tiny

pytestmark = pytest.mark.filterwarnings("ignore")
llguidance: Any = pytest.importorskip("llguidance")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Köln", "京都"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 20},
        "rains": {"type": "boolean"},
    },
    "required": ["city", "days", "rains"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
NOTHING = {"properties": {}, "additionalProperties": False}
NOW = {"type": "function", "function": {"name": "now", "parameters": NOTHING}}
ASKED: dict[str, Any] = {
    "model": NAME,
    "messages": [{"role": "user", "content": "Weights"}],
    "temperature": 0,
    "max_tokens": 180,
}
PROMPT = {"model": NAME, "prompt": "Weights", "temperature": 0, "max_tokens": 100}
FORM = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}


class Weather(BaseModel):
    days: int = Field(ge=1, le=20)
    rains: bool


@contextlib.contextmanager
def serving_as(tiny: Tiny, marks: str) -> Iterator[Served]:
    """Serve the tiny checkpoint, whose chat template has some marks of a format."""
    tokenizer = copy(tiny.tokenizer)
    tokenizer.chat_template = TEMPLATE + "{# " + marks + " #}"
    with (
        tiny.open() as session,
        serving(JoinedTexts(Rows(session, 4)), tiny.model, tokenizer) as served,
    ):
        yield served


@pytest.fixture(scope="module")
def hermes(tiny: Tiny) -> Iterator[Served]:
    """The tiny checkpoint, which calls as Hermes does."""
    with serving_as(tiny, "<tool_call>") as served:
        yield served


@pytest.fixture(scope="module")
def thinking(tiny: Tiny) -> Iterator[Served]:
    """The tiny checkpoint, which thinks, and calls as Hermes does."""
    with serving_as(tiny, "<think></think><tool_call>") as served:
        yield served


def ask(served: Served, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    body = {**(PROMPT if path == "/v1/completions" else ASKED), **fields}
    found = served.ask(path, body)
    assert found.status == 200, found.data
    return found.data["choices"]


def refuse(served: Served, path: str = "/v1/chat/completions", **fields: Any) -> str:
    body = {**(PROMPT if path == "/v1/completions" else ASKED), **fields}
    found = served.ask(path, body)
    assert found.status == 400, found.data
    return str(found.data["error"]["message"])


def check(text: str, schema: Any = SCHEMA) -> None:
    jsonschema.validate(json.loads(text), schema)


def test_a_schema_holds(served: Served) -> None:
    (choice,) = ask(served, response_format=FORM)
    check(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"json_schema": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
def test_all_names_of_a_schema(served: Served, fields: dict[str, Any]) -> None:
    for text in (
        ask(served, **fields)[0]["message"]["content"],
        ask(served, "/v1/completions", **fields)[0]["text"],
    ):
        check(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        ({"regex": "[0-9]{3}-[ab]+c"}, "[0-9]{3}-[ab]+c"),
        ({"choice": ["Köln ✓", 'a"b']}, 'Köln ✓|a"b'),
        ({"grammar": 'root ::= "\\u0041" [&x]{2} .'}, "(?s)A[&x]{2}."),
        ({"grammar": 'start: "x" /[0-9]/'}, "x[0-9]"),
    ],
)
def test_patterns_choices_and_grammars(served: Served, value: dict[str, Any], pattern: str) -> None:
    ((kind, content),) = value.items()
    asked: list[dict[str, Any]] = [{"structured_outputs": value}, {f"guided_{kind}": content}]
    asked += [{kind: content}] if kind in ("regex", "grammar") else []
    asked += [{"ebnf": content}] if kind == "grammar" else []
    for fields in asked:
        for temperature in (0, 2):
            text = ask(served, "/v1/completions", **fields, temperature=temperature)[0]["text"]
            assert re.fullmatch(pattern, text) or len(text) == 100


@pytest.mark.slow
def test_all_prompts_of_a_request_follow_its_form(served: Served) -> None:
    asked: dict[str, Any] = {"prompt": ["Weights", "a"], "n": 2, "guided_regex": "[ab]{3}"}
    choices = ask(served, "/v1/completions", **asked)
    assert len(choices) == 4
    assert all(re.fullmatch("[ab]{3}", each["text"]) for each in choices)


def test_a_grammar_of_no_text_is_refused(served: Served) -> None:
    assert "no text follows it" in refuse(served, guided_json={"$ref": "#"})


@pytest.mark.slow
def test_other_rows_are_as_alone(served: Served) -> None:
    """Texts with and without a grammar run together, each as it is alone."""
    client = served.client()
    alone = client.chat.completions.create(**ASKED, response_format=FORM).choices[0]
    streams = [
        client.completions.create(
            model=NAME, prompt="Weights", temperature=0, max_tokens=80, stream=True
        ),
        client.chat.completions.create(**ASKED, response_format=FORM, stream=True, n=2),
    ]
    texts = ["", "", ""]
    for plain, formed in zip(*streams, strict=False):
        texts[2] += plain.choices[0].text
        if formed.choices:
            texts[formed.choices[0].index] += formed.choices[0].delta.content or ""
    for formed in streams[1]:
        texts[formed.choices[0].index] += formed.choices[0].delta.content or ""
    assert texts[:2] == [alone.message.content] * 2
    assert texts[2]
    assert REST[:80].startswith(texts[2])


@pytest.mark.slow
def test_with_penalties_drawn_and_scored(served: Served) -> None:
    asked: dict[str, Any] = {
        "n": 4,
        "temperature": 5,
        "seed": 3,
        "presence_penalty": 2,
        "logprobs": True,
    }
    choices = ask(served, response_format=FORM, **asked, top_logprobs=2)
    for choice in choices:
        check(choice["message"]["content"])
        tokens = [each["token"] for each in choice["logprobs"]["content"]]
        assert len(tokens) == len(choice["message"]["content"].encode())
    assert len({choice["message"]["content"] for choice in choices}) > 1


@pytest.mark.slow
def test_an_answer_may_be_cut(served: Served) -> None:
    whole = ask(served, response_format=FORM)[0]["message"]["content"]
    (choice,) = ask(served, response_format=FORM, max_tokens=9)
    assert (choice["message"]["content"], choice["finish_reason"]) == (whole[:9], "length")
    (choice,) = ask(served, response_format=FORM, max_tokens=len(whole.encode()))
    assert (choice["message"]["content"], choice["finish_reason"]) == (whole, "stop")
    (choice,) = ask(served, response_format=FORM, stop=["city"])
    assert (choice["message"]["content"], choice["finish_reason"]) == (whole[:3], "stop")
    with pytest.raises(openai.LengthFinishReasonError):
        served.client().chat.completions.parse(
            **{**ASKED, "max_tokens": 3}, response_format=Weather
        )


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "now"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
    ],
)
def test_calls_that_must_be(hermes: Served, choice: Any, names: set[str], *, stream: bool) -> None:
    made: list[Any] = []
    asked = {**ASKED, "tools": [WEATHER, NOW], "tool_choice": choice, "temperature": 1, "seed": 5}
    client = hermes.client()
    if stream:
        with client.chat.completions.stream(**asked, parallel_tool_calls=False) as events:
            made += events.get_final_completion().choices
    else:
        made += client.chat.completions.create(**asked, parallel_tool_calls=False).choices
    ((call,), content) = made[0].message.tool_calls, made[0].message.content
    assert call.function.name in names
    assert not content
    if call.function.name == "get_weather":
        check(call.function.arguments)
    assert made[0].finish_reason == "tool_calls"


@pytest.mark.slow
def test_thoughts_come_before_the_form(thinking: Served) -> None:
    asked: dict[str, Any] = {"guided_regex": "[ab]{3}", "max_tokens": 60}
    begun = [{"role": "user", "content": "Weights<think>\n"}]
    (choice,) = ask(thinking, messages=begun, **asked)
    assert choice["finish_reason"] == "length"  # it thinks on, as the model does
    assert choice["message"]["reasoning_content"]
    ended = [{"role": "user", "content": "Weights<think>\n\n</think>\n\n"}]
    (choice,) = ask(thinking, messages=ended, **asked)
    assert re.fullmatch("[ab]{3}", choice["message"]["content"])
    # it may begin to think, and then ends that
    bias = {str(token): 100 for token in thinking.service.reader.tokenizer("</think>").input_ids}
    (choice,) = ask(thinking, logit_bias=bias, temperature=2, seed=1, **asked)
    assert set(choice["message"].get("reasoning_content") or "") <= set("</think>")


@pytest.mark.slow
def test_tools_beside_a_form_are_called_or_not(hermes: Served) -> None:
    (choice,) = ask(hermes, tools=[NOW], response_format=FORM)
    message = choice["message"]
    assert message.get("tool_calls") or check(message["content"]) is None


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"guided_json": {"type": "objekt"}}, "guided_json: Invalid type: objekt"),
        ({"guided_json": "{"}, "guided_json: "),
        ({"guided_regex": "("}, "unclosed group"),
        ({"guided_regex": "(?=a)"}, "look-around"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar: "),
        ({"grammar": "root ::= [a--b]"}, "two hyphens"),
        ({"grammar": "start: nothing"}, "grammar: "),
        ({"regex": "a", "guided_choice": ["a"]}, "regex and guided_choice name several forms"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos: an answer of a form ends"),
        ({"regex": "a", "min_tokens": 3}, "min_tokens: "),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
        ({"structured_outputs": {"regexx": "a"}}, "did you mean regex"),
        ({"response_format": {"type": "json_schema"}}, "schema: it is missing"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"tool_choice": "required"}, "tool_choice: required needs tools"),
        ({"tools": [NOW], "tool_choice": "required"}, "does not know how this model writes calls"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "there is no tool of this name",
        ),
    ],
)
def test_what_is_wrong_is_named(served: Served, fields: dict[str, Any], why: str) -> None:
    assert why in refuse(served, **fields)


def test_a_schema_of_what_is_not_supported(served: Served) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert "uniqueItems" in refuse(served, response_format=form)
    # the schema itself cannot ask to be read otherwise
    schema["x-guidance"] = {"lenient": True}
    assert "uniqueItems" in refuse(served, response_format=form)


def test_without_the_package(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    assert "pip install 'offplan[serve]'" in refuse(served, response_format=FORM)


@pytest.mark.slow
def test_by_the_other_apis(hermes: Served) -> None:
    said = [{"role": "user", "content": "Weights"}]
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    asked = {"model": NAME, "input": "Weights", "text": {"format": form}, "temperature": 0}
    found = hermes.ask("/v1/responses", asked)
    check(found.data["output"][0]["content"][0]["text"])
    assert found.data["text"]["format"] == form
    asked = {"model": NAME, "messages": said, "format": SCHEMA, "stream": False}
    check(hermes.ask("/api/chat", asked).data["message"]["content"])
    asked = {"model": NAME, "prompt": "Weights", "format": SCHEMA, "stream": False, "raw": True}
    check(hermes.ask("/api/generate", asked).data["response"])
    tool = {"name": "get_weather", "input_schema": SCHEMA}
    asked = {"model": NAME, "messages": said, "max_tokens": 150, "tools": [tool]}
    asked["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    found = hermes.ask("/v1/messages", asked)
    (block,) = found.data["content"]
    assert (block["type"], block["name"]) == ("tool_use", "get_weather")
    check(json.dumps(block["input"]))


@pytest.mark.slow
def test_parse_of_openai(served: Served, hermes: Served) -> None:
    made = served.client().chat.completions.parse(**ASKED, response_format=Weather)
    assert isinstance(made.choices[0].message.parsed, Weather)
    tool = openai.pydantic_function_tool(Weather)
    made = hermes.client().chat.completions.parse(**ASKED, tools=[tool], tool_choice="required")
    for call in made.choices[0].message.tool_calls:
        assert isinstance(call.function.parsed_arguments, Weather)
    said = served.client().responses.parse(model=NAME, input="Weights", text_format=Weather)
    assert isinstance(said.output_parsed, Weather)


@pytest.mark.engines
def test_instructor(served: Served, hermes: Served) -> None:
    instructor: Any = pytest.importorskip("instructor")
    asked = {**ASKED, "response_model": Weather, "max_retries": 0}
    client = instructor.from_openai(hermes.client(), mode=instructor.Mode.TOOLS)
    assert isinstance(client.chat.completions.create(**asked), Weather)
    client = instructor.from_openai(served.client(), mode=instructor.Mode.JSON_SCHEMA)
    assert isinstance(client.chat.completions.create(**asked), Weather)


@pytest.mark.engines
def test_pydantic_ai(served: Served, hermes: Served) -> None:
    ai: Any = pytest.importorskip("pydantic_ai")
    models: Any = pytest.importorskip("pydantic_ai.models.openai")
    providers: Any = pytest.importorskip("pydantic_ai.providers.openai")
    for at, output in ((hermes, Weather), (served, ai.NativeOutput(Weather))):
        provider = providers.OpenAIProvider(base_url=at.url, api_key="none")
        model = models.OpenAIChatModel(NAME, provider=provider)
        settings = {"temperature": 0, "max_tokens": 100}
        agent = ai.Agent(model, output_type=output, model_settings=settings, retries=0)
        assert isinstance(agent.run_sync("Weights").output, Weather)
        asyncio.run(provider.client.close())


@pytest.mark.engines
def test_langchain(served: Served, hermes: Served) -> None:
    langchain: Any = pytest.importorskip("langchain_openai")
    for at, method in ((served, "json_schema"), (hermes, "function_calling")):
        chat = langchain.ChatOpenAI(
            model=NAME, base_url=at.url, api_key="none", temperature=0, max_tokens=CONTEXT // 2
        )
        made = chat.with_structured_output(Weather, method=method).invoke("Weights")
        assert isinstance(made, Weather)
