"""Many clients at once: nobody's tokens are another's, and nobody holds the others up."""

import http.client
import json
import mmap
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch

from offplan.errors import InputError
from offplan.runtime.generate import generate
from offplan.runtime.joined import Added, Continued, JoinedTexts
from offplan.runtime.rows import Rows
from offplan.runtime.rules import TokenRules
from offplan.runtime.sampling import Sampling, make_chooser
from offplan.runtime.session import Session
from offplan.runtime.texts import Text
from tests.serve import END, NAME, TIMEOUT_S, ScriptedRows, Served, count_texts, wait_for
from tests.serve.conftest import Tiny

PROMPTS = [
    *("Weights that do not", "A plan", "Wei", "The GPU waits", "memory", "cross the link before"),
    *("W" * 40, "x", "host", "Weights that do not fit the GPU wait in host memory and cross"),
]
NUM_TOKENS = 24
SOAK_S = float(os.environ.get("OFFPLAN_SOAK_S", "0"))
"""Seconds for which ten clients ask at once; three requests of each without it, and 60 for a soak:
``OFFPLAN_SOAK_S=60 pytest -s -n 0 tests/serve/test_together.py -k ten_clients``."""
MOST_GROWTH_BYTES = 32 * 2**20


def alone(tiny: Tiny, session: Session, prompt: str, sampling: Sampling | None = None) -> str:
    """What follows a prompt that a session continues by itself."""
    tokens = tiny.tokenizer(prompt, return_tensors="pt").input_ids
    choose = make_chooser(sampling, [0], session.device)
    made = generate(session, tokens, NUM_TOKENS, None, frozenset([END]), choose=choose)
    found = [int(token) for token in made]
    return str(tiny.tokenizer.decode(found, skip_special_tokens=True))


