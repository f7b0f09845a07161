"""Formats of thoughts and calls: what a model writes, whole and in pieces, comes apart right."""

# ruff: noqa: RUF001  # marks of DeepSeek have letters that look like others

import json
from types import SimpleNamespace
from typing import Any

import pytest

from offplan.runtime.joined import Added
from offplan.runtime.texts import Text
from offplan.serve.answers import CallParser, Choice, TokenNames, make_answer
from offplan.serve.formats import FORMATS, Format, find_divider
from offplan.serve.requests import ChatRequest, parse_request
from offplan.transformers_private import ResponseParser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}},
]
KOELN: Any = ("get_weather", {"city": "Köln", "days": 3})
CODE: Any = ("write", {"text": "  if a < b:\n    c"})
J_KOELN, J_CODE = (json.dumps(each[1], ensure_ascii=False) for each in (KOELN, CODE))
CALLS = {
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{J_KOELN}<|tool_call_end|><|tool_call_begin|>functions.write:1"
    f"<|tool_call_argument_begin|>{J_CODE}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    f"{J_KOELN}<｜tool▁call▁end｜><｜tool▁call▁begin｜>write<｜tool▁sep｜>{J_CODE}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "dsml": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="text" string="true">'
    f"{CODE[1]['text']}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "minimax": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Köln'
    '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="write">\n'
    f'<parameter name="text">{CODE[1]["text"]}</parameter>\n</invoke>\n</minimax:tool_call>',
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>write"
    f"<arg_key>text</arg_key><arg_value>{CODE[1]['text']}</arg_value></tool_call>",
    "qwen3-coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<function=write>\n"
    f"<parameter=text>\n{CODE[1]['text']}\n</parameter>\n</function>\n</tool_call>",
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{J_KOELN}[TOOL_CALLS]write[CALL_ID]abcdefghi[ARGS]"
    f"{J_CODE}",
    "mistral-list": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {J_KOELN}}}, '
    f'{{"name": "write", "arguments": {J_CODE}}}]',
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {J_KOELN}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "write", "arguments": {J_CODE}}}\n</tool_call>',
}
SAID = {name: f"<think>\nHm.\n\nSo.\n</think>\n\nI look.\n{calls}" for name, calls in CALLS.items()}
SAID["mistral"] = f"[THINK]Hm.\n\nSo.[/THINK]I look.{CALLS['mistral']}"
SAID["mistral-list"] = f"I look.{CALLS['mistral-list']}"
SAID["harmony"] = (
    "<|channel|>analysis<|message|>Hm.\n\nSo.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    f"{J_KOELN}<|call|><|start|>assistant to=functions.write<|channel|>commentary json<|message|>"
    f"{J_CODE}"
)
BY_NAME = {each.name: each for each in reversed(FORMATS)}
NAMES = sorted(SAID)


def parse(
    found: Format, pieces: list[str], tools: list[dict[str, Any]] = TOOLS, prompt: str = ""
) -> dict[str, Any]:
    """Feed a parser with pieces; join what it gives."""
    parser = CallParser(found.template, prompt, tools, has_short_ids=found.has_short_ids)
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for number, piece in enumerate(pieces):
        for key, value in parser.feed(piece, is_last=number == len(pieces) - 1).items():
            message[key] += value
    assert [each["index"] for each in message["tool_calls"]] == [*range(parser.num_calls)]
    return message


