"""Drafts by prediction layers: as transformers' own layers make them, and texts as without."""

from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch

from offplan.capabilities.drafts import Draft
from offplan.checkpoint.open import open_model
from offplan.costs.memory import resident_draft_bytes, stored_draft_bytes
from offplan.errors import PlanError
from offplan.held.held import hold, hold_prediction
from offplan.runtime.joined import Continued
from offplan.runtime.model.cache_mask import filled_blocks
from offplan.runtime.prediction.predictor import Predictor
from offplan.runtime.rows import Rows
from offplan.runtime.session import Session
from tests.runtime.cached import Abort, abort_in
from tests.runtime.conftest import save_tiny
from tests.runtime.counting import Counts
from tests.runtime.drafted import PROMPT, open_drafted
from tests.runtime.plans import CONTEXT, group, offload
from tests.runtime.predicting import (
    FAMILIES,
    HYBRID_WITH_EXPERTS,
    STORED,
    TOLERANCE,
    WITH_EXPERTS,
    Reference,
    check_drafts,
    continue_text,
    noting_logits,
    predicting,
    save_predicting,
)
from tests.runtime.words import DRAWN
from tests.tiers import first_quick


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("family", first_quick(FAMILIES))
def test_drafts_are_those_of_the_layer_as_published(
    tmp_path: Path, family: str, chunk: int
) -> None:
    folder = save_predicting(family, tmp_path)
    reference, decision = Reference(folder), offload(group(2, 1), prefill_chunk=chunk)
    most = HYBRID_WITH_EXPERTS if family == "qwen3_5_moe_text" else TOLERANCE
    with open_drafted(folder, predicting(decision)) as session:
        compared = sum(check_drafts(session, reference, seed, most) for seed in range(4))
    assert compared > 20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_drafts_by_blocks_are_those_by_mask(tmp_path: Path) -> None:
    """As on a GPU, where attention of such heads reads blocks."""
    folder = save_predicting("qwen3_5_text", tmp_path, head_dim=16)
    reference = Reference(folder)
    with open_drafted(folder, predicting(offload(group(2, 1)))) as session:
        assert session.predictor is not None
        for runner in (session.runner, session.predictor._runner):
            runner.forward.find_filled = filled_blocks
        assert check_drafts(session, reference) > 4


