"""Calls of tools: what a model writes comes back as OpenAI's clients want it."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from offplan.serve.answers import CallParser
from offplan.transformers_private import find_response_template
from tests.serve import (
    CALL,
    NAME,
    TEMPLATE,
    TIMEOUT_S,
    ScriptedRows,
    Served,
    scripted_texts,
    serving,
    wait_for,
)
from tests.serve.conftest import Tiny, set_script

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASKED: dict[str, Any] = {
    "model": NAME,
    "messages": [{"role": "user", "content": "<|im_start|>assistant\n"}],
    "tools": [WEATHER],
    "temperature": 0,
    "max_tokens": 200,
}
SAID = f"<think>\nWhere?\n</think>\n\nI look.\n{CALL % 'Köln'}\n{CALL % '京都'}"


@pytest.fixture
def calling(rows: ScriptedRows, tiny: Tiny) -> Iterator[Served]:
    """A server whose model is of a family that transformers knows the calls of."""
    model = replace(tiny.model, model_type="qwen3")
    with serving(scripted_texts(rows), model, tiny.tokenizer) as served:
        yield served


@pytest.fixture
def foreign(rows: ScriptedRows, tiny: Tiny) -> Iterator[Served]:
    """A server whose tokenizer has a response template of its own."""
    tokenizer = copy(tiny.tokenizer)
    fields = {"content": {"content": "text"}}
    tokenizer.response_template = {"start_anchor": "assistant", "fields": fields}
    with serving(scripted_texts(rows), tiny.model, tokenizer) as served:
        yield served


@pytest.mark.slow
def test_calls_whole_and_streamed(calling: Served, rows: ScriptedRows, tiny: Tiny) -> None:
    set_script(rows, tiny, SAID)
    client = calling.client()
    (choice,) = client.chat.completions.create(**ASKED).choices
    calls = [each.function for each in choice.message.tool_calls]
    arguments = ['{"city": "Köln"}', '{"city": "京都"}']
    assert [(each.name, each.arguments) for each in calls] == [
        ("get_weather", each) for each in arguments
    ]
    assert len({each.id for each in choice.message.tool_calls}) == 2
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert choice.message.reasoning_content.strip() == "Where?"

    with client.chat.completions.stream(**ASKED) as stream:
        made = stream.get_final_completion().choices[0]
    assert made.finish_reason == "tool_calls"
    assert [each.function.arguments for each in made.message.tool_calls] == arguments
    assert made.message.content.strip() == "I look."

    # what came back goes in again, with what the tool gave
    said = [*ASKED["messages"], choice.message.model_dump(exclude_none=True)]
    said.append({"role": "tool", "tool_call_id": calls and "call_1", "content": "12 degrees"})
    assert client.chat.completions.create(**{**ASKED, "messages": said, "max_tokens": 1}).choices
    assert not calling.faults


def test_helpers_of_streams_end_each_call(rows: ScriptedRows, tiny: Tiny) -> None:
    """The last call has its event, though this format knows it as whole where the text ends."""
    tokenizer = copy(tiny.tokenizer)
    tokenizer.chat_template = TEMPLATE + "{# <tool_call> #}"
    cities = ["Köln", "京都"]
    with serving(scripted_texts(rows), tiny.model, tokenizer) as served:
        for asked in (cities[:1], cities):
            set_script(rows, tiny, "\n".join(CALL % city for city in asked))
            with served.client().chat.completions.stream(**ASKED) as stream:
                events = [*stream]
            done = [each for each in events if each.type == "tool_calls.function.arguments.done"]
            assert [each.arguments for each in done] == [f'{{"city": "{city}"}}' for city in asked]
            ends = [each.chunk.choices[0] for each in events if each.type == "chunk"]
            assert [each.finish_reason for each in ends if each.finish_reason] == ["tool_calls"]
            assert not ends[-1].delta.model_dump(exclude_none=True)


@pytest.mark.slow
def test_what_is_no_call_stays_text(calling: Served, rows: ScriptedRows, tiny: Tiny) -> None:
    client = calling.client()
    for said in ("It rains.", "a <tool_call is none", '{"name": "get_weather"}'):
        set_script(rows, tiny, said)
        (choice,) = client.chat.completions.create(**ASKED).choices
        assert (choice.message.content, choice.finish_reason) == (said, "stop")
        assert choice.message.tool_calls is None
        chunks = [*client.chat.completions.create(**ASKED, stream=True)]
        assert "".join(each.choices[0].delta.content or "" for each in chunks) == said
    for wrong in ('{"name": "get_weather", ', "[1, 2]", '{"name": 3}'):
        set_script(rows, tiny, f"<tool_call>{wrong}</tool_call>")
        (choice,) = client.chat.completions.create(**ASKED).choices
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        assert wrong in choice.message.content
        chunks = [*client.chat.completions.create(**ASKED, stream=True)]
        assert wrong in "".join(each.choices[0].delta.content or "" for each in chunks)
    assert not calling.faults


@pytest.mark.slow
def test_calls_are_text_without_tools_and_all_is_in_an_unknown_family(
    calling: Served, scripted: Served, rows: ScriptedRows, tiny: Tiny
) -> None:
    set_script(rows, tiny, SAID)
    (choice,) = scripted.client().chat.completions.create(**ASKED).choices
    assert (choice.message.content, choice.finish_reason) == (SAID, "stop")
    asked = {**ASKED, "tool_choice": "none"}
    made = calling.client().chat.completions.create(**asked)
    (choice,) = made.choices
    thought = len(tiny.tokenizer.encode(SAID.partition("I look.")[0]))
    assert made.usage.completion_tokens_details.reasoning_tokens == thought
    said = SAID.partition("</think>")[2].strip()
    assert (choice.message.content, choice.finish_reason) == (said, "stop")
    assert choice.message.reasoning_content == "Where?"


def test_a_template_that_cannot_be_read_is_none(tiny: Tiny) -> None:
    class Tokenizer:
        response_template: ClassVar[Any] = {"fields": {"content": {"close_pattern": "("}}}

    assert find_response_template(Tokenizer(), "qwen3") is None
    assert find_response_template(tiny.tokenizer, "gemma4") is not None
    assert find_response_template(tiny.tokenizer, "llama") is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_that_hangs_holds_up_chats_alone(
    foreign: Served, rows: ScriptedRows, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("offplan.serve.app._STUCK_S", 0.01)
    set_script(rows, tiny, "It rains.")
    hangs, feed = threading.Event(), CallParser.feed

    def hang(parser: CallParser, piece: str, *, is_last: bool) -> dict[str, Any]:
        hangs.wait(TIMEOUT_S)
        return feed(parser, piece, is_last=is_last)

    monkeypatch.setattr(CallParser, "feed", hang)
    with ThreadPoolExecutor(1) as clients:
        asked = {**ASKED, "stream": stream}
        answered = clients.submit(foreign.ask, "/v1/chat/completions", asked)
        wait_for(lambda: foreign.service.dividing.busy_s > 0.01)
        health = foreign.ask("/health")
        assert foreign.ask("/v1/completions", {"prompt": "a"}).status == 200
        assert not answered.done()
        hangs.set()
        assert answered.result().status == 200
    assert health.data["reason"].startswith("the response template has been at one request")