def list_calls(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [each["function"] for each in message["tool_calls"]]
    return [(each["name"], json.loads(each["arguments"])) for each in functions]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_thoughts_text_and_calls(name: str) -> None:
    said, found = SAID[name], BY_NAME[name]
    ways = [[said], [*said, ""], *([said[:at], said[at:]] for at in range(1, len(said)))]
    thought = "" if name == "mistral-list" else "Hm.\n\nSo."
    for pieces in ways:
        message = parse(found, pieces)
        assert list_calls(message) == [KOELN, CODE], pieces
        assert message["content"].strip() == "I look.", pieces
        assert message["reasoning_content"] == thought, pieces
    ids = [each["id"] for each in message["tool_calls"]]
    if name == "kimi":
        assert ids == ["functions.get_weather:0", "functions.write:1"]
    elif found.has_short_ids:
        assert {len(each) for each in ids} == {9}


@pytest.mark.parametrize("name", NAMES)
def test_without_tools_calls_are_text(name: str) -> None:
    message = parse(BY_NAME[name], [*SAID[name], ""], tools=[])
    assert not message["tool_calls"]
    assert "get_weather" in message["content"] or name == "harmony"
    assert "Köln" in message["content"]
    assert "Hm." not in message["content"]


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_is_cut_off_is_none(name: str) -> None:
    said = SAID[name]
    end = said.index("3")
    for cut in (said[:end], said[: end - 4]):
        for pieces in ([cut], [*cut, ""]):
            message = parse(BY_NAME[name], pieces)
            assert not message["tool_calls"]
            assert "Köln" in message["content"] or "K" in message["content"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("said", ["It rains.", " a < b, [1], <t", "  indented\n", "{}"])
def test_plain_text_stays(name: str, said: str) -> None:
    for pieces in ([said], [*said, ""]):
        message = parse(BY_NAME[name], pieces)
        assert (message["content"], message["tool_calls"]) == (said, [])


def test_the_end_of_a_turn_is_not_said() -> None:
    for pieces in (["Yes.\n<|im_end|>"], [*"Yes.\n<|im_end|>", ""]):
        assert parse(BY_NAME["hermes"], pieces, [])["content"] == "Yes."


def test_deepseek_v3_has_its_arguments_in_a_fence() -> None:
    said = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{J_KOELN}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    for pieces in ([said], [*said, ""]):
        assert list_calls(parse(BY_NAME["deepseek"], pieces)) == [KOELN]


def test_a_final_answer_of_harmony() -> None:
    said = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    )
    for tools in (TOOLS, []):
        message = parse(BY_NAME["harmony"], [*said, ""], tools)
        assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")


@pytest.mark.parametrize("end", ["<think>", "<think>\n"])
def test_a_prompt_may_begin_the_thoughts(end: str) -> None:
    prompt = f"<think>x</think>y<tool_call>z</tool_call>{end}"
    message = parse(BY_NAME["hermes"], [*"Hm.\n</think>\n\nYes.", ""], prompt=prompt)
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")
    message = parse(BY_NAME["hermes"], ["Yes."], prompt="<think>x</think>y<think>\n\n</think>\n\n")
    assert message["content"] == "Yes."


@pytest.mark.parametrize("name", NAMES)
def test_the_format_is_told_from_the_chat_template(name: str) -> None:
    tokenizer: Any = SimpleNamespace(chat_template=f"{{{{ a }}}}{SAID[name]}")
    assert find_divider(tokenizer, "llama").template is BY_NAME[name].template
    tokenizer.chat_template = {"default": "a", "tool_use": SAID[name]}
    assert find_divider(tokenizer, "llama").finds_calls
    tokenizer.chat_template = "{{ a }}"
    assert find_divider(tokenizer, "llama").template is None
    assert find_divider(tokenizer, "gemma4").finds_calls


@pytest.mark.parametrize("name", SAID)
def test_a_long_answer_is_parsed_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    format_ = BY_NAME[name]
    fed: list[int] = []

    class Parser(ResponseParser):
        def feed(self, text: str) -> Any:
            fed.append(len(text))
            return super().feed(text)

    monkeypatch.setattr("offplan.serve.answers.ResponseParser", Parser)
    before = "Weights wait in host memory. " * 999
    text = SAID[name].replace("I look.", before)
    choice = Choice(1, calls=CallParser(format_.template, "x", TOOLS))
    body = b'{"messages": [{"role": "user", "content": "a"}]}'
    answer = make_answer(parse_request(ChatRequest, body), [choice], "tiny", TokenNames(None))
    of_text = Text(_NoTokens(), [1], num_tokens=1)
    choice.made = [
        Added(of_text, text[at : at + 64], 1, None, [], "stop" if at + 64 >= len(text) else None)
        for at in range(0, len(text), 64)
    ]
    (told,) = answer.whole()["choices"]
    assert told["message"]["content"] == before.strip()
    assert list_calls(told["message"]) == [KOELN, CODE]
    assert max(fed) <= 64


class _NoTokens:
    def decode(self, tokens: Any, **_: Any) -> str:
        return ""


def test_a_row_of_marks_is_not_held() -> None:
    (format_,) = (each for each in FORMATS if each.name == "qwen3-coder")
    parser = CallParser(format_.template, "x", TOOLS)
    said = [parser.feed("<function=", is_last=False).get("content", "") for _ in range(9)]
    assert "".join(said) == "<function=" * 8