RIGHT = {"right": [True], "half": [True, True, True, False, True, True, False]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form"),
    [*((each, None) for each in FAMILIES), *((each, "fp8_block") for each in STORED)],
)
def test_a_text_is_the_same_whatever_is_drafted(
    tmp_path: Path, family: str, form: str | None
) -> None:
    folder = save_predicting(family, tmp_path, form)
    decision = offload(group(2, 1), prefill_chunk=4, embeddings="host")
    ways = {"greedy": None, "drawn": DRAWN}
    with open_drafted(folder, decision) as session:
        alone = {way: continue_text(session, sampling=how)[0] for way, how in ways.items()}
    for tokens in (1, 2, 3, 7):
        with open_drafted(folder, predicting(decision, tokens)) as session:
            for way, sampling in ways.items():
                assert continue_text(session, sampling=sampling)[0] == alone[way]
                for kind, right in RIGHT.items():
                    made, each = continue_text(
                        session, right=right, expected=alone[way], sampling=sampling
                    )
                    assert made == alone[way], (way, kind, tokens)
                    assert each.drafts is not None
                    assert each.drafts.accepted > 5


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_text"])
def test_a_text_with_a_grammar_is_the_same_whatever_is_drafted(tmp_path: Path, family: str) -> None:
    """The layer goes on behind passes whose drafts were forced, or cut, and not its own."""
    folder, decision = save_predicting(family, tmp_path), offload(group(2, 1), prefill_chunk=4)
    ways = {"greedy": None, "drawn": DRAWN}
    last = 26

    def continue_formed(session: Session, often: int, **given: Any) -> tuple[list[int], Continued]:
        return continue_text(session, matcher=Counts(last, often=often), **given)

    with open_drafted(folder, decision) as session:
        alone = {way: continue_formed(session, 2, sampling=how)[0] for way, how in ways.items()}
    with open_drafted(folder, predicting(decision)) as session:
        for way, sampling in ways.items():
            assert continue_formed(session, 2, sampling=sampling)[0] == alone[way]
            for right in RIGHT.values():
                made, each = continue_formed(
                    session, 2, right=right, expected=alone[way], sampling=sampling
                )
                assert made == alone[way]
                assert each.drafts is not None
                assert each.drafts.accepted > 5
        made, each = continue_formed(session, 1)
        assert made == [*range(10, last + 1)]
        assert each.drafts is not None
        assert each.drafts.rejected == 0
        assert each.drafts.accepted > 8


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, "fp8_block"])
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_experts_on_the_host_change_nothing_but_memory(
    tmp_path: Path, family: str, form: str | None
) -> None:
    folder = save_predicting(family, tmp_path, form)
    stage = hold(open_model(str(folder)))
    decision, made, held_bytes = offload(group(2, 1), prefill_chunk=4), [], {}
    places: tuple[Literal["device", "host"], ...] = ("device", "host")
    for experts in places:
        placed = predicting(decision, experts=experts)
        with open_drafted(folder, placed) as session:
            assert session.predictor is not None
            text, _ = continue_text(session)
            with noting_logits() as noted:
                again, _ = continue_text(session, right=RIGHT["half"], expected=text)
            assert again == text
            made.append((text, torch.stack(noted)))
            store = session.predictor._loaded.store
            held_bytes[experts] = sum(weight.nbytes for weight in store.resident.values())
            assert held_bytes[experts] == resident_draft_bytes(stage, placed.draft)
            slab_bytes = sum(each.nbytes for each in store.slabs.values())
            assert slab_bytes == stored_draft_bytes(stage, placed.draft)
            assert all(".experts." in name for name in store.offloaded)
            assert bool(store.offloaded) == (experts == "host")
    (text, logits), (on_host, logits_on_host) = made
    assert text == on_host
    assert torch.equal(logits, logits_on_host)
    assert len(logits) > 20
    layers = hold_prediction(stage, Draft(kind="mtp", tokens=1))
    assert layers is not None
    (block,) = layers.layers
    assert block.expert_bytes == held_bytes["device"] - held_bytes["host"]


@pytest.mark.slow
@pytest.mark.parametrize("family", first_quick(FAMILIES))
def test_a_chat_goes_on_from_a_text_that_was_drafted(tmp_path: Path, family: str) -> None:
    folder, decision = save_predicting(family, tmp_path), offload(group(2, 1), prefill_chunk=3)
    reference = Reference(folder)
    with open_drafted(folder, decision) as session:
        first, _ = continue_text(session, num_tokens=12)
        more = [*PROMPT, *first, 5, 6]
        second, _ = continue_text(session, more, 12)
    with open_drafted(folder, predicting(decision)) as session:
        rows = Rows(session, 1)
        made, _ = continue_text(rows, num_tokens=12, right=[True, False], expected=first)
        assert made == first
        made, each = continue_text(rows, more, 12, right=[True], expected=second)
        assert each.num_read < len(more)
        assert made == second
        # the layer goes on from the end of the text before, whose last hidden state waits
        rows.join([*PROMPT, *first])
        rows.step({0: 5})
        rows.leave(0)
        joined = rows.join([*PROMPT, *first, 5, 8])
        assert joined.tokens_read == 1
        expected = reference.logits([*PROMPT, *first, 5, 8, 9], 2)
        assert rows._predict(9, 2) == expected.argmax(-1).tolist()


@pytest.mark.slow
def test_no_pass_is_padded_beyond_the_context(tmp_path: Path) -> None:
    folder, decision = save_predicting("deepseek_v3", tmp_path), offload(group(2, 1))
    prompt = [number % 60 for number in range(CONTEXT - 6)]
    reference = Reference(folder)
    with open_drafted(folder, predicting(decision)) as session:
        rows = Rows(session, 1)
        row, text = rows.join(prompt).row, [*prompt]
        for token in (5, 6, 7):
            rows.step({row: token})
            text.append(token)
        expected = reference.logits([*text, 8], 2)
        assert rows._predict(8, 2) == expected.argmax(-1).tolist()
        assert continue_text(session, prompt, 6)[0]


