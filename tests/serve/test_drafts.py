"""A server whose passes check drafts says the same, and counts what was taken."""

from collections.abc import Iterator

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
