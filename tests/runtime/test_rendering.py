"""Chat templates in a process of their own: transformers' text, and an end to what has none."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from offplan.checkpoint.open import open_model
from offplan.errors import InputError, OffplanError
from tests.cli import TINY_MOE

pytest.importorskip("transformers")

from offplan.runtime import rendering
from offplan.runtime.prompts import load_tokenizer, read_chat
from offplan.runtime.rendering import Renderer, TemplateError, _answer

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Grüße <b> \U0001f642 \ud800"},
    {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [{"a": 1.5}]},
    {"role": "tool", "content": None, "name": "weather"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": [True, None]}}}]
TEMPLATES: list[Any] = [
    "{% for m in messages %}\n  {{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}",
    "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ add_generation_prompt }}",
    "{% for m in messages if m.content is defined %}{{ loop.index }}{% break %}{% endfor %}",
    {"default": "{{ messages[0].content }}", "tool_use": "{{ tools[0].function.name }}"},
]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer()


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer(open_model(str(TINY_MOE)))


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_text_is_that_of_transformers(
    renderer: Renderer, tokenizer: Any, template: Any, tools: Any
) -> None:
    tokenizer.chat_template = template
    expected = tokenizer.apply_chat_template(
        MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert renderer.render(tokenizer, MESSAGES, tools) == expected


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 'a' * 10 ** 10 }}", "takes more than 512 MiB of memory for the messages"),
        ("{{ 'a' * 10 ** 7 }}", "makes 10000000 characters of the messages, more than"),
        ("{{ raise_exception('no') }}", "does not take the messages: TemplateError: no"),
        ("{{ messages", "does not take the messages: TemplateSyntaxError"),
        ({"other": ""}, "does not take the messages: ValueError: This model has multiple"),
        pytest.param(LOOP, "takes more than 1 s for the messages", marks=pytest.mark.slow),
    ],
)
def test_what_a_template_exceeds(
    renderer: Renderer, tokenizer: Any, template: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "MOST_S", 1)
    model = open_model(str(TINY_MOE))
    tokenizer.chat_template = template
    with pytest.raises(InputError) as refused:
        read_chat(model, tokenizer, renderer, MESSAGES[:1])
    assert str(refused.value).startswith(f"the chat template of {model.source} {why}")
    monkeypatch.undo()
    tokenizer.chat_template = "Weights"
    assert len(read_chat(model, tokenizer, renderer, MESSAGES[:1])[0]) == 7, "the next one is read"


@pytest.mark.slow
def test_ctrl_c_ends_a_template(tokenizer: Any) -> None:
    renderer = Renderer()
    tokenizer.chat_template = "a"
    renderer.render(tokenizer, MESSAGES)
    assert renderer._process is not None
    child = renderer._process._child
    tokenizer.chat_template = LOOP
    interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it
    try:
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            renderer.render(tokenizer, MESSAGES)
        interrupt.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert child.returncode == -signal.SIGKILL
    tokenizer.chat_template = "b"
    assert renderer.render(tokenizer, MESSAGES) == "b"


@pytest.mark.slow
def test_the_process_ends_by_itself(tokenizer: Any) -> None:
    renderer = Renderer()
    tokenizer.chat_template = "a"
    renderer.render(tokenizer, MESSAGES)
    assert renderer._process is not None
    child = renderer._process._child
    renderer._process._connection.close()  # as the system does where nobody else can
    assert child.wait(60) == 0


@pytest.mark.slow
def test_a_process_that_was_killed_between_chats(tokenizer: Any) -> None:
    tokenizer.chat_template, renderer = "a", Renderer()
    text = renderer.render(tokenizer, MESSAGES)
    assert renderer._process is not None
    child = renderer._process._child
    child.kill()
    child.wait()
    assert renderer.render(tokenizer, MESSAGES) == text


def test_a_process_that_is_gone(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    tokenizer.chat_template = "a"
    monkeypatch.setattr(rendering, "_CODE", "raise SystemExit(3)")
    with pytest.raises(OffplanError, match=r"ended before it had begun \(exit code 3\)"):
        Renderer().render(tokenizer, MESSAGES)
    die = "c.send_bytes(b'{}'); c.recv_bytes(); import os; os.abort()"
    connect = "import sys; from multiprocessing.connection import Connection as C"
    monkeypatch.setattr(rendering, "_CODE", f"{connect}; c = C(int(sys.argv[1])); {die}")
    with pytest.raises(TemplateError, match=r"ended the process that rendered it \(exit code -6\)"):
        Renderer().render(tokenizer, MESSAGES)


def test_an_answer_in_this_process(tokenizer: Any) -> None:
    """What the process does with a question, where coverage sees it."""

    def ask(template: str) -> Iterator[tuple[str, str]]:
        asked: dict[str, Any] = {
            "messages": MESSAGES,
            "tools": None,
            "template": template,
            "variables": {},
        }
        yield from json.loads(_answer(tokenizer, json.dumps(asked).encode())).items()

    assert dict(ask("{{ messages[2].name }}")) == {"text": "weather"}
    assert dict(ask("{{ 'a' * 10 ** 7 }}"))["refused"].startswith("makes 10000000 characters")
    assert dict(ask("{{ nothing.there }}"))["refused"].startswith("does not take")
