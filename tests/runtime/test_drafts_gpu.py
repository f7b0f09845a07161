"""Passes that check drafts on a GPU, where they are compiled and captured."""

from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers.modeling_layers import MtpModel

from offplan.capabilities.way import OWN
from offplan.placement import Phase
from offplan.runtime.joined import Continued, JoinedTexts
from offplan.runtime.rows import Rows
from offplan.runtime.texts import Text
from tests.runtime.cached import keeping
from tests.runtime.coded_cache import FP8
from tests.runtime.conftest import save_tiny
from tests.runtime.drafted import (
    FED,
    PROMPT,
    Scripted,
    drafting,
    feed_passes,
    feed_steps,
    open_drafted,
)
from tests.runtime.plans import group, offload
from tests.runtime.predicting import FAMILIES as PREDICTING
from tests.runtime.predicting import STORED as STORED_PREDICTING
from tests.runtime.predicting import (
    WITH_EXPERTS,
    Reference,
    check_drafts,
    continue_text,
    noting_logits,
    predicting,
    save_predicting,
)
from tests.runtime.quantise import save_stored
from tests.runtime.words import DRAWN, Words

pytestmark = pytest.mark.gpu

FLOAT32 = ["qwen3_wide", "deepseek_v2", "mistral_windowed", "sinks", "chunked", "shared_rings"]
FLOAT32 += ["longrope", "qwen3_moe_tied"]
TOLERANCE = 1e-5
"""Part of the largest logit by which a pass of float32 may differ from steps."""
HYBRIDS = {"linear": 2e-5, "linear_experts": 4e-5}
"""The same of hybrids, which answer the last bit of their embeddings by 3e-6 and 7e-6."""
STORED = {
    "ring": ("qwen3", "fp8_block", offload(group(1, 1), prefetch_step=3), OWN),
    "in place": ("qwen3", "nvfp4", offload(group(2, 1, prefill="uva", decode="uva")), OWN),
    "window": ("gpt_oss", "mxfp4", offload(group(2, 1)), OWN),
    "FP8 window": ("gpt_oss", "mxfp4", offload(group(2, 1)), FP8),
    "FP8 latents": ("deepseek_v3", "fp8_block", offload(group(2, 1)), FP8),
    "kept experts": ("qwen3_moe", "fp8_block", offload(keeping(2)), OWN),
    "few slots": ("gpt_oss", "mxfp4", offload(keeping(1, every=1)), OWN),
    "states": ("qwen3_5_text", "fp8_block", offload(group(2, 1)), OWN),
    "states, kept experts": ("qwen3_next", "fp8_block", offload(keeping(2)), OWN),
}
ROUNDED = 0.05
"""The same of bfloat16 on average, relative to the logits' spread: experts may be others."""


@pytest.mark.parametrize("name", [*FLOAT32, *HYBRIDS])
def test_a_pass_gives_what_steps_give(tmp_path: Path, name: str) -> None:
    folder, decision = save_tiny(name, tmp_path), offload(group(2, 1), prefill_chunk=4)
    with open_drafted(folder, decision, device="cuda") as session:
        expected = feed_steps(session)
    for tokens in (1, 3, 7):
        with open_drafted(folder, drafting(decision, tokens), device="cuda") as session:
            for seed in (1, 2):  # the second time what was captured is replayed
                made, _ = feed_passes(session, seed)
                difference = (made - expected).abs().max() / expected.abs().max()
                assert float(difference) < HYBRIDS.get(name, TOLERANCE)


@pytest.mark.parametrize("name", STORED)
def test_weights_and_caches_wherever_they_are(tmp_path: Path, name: str) -> None:
    family, form, decision, way = STORED[name]
    folder, _ = save_stored(family, form, tmp_path, torch.bfloat16)
    with open_drafted(folder, decision, way, device="cuda") as session:
        expected = feed_steps(session).float()
    with open_drafted(folder, drafting(decision), way, device="cuda") as session:
        for seed in (1, 2):
            made, _ = feed_passes(session, seed)
            difference = (made.float() - expected).abs().mean() / expected.std()
            assert float(difference) < ROUNDED


