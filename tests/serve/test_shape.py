"""What a body costs before it is known to be a request."""

import json
import threading
from typing import Any

import pytest
from pydantic import ValidationError

from offplan.serve import requests
from offplan.serve.errors import ApiError, refuse_fields
from offplan.serve.requests import MAX_CONTAINERS, ChatRequest, CompletionRequest, parse_request
from tests.serve import Served

NUM = 20_000
SAID: dict[str, Any] = {"role": "user", "content": "a"}
FIELDS = {f"field{number}": 1 for number in range(NUM)}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [{}] * NUM}),
        (CompletionRequest, {"prompt": [True] * NUM}),
        (CompletionRequest, {"prompt": [[True] * NUM] * 2}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * NUM}),
        (CompletionRequest, {"prompt": "a", **FIELDS}),
        (ChatRequest, {"messages": [{}] * NUM}),
        (ChatRequest, {"messages": [FIELDS]}),
        (ChatRequest, {"messages": [{**SAID, "content": [{}] * NUM}]}),
        (ChatRequest, {"messages": [{**SAID, "tool_calls": [{}] * NUM}]}),
        (ChatRequest, {"messages": [SAID], "tools": [{}] * NUM}),
    ],
)
def test_few_mistakes_are_looked_for(
    kind: type[requests.Request], body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []

    def count(error: ValidationError) -> ApiError:
        counts.append(error.error_count())
        return refuse_fields(error)

    monkeypatch.setattr(requests, "refuse_fields", count)
    with pytest.raises(ApiError) as refused:
        parse_request(kind, json.dumps(body).encode())
    assert refused.value.status == 400
    assert counts[0] < 10


def test_objects_and_lists_are_counted_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CompletionRequest, "model_validate_json", None)
    for item, outer in (("{}", "[%s]"), ("[]", '{"prompt": [%s]}'), ('{"a\\"": "\\\\"}', "[%s]")):
        body = outer % ",".join([item] * MAX_CONTAINERS)
        with pytest.raises(ApiError, match=f"this server reads {MAX_CONTAINERS}") as refused:
            parse_request(CompletionRequest, body.encode())
        assert refused.value.status == 400


@pytest.mark.parametrize("text", ["{", '[{"a": "[{"}, "\\"]'])
def test_a_text_may_hold_any_number_of_braces(text: str) -> None:
    prompt = text * (MAX_CONTAINERS + 1)
    body = json.dumps({"prompt": prompt}).encode()
    assert parse_request(CompletionRequest, body).prompt == [prompt]


def test_large_bodies_are_parsed_off_the_event_loop(
    scripted: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []

    def parse(kind: type[requests.Request], body: bytes) -> requests.Request:
        names.append(threading.current_thread().name)
        return parse_request(kind, body)

    monkeypatch.setattr("offplan.serve.api.parse_request", parse)
    for text in ("a", "a" * 2**14):
        scripted.ask("/v1/completions", {"prompt": text})
    assert [name.startswith("offplan-parser") for name in names] == [False, True]
