"""Requests that nobody means: each is answered, and none with a mistake of the server.

Bodies are right but for a field or two. Of those that schemathesis makes of the requests' schemas
19 in 20 get 400 for their first field, so that they try less.
"""

import http.client
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offplan.serve.requests import ChatRequest, CompletionRequest
from tests.serve import ScriptedRows, Served

ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
FIELDS = sorted(
    {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    | {"n", "best_of", "echo", "logit_bias", "response_format", "user", "metadata", "unknown"}
)
RIGHT: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from([None, "tiny"]),
    "max_tokens": st.integers(1, 40),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(1, 400),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "stream": st.booleans(),
    "logprobs": st.booleans() | st.integers(0, 20),
    "top_logprobs": st.integers(0, 20),
}
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
    optional={"content": st.text(max_size=20) | ANYTHING, "tool_calls": ANYTHING, "name": ANYTHING},
)
PROMPT = st.text(max_size=300) | st.lists(st.integers(-1, 300), max_size=300) | ANYTHING
BODY = st.builds(
    lambda right, wrong: {**right, **wrong},
    st.fixed_dictionaries({}, optional=RIGHT),
    st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=2),
)
COMPLETION = st.builds(lambda body, prompt: {"prompt": prompt, **body}, BODY, PROMPT)
CHAT = st.builds(
    lambda body, said: {"messages": said, **body}, BODY, st.lists(MESSAGE, max_size=3) | ANYTHING
)
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
ASKED = st.sampled_from(sorted(PATHS)).flatmap(
    lambda path: st.tuples(st.just(path), PATHS[path].map(lambda body: json.dumps(body).encode()))
)
ANY_BYTES = st.tuples(st.sampled_from(sorted(PATHS)), st.binary(max_size=60))
MEANT = {200, 400, 404}

fuzzed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)


@fuzzed
@given(asked=ASKED | ANY_BYTES)
@pytest.mark.slow
def test_every_body_has_an_answer(
    asked: tuple[str, bytes], scripted: Served, rows: ScriptedRows
) -> None:
    path, body = asked
    try:
        answered = scripted.ask(path, body)
    except http.client.HTTPException as error:
        raise AssertionError(f"{path} {body!r}: {error!r}") from error
    assert answered.status in MEANT, (answered, scripted.faults)
    if answered.status != 200:
        assert set(answered.data["error"]) == {"message", "type", "param", "code"}
        assert answered.data["error"]["message"]
    elif isinstance(answered.data, str):
        assert answered.data.endswith("data: [DONE]\n\n")
    else:
        assert answered.data["choices"][0]["finish_reason"] in ("stop", "length")
    assert not scripted.faults
    assert scripted.ask("/health").status == 200


TEXTS = st.text(max_size=20) | ANYTHING
BLOCKS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "tool_use", "thinking", "input_text", "image"])},
        optional=dict.fromkeys(["text", "id", "name", "input", "thinking"], TEXTS),
    ),
    max_size=2,
)
SAID = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "reasoning", "item_reference"]),
        "role": st.sampled_from(["user", "assistant", "tool"]),
        "content": TEXTS | BLOCKS,
        **dict.fromkeys(["call_id", "name", "arguments", "output", "summary", "images"], TEXTS),
    },
)
OTHER = {
    "/v1/messages": ("messages", "system", "tools", "tool_choice", "thinking", "metadata"),
    "/v1/messages/count_tokens": ("messages", "system", "tools"),
    "/v1/responses": ("input", "tools", "text", "reasoning", "include", "store", "tool_choice"),
    "/api/chat": ("messages", "tools", "options", "format", "think", "keep_alive"),
    "/api/generate": ("prompt", "system", "raw", "options", "format", "context"),
    "/api/show": ("model", "name", "verbose"),
    "/tokenize": ("prompt", "content", "messages", "with_pieces", "return_token_strs"),
    "/detokenize": ("tokens",),
}
"""Paths of the other APIs, each with fields; the first one has the right form in half of them."""


def ask_other(path: str) -> st.SearchStrategy[tuple[str, bytes]]:
    first, *others = OTHER[path]
    body = st.fixed_dictionaries(
        {
            "model": st.just("tiny"),
            "max_tokens": st.just(3),
            first: st.lists(SAID, min_size=1, max_size=3) | TEXTS | st.lists(st.integers(0, 300)),
        },
        optional={"stream": st.booleans()} | dict.fromkeys(others, TEXTS),
    )

    def write(said: dict[str, Any]) -> tuple[str, bytes]:
        if path != "/v1/messages":
            del said["max_tokens"]
        return path, json.dumps(said).encode()

    return body.map(write)


@fuzzed
@given(asked=st.sampled_from(sorted(OTHER)).flatmap(ask_other))
@pytest.mark.slow
def test_every_body_of_the_other_apis_has_an_answer(
    asked: tuple[str, bytes], scripted: Served
) -> None:
    path, body = asked
    answered = scripted.ask(path, body)
    assert answered.status in MEANT, (answered, scripted.faults)
    assert answered.status == 200 or answered.data["error"]
    assert not scripted.faults


@pytest.mark.slow
@fuzzed
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "HEAD", "DELETE", "OPTIONS"]),
    path=st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), max_size=20),
    headers=st.dictionaries(
        st.sampled_from(["Host", "Content-Type", "Authorization", "Origin", "Accept"]),
        st.text(st.characters(codec="latin-1", categories=["L", "N", "P"]), max_size=20),
        max_size=3,
    ),
)
def test_every_path_has_an_answer(
    method: str, path: str, headers: dict[str, str], scripted: Served
) -> None:
    answered = scripted.ask(f"/v1/{path}", headers=headers, method=method)
    assert 200 <= answered.status < 500, (answered, scripted.faults)
    assert not scripted.faults
