"""What a server does not do: let strangers in, run out of room, tell paths."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import openai
import pytest

from offplan.errors import InputError, MemoryLimitError, OffplanError
from offplan.serve.guard import Guard, check_exposure
from offplan.serve.serving import listen
from tests.serve import (
    CONTEXT,
    KEY,
    NAME,
    TIMEOUT_S,
    ScriptedRows,
    Served,
    scripted_texts,
    serving,
    wait_for,
)
from tests.serve.conftest import Tiny

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SEES = {"image_token_id": 54}
"""The first token of "Weights" is what stands for an image."""
ASKED = {"prompt": "a", "max_tokens": 2, "temperature": 0}


@pytest.fixture
def guarded(rows: ScriptedRows, tiny: Tiny) -> Iterator[Served]:
    guard = Guard(api_key=KEY, max_body_bytes=2000)
    origins = ["http://chat.example"]
    texts = scripted_texts(rows)
    with serving(texts, tiny.model, tiny.tokenizer, guard=guard, origins=origins) as served:
        yield served


def test_a_key(guarded: Served) -> None:
    for key in ("wrong", "sk-secre", "sk-secret0"):
        with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
            guarded.client(api_key=key).models.list()
    assert guarded.client(api_key=KEY).models.list().data[0].id == NAME
    assert guarded.ask("/health").status == 200
    for path in ("/metrics", "/v1/models", "/v1/nothing"):
        assert guarded.ask(path).status == 401
        assert guarded.ask(path, headers={"Authorization": f"Basic {KEY}"}).status == 401
    right = {"Authorization": f"bearer {KEY}", "Host": "anything.example"}
    assert guarded.ask("/v1/completions", ASKED, right).status == 200
    assert guarded.ask("/v1/completions", ASKED, {"Authorization": "Bearer \xe9"}).status == 401


def test_sizes(guarded: Served) -> None:
    key = {"Authorization": f"Bearer {KEY}"}
    too_long = guarded.ask("/v1/completions", {**ASKED, "prompt": "a" * 2000}, key)
    assert (too_long.status, "2000 bytes" in too_long.data["error"]["message"]) == (413, True)
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=TIMEOUT_S) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}"
        kind = "Content-Type: application/json\r\nTransfer-Encoding: chunked"
        raw.sendall(f"{head}\r\n{kind}\r\n\r\n".encode() + (b"400\r\n" + b" " * 1024 + b"\r\n") * 2)
        assert b" 413 " in raw.recv(4096).split(b"\r\n")[0]


def test_pages_of_other_origins(guarded: Served, scripted: Served) -> None:
    asks = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    allowed = {"Origin": "http://chat.example", **asks}
    assert guarded.ask("/v1/completions", headers=allowed, method="OPTIONS").status == 200
    foreign = {**allowed, "Origin": "http://evil.example"}
    assert guarded.ask("/v1/completions", headers=foreign, method="OPTIONS").status == 400
    assert scripted.ask("/v1/completions", headers=allowed, method="OPTIONS").status == 405
    # what a page may send without asking is no JSON, and a name of its own is not ours
    form = "application/x-www-form-urlencoded"  # as curl names what it sends with -d
    for kind, status in (("text/plain", 415), ("", 200), (form, 200)):
        headers = {"Content-Type": kind}
        assert scripted.ask("/v1/completions", ASKED, headers).status == status, "a program's"
        for of_page in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            assert scripted.ask("/v1/completions", ASKED, headers | of_page).status == 415
    for host, status in (
        ("localhost:80", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("rebound.example", 403),
        ("127.0.0.1.evil.example:8000", 403),
        ("[", 403),
        ("", 403),
    ):
        assert scripted.ask("/v1/models", headers={"Host": host}).status == status, host


def test_paths_and_methods(scripted: Served) -> None:
    for path, method, status in (
        ("/", "GET", 404),
        ("/v1/completions", "GET", 405),
        ("/v1/models", "POST", 405),
        ("/v1/models/other", "GET", 404),
        ("/../../etc/passwd", "GET", 404),
        ("/%00%ff", "GET", 404),
    ):
        answered = scripted.ask(path, method=method)
        assert (answered.status, set(answered.data)) == (status, {"error"}), path
    for path, why in (
        ("/chat/completions", "the base URL ends with /v1"),
        ("/v1/v1/messages", "the base URL ends before /v1"),
        ("/v1/api/chat", "the base URL ends before /v1"),
    ):
        assert why in str(scripted.ask(path, {}).data), path
    text = scripted.ask("/metrics").data
    assert 'offplan_requests_total{path="other",status="404"}' in text
    assert "passwd" not in text


def test_no_path_of_the_machine_in_an_error(scripted: Served, tiny: Tiny) -> None:
    reader = scripted.service.reader
    template, reader.tokenizer.chat_template = reader.tokenizer.chat_template, None
    try:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
        found = [scripted.ask("/v1/chat/completions", asked)]
        reader.tokenizer.chat_template = "{{ raise_exception('no') }}"
        found.append(scripted.ask("/v1/chat/completions", asked))
    finally:
        reader.tokenizer.chat_template = template
    assert [each.status for each in found] == [400, 400]
    assert str(tiny.folder) not in json.dumps([each.data for each in found])
    assert NAME in found[0].data["error"]["message"]


def test_a_mistake_of_the_server_is_told_to_its_log_alone(
    scripted: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("/secret/path")

    monkeypatch.setattr("offplan.serve.reading.Reader.read", fail)
    failed = scripted.ask("/v1/completions", ASKED)
    assert (failed.status, "secret" in json.dumps(failed.data)) == (500, False)
    assert str(scripted.faults.pop()) == "/secret/path"
    monkeypatch.undo()
    assert scripted.ask("/v1/completions", ASKED).status == 200
    assert scripted.service.metrics.waiting._value.get() == 0


def test_no_error_speaks_of_options(
    scripted: Served, tiny: Tiny, rows: ScriptedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads an answer types no command: what helps them is said in words of the API."""
    reader, chat = scripted.service.reader, {"messages": [{"role": "user", "content": "a"}]}
    sees = replace(tiny.model, config={"model_type": "qwen2_vl", "vision_config": {}} | SEES)
    knows_little = replace(tiny.model, config={**tiny.model.config, "vocab_size": 3})
    long = InputError("the prompt has 40 tokens", remedy="plan with `prompt_tokens=40`")
    changes: list[tuple[str, Any, Any]] = [
        ("tokenizer.chat_template", None, chat),
        ("tokenizer.chat_template", "{{ raise_exception('no') }}", chat),
        ("tokenizer.chat_template", "{{ 'a' * 10 ** 10 }}", chat),
        ("tokenizer.chat_template", "", chat),
        ("tokenizer.chat_template", " ", {"messages": []}),
        ("tokenizer.chat_template", "{{ '' }}", chat),
        ("model", sees, {"prompt": "Weights"}),
        ("model", knows_little, {"prompt": "Weights"}),
        ("context", CONTEXT, {"prompt": ""}),
        ("context", CONTEXT, {"prompt": "a" * 999}),
        ("context", CONTEXT, {"prompt": "a", "max_tokens": 999}),
        ("context", CONTEXT, {"prompt": [[5], [9**9]]}),
        ("context", CONTEXT, {"prompt": ["a"] * 64}),
        ("context", CONTEXT, {"prompt": "a", "top_p": 2}),
        ("context", CONTEXT, {"prompt": "a", "n": 3}),
        ("context", CONTEXT, {"prompt": "a", "mirostat": 3}),
        ("context", CONTEXT, {"prompt": "a", "fails": long}),
        ("context", CONTEXT, {"prompt": "a", "fails": MemoryLimitError("no `gpu_memory`")}),
        ("context", CONTEXT, {"prompt": "a", "fails": RuntimeError("--secret")}),
    ]
    told = []
    for name, value, body in changes:
        asked = dict(body)
        with monkeypatch.context() as patched:
            *parts, last = name.split(".")
            changed = getattr(reader, parts[0]) if parts else reader
            patched.setitem(vars(changed), last, value)
            if "fails" in asked:
                rows.faults[0] = asked.pop("fails")
            path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
            answered = scripted.ask(path, asked)
        assert answered.status in (400, 500), (name, value, body, answered)
        told.append(answered.data["error"]["message"])
    assert not [text for text in told if "--" in text or "`" in text]
    assert "tiny has no chat template, and so continues prompts and reads no messages" in told
    assert "the prompt has 40 tokens" in told


