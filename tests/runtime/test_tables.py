"""Tables that lie on the host and are read by row: what comes out is the same to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from offplan.capabilities.stock import STOCK
from offplan.checkpoint.open import open_model
from offplan.errors import PlanError
from offplan.held.held import hold
from offplan.plan import Workload
from offplan.runtime.measuring import layer_times, pass_times
from offplan.runtime.rows import Rows
from offplan.runtime.session import Session
from tests.runtime.families import (
    BATCH,
    PROMPT,
    draw_weights,
    extend,
    load_stock,
    make_config,
    run_planned,
    run_stock,
)
from tests.runtime.plans import group, offload, open_session, run_greedily

NGRAMS: dict[str, Any] = {
    **{"ple_layer_ids": [1], "ple_embed_dim": 32, "ngram_size": 3, "heads_per_ngram": 4},
    **{"ngram_vocab_size_base": 50, "split_ngram_parts": 4, "hc_count": 2, "hc_lowrank": 8},
    **{"make_ngram_vocab_size_divisible_by": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1},
    **{"indexer_head_dim": 16, "indexer_budget": 64, "indexer_compress_ratio": 4},
    **{"head_dim": 16, "vocab_size": 64},
    "layer_types": [*["linear_attention", "qwen_sparse_attention"] * 2, "linear_attention"],
}
"""A model whose first layer gathers eight rows a token of a table that is stored in four parts."""
CHANGES = {"gemma3n_text": {}, "gemma4_text": {}, "qwen4_exp_text": NGRAMS}
TABLES = {
    "gemma3n_text": "model.embed_tokens_per_layer",
    "gemma4_text": "model.embed_tokens_per_layer",
    "qwen4_exp_text": "model.layers.0.ple.ple_embedding.ngram_embedding",
}


def save(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    config = make_config(family, CHANGES[family])
    draw_weights(AutoModelForCausalLM.from_config(config, dtype=dtype)).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma4_text", "gemma3n_text"])
def test_rows_are_read_where_they_lie(tmp_path: Path, family: str) -> None:
    folder = save(family, tmp_path, torch.bfloat16)
    (table,) = open_model(str(folder)).tables
    resident = run_greedily(folder, offload(group(2, 1)), PROMPT)
    with open_session(folder, offload(group(2, 1), embeddings="host")) as session:
        lying = session.loaded.store.offloaded[f"{table.name}.weight"]
        assert session.loaded.placement.table_bytes == table.nbytes == lying.nbytes
        logits = [session.prefill(PROMPT).clone()]
        before = session.link_bytes
        logits.append(session.decode(logits[0].argmax(-1, keepdim=True)).clone())
        copied = session.link.bytes_moved
        assert before <= session.link_bytes - table.token_bytes * len(PROMPT)
        assert session.link_bytes - copied == table.token_bytes * (PROMPT.numel() + len(PROMPT))
    assert all(map(torch.equal, logits, resident))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma4_text", "gemma3n_text"])
@pytest.mark.parametrize(("chunk", "dtype"), [(64, torch.float32), (3, torch.bfloat16)])
def test_the_same_as_resident(tmp_path: Path, family: str, chunk: int, dtype: torch.dtype) -> None:
    folder = save(family, tmp_path, dtype)
    for prompt in (PROMPT, BATCH):
        resident = run_greedily(folder, offload(prefill_chunk=chunk), prompt)
        decision = offload(group(2, 1), embeddings="host", prefill_chunk=chunk)
        assert all(map(torch.equal, run_greedily(folder, decision, prompt), resident))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma4_text", "gemma3n_text"])
def test_the_same_as_stock(tmp_path: Path, family: str) -> None:
    folder = save(family, tmp_path)
    expected = run_stock(load_stock(folder), PROMPT)
    made = run_planned(folder, extend(PROMPT, expected), offload(embeddings="host"))
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma4_text", "gemma3n_text"])
def test_rows_that_join_and_leave(tmp_path: Path, family: str) -> None:
    folder, made = save(family, tmp_path), []
    for place in ("device", "host"):
        with open_session(folder, offload(group(2, 1), embeddings=place)) as session:  # type: ignore[arg-type]
            rows = Rows(session, 2)
            logits = [joined.logits.clone() for joined in rows.join_all([[3, 1, 4], [1, 5]])]
            logits += [each.clone() for each in rows.step({0: 9, 1: 2}).values()]
            rows.leave(0)
            logits += [each.clone() for each in rows.step({1: 6}).values()]
            made.append(logits)
    assert all(map(torch.equal, *made))


@pytest.mark.slow
@pytest.mark.parametrize("family", TABLES)
def test_by_passes_of_transformers(tmp_path: Path, family: str) -> None:
    folder = save(family, tmp_path)
    resident = run_greedily(folder, offload(group(2, 1)), PROMPT, stock=True)
    decision = offload(group(2, 1), embeddings="host")
    assert all(map(torch.equal, run_greedily(folder, decision, PROMPT, stock=True), resident))


@pytest.mark.slow
@pytest.mark.parametrize("family", TABLES)
def test_transformers_gathers_as_many_rows(tmp_path: Path, family: str) -> None:
    folder, gathered = save(family, tmp_path), list[int]()
    table = next(t for t in open_model(str(folder)).tables if t.name == TABLES[family])
    stock = load_stock(folder)
    module = stock.get_submodule(table.name)
    module.register_forward_pre_hook(lambda _, given: gathered.append(given[0].numel()))
    stock(PROMPT)
    assert gathered == [table.rows_per_token * PROMPT.numel()]
    assert table.nbytes == module.weight.nbytes


@pytest.mark.slow
def test_layers_are_timed_with_tables_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, close = list[int](), Session.close
    monkeypatch.setattr(layer_times, "NUM_SAMPLES", 2)
    monkeypatch.setattr(
        Session,
        "close",
        lambda self: (held.append(self.loaded.placement.table_bytes), close(self)),
    )
    model = open_model(str(save("gemma4_text", tmp_path)))
    workload = Workload(prompt_tokens=8, output_tokens=4, context=64)
    layer_times.measure_layer_times(hold(model), workload, (8,), device="cpu")
    assert held == [model.tables[0].nbytes]


@pytest.mark.slow
def test_stock_passes_are_timed_with_tables_of_layers_that_are_alike(tmp_path: Path) -> None:
    types = 2 * ["linear_attention", "qwen_sparse_attention", "linear_attention"]
    changes = {**NGRAMS, "ple_layer_ids": [1, 3], "layer_types": types, "num_hidden_layers": 6}
    config = make_config("qwen4_exp_text", changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = open_model(str(tmp_path))
    assert len(model.tables) == 3
    assert model.layers[0].key == model.layers[2].key
    workload = Workload(prompt_tokens=8, output_tokens=4, context=64)
    times = pass_times.measure_pass_times(hold(model, way=STOCK), workload, (8,), device="cpu")
    assert {each.phase for each in times} == {"prefill", "decode"}


@pytest.mark.slow
def test_a_table_that_a_product_reads_whole_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("gemma4_text", tmp_path)
    monkeypatch.setattr(torch.nn, "Embedding", torch.nn.Linear)
    with pytest.raises(PlanError, match=r"embed_tokens_per_layer .*reads all of .*: plan with"):
        open_session(folder, offload(embeddings="host"))