def find_memory() -> int:
    """Bytes of memory that this process, client and server, has in use; 0 where nobody says."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * mmap.PAGESIZE if path.exists() else 0


def send_and_hang(served: Served) -> socket.socket:
    """Ask for a stream, and never read it."""
    hanging = socket.create_connection(("127.0.0.1", served.port), timeout=TIMEOUT_S)
    body = json.dumps({"prompt": "Weights", "max_tokens": 200, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    hanging.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return hanging


@pytest.mark.slow
def test_ten_clients_one_hangs_and_one_goes_away(served: Served, tiny: Tiny) -> None:
    drawn = {"seed": 5, "temperature": 2.0}
    sampling = Sampling(temperature=2.0, seed=5)
    with tiny.open() as session:
        expected = {
            prompt: (alone(tiny, session, prompt), alone(tiny, session, prompt, sampling))
            for prompt in PROMPTS
        }

    num_asked, taken, began = 0, list[int](), time.monotonic()

    def ask(prompt: str) -> None:
        nonlocal num_asked
        asked = {"model": NAME, "prompt": prompt, "max_tokens": NUM_TOKENS}
        client, number = served.client(), 0
        while number < 3 or time.monotonic() < began + SOAK_S:
            number, num_asked = number + 1, num_asked + 2
            taken.append(find_memory())
            whole = client.completions.create(**asked, temperature=0).choices[0].text
            chunks = client.completions.create(**asked, **drawn, stream=True)
            streamed = "".join(chunk.choices[0].text for chunk in chunks)
            assert (whole, streamed) == expected[prompt]

    hanging = send_and_hang(served)
    with served.client().completions.create(
        model=NAME, prompt="Weights", max_tokens=200, stream=True
    ) as stream:
        next(iter(stream))  # and no more
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        list(clients.map(ask, PROMPTS))
    hanging.close()
    assert not served.faults
    print(f"{num_asked} requests in {time.monotonic() - began:.0f} s")
    settled = max(taken[: len(taken) // 2])
    print(f"{settled / 2**20:.0f} MiB in the first half, then {max(taken) / 2**20:.0f}")
    assert max(taken) - settled < MOST_GROWTH_BYTES


def test_a_client_that_goes_away_stops_its_text(scripted: Served, rows: ScriptedRows) -> None:
    rows.script = [5] * 250
    for is_streamed in (True, False):
        rows.gate.clear()
        body = {"prompt": "a", "max_tokens": 200, "stream": is_streamed}
        gone = http.client.HTTPConnection("127.0.0.1", scripted.port, timeout=TIMEOUT_S)
        headers = {"Content-Type": "application/json"}
        gone.request("POST", "/v1/completions", json.dumps(body), headers)
        wait_for(lambda: scripted.service.num_open == 1)
        gone.close()
        wait_for(lambda: scripted.service.num_open == 0)
        rows.gate.set()
        wait_for(lambda: rows.num_free == rows.num_rows)
    assert scripted.service.metrics.made_tokens._value.get() < 200


def test_those_that_wait_are_served_in_turn_and_no_more_than_the_bound(
    scripted: Served, rows: ScriptedRows
) -> None:
    rows.gate.clear()
    client = scripted.client()

    def ask() -> str:
        made = client.completions.create(model=NAME, prompt="a", max_tokens=40, temperature=0)
        return made.choices[0].text

    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(ask) for _ in range(4)]  # the first of them is in a pass
        wait_for(lambda: count_texts(scripted) == 4)
        with pytest.raises(openai.InternalServerError, match=r"\d texts wait already") as full:
            ask()
        assert (full.value.status_code, full.value.code) == (503, "queue_full")
        assert full.value.response.headers["retry-after"]
        rows.gate.set()
        texts = {future.result() for future in asked}
    assert texts == {"Größe: 5 µm, ✓ 日本 🙂."}
    assert scripted.service.metrics.waiting._value.get() == 0


def test_a_fault_ends_what_was_in_the_pass_and_nothing_else(
    scripted: Served, rows: ScriptedRows
) -> None:
    client = scripted.client()
    asked = {"model": NAME, "prompt": "a", "max_tokens": 2, "temperature": 0}
    for fault in (MemoryError("/secret/path"), RuntimeError("/secret/path")):
        rows.faults[0] = fault
        with pytest.raises(openai.InternalServerError) as failed:
            client.completions.create(**asked)
        assert (failed.value.status_code, failed.value.code) == (500, "pass_failed")
        assert "secret" not in failed.value.response.text
        assert scripted.faults.pop() is fault
        assert client.completions.create(**asked).choices[0].text == "Gr"
    # one that has begun is told in the stream
    rows.faults[4] = RuntimeError("later")
    stream = iter(client.completions.create(**{**asked, "max_tokens": 20}, stream=True))
    assert next(stream).choices[0].text == "G"
    with pytest.raises(openai.APIError, match="ended this text"):
        list(stream)
    assert client.completions.create(**asked).choices[0].text == "Gr"


def test_a_prompt_that_passes_cannot_read_is_the_clients_mistake(
    scripted: Served, rows: ScriptedRows
) -> None:
    rows.faults[0] = InputError("the prompt has 40 tokens, and the passes have room for 32")
    answered = scripted.ask("/v1/completions", {"prompt": "a"})
    assert (answered.status, not scripted.faults) == (400, True)
    assert "room for 32" in answered.data["error"]["message"]
    assert scripted.ask("/v1/completions", {"prompt": "a"}).status == 200


def test_a_signal_drains_and_a_second_one_ends(scripted: Served, rows: ScriptedRows) -> None:
    rows.gate.clear()
    rows.script = [5] * 250
    with ThreadPoolExecutor(2) as clients:
        body = {"prompt": "a", "max_tokens": 200}
        asked = clients.submit(scripted.ask, "/v1/completions", body)
        wait_for(lambda: scripted.service.metrics.running._value.get() == 1)
        scripted.serving.end()
        wait_for(lambda: scripted.service.is_draining)
        assert scripted.ask("/health") == (503, {"status": "shutting down"})
        refused = scripted.ask("/v1/completions", {"prompt": "a"})
        assert (refused.status, refused.data["error"]["code"]) == (503, "shutting_down")
        scripted.serving.end()
        rows.gate.set()
        ended = asked.result()
    assert (ended.status, ended.data["error"]["code"]) == (503, "shutting_down")


def test_draining_finishes_what_waits(scripted: Served, rows: ScriptedRows) -> None:
    rows.gate.clear()
    with ThreadPoolExecutor(4) as clients:
        body = {"prompt": "a", "max_tokens": 200, "temperature": 0}
        asked = [clients.submit(scripted.ask, "/v1/completions", body) for _ in range(4)]
        wait_for(lambda: count_texts(scripted) == 4)
        scripted.serving.end()
        rows.gate.set()
        assert {future.result().status for future in asked} == {200}


def test_logarithms_are_those_of_the_logits(tiny: Tiny) -> None:
    prompt = tiny.tokenizer("Weights").input_ids
    rules = TokenRules(end_tokens=frozenset([END]), repetition_penalty=1.3)
    with tiny.open() as session:
        text = Text(tiny.tokenizer, prompt, num_tokens=4, rules=rules)
        continued, made = Continued(text, Sampling(0.7, seed=2), 3), list[Added]()
        texts = JoinedTexts(Rows(session, 2))
        texts.join([continued])
        while len(texts):
            made += [added for _, added in texts.step() if isinstance(added, Added)]
        for index, added in enumerate(made):
            before = [*prompt, *(each.token for each in made[:index])]
            logits = session.prefill(torch.tensor([before]))[0]
            expected = logits.log_softmax(-1)
            assert added.scored is not None
            assert added.scored.logprob == pytest.approx(float(expected[added.token]), abs=1e-5)
            values, names = expected.topk(3)
            assert [each.token for each in added.likeliest] == names.tolist()
            found = [each.logprob for each in added.likeliest]
            assert found == pytest.approx(values.tolist(), abs=1e-5)
