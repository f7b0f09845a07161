"""Connections that say little or nothing take no room from others."""

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from offplan.serve.answers import CompletionAnswer
from offplan.serve.connections import Idle, name_client
from offplan.serve.guard import Guard
from tests.serve import (
    HEAD,
    TIMEOUT_S,
    ScriptedRows,
    Served,
    read,
    scripted_texts,
    serving,
    wait_for,
)
from tests.serve.conftest import Tiny

ASKED = {"prompt": "a", "max_tokens": 2, "temperature": 0}
MOST = 2


@pytest.fixture
def narrow(rows: ScriptedRows, tiny: Tiny) -> Iterator[Served]:
    """A server with room for two connections of an address with a request, and two without."""
    guard = Guard(max_connections=MOST)
    with serving(scripted_texts(rows), tiny.model, tiny.tokenizer, guard=guard) as served:
        yield served


@pytest.mark.parametrize(
    "begins",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ",
        HEAD + b"Content-Length: 99\r\n\r\n{",
    ],
)
def test_silent_connections_make_room_for_new_ones(
    narrow: Served, monkeypatch: pytest.MonkeyPatch, begins: bytes
) -> None:
    monkeypatch.setattr("offplan.serve.connections._HEAD_S", 2 * TIMEOUT_S)
    monkeypatch.setattr("offplan.serve.guard._BODY_S", 2 * TIMEOUT_S)
    silent = [narrow.connect(begins) for _ in range(2 * MOST)]
    assert narrow.ask("/health").status == 200
    assert narrow.ask("/v1/completions", ASKED).status == 200
    for each in silent[:MOST]:  # those that have waited longest
        assert read(each) == b""


@pytest.mark.parametrize(
    ("begins", "answer"),
    [
        (b"", b""),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", b""),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET", b" 200 "),
        # refused before its body is read, which never comes
        (HEAD.replace(b"json", b"text") + b"Content-Length: 9\r\n\r\n", b" 415 "),
    ],
)
def test_headers_have_a_time_limit(
    scripted: Served, monkeypatch: pytest.MonkeyPatch, begins: bytes, answer: bytes
) -> None:
    monkeypatch.setattr("offplan.serve.connections._HEAD_S", 0.2)
    assert answer in read(scripted.connect(begins)).split(b"\r\n")[0]


def test_a_text_that_takes_long_is_no_silence(
    scripted: Served, rows: ScriptedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offplan.serve.connections._HEAD_S", 0.2)
    rows.gate.clear()
    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(scripted.ask, "/v1/completions", ASKED)
        wait_for(lambda: scripted.service.num_open == 1)
        wait_for(lambda: read(scripted.connect()) == b"")  # longer than headers may take
        rows.gate.set()
        assert asked.result().status == 200


@pytest.mark.parametrize("begins", [b"", b'{"prompt"'])
def test_bodies_have_a_time_limit(
    scripted: Served, monkeypatch: pytest.MonkeyPatch, begins: bytes
) -> None:
    monkeypatch.setattr("offplan.serve.guard._BODY_S", 0.05)
    lengths = b"Connection: close\r\nContent-Length: 99\r\n\r\n"
    said = read(scripted.connect(HEAD + lengths + begins))
    assert b" 408 " in said.split(b"\r\n")[0]
    assert f"{len(begins)} bytes of the body came".encode() in said


def test_requests_of_one_address_are_bounded_and_health_is_answered(
    narrow: Served, rows: ScriptedRows
) -> None:
    rows.gate.clear()
    with ThreadPoolExecutor(MOST) as clients:
        asked = [clients.submit(narrow.ask, "/v1/completions", ASKED) for _ in range(MOST)]
        wait_for(lambda: sum(narrow.service.guard._open.values()) == MOST)
        refused = narrow.ask("/v1/completions", ASKED)
        assert (refused.status, refused.data["error"]["code"]) == (503, "too_many_requests")
        assert narrow.ask("/health") == (200, {"status": "ok"})
        rows.gate.set()
        assert [each.result().status for each in asked] == [200] * MOST
    assert narrow.ask("/v1/completions", ASKED).status == 200


def test_names_of_clients() -> None:
    assert name_client("10.0.0.1") == name_client("::ffff:10.0.0.1") == "10.0.0.1"
    assert name_client("2001:db8::1") == name_client("2001:db8::f:2%eth0") == "2001:db8::/64"
    assert name_client("2001:db8:0:1::1") == "2001:db8:0:1::/64"
    assert name_client(None) == name_client("/run/socket") == ""


@pytest.mark.parametrize(
    ("num_bytes", "num_chunks", "status"), [(1, 3000, 400), (300, 3000, 200), (1, 1000, 200)]
)
def test_chunks_of_a_body(scripted: Served, num_bytes: int, num_chunks: int, status: int) -> None:
    asked = json.dumps(ASKED).encode()
    chunks = b"%x\r\n%s\r\n" % (len(asked), asked)
    chunks += b"%x\r\n%s\r\n" % (num_bytes, b" " * num_bytes) * num_chunks + b"0\r\n\r\n"
    how = b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    said = read(scripted.connect(HEAD + how + chunks))
    assert b" %d " % status in said.split(b"\r\n")[0]
    assert (b"more than 1024 chunks" in said) == (status == 400)
    assert not scripted.faults


def test_a_flood_of_connections_takes_few_files(
    narrow: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, num_files, add = 300, list[int](), Idle.add

    def count(idle: Idle, *of_connection: Any) -> None:
        num_files.append(len(os.listdir("/proc/self/fd")))
        add(idle, *of_connection)

    monkeypatch.setattr(Idle, "add", count)
    is_held, all_wait = threading.Event(), threading.Event()
    narrow.serving._call(lambda: is_held.set() or all_wait.wait(TIMEOUT_S))
    assert is_held.wait(TIMEOUT_S)
    silent = [narrow.connect() for _ in range(most)]
    num_before = len(os.listdir("/proc/self/fd"))
    all_wait.set()
    assert read(silent[0]) == b""
    wait_for(lambda: len(num_files) == most)
    assert max(num_files) < num_before + most / 2
    assert narrow.ask("/health").status == 200


def test_an_answer_may_be_read_slowly(scripted: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offplan.serve.connections._HEAD_S", 0.05)
    monkeypatch.setattr(CompletionAnswer, "whole", lambda _: {"text": "a" * 2**24})
    asked = json.dumps(ASKED).encode()
    slow = scripted.connect(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(asked), asked))
    answer = slow.makefile("rb", buffering=0)
    assert answer.read(8) == b"HTTP/1.1"
    wait_for(lambda: read(scripted.connect()) == b"")  # longer than headers may take
    head, _, body = answer.readall().partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0]
    assert len(json.loads(body)["text"]) == 2**24


def test_many_that_send_at_once_are_served(tiny: Tiny, rows: ScriptedRows) -> None:
    most, asked = 40, json.dumps(ASKED).encode()
    whole = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(asked), asked)
    texts, guard = scripted_texts(rows), Guard(max_connections=most)
    with serving(texts, tiny.model, tiny.tokenizer, guard=guard) as served:
        is_held, all_wait = threading.Event(), threading.Event()
        served.serving._call(lambda: is_held.set() or all_wait.wait(TIMEOUT_S))
        assert is_held.wait(TIMEOUT_S)
        asking = [served.connect(whole) for _ in range(2 * most)]
        all_wait.set()
        told = [read(each).split(b"\r\n")[0] for each in asking]
    assert b"" not in told, "each gets an answer, be it that there are too many"
    assert any(b" 200 " in each for each in told)
