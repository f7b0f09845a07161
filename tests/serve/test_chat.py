"""``offplan chat``: with a plan's model, and with a server."""

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from offplan.cli.speakers import LocalSpeaker, StoppedError
from offplan.runtime.rendering import Renderer
from offplan.runtime.rules import TokenRules
from tests.cli import CLI, RULES, Finished, write_plan
from tests.serve import (
    CONTEXT,
    END,
    KEY,
    NAME,
    RENDERER,
    TEMPLATE,
    ScriptedRows,
    Served,
    scripted_texts,
    serving,
)
from tests.serve.conftest import Tiny, set_script

Talk = Callable[..., Finished]


@pytest.fixture
def talk(cli: CLI, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """``offplan chat`` whose user types lines."""

    def run(lines: str, *arguments: object) -> Finished:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return cli("chat", *arguments)

    return run


@pytest.fixture
def local(tmp_path: Path, copy: Path) -> tuple[object, ...]:
    """A plan of a checkpoint that has a chat template."""
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    return (write_plan(tmp_path, RULES["mixed"]), "--model", copy, "--device", "cpu")


@pytest.mark.slow
def test_a_conversation_with_a_plan(
    talk: Talk, local: tuple[object, ...], tmp_path: Path, cli: CLI
) -> None:
    saved = tmp_path / "saved.jsonl"
    lines = f"Weights\n\ndo\n/save {saved}\n/save {saved}\n/reset\nWeights that\n/exit\nnever"
    code, out, err = talk(lines, *local, "--max-new-tokens", 5)
    assert (code, out) == (0, " that\n not \n do n\n")
    # of the second prompt the cache held all but the last token made, and two new ones
    assert "read 7 of the prompt's 7 tokens, made 5" in err
    assert "read 3 of the prompt's 14 tokens, made 5" in err
    assert err.count("the answer was cut there") == 3
    assert f"wrote {saved}" in err
    assert f"{saved} exists" in err
    messages = json.loads(saved.read_text())["messages"]
    assert [each["content"] for each in messages] == ["Weights", " that", "do", " not "]
    plan, *others = local
    assert cli("run", plan, "--prompts", saved, *others).code == 0


@pytest.mark.slow
def test_a_conversation_beyond_the_context(talk: Talk, local: tuple[object, ...]) -> None:
    long = "a" * CONTEXT
    code, out, err = talk(f"{long}\nWeights\n/what\n", *local, "--max-new-tokens", 5)
    assert (code, out) == (0, " that\n")
    assert f"the conversation has {CONTEXT} tokens and the plan's context is {CONTEXT}" in err
    assert "/reset forgets the conversation" in err


def test_what_a_chat_needs(talk: Talk, local: tuple[object, ...], copy: Path) -> None:
    assert "name a plan or a model, or a server" in talk("").err
    assert (
        "name a plan or a model, or a server" in talk("", local[0], "--url", "http://localhost").err
    )
    (copy / "chat_template.jinja").unlink()
    assert "has no chat template" in talk("", *local).err


@pytest.mark.slow
def test_a_conversation_with_a_server(talk: Talk, served: Served) -> None:
    arguments = ("--url", served.url, "--temperature", 0, "--max-new-tokens", 5)
    code, out, err = talk("Weights\ndo\n", *arguments)
    assert (code, out) == (0, " that\n not \n")
    assert "read 3 of the prompt's 14 tokens, made 5; the answer was cut there" in err
    assert "cut there" not in talk("Weights\n", "--url", served.url, "--temperature", 0).err
    assert talk("ts\n", *arguments, "--system", "Weigh").out == " that\n"
    code, out, err = talk("a\nWeights\n", *arguments, "--model", "other")
    assert (code, out) == (0, "")
    assert f"answers 404: there is no such model here; the one that is served is {NAME}" in err


@pytest.mark.slow
def test_thoughts_are_shown_and_not_kept(
    talk: Talk, tiny: Tiny, rows: ScriptedRows, tmp_path: Path
) -> None:
    set_script(rows, tiny, "<think>\nWhy?\n</think>\n\nSo.")
    model, saved = replace(tiny.model, model_type="qwen3"), tmp_path / "saved.jsonl"
    with serving(scripted_texts(rows), model, tiny.tokenizer) as server:
        code, out, _ = talk(f"a\n/save {saved}\n", "--url", server.url)
    assert (code, out) == (0, "Why?\n\nSo.\n")
    assert [each["content"] for each in json.loads(saved.read_text())["messages"]] == ["a", "So."]


def test_a_servers_errors(talk: Talk, scripted: Served, rows: ScriptedRows) -> None:
    rows.faults[3] = RuntimeError("no")
    code, out, err = talk("a\nb\n", "--url", f"http://127.0.0.1:{scripted.port}")
    assert code == 0
    assert "the server says: a pass of the model failed" in err
    assert out.endswith("Größe: 5 µm, ✓ 日本 🙂.\n")
    for url in ("file:///etc/passwd", "127.0.0.1:80", "http://"):
        refused = talk("a\n", "--url", url)
        assert (refused.code, "expected an address" in refused.err) == (2, True)
    scripted.serving.end()
    code, _, err = talk("a\n", "--url", "http://127.0.0.1:1/v1")
    assert (code, "is the server there?" in err) == (1, True)


def test_a_key_is_sent_nowhere_else(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str | None] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.append(self.headers["Authorization"])
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_port}/other")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        monkeypatch.setenv("OFFPLAN_API_KEY", KEY)
        code, _, err = talk("a\n", "--url", f"http://127.0.0.1:{server.server_port}")
        thread.join()
    assert (code, "answers 302" in err, found) == (1, True, [f"Bearer {KEY}"])


