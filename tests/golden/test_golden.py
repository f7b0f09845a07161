"""The answers of some two hundred questions, byte for byte."""

from pathlib import Path

import pytest

from tests.golden import MODELS, answer, questions, read_answers
from tests.tiers import others_in_sweep

ASKED = [(model, question) for model in MODELS for question in questions(model)]
WHOLE = ("dense", "moe")
KEPT = [
    (model, question)
    for model in MODELS
    for question in [*questions(model)][:: 1 if model in WHOLE else 4]
]
"""Two models are asked all that concerns them, others every fourth question."""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "question"), others_in_sweep(ASKED, KEPT), ids=lambda text: text)
def test_golden(model: str, question: str, tmp_path: Path) -> None:
    assert answer(model, question, tmp_path) == read_answers(model)[question]


def test_every_question_has_an_answer() -> None:
    for model in MODELS:
        assert [*questions(model)] == [*read_answers(model)], "run python -m tests.golden"
