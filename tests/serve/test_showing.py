"""What a chat template leaves out is refused, and its variables are set by requests."""

from copy import copy
from typing import Any

import pytest

from offplan.runtime.rules import TokenRules
from offplan.serve.errors import ApiError
from offplan.serve.reading import Reader
from offplan.serve.requests import ChatRequest, parse_request
from tests.serve import CONTEXT, NAME, RENDERER, TEMPLATE, Served
from tests.serve.conftest import Tiny

SAYS = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "look"}}]
CALLS = [{"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
USER = {"role": "user", "content": "x"}
ASSISTANT = {"role": "assistant", "content": "", "tool_calls": CALLS}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "seen"}


def make_reader(tiny: Tiny, template: str) -> Reader:
    tokenizer = copy(tiny.tokenizer)
    tokenizer.chat_template = template
    return Reader.of(tiny.model, tokenizer, TokenRules(), CONTEXT, NAME, RENDERER)


def render(reader: Reader, **body: Any) -> str:
    return reader.render(parse_request(ChatRequest, {"messages": [USER], **body}))


@pytest.mark.slow
def test_what_is_not_shown_is_refused(tiny: Tiny) -> None:
    reader = make_reader(tiny, SAYS)
    for body, what in (
        ({"tools": TOOLS}, "does not show tools,"),
        ({"messages": [USER, ASSISTANT]}, "does not show tool_calls,"),
        ({"messages": [USER, ASSISTANT, RESULT], "tools": TOOLS}, "tools and tool_calls,"),
    ):
        with pytest.raises(ApiError, match=what):
            render(reader, **body)
    assert render(reader, tools=TOOLS, tool_choice="none") == "u:x;"
    assert render(reader, messages=[USER, RESULT]) == "u:x;t:seen;"
    (note,) = reader.notes
    assert "does not show tools and tool_calls" in note
    assert reader.capabilities == ["completion"]

    reader = make_reader(tiny, TEMPLATE)
    assert render(reader, tools=TOOLS, messages=[USER, ASSISTANT]) == "[look]x(look)"
    assert reader.notes == ["calls of tools stay in the text, since their format is not known"]
    assert make_reader(tiny, TEMPLATE + "{# <tool_call> #}").notes == []
    deaf = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ApiError, match="does not show messages of the role tool"):
        render(make_reader(tiny, deaf), messages=[USER, RESULT])


@pytest.mark.slow
def test_a_template_that_refuses_says_so_itself(tiny: Tiny) -> None:
    reader = make_reader(tiny, "{% if tools %}{{ raise_exception('none') }}{% endif %}" + SAYS)
    assert reader.notes == ["calls of tools stay in the text, since their format is not known"]
    with pytest.raises(ApiError, match="none"):
        render(reader, tools=TOOLS)


@pytest.mark.slow
def test_variables_of_the_template(tiny: Tiny) -> None:
    qwen = make_reader(tiny, SAYS + "{% if enable_thinking is false %}off{% endif %}")
    deepseek = make_reader(tiny, SAYS + "{% if thinking %}on{% endif %}")
    harmony = make_reader(tiny, SAYS + "{{ reasoning_effort }}")
    plain = make_reader(tiny, SAYS)
    off, on = ({"chat_template_kwargs": {"enable_thinking": each}} for each in (False, True))
    none, high = ({"reasoning_effort": each} for each in ("none", "high"))
    for reader, body, end in (
        (qwen, off, "off"),
        (qwen, on, ""),
        (qwen, none, "off"),
        (qwen, high, ""),
        (deepseek, on, "on"),
        (deepseek, off, ""),
        (deepseek, high, "on"),
        (harmony, high, "high"),
        (plain, off, ""),
        (plain, none, ""),
    ):
        assert render(reader, **body) == f"u:x;{end}"
    always = make_reader(tiny, SAYS + "{# <think> #}")
    assert render(always, **on) == "u:x;"
    for body in (off, none):
        with pytest.raises(ApiError, match="has no variable"):
            render(always, **body)
    for body in (on, high, {"chat_template_kwargs": {"enable_thinkin": True}}):
        with pytest.raises(ApiError, match="has no variable"):
            render(plain, **body)
    with pytest.raises(ApiError, match="has no variable 'messages'"):
        render(plain, chat_template_kwargs={"messages": []})


@pytest.mark.slow
def test_names_that_templates_have(tiny: Tiny) -> None:
    developer = [{"role": "developer", "content": "b"}, USER]
    assert render(make_reader(tiny, SAYS), messages=developer) == "s:b;u:x;"
    assert render(make_reader(tiny, SAYS + "{# developer #}"), messages=developer) == "d:b;u:x;"
    said = [USER, {"role": "assistant", "content": "b", "reasoning_content": "t"}, USER]
    thinks = "{% for m in messages %}{{ m.thinking }}{{ m.content }};{% endfor %}"
    assert render(make_reader(tiny, thinks), messages=said) == "x;tb;x;"


def test_a_request_sets_variables(scripted: Served) -> None:
    asked = {"messages": [USER], "max_tokens": 1}
    for path in ("/v1/chat/completions", "/tokenize"):
        body = {**asked} if "chat" in path else {"messages": [USER]}
        off = {**body, "chat_template_kwargs": {"enable_thinking": False}}
        assert scripted.ask(path, off).status == 200
        on = {**body, "chat_template_kwargs": {"enable_thinking": True}}
        assert scripted.ask(path, on).status == 400