@pytest.mark.slow
def test_ctrl_c_stops_a_text_and_not_the_program(
    talk: Talk, scripted: Served, rows: ScriptedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows.script = rows.script[:2] * 60
    rows.gate.clear()
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))

    def read_on() -> Iterator[str]:
        interrupt.start()
        yield "a"
        rows.gate.set()
        yield "b"
        yield "/exit"

    lines = read_on()
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    code, out, _ = talk("", "--url", scripted.url, "--max-new-tokens", 4)
    interrupt.join()
    assert (code, out) == (0, "\nGrGr\n"), "the first answer has nothing, the second one is whole"


def test_an_answer_that_is_stopped_has_what_came(tiny: Tiny, rows: ScriptedRows) -> None:
    rows.script = rows.script[:2] * 60
    rules = TokenRules(end_tokens=frozenset([END]))
    texts = scripted_texts(rows)
    speaker = LocalSpeaker(texts, tiny.model, tiny.tokenizer, rules, CONTEXT, None, None, RENDERER)
    pieces = []
    for piece in speaker.answer([{"role": "user", "content": "a"}]):
        pieces.append(piece)
        if len(pieces) == 3:
            speaker.stop()
    assert (pieces, len(texts), rows.num_free) == (["G", "r", "G"], 0, 2)
    assert speaker.told.startswith("read 1 of the prompt's 1 tokens, made 3 in ")


def test_ctrl_c_stops_a_chat_template(tiny: Tiny, rows: ScriptedRows) -> None:
    class Interrupted(Renderer):
        def render(self, *_: object) -> str:
            speaker.stop()  # as a signal's handler does
            raise AssertionError("it goes on")

    rules, texts = TokenRules(end_tokens=frozenset([END])), scripted_texts(rows)
    speaker = LocalSpeaker(
        texts, tiny.model, tiny.tokenizer, rules, CONTEXT, None, None, Interrupted()
    )
    with pytest.raises(StoppedError):
        next(speaker.answer([{"role": "user", "content": "a"}]))
    speaker.stop()
    assert rows.num_free == 2
