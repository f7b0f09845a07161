"""A text is the same whatever is drafted of it, and a rejected draft leaves no trace."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from offplan.capabilities.drafts import Draft
from offplan.capabilities.packing import Packing
from offplan.capabilities.stock import STOCK
from offplan.capabilities.way import OWN, Way
from offplan.checkpoint.open import open_model
from offplan.errors import InputError, MemoryLimitError, NotANumberError, OffplanError, PlanError
from offplan.plan import Offload
from offplan.refusals import require_batch
from offplan.runtime.cached_experts.expert_table import ORDER
from offplan.runtime.joined import Added, Continued, JoinedTexts
from offplan.runtime.model.cache_mask import filled_blocks, filled_up_to
from offplan.runtime.rows import Rows
from offplan.runtime.rules import TokenRules
from offplan.runtime.sampling import Checking, Sampler, Sampling
from offplan.runtime.session import Session
from offplan.runtime.texts import Text
from tests.hostcores.cores import require_cores
from tests.runtime.cached import Abort, Trace, abort_in, cached_of, count_experts, keeping
from tests.runtime.coded_cache import FP8, weigh_codes, weigh_latents
from tests.runtime.conftest import CONFIGS, OTHERS, save_tiny
from tests.runtime.divided import check_contents, dividing, sharing, wide
from tests.runtime.drafted import (
    FED,
    PROMPT,
    Scripted,
    drafting,
    feed_passes,
    feed_steps,
    open_drafted,
)
from tests.runtime.families import MOST_ROUNDING, VARIANTS, make_config, save_model
from tests.runtime.interpreted import need_triton
from tests.runtime.plans import CONTEXT, group, offload
from tests.runtime.quantise import save_stored
from tests.runtime.words import DRAWN, Words
from tests.tiers import first_quick, others_in_sweep

ALONE = ("dynamic",)
"""Families whose rotary embeddings change with every token: steps extend their long texts."""
NOT_RUN = ("jetmoe",)
FAMILIES = [name for name in CONFIGS | OTHERS if name not in NOT_RUN]
KEPT = ["qwen3", "deepseek_v2", "sinks", "mistral_windowed", "chunked", "shared_rings"]
KEPT += ["soft_caps", "longrope", "qwen3_moe_tied", "linear", "linear_experts"]
TOLERANCE = 8e-6
"""Part of the largest logit by which a pass of float32 may differ from steps.

Each layer's weights here are fifteen times as large as a trained model's: with those of tests of
stored forms the difference is within 2e-6.
"""
BY_PROCESSOR = {"longrope": 1e-5}
"""The same where a processor's order of sums gives more, as on a GPU: 8.7e-6 on a Xeon with AMX."""


