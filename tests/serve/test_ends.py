"""A server before its model is there, and once it is to end."""

import http.client
import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from offplan.errors import OffplanError
from offplan.serve.serving import Serving, listen
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


def make_loading() -> Serving:
    """A server that has no service yet."""
    return Serving(
        listen("127.0.0.1", 0),
        drain_s=TIMEOUT_S,
        on_end=lambda _: None,
        leave=lambda _: None,
    )


def test_while_the_model_is_loaded() -> None:
    with make_loading() as server:
        for path in ("/health", "/v1/models"):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
            connection.request("GET", path)
            response = connection.getresponse()
            found = json.loads(response.read())
            connection.close()
            assert (response.status, response.headers["retry-after"]) == (503, "1")
            assert found.get("status", "loading") == "loading"
            assert path == "/health" or found["error"]["code"] == "loading"
        port = server.port
    listen("127.0.0.1", port).close()


def test_loading_that_fails_ends_the_server() -> None:
    with (
        pytest.raises(KeyError),
        make_loading() as server,
    ):
        raise KeyError
    listen("127.0.0.1", server.port).close()


def test_an_upload_holds_no_end_up(scripted: Served, rows: ScriptedRows) -> None:
    rows.gate.clear()
    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(scripted.ask, "/v1/completions", {"prompt": "a", "max_tokens": 2})
        wait_for(lambda: scripted.service.metrics.running._value.get() == 1)
        upload = scripted.connect(HEAD + b"Connection: close\r\nContent-Length: 99\r\n\r\n{")
        wait_for(lambda: scripted.service.num_open == 2)
        scripted.serving.end()
        assert b"shutting_down" in read(upload)
        rows.gate.set()
        assert asked.result().status == 200


def test_a_server_hears_of_signals_until_it_ends() -> None:
    before = signal.getsignal(signal.SIGTERM)
    server = make_loading()
    with pytest.raises(KeyboardInterrupt), server, server.hearing_signals():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_drain_has_a_limit(
    rows: ScriptedRows, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offplan.serve.serving._LAST_ANSWERS_S", 0)
    monkeypatch.setattr("offplan.serve.serving._END_S", 0)
    texts, num_before = scripted_texts(rows), threading.active_count()
    with (
        serving(texts, tiny.model, tiny.tokenizer, drain_s=0.05) as served,
        ThreadPoolExecutor(1) as clients,
    ):
        rows.gate.clear()
        asked = clients.submit(served.ask, "/v1/completions", {"prompt": "a"})
        wait_for(lambda: served.service.metrics.running._value.get() == 1)
        served.serving.end()
        # a pass that does not end is left to the command, which ends the process
        wait_for(lambda: served.faults)
        assert isinstance(served.faults[0], OffplanError)
        assert served.service.num_open == 0
        rows.gate.set()
        assert asked.exception() or asked.result().status >= 500
    wait_for(lambda: threading.active_count() <= num_before)


def test_a_thread_that_hangs_holds_no_end_up(
    scripted: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offplan.serve.serving._END_S", 0)
    hangs, reader = threading.Event(), scripted.service.reader
    monkeypatch.setattr(type(reader), "read", lambda *_: hangs.wait(TIMEOUT_S) and [])
    with ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(scripted.ask, "/v1/completions", {"prompt": "a"}) for _ in "ab"]
        wait_for(lambda: scripted.service.tokenizing.busy_s and scripted.service.num_open == 2)
        for _ in range(2):
            scripted.serving.end()
        for each in asked:
            assert each.result().data["error"]["code"] == "shutting_down"
        # what joins it would wait for good: the command ends the process
        wait_for(lambda: scripted.faults)
        assert str(scripted.faults[0]).startswith("the tokenizer did not end in time")
        hangs.set()