@pytest.mark.slow
def test_a_template_that_loops_holds_up_chats_alone(
    scripted: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offplan.runtime.rendering.MOST_S", 1)
    monkeypatch.setattr("offplan.serve.app._STUCK_S", 0.01)
    reader = scripted.service.reader
    template, reader.tokenizer.chat_template = reader.tokenizer.chat_template, LOOP
    asked = {"messages": [{"role": "user", "content": "a"}]}
    try:
        with ThreadPoolExecutor(1) as clients:
            looping = clients.submit(scripted.ask, "/v1/chat/completions", asked)
            wait_for(lambda: scripted.service.rendering.busy_s > 0.01)
            assert scripted.ask("/v1/completions", ASKED).status == 200
            health = scripted.ask("/health")
            assert not looping.done()
            refused = looping.result()
    finally:
        reader.tokenizer.chat_template = template
    assert (health.status, health.data["status"]) == (503, "stuck")
    assert health.data["reason"].startswith("the chat template has been at one request for")
    assert (refused.status, not scripted.faults) == (400, True)
    assert "takes more than 1 s for the messages" in refused.data["error"]["message"]
    assert scripted.ask("/health").status == 200
    assert scripted.ask("/v1/chat/completions", asked).status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", ""])
def test_others_are_let_in_with_a_key_alone(host: str) -> None:
    with pytest.raises(InputError, match="--insecure"):
        check_exposure(host, None, insecure=False)
    check_exposure(host, KEY, insecure=False)
    check_exposure(host, None, insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.9.1"])
def test_loopback_needs_no_key(host: str) -> None:
    check_exposure(host, None, insecure=False)
    assert Guard(host=host).is_local
    for key in ("", " ", "clé", "a\nb"):
        with pytest.raises(InputError, match="printable"):
            check_exposure(host, key, insecure=False)


def test_a_port_that_is_taken() -> None:
    found = pytest.raises(OffplanError, match="name another --host or --port")
    with listen("127.0.0.1", 0) as first, found:
        listen("127.0.0.1", first.getsockname()[1])
    with pytest.raises(OffplanError, match="cannot listen on no-such-host"):
        listen("no-such-host.invalid", 0)
