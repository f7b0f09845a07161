"""Clients beside each other: none learns what another asks, and none waits for all of another's."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import pytest

from offplan.runtime.joined import JoinedTexts
from offplan.runtime.rows import Rows
from offplan.serve.guard import Guard
from offplan.serve.requests import CompletionRequest, parse_request
from offplan.serve.worker import Job, Turns, identify
from tests.serve import (
    KEY,
    TIMEOUT_S,
    ScriptedRows,
    Served,
    count_texts,
    scripted_texts,
    serving,
    wait_for,
)
from tests.serve.conftest import Tiny
from tests.tiers import first_quick

SECRET = "My PIN is 4711. Tell me a story."
PROBE = "My PIN is 47"
FIELDS = ["user", "safety_identifier", "prompt_cache_key", "cache_salt"]


def make_guard(name: str) -> Guard:
    """A guard of its own for each server: it counts what is open there."""
    host = "127.0.0.1" if name == "here" else "0.0.0.0"
    return Guard(api_key=KEY if name == "key" else None, host=host)


def ask(served: Served, prompt: str, **said: Any) -> tuple[str, int]:
    """What follows a prompt, and the tokens of the prompt that the cache had."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **said}
    answered = served.ask("/v1/completions", body, {"Authorization": f"Bearer {KEY}"})
    assert answered.status == 200, answered
    usage = answered.data["usage"]
    return answered.data["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def rows_of_tiny(tiny: Tiny) -> Iterator[Rows]:
    with tiny.open() as session:
        yield Rows(session, 4)


@pytest.fixture(params=["key", "open"])
def strange(request: pytest.FixtureRequest, tiny: Tiny, rows_of_tiny: Rows) -> Iterator[Served]:
    """A server that others reach, of the tiny checkpoint."""
    guard, texts = make_guard(request.param), JoinedTexts(rows_of_tiny)
    with serving(texts, tiny.model, tiny.tokenizer, guard=guard) as served:
        yield served


@pytest.mark.slow
@pytest.mark.parametrize("field", first_quick(FIELDS))
def test_a_client_reads_nothing_of_another_ones_prompt(strange: Served, field: str) -> None:
    mine, other = {field: f"mine {field}"}, {field: "another"}
    client = strange.client(api_key=KEY)
    stream = client.completions.create(
        model="tiny", prompt=SECRET, max_tokens=150, stream=True, temperature=3, extra_body=mine
    )
    next(iter(stream))
    text, cached = ask(strange, PROBE, **other)
    assert cached == 0, "while the text is being made"
    assert ask(strange, f"{SECRET}#", **mine)[1] >= len(SECRET), "it is the client's own"
    stream.close()
    wait_for(lambda: count_texts(strange) == 0)
    assert ask(strange, f"{SECRET}#", **other)[1] <= len(PROBE), "nor when it has ended"
    assert ask(strange, PROBE, **mine) == (text, len(PROBE) - 1), "what is reused is right"


@pytest.mark.slow
def test_a_stranger_who_says_nothing_shares_with_nobody(tiny: Tiny, rows_of_tiny: Rows) -> None:
    texts = JoinedTexts(rows_of_tiny)
    with serving(texts, tiny.model, tiny.tokenizer, guard=make_guard("open")) as served:
        assert [ask(served, SECRET)[1] for _ in range(2)] == [0, 0]
    with serving(
        texts, tiny.model, tiny.tokenizer, guard=make_guard("open"), shares_prefixes=True
    ) as served:
        found = [ask(served, SECRET, user=user)[1] for user in "ab"]
        assert found == [0, len(SECRET) - 1], "shared on purpose"


def test_at_home_all_are_one_client(served: Served) -> None:
    prompt = "Nobody else asks this"
    assert [ask(served, prompt)[1] for _ in range(2)] == [0, len(prompt) - 1]


@pytest.mark.slow
def test_a_row_that_another_client_had_is_right(tiny: Tiny) -> None:
    with tiny.open() as session:
        texts = JoinedTexts(Rows(session, 1))  # all have the same row
        with serving(texts, tiny.model, tiny.tokenizer) as served:
            alone = {prompt: ask(served, prompt, user=prompt) for prompt in ("Weights", "Weigh")}
            for user in "abab":
                for prompt, (text, cached) in alone.items():
                    assert ask(served, prompt, user=user + prompt) == (text, cached) == (text, 0)
            assert ask(served, "Weigh", user="bWeigh") == (alone["Weigh"][0], 4)


def test_who_is_who() -> None:
    said = [
        {},
        *({field: "a"} for field in FIELDS),
        {"user": "b"},
        *({one: "a", other: "a"} for one, other in combinations(FIELDS, 2)),
    ]
    asked = [parse_request(CompletionRequest, {"prompt": "a", **each}) for each in said]
    for name, guard in {each: make_guard(each) for each in ("here", "key", "open")}.items():
        found = [identify(each, guard, "1.2.3.4", shares_prefixes=False) for each in asked]
        again = [identify(each, guard, "5.6.7.8", shares_prefixes=False) for each in asked]
        assert len({each.owner for each in found}) == len(said), "each thing that is said separates"
        equal = [one.owner == other.owner for one, other in zip(found, again, strict=True)]
        assert equal == [name != "open"] + [True] * (len(said) - 1), "an address never does"
        if name == "open":
            assert {each.turn for each in found} == {("address", "1.2.3.4")}
        else:
            assert len({each.turn for each in found}) == len(said)
        shared = [identify(each, guard, "1.2.3.4", shares_prefixes=True) for each in asked]
        assert len({each.owner for each in shared}) == 1
    empty = parse_request(CompletionRequest, {"prompt": "a", "user": ""})
    assert not empty.identity


def test_clients_take_turns(tiny: Tiny) -> None:
    rows = ScriptedRows([5], num_rows=1)
    rows.gate.clear()
    with (
        serving(scripted_texts(rows), tiny.model, tiny.tokenizer, most_of_client=8) as served,
        ThreadPoolExecutor(4) as clients,
    ):

        def send(user: str, num_prompts: int) -> Any:
            prompts = [[*f"{user}{number}".encode()] for number in range(num_prompts)]
            body = {"prompt": prompts, "user": user, "max_tokens": 1}
            before = count_texts(served)
            sent = clients.submit(served.ask, "/v1/completions", body)
            wait_for(lambda: count_texts(served) == before + num_prompts)
            return sent

        asked = [send("a", 1)]
        wait_for(lambda: served.service.metrics.running._value.get() == 1)
        asked += [send("b", 6), send("c", 6), send("d", 2)]
        wait_for(lambda: served.service.worker._waiting.num_waiting == 14)
        rows.gate.set()
        assert {each.result(TIMEOUT_S).status for each in asked} == {200}
    joined = " ".join(bytes(prompt).decode() for prompt in rows.joined)
    assert joined == "a0 b0 c0 d0 b1 c1 d1 b2 c2 b3 c3 b4 c4 b5 c5"


def test_the_client_with_the_fewest_texts_comes_first() -> None:
    def jobs(turn: str, count: int) -> list[Job]:
        text: Any = turn
        return [Job(text, print, turn) for _ in range(count)]

    turns = Turns[Job]()
    for job in (*jobs("a", 3), *jobs("b", 3), *jobs("c", 1)):
        turns.add(job)
    taken = turns.take(5, [*jobs("a", 2), *jobs("b", 1)])
    assert [job.turn for job in taken] == ["c", "b", "a", "b", "a"]
    assert (turns.num_waiting, turns.count("a"), turns.count("b")) == (2, 1, 1)


def test_each_client_waits_up_to_a_bound_of_its_own(tiny: Tiny) -> None:
    rows = ScriptedRows([5], num_rows=1)
    rows.gate.clear()
    guard = Guard(api_key=KEY)
    with (
        serving(
            scripted_texts(rows), tiny.model, tiny.tokenizer, most_of_client=2, guard=guard
        ) as served,
        ThreadPoolExecutor(8) as clients,
    ):
        client = served.client(api_key=KEY)

        def ask_for(user: str) -> Any:
            return client.completions.with_raw_response.create(
                model="tiny", prompt="a", max_tokens=1, user=user
            )

        asked = [clients.submit(ask_for, "a") for _ in range(3)]
        wait_for(lambda: count_texts(served) == 3)
        wait_for(lambda: served.service.metrics.running._value.get() == 1)
        refused = served.ask(
            "/v1/completions", {"prompt": "a", "user": "a"}, {"Authorization": f"Bearer {KEY}"}
        )
        assert (refused.status, refused.data["error"]["type"]) == (429, "rate_limit_error")
        assert "2 texts of this client wait already" in refused.data["error"]["message"]
        asked.append(clients.submit(ask_for, "b"))
        wait_for(lambda: count_texts(served) == 4)
        rows.gate.set()
        assert {each.result(TIMEOUT_S).status_code for each in asked} == {200}
        told = served.service.metrics.render().decode()
        assert 'offplan_requests_total{path="/v1/completions",status="429"} 1.0' in told
