"""Real rotary embeddings against transformers' complex ones."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config
from transformers.models.deepseek_v2 import modeling_deepseek_v2

from offplan.runtime.model.rewrites import apply_rotary_emb, compile_as_real
from tests.runtime.conftest import LATENTS, SIZES


def make_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    angles = torch.randn(1, 5, 4)
    return (
        torch.randn(2, 4, 5, 8),
        torch.randn(2, 1, 5, 8),
        torch.polar(torch.ones(1, 5, 4), angles),
    )


def test_real_products_turn_as_complex_ones_do() -> None:
    inputs = make_inputs()
    for ours, theirs in zip(
        apply_rotary_emb(*inputs), modeling_deepseek_v2.apply_rotary_emb(*inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_complex_products_are_not_compiled() -> None:
    config = DeepseekV2Config(**SIZES, **LATENTS)
    layers = AutoModelForCausalLM.from_config(config).model.layers
    for _ in range(2):  # a second session
        compile_as_real(layers)
    compiled: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    def turn(xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor) -> Any:
        return modeling_deepseek_v2.apply_rotary_emb(xq, xk, freqs_cis)

    inputs = make_inputs()
    torch.testing.assert_close(torch.compile(turn, backend=keep)(*inputs), turn(*inputs))
    (graph,) = compiled
    assert "view_as_complex" not in graph.code