@pytest.mark.slow
def test_an_aborted_pass_costs_no_more_than_drafts(tmp_path: Path) -> None:
    folder, decision = save_predicting("deepseek_v3", tmp_path), offload(group(2, 1))
    reference = Reference(folder)
    with open_drafted(folder, decision) as session:
        expected, _ = continue_text(session)
    with open_drafted(folder, predicting(decision)) as session:
        rows = Rows(session, 1)
        row = rows.join(PROMPT).row
        token = int(rows.step({row: 5})[row].argmax())
        drafting = session.predictor
        assert drafting is not None
        with patch.object(Predictor, "_choose", side_effect=Abort), pytest.raises(Abort):
            rows._predict(token, 2)
        assert rows._predict(token, 2) == []  # until a text begins
        abort_in(session, 1)
        with pytest.raises(Abort):
            rows.check(row, [token, 1])
        rows.check(row, [token, 1])
        rows.take(row, 2, 1, has_nan=False)
        assert rows._predict(3, 2) == []
        rows.leave(row)
        text = [*PROMPT, 5, token, 4]
        assert rows.join(text).tokens_read == 1
        assert rows._predict(3, 2) == []  # the layer has not read what the cache has
        rows.leave(row)
        rows.join(PROMPT)
        wanted = reference.logits([*PROMPT, 3], 2)
        assert rows._predict(3, 2) == wanted.argmax(-1).tolist()
        rows.leave(row)
        assert continue_text(rows, right=[True], expected=expected)[0] == expected


@pytest.mark.slow
@pytest.mark.parametrize("part", ["_read_prompt", "_read_waiting", "_pass"])
def test_memory_that_drafts_lack_ends_no_text(tmp_path: Path, part: str) -> None:
    folder, decision = save_predicting("deepseek_v3", tmp_path), offload(group(2, 1))
    with open_drafted(folder, decision) as session:
        expected, _ = continue_text(session)
    lacking = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    with open_drafted(folder, predicting(decision)) as session:
        rows = Rows(session, 1)
        with patch.object(Predictor, part, side_effect=lacking):
            made, each = continue_text(rows)
        assert made == expected
        assert each.drafts is not None
        assert each.drafts.num_passes == 0
        other = patch.object(Predictor, part, side_effect=RuntimeError("another"))
        with other, pytest.raises(RuntimeError, match="another"):
            continue_text(rows, PROMPT[1:])
        assert continue_text(session, right=[True], expected=expected)[0] == expected


@pytest.mark.slow
def test_the_host_has_to_have_room_for_model_and_layer(tmp_path: Path) -> None:
    folder = save_predicting("glm4_moe", tmp_path)
    placed = predicting(offload(group(2, 1)), experts="host")
    with patch("offplan.runtime.loading.prepared.check_host_room") as check:
        open_drafted(folder, placed).close()
    (of_model, on_device), (in_all, all_on_device) = (each.args for each in check.call_args_list)
    stage = hold(open_model(str(folder)))
    on_host = stored_draft_bytes(stage, placed.draft)
    assert on_host > 0
    assert all_on_device - on_device == resident_draft_bytes(stage, placed.draft)
    assert in_all - of_model == on_host + all_on_device - on_device


@pytest.mark.slow
def test_experts_that_are_not_there_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = save_predicting("qwen3_5_text", tmp_path)
    with pytest.raises(PlanError, match="with `experts: host`: the prediction layer"):
        open_drafted(folder, predicting(offload(), experts="host"))


@pytest.mark.parametrize(("name", "why"), [("qwen3", "stores no layers that predict")])
def test_refused_before_anything_is_loaded(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(PlanError, match=f"`draft=mtp:3`: .* {why}"):
        open_drafted(save_tiny(name, tmp_path), predicting(offload()))
