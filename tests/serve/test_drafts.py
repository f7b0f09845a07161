"""A server whose passes check drafts says the same, and counts what was taken."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from offplan.capabilities.drafts import Draft
from offplan.runtime.joined import JoinedTexts
from offplan.runtime.rows import Rows
from offplan.runtime.session import Session
from tests.runtime.plans import group, offload
from tests.serve import CONTEXT, NAME, WEIGHTS, Served, serving
from tests.serve.conftest import Tiny

AGAIN = f"{WEIGHTS} {WEIGHTS[:30]}"
"""A prompt that the tiny checkpoint continues as it says the sentence itself."""


@pytest.fixture(scope="module")
def drafted(tiny: Tiny) -> Iterator[Served]:
    draft = Draft(kind="ngram", tokens=7)
    decision = offload(group(2, 1), prefill_chunk=32).model_copy(update={"draft": draft})
    with (
        Session(tiny.model, decision, context=CONTEXT, device="cpu", folder=tiny.folder) as session,
        serving(JoinedTexts(Rows(session, 1)), tiny.model, tiny.tokenizer) as served,
    ):
        yield served


def test_answers_are_the_same_and_usage_counts(drafted: Served, served: Served) -> None:
    for more in (
        {"temperature": 0},
        {"temperature": 0.5, "seed": 7, "frequency_penalty": 0.1},
        {"temperature": 0, "stop": "link"},
        {"temperature": 0, "logprobs": 2},
    ):
        asked = {"model": NAME, "prompt": AGAIN, "max_tokens": 40, **more}
        found, expected = (each.client().completions.create(**asked) for each in (drafted, served))
        assert found.choices[0].text == expected.choices[0].text
        assert found.choices[0].finish_reason == expected.choices[0].finish_reason
        assert found.usage.completion_tokens == expected.usage.completion_tokens
        assert expected.usage.completion_tokens_details is None
        counted = found.usage.completion_tokens_details
        assert 0 < counted.accepted_prediction_tokens < found.usage.completion_tokens
        chunks = [*drafted.client().completions.create(**asked, stream=True)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == found.choices[0].text
    assert drafted.service.worker.drafts.accepted > 0
    assert not drafted.faults


def test_a_client_that_goes_away_leaves_the_row_to_others(drafted: Served) -> None:
    client = drafted.client()
    asked = {"model": NAME, "prompt": AGAIN, "max_tokens": 60, "temperature": 0}
    expected = client.completions.create(**asked).choices[0].text
    with client.completions.create(**asked, stream=True) as stream:
        next(iter(stream))
    assert client.completions.create(**asked).choices[0].text == expected


SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 2,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {"city_by_name": {"enum": ["Köln", "京都"]}, "days": {"type": "integer"}},
        "required": ["city_by_name", "days"],
        "additionalProperties": False,
    },
}
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": SCHEMA},
    "pattern": {"regex": "(one city and another city[.] ){2,3}[a-f]{2,9}!"},
    "grammar": {"grammar": 'root ::= ("to and fro " [0-9] ", "){3} "end"'},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
def test_answers_of_a_form_are_the_same(drafted: Served, served: Served, form: str) -> None:
    """Beside others without one, each in its turn; a mask of another place would change them."""
    pytest.importorskip("llguidance")
    asked = {"model": NAME, "prompt": "Weights", "max_tokens": 200, **FORMS[form]}
    plain = {"model": NAME, "prompt": AGAIN, "max_tokens": 30, "temperature": 0}

    def complete(server: Served, fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        found = server.ask("/v1/completions", fields)
        assert found.status == 200, found.data
        return found.data["choices"][0], found.data["usage"]

    alone, _ = complete(served, plain)
    for more in (
        {"temperature": 0},
        {"temperature": 0.9, "seed": 7, "frequency_penalty": 0.3, "logit_bias": {"101": 2}},
        {"temperature": 0, "stop": "days"},
        {"temperature": 0, "max_tokens": 33},
        {"temperature": 0, "logprobs": 2},
    ):
        expected, _ = complete(served, {**asked, **more})
        found, usage = complete(drafted, {**asked, **more})
        assert (found["text"], found["finish_reason"]) == (
            expected["text"],
            expected["finish_reason"],
        )
        counted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
        assert 5 < counted < usage["completion_tokens"]
        assert complete(drafted, plain)[0]["text"] == alone["text"]
        if form == "schema" and "stop" not in more and "max_tokens" not in more:
            assert len(json.loads(found["text"])) in (2, 3)
    assert not drafted.faults


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_grammar_that_does_not_go_back_has_no_drafts(drafted: Served, served: Served) -> None:
    pytest.importorskip("llguidance")
    lark = 'start: u "x" /[a-z]{9}/\nu[max_tokens=4]: /[a-d]*/'
    asked = {"prompt": "Weights", "max_tokens": 40, "temperature": 0, "grammar": lark}
    found, expected = (each.ask("/v1/completions", asked).data for each in (drafted, served))
    assert found["choices"][0]["text"] == expected["choices"][0]["text"]
    assert found["usage"].get("completion_tokens_details") is None
