"""A plan that needs an executor which the table lacks is refused, by its name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from offplan.capabilities.way import OWN
from offplan.checkpoint.open import open_model
from offplan.errors import PlanError
from offplan.held.held import hold
from offplan.held.runtimes import RUNTIMES
from offplan.plan import Rule
from offplan.runtime.executors import EXECUTORS
from offplan.runtime.loading.prepared import fit
from tests.runtime.plans import offload
from tests.runtime.quantise import save_stored

EXPERTS: dict[str, Any] = {"cpu_offload_params": ["experts"], "group_size": 1, "num_in_group": 1}
NEEDS: dict[str, dict[str, Any]] = {
    "cached_experts": {"prefill": "prefetch", "decode": "uva", "cached_experts": 2},
    "parts": {"prefill": "prefetch", "decode": "uva", "parts": 2},
    "host_cores": {"prefill": "prefetch", "decode": "host"},
    "peer": {"prefill": "prefetch", "decode": "prefetch"},
    "stock": {"prefill": "prefetch", "decode": "prefetch"},
}
"""Rules of a plan that needs each executor."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    return save_stored("qwen3_moe", "fp8_block", folder, torch.bfloat16, num_hidden_layers=1)[1]


@pytest.mark.parametrize("name", EXECUTORS)
def test_a_plan_is_refused_whose_executor_is_missing(name: str, checkpoint: Path) -> None:
    rule = Rule.model_validate({**EXPERTS, **NEEDS[name]})
    decision = offload(rule, store="peer" if name == "peer" else "host")
    way = next((each for each in RUNTIMES if each.name == name), OWN)
    stage = hold(open_model(str(checkpoint)), way=way)
    assert name in fit(stage, decision, EXECUTORS, "cpu").executors
    others = {each: kind for each, kind in EXECUTORS.items() if each != name}
    with pytest.raises(PlanError, match=f"needs {name}, which this runtime does not execute: it "):
        fit(stage, decision, others, "cpu")
