"""The same on a GPU, where copies and compute really run side by side."""

from pathlib import Path

import pytest
import torch

from offplan.checkpoint.open import open_model
from offplan.errors import MemoryLimitError
from offplan.hostmem.block import HostBlock
from offplan.plan import Rule
from tests.held import input_embedding
from tests.runtime.conftest import auto_class, save_tiny
from tests.runtime.families import load_stock, run_stock
from tests.runtime.plans import group, offload, open_session
from tests.runtime.resident import (
    BATCH,
    NUM_TOKENS,
    PROMPT,
    check_against_resident,
    run,
    run_resident,
)

pytestmark = pytest.mark.gpu

OTHERS = ["sinks", "soft_caps", "mistral_windowed", "olmo3_windowed"]
OTHERS += ["dynamic", "longrope", "shared_keys", "linear", "linear_experts"]
OTHERS += ["chunked", "gptj", "text_part"]

RULES: dict[str, tuple[Rule, ...]] = {
    "every layer": (group(1, 1),),
    "every second layer": (group(2, 1),),
    "four of five": (group(5, 4),),
    "attention": (group(1, 1, "self_attn"),),
    "prefetch, then in place": (group(2, 1, "mlp", decode="uva"),),
    "in place": (group(1, 1, "mlp", prefill="uva", decode="uva"),),
    "in chunks": (group(2, 1, "mlp"),),
    "two rules": (group(2, 1, "mlp", decode="uva"), group(1, 1, "self_attn", prefill="uva")),
}


@pytest.mark.parametrize(
    ("prefetch_step", "capture"), [(1, True), (2, True), (3, True), (2, False)]
)
@pytest.mark.parametrize("name", RULES)
def test_logits_equal_resident(
    checkpoint: Path, name: str, prefetch_step: int, capture: bool
) -> None:
    rules, chunk = RULES[name], 4 if name == "in chunks" else 10
    untied = input_embedding(open_model(str(checkpoint))) is not None
    decision = offload(
        *rules,
        prefetch_step=prefetch_step,
        prefill_chunk=chunk,
        embeddings="host" if untied and name == "two rules" else "device",
    )
    check_against_resident(checkpoint, decision, capture)


@pytest.mark.parametrize("chunk", [4, 10])
@pytest.mark.parametrize("name", OTHERS)
def test_what_a_model_asks_for_is_heeded(name: str, chunk: int, tmp_path: Path) -> None:
    """Compiled and captured, with and without offloading, against stock transformers."""
    folder = save_tiny(name, tmp_path)
    check_against_resident(folder, offload(group(2, 1), prefill_chunk=chunk), capture=True)
    got, _ = run_resident(folder, chunk, True)
    cached = name == "dynamic"  # keys keep the rotation that they came with
    stock = load_stock(folder, auto_class=auto_class(name))
    expected = [
        logits for prompt in (PROMPT, BATCH) for logits in run_stock(stock, prompt, cached=cached)
    ]
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("chunk", [4, 10])
def test_rows_of_a_table_on_the_host(chunk: int, tmp_path: Path) -> None:
    folder = save_tiny("shared_keys", tmp_path)
    decision = offload(group(2, 1), embeddings="host", prefill_chunk=chunk)
    check_against_resident(folder, decision, capture=True)


def test_closing_gives_the_device_memory_back(checkpoint: Path) -> None:
    session = open_session(checkpoint, offload(group(2, 1)), "cuda")
    session.warm_up(*PROMPT.shape)
    assert session.runner.layers.cache is not None
    held = [session.loaded.store.arena, *session.loaded.store.slots]
    for layer in session.runner.layers.cache.layers:
        held += [layer.keys, layer.values]
    num_bytes = sum(tensor.nbytes for tensor in held)
    del held, layer
    before = torch.cuda.memory_allocated()
    session.close()
    assert before - torch.cuda.memory_allocated() >= num_bytes


def test_a_refused_page_lock_leaves_no_error_behind() -> None:
    block = HostBlock(2**20, pin=True)
    with pytest.raises(MemoryLimitError, match="could not page-lock"):
        block.pin()  # pages can be registered once
    assert torch.ones(2, device="cuda").sum().item() == 2
    block.close()
    HostBlock(2**20, pin=True).close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device here")
def test_a_device_that_is_not_the_current_one(checkpoint: Path) -> None:
    decision = offload(group(2, 1, "mlp", decode="uva"), group(1, 1, "self_attn"))
    expected, *_ = run(checkpoint, decision, capture=True)
    before = torch.cuda.memory_allocated(0)
    logits: list[torch.Tensor] = []
    with open_session(checkpoint, decision, "cuda:1") as session, session.stream():
        for prompt in (PROMPT, BATCH):
            session.warm_up(*prompt.shape)
            logits.append(session.prefill(prompt).cpu())
            for _ in range(NUM_TOKENS):
                tokens = logits[-1].argmax(-1, keepdim=True).to(session.device)
                logits.append(session.decode(tokens).cpu())
        assert torch.cuda.memory_allocated(0) <= before
    for found, wanted in zip(logits, expected, strict=True):
        assert torch.equal(found, wanted)
