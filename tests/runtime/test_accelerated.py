"""The comparison with accelerate offloads what the plan does, and computes the same."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from offplan.capabilities.stock import STOCK
from offplan.capabilities.way import OWN
from offplan.errors import InputError
from offplan.runtime.measuring import accelerated
from offplan.runtime.measuring.accelerated import bench_accelerate
from offplan.runtime.measuring.bench import Bench
from tests.runtime.conftest import save_tiny
from tests.runtime.families import draw_weights, make_config
from tests.runtime.plans import group, make_bench, offload
from tests.tiers import first_quick

PROMPT = torch.tensor([[3, 14, 15, 9, 26], [58, 9, 7, 9, 3]])
CPU = torch.device("cpu")


def question(folder: Path, *segments: str) -> Bench:
    return make_bench(folder, offload(group(2, 1, *segments)), PROMPT, "cpu")


def names(folder: Path, *segments: str) -> list[str]:
    """The modules that accelerate is given for a rule that takes every second layer."""
    module, offloaded = accelerated._load(question(folder, *segments), lambda *_: None)
    by_module = {id(part): name for name, part in module.named_modules()}
    return [by_module[id(part)] for part in accelerated._largest_modules(module, offloaded)]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3_moe_tied", tmp_path_factory.mktemp("moe"))


def test_whole_layers(moe: Path) -> None:
    assert names(moe) == ["model.layers.1", "model.layers.3"]


@pytest.mark.slow
def test_parts_of_layers(moe: Path) -> None:
    layers = ("model.layers.1", "model.layers.3")
    assert sorted(names(moe, "experts")) == [f"{layer}.mlp.experts" for layer in layers]
    projections = sorted(names(moe, "self_attn.q_proj", "self_attn.o_proj"))
    assert projections == [f"{la}.self_attn.{p}" for la in layers for p in ("o_proj", "q_proj")]


def test_a_module_with_parameters_of_both_kinds_is_taken_whole(moe: Path) -> None:
    assert names(moe, "experts.down_proj") == [f"model.layers.{i}.mlp.experts" for i in (1, 3)]


def test_sparse_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="leave accelerate out"):
        bench_accelerate(question(save_tiny("deepseek_v32", tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("family", first_quick([None, "falcon", "nemotron_h", "rwkv"]))
def test_it_computes_the_same(
    family: str | None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if family is not None:  # transformers' own passes
        config = make_config(family, {})
        checkpoint = tmp_path
        draw_weights(AutoModelForCausalLM.from_config(config)).save_pretrained(checkpoint)
    stock = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    expected = stock.generate(PROMPT, max_new_tokens=5, do_sample=False, eos_token_id=None)
    taken: list[torch.Tensor] = []
    time_requests = accelerated.time_requests

    def note(bench, prefill, decode, *counted):  # type: ignore[no-untyped-def]
        state = prefill()
        for _ in range(5):
            taken.append(state[0])
            state = decode(state)
        return time_requests(bench, prefill, decode, *counted)

    monkeypatch.setattr(accelerated, "time_requests", note)
    cost = bench_accelerate(replace(question(checkpoint), way=STOCK if family else OWN))
    assert torch.equal(torch.cat(taken, dim=1), expected[:, PROMPT.shape[1] :])
    assert cost.decode.link_bytes is None
    assert 0 < cost.decode.step.min_s <= cost.decode.step.median_s <= cost.decode.step.max_s
