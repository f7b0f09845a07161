"""Gates of experts that a kernel knows, told from what modules compute."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN

from offplan.runtime.forms.gates import Gate, compute_gate, find_gate, find_gates


class Experts(SimpleNamespace):
    """Experts of some attributes, as transformers has them."""

    num_experts, has_gate = 8, True

    def _apply_gate(self, made: torch.Tensor) -> torch.Tensor:
        gate, up = made.chunk(2, -1)
        result: torch.Tensor = self.act_fn(gate) * up
        return result


@pytest.mark.parametrize(
    ("name", "gate"),
    [
        ("silu", Gate()),
        ("gelu", Gate("gelu")),
        ("gelu_pytorch_tanh", Gate("gelu_tanh")),
        ("relu", Gate("relu")),
        ("quick_gelu", Gate(factor=1.702)),
        ("tanh", None),
    ],
)
def test_activations_are_told_apart(name: str, gate: Gate | None) -> None:
    assert find_gate(Experts(act_fn=ACT2FN[name], limit=7.0)) == gate


@pytest.mark.parametrize(
    "gate",
    [
        Gate(limited="before", limit=7.0),
        Gate(limited="after", limit=7.0),
        Gate("silu", True, "before", 7.0, 1.702, 1.0),
    ],
)
def test_limits_and_factors_are_among_the_attributes(gate: Gate) -> None:
    class Limited(Experts):
        def _apply_gate(self, made: torch.Tensor) -> torch.Tensor:
            return compute_gate(gate, made)

    experts = [Limited(swiglu_limit=7, alpha=1.702), Limited(swiglu_limit=7, alpha=1.702)]
    assert find_gates(experts) == [gate, gate]
    assert find_gate(Limited(alpha=1.702)) is None


def test_no_kernel_knows_what_fails_or_has_no_gate() -> None:
    def fail(*_: Any) -> None:
        raise ValueError

    assert find_gate(Experts(act_fn=fail)) is None
    assert find_gate(SimpleNamespace(has_gate=False)) is None
