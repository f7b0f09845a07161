"""Experts that loading turns round, as those of Qwen3-VL, are multiplied as any others."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from offplan.capabilities.packing import Packing
from offplan.runtime.forms import packing
from tests.hostcores.cores import require_cores
from tests.runtime.cached import keeping
from tests.runtime.divided import dividing, save, sharing, wide
from tests.runtime.fed import run_fed
from tests.runtime.plans import group, in_parts, offload

require_cores()

PACKING = Packing(group_size=1, num_in_group=1)
WAYS = {
    "resident": offload(),
    "kept": offload(keeping(2)),
    "by cores": offload(group(1, 1, "experts", decode="host")),
    "split": offload(dividing(3, later=1.5), prefill_chunk=3),
    "in parts": offload(in_parts(2)),
    "packed": offload().model_copy(update={"packing": PACKING}),
    "packed, kept": offload(keeping(2)).model_copy(update={"packing": PACKING}),
    "packed, divided": offload(dividing(3)).model_copy(update={"packing": PACKING}),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE, whose experts are stored one by one."""
    config = {"num_local_experts": 8, "norm_topk_prob": True, **wide("qwen3_moe")}
    return save("qwen3_moe", "values", tmp_path_factory.mktemp("plain"), **config)[0]


def save_as_vl(plain: Path, into: Path, *, turns: bool) -> Path:
    """Save the same text model as Qwen3-VL's, which ``turns`` its experts' weights round."""
    weights: dict[str, torch.Tensor] = {}
    experts: Any = defaultdict(lambda: defaultdict(list))
    stored = load_file(plain / "model.safetensors")
    for name in sorted(stored):
        of_text = name.replace("model.", "model.language_model.", 1)
        block, _, rest = of_text.partition(".mlp.experts.")
        if rest:
            experts[block][rest.split(".")[1]].append(stored[name])
        else:
            weights[of_text] = stored[name]
    for block, parts in experts.items():
        gate, up, down = (torch.stack(parts[f"{part}_proj"]) for part in ("gate", "up", "down"))
        for name, values in (("gate_up_proj", torch.cat([gate, up], 1)), ("down_proj", down)):
            values = values.mT if turns else values
            weights[f"{block}.mlp.experts.{name}"] = values.contiguous()
    text: dict[str, Any] = json.loads((plain / "config.json").read_text())
    text |= {"model_type": "qwen3_vl_moe_text", "num_experts": text["num_local_experts"]}
    text["rope_parameters"] |= {"mrope_section": [12, 10, 10]}
    del text["architectures"]
    config = {
        **{"model_type": "qwen3_vl_moe", "architectures": ["Qwen3VLMoeForConditionalGeneration"]},
        **{"text_config": text, "dtype": "bfloat16", "tie_word_embeddings": False},
    }
    into.mkdir()
    (into / "config.json").write_text(json.dumps(config))
    save_file(weights, into / "model.safetensors", {"format": "pt"})
    return into


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("turns", [True, False])
def test_logits_are_those_of_experts_stored_one_by_one(
    plain: Path, turns: bool, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published with inputs as rows, and saved again by transformers 5 as they are held."""
    monkeypatch.setattr(packing, "RUN_WEIGHTS", 2**15)  # a matrix is packed in several runs
    folder = save_as_vl(plain, tmp_path / "vl", turns=turns)
    for name, decision in WAYS.items():
        with sharing(0.4):
            made, expected = (run_fed(each, decision, device) for each in (folder, plain))
        assert torch.equal(made, expected), name