def compare(made: torch.Tensor, expected: torch.Tensor) -> float:
    return float((made - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("name", others_in_sweep(FAMILIES, KEPT))
def test_a_pass_gives_what_steps_give(tmp_path: Path, name: str) -> None:
    folder, decision = save_tiny(name, tmp_path), offload(group(2, 1), prefill_chunk=4)
    with open_drafted(folder, decision) as session:
        expected = feed_steps(session)
    for tokens in (1, 3, 7):
        with open_drafted(folder, drafting(decision, tokens)) as session:
            made, passes = feed_passes(session, tokens)
        assert compare(made, expected) < BY_PROCESSOR.get(name, TOLERANCE)
        assert sum(passes[2:]) > 0 or name in ALONE


MECHANISMS: dict[str, tuple[str, str, torch.dtype, Offload, Way]] = {
    "ring": ("qwen3", "fp8_block", torch.float32, offload(group(1, 1), prefetch_step=3), OWN),
    "in place": (
        *("qwen3", "nvfp4", torch.float32),
        *(offload(group(2, 1, prefill="uva", decode="uva")), OWN),
    ),
    "FP8 cache": ("qwen3", "fp8_block", torch.float32, offload(group(2, 1)), FP8),
    "FP8 ring": ("gpt_oss", "mxfp4", torch.float32, offload(group(2, 1)), FP8),
    "FP8 latents": ("deepseek_v3", "fp8_block", torch.float32, offload(group(2, 1)), FP8),
    "cached experts": ("qwen3_moe", "fp8_block", torch.float32, offload(keeping(2)), OWN),
    "few slots": ("gpt_oss", "mxfp4", torch.float32, offload(keeping(1, every=1)), OWN),
    "host embedding": (
        *("qwen3", "int4", torch.float32),
        *(offload(group(2, 1), embeddings="host"), OWN),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_weights_and_caches_wherever_they_are(tmp_path: Path, name: str) -> None:
    family, form, dtype, decision, way = MECHANISMS[name]
    folder, _ = save_stored(family, form, tmp_path, dtype)
    with open_drafted(folder, decision, way) as session:
        expected = feed_steps(session)
    with open_drafted(folder, drafting(decision, 7), way) as session:
        made, _ = feed_passes(session, 1)
    most = 2e-6 if family != "gpt_oss" else TOLERANCE
    # a code may round the other way, of the one vector whose sum does
    assert compare(made, expected) < (most if way is OWN else 2e-3)


def list_added(
    session: Session,
    num_tokens: int = 24,
    right: Sequence[bool] | None = None,
    *,
    expected: Sequence[int] = (),
    sampling: Sampling | None = None,
    rules: TokenRules | None = None,
    stops: Sequence[str] = (),
    num_logprobs: int | None = None,
) -> list[Added]:
    """Continue PROMPT; drafts are of the ``expected`` text, where some are ``right``."""
    make = None if right is None else lambda: Scripted([*PROMPT, *expected], right)
    text = Text(Words(), PROMPT, num_tokens=num_tokens, rules=rules, stop_strings=stops)
    texts, added = JoinedTexts(Rows(session, 1), make_drafter=make), []
    texts.join([Continued(text, sampling, num_logprobs)])
    while len(texts):
        for _, each in texts.step():
            assert isinstance(each, Added)
            added.append(each)
    assert texts.num_free == 1
    return added


def tokens_of(added: Sequence[Added]) -> list[int]:
    return [each.token for each in added]


RIGHT = {"right": [True], "wrong": [False], "half": [True, True, True, False, True, True, False]}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"sampling": DRAWN},
    "penalties": {"rules": TokenRules(repetition_penalty=1.3, frequency_penalty=0.5)},
    "drawn by rules": {
        "sampling": DRAWN,
        "rules": TokenRules(frozenset({9}), presence_penalty=0.8, min_new_tokens=5),
    },
    "logprobs": {"num_logprobs": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", first_quick(["qwen3", "sinks", "deepseek_v2", "linear", "linear_experts"])
)
def test_a_text_is_the_same_whatever_is_drafted(tmp_path: Path, name: str) -> None:
    folder, decision = save_tiny(name, tmp_path), offload(group(2, 1), prefill_chunk=4)
    with open_drafted(folder, decision) as session:
        alone = {way: list_added(session, **given) for way, given in WAYS.items()}
        assert all(each.drafts is None for each in alone["greedy"])
    with open_drafted(folder, drafting(decision, 7)) as session:
        for way, given in WAYS.items():
            expected = tokens_of(alone[way])
            for kind, right in RIGHT.items():
                added = list_added(session, right=right, expected=expected, **given)
                assert tokens_of(added) == expected, (way, kind)
                assert "".join(each.piece for each in added) == "".join(
                    each.piece for each in alone[way]
                )
                counts = added[-1].drafts
                assert counts is not None
                assert (counts.accepted > 0) == (kind != "wrong")
                assert (counts.rejected > 0) == (kind == "half")
                for ours, theirs in zip(added, alone[way], strict=True):
                    for scored, other in zip(ours.likeliest, theirs.likeliest, strict=True):
                        assert scored.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert tokens_of(list_added(session, **given)) == expected  # by the plan's own drafter


@pytest.mark.slow
def test_a_pass_is_cut_where_the_text_ends(tmp_path: Path) -> None:
    folder, decision = save_tiny("qwen3", tmp_path), offload(group(2, 1))
    with open_drafted(folder, decision) as session:
        expected = tokens_of(list_added(session))
    with open_drafted(folder, drafting(decision, 7)) as session:
        given: dict[str, Any] = {"right": [True], "expected": expected}
        for num_tokens in range(1, 14):
            added = list_added(session, num_tokens, **given)
            assert tokens_of(added) == expected[:num_tokens]
            assert [each.finish for each in added] == [None] * (num_tokens - 1) + ["length"]
        for token in sorted({*expected[4:12]}):
            stop = expected.index(token) + 1
            added = list_added(session, rules=TokenRules(frozenset({token})), **given)
            assert tokens_of(added) == expected[:stop]
            assert added[-1].finish == "stop"
            added = list_added(session, stops=[f" {token} "], **given)
            assert added[-1].text.ended_by == f" {token} "
            assert tokens_of(added) == expected[: stop + 1]
        # what the row holds of such a text serves the next prompt
        rows = Rows(session, 1)
        assert rows.join(PROMPT).tokens_read == len(PROMPT)


@pytest.mark.slow
@pytest.mark.parametrize("name", first_quick(["qwen3", "mistral_windowed", "linear"]))
def test_a_chat_goes_on_from_a_text_that_was_drafted(tmp_path: Path, name: str) -> None:
    folder, decision = save_tiny(name, tmp_path), offload(group(2, 1), prefill_chunk=3)
    made: dict[int, list[int]] = {}
    for tokens in (0, 7):
        with open_drafted(folder, drafting(decision, tokens) if tokens else decision) as session:
            prompt, made[tokens] = PROMPT, []
            rows = Rows(session, 1)
            for turn in range(2):
                script = [*prompt, *made[0][12 * turn :]]
                make = partial(Scripted, script, [True, True, False])
                texts = JoinedTexts(rows, make_drafter=make)
                each = Continued(Text(Words(), prompt, num_tokens=12))
                texts.join([each])
                assert not turn or each.num_read < len(prompt)
                while len(texts):
                    made[tokens] += [added.token for _, added in texts.step()]
                prompt = [*prompt, *made[tokens][-12:], 5, 6]
    assert made[7] == made[0]


@pytest.mark.slow
def test_texts_that_leave_between_passes(tmp_path: Path) -> None:
    folder, decision = save_tiny("qwen3", tmp_path), offload(group(2, 1))
    with open_drafted(folder, decision) as session:
        expected = tokens_of(list_added(session))
    with open_drafted(folder, drafting(decision, 7)) as session:
        script = Scripted([*PROMPT, *expected], [True])
        texts = JoinedTexts(Rows(session, 1), make_drafter=lambda: script)
        each = Continued(Text(Words(), PROMPT, num_tokens=24))
        texts.join([each])
        made = []
        for _ in range(6):
            for _, added in texts.step():
                made.append(added.token)
                if len(made) == 8:  # in the middle of a pass
                    texts.leave(each)
        assert made == expected[:8]
        assert (len(texts), texts.num_free) == (0, 1)
        assert tokens_of(list_added(session)) == expected


def test_drawn_tokens_have_the_distribution_of_the_logits() -> None:
    """Source: rejection sampling of a draft that is no random choice."""
    logits = torch.tensor([[1.0, 0.5, 0.0, -1.0]]).repeat(2, 1)
    sampler = Sampler(Sampling(seed=3), [0], torch.device("cpu"))
    counted, num_taken, number = Counter[int](), 0, 4000
    for _ in range(number):
        checking = Checking(sampler)
        first, second = checking.choose(logits).flatten().tolist()
        is_right = first == 1
        num_taken += is_right
        counted[first] += 1
        if is_right:
            counted[second + 10] += 1
        checking.keep(1 + is_right)
    for token, chance in enumerate(logits[0].softmax(-1).tolist()):
        spread = 4 * (chance * (1 - chance) / number) ** 0.5
        assert abs(counted[token] / number - chance) < spread
        assert abs(counted[token + 10] / num_taken - chance) < 2 * spread


@pytest.mark.slow
def test_a_nan_of_a_rejected_draft_reaches_nothing(tmp_path: Path) -> None:
    folder, decision = save_tiny("sinks", tmp_path), drafting(offload(group(2, 1)), 3)
    with open_drafted(folder, decision) as session:
        expected = feed_steps(session)
        rows = Rows(session, 1)
        row = rows.join(PROMPT).row
        fed = FED.tolist()
        made = []
        with session.stream(), torch.inference_mode():
            for at in range(0, 12, 2):
                logits = rows.check(row, [*fed[at : at + 2], 1, 1])
                made.append(logits[:2].clone())
                caches = session.runner.layers.cache.by_layer
                for layer in caches:
                    size = layer.keys.shape[2]
                    for place in range(2):
                        behind = (len(PROMPT) + at + 2 + place) % size
                        layer.values[:, :, behind] = torch.nan
                rows.take(row, 4, 2, has_nan=True)
        assert compare(torch.cat(made), expected[:12]) < TOLERANCE


@pytest.mark.slow
def test_a_text_whose_tokens_cannot_be_taken_is_lost(tmp_path: Path) -> None:
    """Whoever goes on would feed its last token once more, behind those that were taken."""
    folder, decision = save_tiny("qwen3", tmp_path), drafting(offload(group(2, 1)), 3)
    with open_drafted(folder, decision) as session:
        texts = JoinedTexts(Rows(session, 1), make_drafter=partial(Scripted, [9] * 60, [True]))
        each = Continued(Text(Words(), PROMPT, num_tokens=30))
        texts.join([each])
        assert each._drafting is not None
        each._drafting._length._begin()
        lacking = patch.object(session.runner, "take", side_effect=torch.OutOfMemoryError)
        with lacking, pytest.raises(MemoryLimitError):
            list(texts.step())
        assert texts.find_lost() == [each]
        assert not texts


def test_no_more_than_what_fits(tmp_path: Path) -> None:
    folder, decision = save_tiny("qwen3", tmp_path), drafting(offload(group(2, 1)), 3)
    with open_drafted(folder, decision) as session:
        with pytest.raises(InputError, match="2 rows with `draft=ngram:3`: a pass checks"):
            Rows(session, 2)
        rows = Rows(session, 1)
        row = rows.join([3] * (CONTEXT - 3)).row
        assert rows.count_checked(row) == 2
        with pytest.raises(InputError, match="a pass of 3 tokens: expected 2 to 2"):
            rows.check(row, [1, 2, 3])
        rows.check(row, [1, 2])
        rows.take(row, 2, 1, has_nan=False)
        assert (rows.length(row), rows.count_checked(row)) == (CONTEXT - 2, 2)


@pytest.mark.parametrize(
    ("kind", "name", "way", "store", "why"),
    [
        ("mtp", "qwen3", OWN, "host", "stores no layers that predict further tokens"),
        ("ngram", "qwen3", STOCK, "host", "transformers' own passes are to run"),
        ("ngram", "linear", STOCK, "host", "transformers' own passes are to run"),
        ("ngram", "qwen3", OWN, "peer", "`store=peer`: passes of several tokens read no peer's"),
    ],
)
def test_refused_before_anything_is_loaded(
    tmp_path: Path, kind: Any, name: str, way: Way, store: Any, why: str
) -> None:
    decision = offload(store=store).model_copy(update={"draft": Draft(kind=kind, tokens=3)})
    with pytest.raises(PlanError, match=f"`draft={kind}:3`.*{why}"):
        open_drafted(save_tiny(name, tmp_path), decision, way)


def test_routing_is_recorded_without_drafts(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="record it by a plan without `draft`"):
        open_drafted(
            save_tiny("qwen3_moe_tied", tmp_path), drafting(offload()), record_routing=True
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", first_quick(["sinks", "chunked", "deepseek_v3", "shared_rings"]))
def test_passes_in_place_see_what_passes_by_mask_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As on a GPU, whose kernel is told positions, with products by torch in its place."""
    need_triton()
    from offplan.runtime.model import coded_kernel

    monkeypatch.setattr(coded_kernel, "attend_one", weigh_codes)
    monkeypatch.setattr(coded_kernel, "attend_latent_codes", weigh_latents)
    folder, decision = save_tiny(name, tmp_path), offload(group(2, 1), prefill_chunk=4)
    with open_drafted(folder, decision, FP8) as session:
        expected = feed_steps(session)
    with open_drafted(folder, drafting(decision), FP8) as session:
        session.runner.forward.find_filled = filled_up_to
        made, passes = feed_passes(session, 7)
    assert sum(passes[2:]) > 3
    # a code may round the other way, of the one vector whose sum does
    assert compare(made, expected) < 2e-2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_passes_by_blocks_see_what_passes_by_mask_see(tmp_path: Path) -> None:
    folder, decision = save_tiny("qwen3_wide", tmp_path), offload(group(2, 1))
    with open_drafted(folder, decision) as session:
        expected = feed_steps(session)
    with open_drafted(folder, drafting(decision)) as session:
        session.runner.forward.find_filled = filled_blocks
        made, _ = feed_passes(session, 7)
    assert compare(made, expected) < TOLERANCE


BY_CORES: dict[str, tuple[str, str, dict[str, int], Offload]] = {
    "divided": ("qwen3_moe", "fp8_block", {}, offload(dividing(2, later=0.7))),
    "split": ("gpt_oss", "mxfp4", wide("gpt_oss"), offload(dividing(3, later=0.7))),
    "matrices": ("qwen3", "int4", {}, offload(group(1, 1, prefill="uva", decode="host"))),
    "experts": ("deepseek_v3", "fp8_block", {}, offload(group(1, 1, "experts", decode="host"))),
    "packed": ("qwen3", "fp8_block", {}, offload(group(2, 1))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_CORES)
def test_a_pass_of_bfloat16_is_as_near_to_float32(tmp_path: Path, name: str) -> None:
    if name != "packed":
        require_cores()
    family, form, sizes, decision = BY_CORES[name]
    stored, plain = save_stored(family, form, tmp_path, torch.bfloat16, **sizes)
    if name == "packed":
        stored = plain
        decision = decision.model_copy(
            update={"packing": Packing(group_size=1, num_in_group=1, output_head=True)}
        )
    stock = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    exact = stock(torch.cat([torch.tensor(PROMPT), FED])[None]).logits[0, len(PROMPT) :].detach()
    with sharing(0.5):
        with open_drafted(stored, decision) as session:
            steps = feed_steps(session).float()
        with open_drafted(stored, drafting(decision)) as session:
            passes, counted = feed_passes(session, 7)
            if "cached_experts" in session.loaded.executors:
                cached_of(session)._drain()
                check_contents(session)
    assert sum(counted[2:]) > 3
    errors = [(each.float() - exact).abs().mean(-1).median() for each in (passes, steps)]
    assert errors[0] < MOST_ROUNDING * errors[1]


@pytest.mark.slow
def test_every_token_of_a_pass_counts_in_the_order_of_experts(tmp_path: Path) -> None:
    """A pass is one step of all its tokens; what pads it is sent where the first token is."""
    folder = save_tiny("qwen3_moe_tied", tmp_path)
    with open_drafted(folder, drafting(offload(keeping(2, every=1)))) as session:
        rows = Rows(session, 1)
        row = rows.join(PROMPT).row
        trace, before = Trace(session, 2), count_experts(session)
        orders = {
            n: layer.table.list_of(ORDER).tolist() for n, layer in cached_of(session).layers.items()
        }
        rows.check(row, FED[:3].tolist())
        rows.take(row, 3, 1, has_nan=False)
        after = count_experts(session)
        for index, (call,) in trace.calls.items():
            assert call.shape == (4, 2)
            assert call[3].tolist() == call[0].tolist()
            chosen = {*call.flatten().tolist()}
            order = cached_of(session).layers[index].table.list_of(ORDER).tolist()
            assert {*order[: len(chosen)]} == chosen
            assert [e for e in order if e not in chosen] == [
                e for e in orders[index] if e not in chosen
            ]
            found = after[index].hits + after[index].misses
            assert found - before[index].hits - before[index].misses == len(chosen)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "sinks", "qwen3_moe_tied", "linear", "linear_experts"])
def test_a_pass_that_is_aborted_leaves_the_text_as_it_was(tmp_path: Path, name: str) -> None:
    rules = [keeping(2)] if name == "qwen3_moe_tied" else []
    folder, decision = save_tiny(name, tmp_path), offload(*rules, group(2, 1), prefill_chunk=4)
    with open_drafted(folder, decision) as session:
        expected = feed_steps(session)
    fed = FED.tolist()
    with open_drafted(folder, drafting(decision)) as session, session.stream():
        rows = Rows(session, 1)
        row, made = rows.join(PROMPT).row, []
        for at in range(0, 20, 4):
            abort_in(session, at // 4)
            with pytest.raises(Abort):
                rows.check(row, [*fed[at : at + 2], 1, 1])
            assert rows.length(row) == len(PROMPT) + at
            if at % 8:
                made.append(rows.step({row: fed[at]})[row][None].clone())
                made.append(rows.check(row, fed[at + 1 : at + 4]).clone())
                rows.take(row, 3, 3, has_nan=False)
            else:
                made.append(rows.check(row, fed[at : at + 4]).clone())
                rows.take(row, 4, 4, has_nan=False)
        assert compare(torch.cat(made), expected[:20]) < TOLERANCE


@pytest.mark.slow
def test_a_text_whose_pass_has_a_nan_ends_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, decision = save_tiny("qwen3", tmp_path), drafting(offload(group(2, 1)))
    with open_drafted(folder, decision) as session:
        expected = tokens_of(list_added(session, right=[True], expected=[]))
        check = Rows.check

        def spoil(rows: Rows, row: int, tokens: Sequence[int]) -> torch.Tensor:
            logits = check(rows, row, tokens).clone()
            logits[2] = torch.nan
            return logits

        monkeypatch.setattr(Rows, "check", spoil)
        script = partial(Scripted, [*PROMPT, *expected], [True])
        texts, made = JoinedTexts(Rows(session, 1), make_drafter=script), []
        texts.join([Continued(Text(Words(), PROMPT, num_tokens=24))])
        while len(texts):
            made += [added for _, added in texts.step()]
        *tokens, error = made
        assert isinstance(error, NotANumberError)
        assert [added.token for added in tokens if isinstance(added, Added)] == expected[
            : len(tokens)
        ]
        assert len(tokens) == 5  # three steps, and two tokens of the pass
        assert texts.num_free == 1


@pytest.mark.sweep
@pytest.mark.parametrize("family", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_no_family_comes_out_wrong(tmp_path: Path, family: str) -> None:
    try:
        config = make_config(family, VARIANTS["windows"], None)
        save_model(config, AutoModelForCausalLM, torch.float32, 0, tmp_path)
    except Exception as error:
        pytest.skip(f"not built: {error}")
    decision = offload(group(2, 1), prefill_chunk=4)
    try:
        with open_drafted(tmp_path, drafting(decision)) as session:
            made, _ = feed_passes(session, 7)
    except OffplanError as error:
        pytest.skip(f"refused: {error}")
    with open_drafted(tmp_path, decision) as session:
        # a last bit of the embeddings moves steps of qwen3_next by half as much
        assert compare(made, feed_steps(session)) < 3 * TOLERANCE


def test_a_plan_of_several_texts_is_refused(tmp_path: Path) -> None:
    model = open_model(str(save_tiny("qwen3", tmp_path)))
    with pytest.raises(PlanError, match="`draft=ngram:7` with `batch=2`: a pass checks the drafts"):
        require_batch(model, drafting(offload()), 2)
    require_batch(model, drafting(offload()), 1)
