"""A capability's keys, words and refusals are in one file, and come and go with its classes."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offplan.backends import Backend
from offplan.capabilities import table
from offplan.capabilities.goal import Asked, GoalBase
from offplan.capabilities.rule import RuleBase
from tests.costs.builders import DENSE, make_model

FOLDER = Path(table.__file__).parent
SHARED = {"capability", "goal", "offload", "rule", "table", "way"}
COMMON: dict[str, Any] = {"group_size": 2, "num_in_group": 1, "prefill": Backend.UVA}


class LoudRule(RuleBase):
    """A rule of a capability that offplan does not have."""

    volume: int | None = None

    def describe(self) -> str:
        return super().describe() + f"; volume {self.volume}" * (self.volume is not None)

    def list_faults(self) -> Iterator[str]:
        if self.volume == 11:
            yield "this one goes to 10"
        yield from super().list_faults()

    def list_unsaid(self) -> Iterator[str]:
        yield from super().list_unsaid()
        if self.volume is not None:
            yield "is loud (volume)"


class LoudGoal(GoalBase):
    """A question for its plans."""

    loud: bool = False

    def list_unsaid(self) -> Iterator[tuple[str, str]]:
        yield from super().list_unsaid()
        if self.loud:
            yield "loud", "no engine is loud"

    def list_refusals(self, asked: Asked) -> Iterator[str]:
        yield from super().list_refusals(asked)
        if self.loud and asked.model.experts is None:
            yield "`loud`: it is quiet"

    def choose(self, asked: Asked, *, by_others: bool) -> dict[str, Any]:
        return super().choose(asked, by_others=by_others) | {"loud": not by_others}


class Rule(LoudRule, table.Rule):
    """The rules of plans, with one capability more."""


class Goal(LoudGoal, table.Goal):
    """Their goal."""


def test_one_more_has_its_keys_words_and_refusals() -> None:
    rule = Rule(**COMMON, decode=Backend.UVA, cached_experts=2, volume=3)
    assert rule.describe().endswith("are on the GPU, too; volume 3")
    assert [*rule.list_unsaid()] == [
        "keeps 2 experts of a layer on the GPU (cached_experts)",
        "is loud (volume)",
    ]
    with pytest.raises(ValueError, match="this one goes to 10"):
        Rule(**COMMON, decode=Backend.UVA, volume=11)


def test_one_more_is_asked_for_chosen_and_refused() -> None:
    asked = Asked(make_model([DENSE]), 1, "host")
    chosen = Goal().choose(asked, by_others=False)
    assert chosen == {"cached_experts": "off", "parts": "off", "host_cores": True, "loud": True}
    assert [*Goal(loud=True).list_refusals(asked)] == ["`loud`: it is quiet"]
    with pytest.raises(ValueError, match="`loud` with `engine=vllm`: no engine is loud"):
        Goal(loud=True, engine="vllm")
    assert not Goal(**Goal(loud=True).for_engine("vllm")).loud


def test_none_names_another() -> None:
    for path in FOLDER.glob("*.py"):
        if path.stem in SHARED:
            continue
        tree = ast.parse(path.read_text("utf-8"))
        modules = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        near = {module.rpartition(".")[2] for module in modules if "capabilities" in module}
        assert near <= SHARED, path


@pytest.mark.parametrize("pair", [each for each in table.APART if each[0] != "stock"])
def test_pairs_that_may_not_meet(pair: tuple[str, str, str]) -> None:
    one, other, why = pair
    with pytest.raises(ValueError, match=why):
        table.Rule(
            **{**COMMON, "prefill": Backend.PREFETCH, "decode": Backend.UVA, one: 2, other: 2}
        )