@pytest.mark.parametrize("name", ["qwen3_wide", "linear", "linear_experts"])
def test_alternating_lengths_are_captured_once(tmp_path: Path, name: str) -> None:
    folder, decision = save_tiny(name, tmp_path), drafting(offload(group(2, 1)))
    with open_drafted(folder, decision, device="cuda") as session:
        rows = Rows(session, 1)
        rows.warm_up(len(PROMPT))
        captured = dict(session.runner._passes._captured)
        shapes = {shape for phase, shape in captured if phase is Phase.DECODE}
        assert shapes == {(1, 1), (1, 2), (1, 4), (1, 8)}
        row, fed = rows.join(PROMPT).row, FED.tolist()
        for number in (8, 1, 2, 4, 1, 8, 3):
            at = rows.length(row) - len(PROMPT)
            with session.stream():
                if number == 1:
                    rows.step({row: fed[at]})
                else:
                    rows.check(row, fed[at : at + number])
                    rows.take(row, number, 2, has_nan=False)
        after = session.runner._passes._captured
        assert all(after.get(kind) is each for kind, each in captured.items())


@pytest.mark.parametrize("sampling", [None, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", ["qwen3_wide", "linear", "linear_experts"])
def test_a_text_is_the_same_whatever_is_drafted(
    tmp_path: Path, name: str, sampling: object
) -> None:
    folder, decision = save_tiny(name, tmp_path), drafting(offload(group(2, 1)))
    expected: list[int] = []
    with open_drafted(folder, decision, device="cuda") as session:
        rows = Rows(session, 1)
        for right in ([False], [True], [True, True, False]):
            make = partial(Scripted, [*PROMPT, *expected], right)
            texts, made = JoinedTexts(rows, make_drafter=make), []
            each = Continued(Text(Words(), PROMPT, num_tokens=30), sampling)  # type: ignore[arg-type]
            texts.join([each])
            while len(texts):
                made += [added.token for _, added in texts.step()]  # type: ignore[union-attr]
            expected = expected or made
            assert made == expected
            assert each.drafts is not None
            assert (each.drafts.num_passes > 0) == (right != [False])


@pytest.mark.parametrize("name", ["linear", "linear_experts"])
def test_captured_passes_leave_states_to_what_is_taken(tmp_path: Path, name: str) -> None:
    """Replayed passes write no state, and a text has the same states after other drafts."""
    folder, decision = save_tiny(name, tmp_path), drafting(offload(group(2, 1)))
    with open_drafted(folder, decision, device="cuda") as session:
        rows, fed, kept = Rows(session, 1), FED.tolist(), []
        rows.warm_up(len(PROMPT))
        for wrong in (1, 2):
            row = rows.join(PROMPT).row
            with session.stream(), torch.inference_mode():
                cache = session.runner.layers.cache
                parts = [part for each in cache._states.values() for part in each.tensors()]
                for at in range(0, 12, 3):
                    before = [each.clone() for each in parts]
                    rows.check(row, [*fed[at : at + 3], wrong, wrong])
                    assert all(map(torch.equal, parts, before))
                    rows.take(row, 5, 3, has_nan=False)
                    assert not any(map(torch.equal, parts, before))
                kept.append([each.clone() for each in parts])
            rows.leave(row)
            rows._rows[row].forget()
        with session.stream():
            for ours, theirs in zip(*kept, strict=True):
                assert float((ours - theirs).abs().max()) < TOLERANCE * float(ours.abs().max())


@pytest.mark.parametrize("tokens", [1, 7])
def test_drafts_of_hybrids_keep_to_the_memory_that_is_planned(tmp_path: Path, tokens: int) -> None:
    """Of states: what drafts add is allocated once, and adding it takes no more."""
    folder, decision = save_tiny("linear", tmp_path), offload(group(2, 1))
    with open_drafted(folder, drafting(decision, tokens), device="cuda") as session:
        rows = Rows(session, 1)
        rows.warm_up(len(PROMPT))
        row = rows.join(PROMPT).row
        with session.stream():
            rows.check(row, FED[: 1 + tokens].tolist())
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            rows.take(row, 1 + tokens, 2, has_nan=False)
            torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < 2**20
        assert torch.cuda.memory_allocated() <= before


@pytest.mark.skipif(
    not hasattr(MtpModel, "forward_layer"), reason="transformers runs no single prediction layer"
)
@pytest.mark.parametrize("family", PREDICTING)
def test_prediction_layers_draft_as_transformers_own_do(tmp_path: Path, family: str) -> None:
    # heads as wide as attention by blocks wants them; DeepSeek's have sizes of their own
    sizes: dict[str, Any] = {} if family == "deepseek_v3" else {"head_dim": 16}
    folder = save_predicting(family, tmp_path, **sizes)
    reference, decision = Reference(folder), offload(group(2, 1), prefill_chunk=4)
    with open_drafted(folder, predicting(decision), device="cuda") as session:
        Rows(session, 1).warm_up(len(PROMPT))
        assert session.predictor is not None
        captured = session.predictor._runner._passes._captured
        kinds = dict(captured)
        assert {shape for _, shape in kinds} == {(1, 1), (1, 2), (1, 4), (1, 8)}
        compared = [check_drafts(session, reference, seed, TOLERANCE) for seed in range(4)]
        assert all(captured.get(kind) is each for kind, each in kinds.items())
    assert sum(compared) > 20


@pytest.mark.parametrize("sampling", [None, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("family", PREDICTING)
def test_a_text_is_the_same_whatever_is_predicted(
    tmp_path: Path, family: str, sampling: object
) -> None:
    folder, decision = save_predicting(family, tmp_path), offload(group(2, 1), prefill_chunk=4)
    with open_drafted(folder, decision, device="cuda") as session:
        expected, _ = continue_text(session, sampling=sampling)
    for tokens in (1, 3):
        with open_drafted(folder, predicting(decision, tokens), device="cuda") as session:
            rows = Rows(session, 1)
            assert continue_text(rows, sampling=sampling)[0] == expected
            for right in ([True], [True, True, True, False, True]):
                given = {"right": right, "expected": expected, "sampling": sampling}
                made, each = continue_text(rows, **given)  # type: ignore[arg-type]
                assert made == expected
                assert each.drafts is not None
                assert each.drafts.accepted > 5


@pytest.mark.parametrize("form", [None, "fp8_block"])
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_experts_of_prediction_layers_on_the_host(
    tmp_path: Path, family: str, form: str | None
) -> None:
    """They leave the device, and captured passes draft by them what they draft by resident ones."""
    folder = save_predicting(family, tmp_path, form, torch.bfloat16)
    decision, made, held = offload(group(2, 1), prefill_chunk=4), [], []
    places: tuple[Literal["device", "host"], ...] = ("device", "host")
    for experts in places:
        before = torch.cuda.memory_allocated()
        with open_drafted(folder, predicting(decision, experts=experts), device="cuda") as session:
            held.append(torch.cuda.memory_allocated() - before)
            rows = Rows(session, 1)
            rows.warm_up(len(PROMPT))
            text, _ = continue_text(rows)
            with noting_logits() as noted, session.stream():
                again, _ = continue_text(rows, right=[True, True, False], expected=text)
            assert again == text
            made.append((text, torch.stack(noted).float().cpu()))
            assert session.predictor is not None
            offloaded = session.predictor._loaded.store.offloaded
            assert bool(offloaded) == (experts == "host")
            assert all(
                each.device.type == "cuda" or each.is_pinned() for each in offloaded.values()
            )
    (text, logits), (on_host, logits_on_host) = made
    assert text == on_host
    assert held[1] < held[0]
    assert logits.shape == logits_on_host.shape
    assert float((logits - logits_on_host).abs().mean() / logits.std()) < ROUNDED


@pytest.mark.parametrize("family", STORED_PREDICTING)
def test_prediction_layers_of_codes_are_as_on_a_cpu(tmp_path: Path, family: str) -> None:
    folder = save_predicting(family, tmp_path, "fp8_block", torch.bfloat16)
    made = {}
    for device in ("cpu", "cuda"):
        with open_drafted(folder, predicting(offload(group(2, 1))), device=device) as session:
            rows, logits = Rows(session, 1), []
            row = rows.join(PROMPT).row
            for at in range(0, 24, 4):
                with noting_logits() as noted:
                    assert len(rows._predict(int(FED[at]), 1)) == 1
                logits += noted
                rows.check(row, FED[at : at + 4].tolist())
                rows.take(row, 4, 4, has_nan=False)
            made[device] = torch.stack(logits).float().cpu()
    difference = (made["cuda"] - made["cpu"]).abs().mean() / made["cpu"].std()
    assert float(difference) < ROUNDED
