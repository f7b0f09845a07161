"""States of linear attention go on from what passes take of drafts, and from nothing else."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next

from offplan.runtime.joined import Added, Continued, JoinedTexts
from offplan.runtime.model import caches
from offplan.runtime.model.delta_rule import Additions, add_taken, taking_additions
from offplan.runtime.rows import Rows
from offplan.runtime.session import Session
from offplan.runtime.texts import Text
from tests.runtime.cached import keeping
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
from tests.runtime.families import MOST_ROUNDING, VARIANTS, make_config, save_model
from tests.runtime.plans import group, offload
from tests.runtime.quantise import save_stored
from tests.runtime.words import Words
from tests.tiers import first_quick

FAMILIES = ["qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"]
LAST_BIT = 2.0**-24
TOLERANCE = 8e-6
FEDS: list[int] = FED.tolist()


def save(family: str, folder: Path, change: float = 0.0) -> Path:
    """Save a tiny hybrid; ``change`` multiplies its embeddings by 1 and as much more, or less."""
    config = make_config(family, VARIANTS["windows"], None)
    save_model(config, AutoModelForCausalLM, torch.float32, 0, folder)
    if change:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        weight = model.get_input_embeddings().weight
        with torch.no_grad():
            weight.mul_(1 + change * torch.randn_like(weight).sign())
        model.save_pretrained(folder)
    return folder


def distance(made: torch.Tensor, expected: torch.Tensor) -> float:
    return float((made - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("family", first_quick(FAMILIES))
def test_a_pass_is_as_near_to_steps_as_these_are_exact(tmp_path: Path, family: str) -> None:
    """These models answer the last bit of their embeddings by 3e-6 to 1e-5 of a logit."""
    decision = offload(group(2, 1), prefill_chunk=4)
    folder = save(family, tmp_path / "exact")
    with open_drafted(folder, decision) as session:
        expected = feed_steps(session)
    with open_drafted(save(family, tmp_path / "other", LAST_BIT), decision) as session:
        rounding = distance(feed_steps(session), expected)
    for tokens in (1, 3, 7):
        with open_drafted(folder, drafting(decision, tokens)) as session:
            made, passes = feed_passes(session, tokens)
        assert sum(passes[2:]) > 3
        assert distance(made, expected) < max(2e-6, 2.5 * rounding)


@pytest.mark.slow
@pytest.mark.parametrize("family", first_quick(FAMILIES))
def test_a_greedy_text_is_the_same_whatever_is_taken(tmp_path: Path, family: str) -> None:
    folder, decision = save(family, tmp_path), offload(group(2, 1), prefill_chunk=4)
    expected: list[int] = []
    with open_drafted(folder, drafting(decision)) as session:
        rows = Rows(session, 1)
        for right in ([False], [True], [True, True, False]):
            make = partial(Scripted, [*PROMPT, *expected], right)
            texts, made = JoinedTexts(rows, make_drafter=make), []
            each = Continued(Text(Words(), PROMPT, num_tokens=30))
            texts.join([each])
            while len(texts):
                for _, added in texts.step():
                    assert isinstance(added, Added)
                    made.append(added.token)
            expected = expected or made
            assert made == expected
            assert each.drafts is not None
            assert (each.drafts.accepted > 0) == (right != [False])
            assert (each.drafts.rejected > 0) == (len(right) > 1)
    with open_drafted(folder, decision) as session:
        texts, made = JoinedTexts(Rows(session, 1)), []
        texts.join([Continued(Text(Words(), PROMPT, num_tokens=30))])
        while len(texts):
            made += [added.token for _, added in texts.step()]  # type: ignore[union-attr]
    assert made == expected


def states_of(session: Session) -> list[torch.Tensor]:
    cache = session.runner.layers.cache
    assert cache is not None
    return [part for state in cache._states.values() for part in state.tensors()]


@pytest.mark.slow
@pytest.mark.parametrize("name", first_quick(["linear", "linear_experts"]))
@pytest.mark.parametrize("taken", [1, 2, 5, 8])
def test_states_have_no_trace_of_what_is_rejected(tmp_path: Path, name: str, taken: int) -> None:
    folder, decision = save_tiny(name, tmp_path), drafting(offload(group(2, 1)))
    kept = []
    with open_drafted(folder, decision) as session, session.stream(), torch.inference_mode():
        for wrong in (0, 1, torch.nan):
            rows = Rows(session, 1)
            row = rows.join(PROMPT).row
            before = [each.clone() for each in states_of(session)]
            rejected = [int(wrong == 1)] * (8 - taken)
            rows.check(row, [*FEDS[:taken], *rejected])
            assert all(map(torch.equal, states_of(session), before))
            if wrong is torch.nan:
                assert session.runner.layers.cache is not None
                for stack in session.runner.layers.cache._of_states._noted.values():
                    at = stack.whole.shape.index(8) if stack.whole.shape[-1] != 8 else -1
                    stack.whole.narrow(at, taken, 8 - taken).fill_(torch.nan)
            rows.take(row, 8, taken, has_nan=wrong is torch.nan)
            kept.append([each.clone() for each in states_of(session)])
        rows = Rows(session, 1)
        row = rows.join(PROMPT).row
        for token in FEDS[:taken]:
            rows.step({row: token})
        for ours, theirs in zip(kept[0], states_of(session), strict=True):
            assert distance(ours, theirs) < TOLERANCE
    for other in kept[1:]:
        assert all(map(torch.equal, kept[0], other))


@pytest.mark.slow
def test_a_text_goes_on_where_one_that_left_ended(tmp_path: Path) -> None:
    """A row whose drafts were rejected has the states of its text's end."""
    folder, decision = save_tiny("linear", tmp_path), offload(group(2, 1), prefill_chunk=4)
    prompt = [*PROMPT, *FEDS[:6]]
    with open_drafted(folder, decision) as session, session.stream():
        expected = Rows(session, 1).join([*prompt, 7]).logits.clone()
    with open_drafted(folder, drafting(decision)) as session, session.stream():
        rows = Rows(session, 1)
        row = rows.join(PROMPT).row
        for at in (0, 3):
            rows.check(row, [*FEDS[at : at + 3], 1, 1])
            rows.take(row, 5, 3, has_nan=False)
        rows.leave(row)
        joined = rows.join([*prompt, 7])
        assert joined.tokens_read == 1
        assert distance(joined.logits, expected) < TOLERANCE


@pytest.mark.slow
def test_a_text_is_as_it_was_until_tokens_are_taken(tmp_path: Path) -> None:
    folder, decision = save_tiny("linear", tmp_path), drafting(offload(group(2, 1)))
    with open_drafted(folder, decision) as session, session.stream():
        rows = Rows(session, 1)
        expected = rows.step({rows.join(PROMPT).row: FEDS[0]})[0].clone()
        rows = Rows(session, 1)
        row = rows.join(PROMPT).row
        rows.check(row, FEDS[4:9])
        assert rows.length(row) == len(PROMPT)
        assert torch.equal(rows.step({row: FEDS[0]})[row], expected)


@pytest.mark.slow
def test_states_that_have_partly_gone_on_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, decision = save_tiny("linear", tmp_path), drafting(offload(group(2, 1)))
    with open_drafted(folder, decision) as session, session.stream():
        expected = feed_passes(session, 3)[0]
        rows = Rows(session, 1)
        row = rows.join(PROMPT).row
        rows.check(row, FEDS[:4])

        def fail(states: torch.Tensor, *_: Any) -> None:
            states.zero_()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(caches, "add_taken", fail)
            with pytest.raises(KeyboardInterrupt):
                rows.take(row, 4, 2, has_nan=False)
        assert not rows.in_use
        assert torch.equal(feed_passes(session, 3)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 7])
def test_what_tokens_add_lies_where_it_was_and_takes_what_was_planned(
    tmp_path: Path, tokens: int
) -> None:
    folder, decision = save_tiny("linear", tmp_path), drafting(offload(group(2, 1)), tokens)
    with open_drafted(folder, decision) as session:

        def noted() -> Sequence[torch.Tensor]:
            assert session.runner.layers.cache is not None
            return [each.whole for each in session.runner.layers.cache._of_states._noted.values()]

        feed_passes(session, 1)
        at = [each.data_ptr() for each in noted()]
        feed_passes(session, 2)
        assert [each.data_ptr() for each in noted()] == at
        row = session.loaded.stage.row_cache(session.context, tokens)
        assert sum(each.nbytes for each in noted()) == row.addition_bytes > 0
        assert sum(each.nbytes for each in states_of(session)) == row.state_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "linear_experts"])
def test_a_pass_is_compiled_once_for_each_kind_of_layer_and_whole(
    tmp_path: Path, name: str
) -> None:
    folder, decision = save_tiny(name, tmp_path), drafting(offload(group(2, 1)))
    with open_drafted(folder, decision) as session, session.stream(), torch.inference_mode():
        Rows(session, 1).join(PROMPT)
        layers = session.runner.layers
        for number in (2, 4, 8):
            tokens, counter = torch.arange(number)[None], CompileCounter()
            calls = layers.note_calls(lambda tokens=tokens: session.runner.forward.step(tokens))
            torch._dynamo.reset()
            for own, call in zip(layers._steps, calls, strict=True):
                torch.compile(own, backend=counter, fullgraph=True)(call.hidden, **call.arguments)
            assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_a_pass_of_bfloat16_is_as_near_to_float32(tmp_path: Path, family: str) -> None:
    stored, plain = save_stored(family, "fp8_block", tmp_path, torch.bfloat16)
    stock = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    text = torch.cat([torch.tensor(PROMPT), FED])[None]
    exact = stock(text).logits[0, len(PROMPT) :].detach()
    decision = offload(group(2, 1))
    with open_drafted(stored, decision) as session:
        steps = feed_steps(session).float()
    with open_drafted(stored, drafting(decision)) as session:
        passes = feed_passes(session, 7)[0].float()
    errors = [(each - exact).abs().mean(-1).median() for each in (passes, steps)]
    assert errors[0] < MOST_ROUNDING * errors[1]


@pytest.mark.slow
def test_experts_that_are_kept_beside_states(tmp_path: Path) -> None:
    folder = save_tiny("linear_experts", tmp_path)
    decision = offload(keeping(2), group(2, 1), prefill_chunk=4)
    with open_drafted(folder, decision) as session:
        expected = feed_steps(session)
    with open_drafted(folder, drafting(decision)) as session:
        assert distance(feed_passes(session, 5)[0], expected) < TOLERANCE


def test_the_rule_for_several_tokens_is_that_of_each() -> None:
    """What tokens read, and the state behind those that are taken."""
    draw = torch.Generator().manual_seed(0)

    def make(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw)

    query, key, value = make(1, 3, 1, 16), make(1, 3, 1, 16), make(1, 3, 2, 8)
    given = {"g": -make(1, 3, 2).abs(), "beta": make(1, 3, 2).sigmoid()}
    state = make(1, 2, 16, 8)
    sizes = (1, 2, 4, 16), (1, 2, 4, 8), (1, 2, 4), (1, 5, 4)
    noted = Additions(*(torch.zeros(size) for size in sizes))
    noted.inputs[..., :3] = new = make(1, 5, 3)
    rule = taking_additions(modeling_qwen3_next.torch_chunk_gated_delta_rule)
    made, after = rule(query, key, value, additions=noted, initial_state=state, **given)
    assert after is None

    def run(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = (each[:, :num_tokens].repeat_interleave(2, 2) for each in (query, key))
        rest = {name: each[:, :num_tokens] for name, each in given.items()}
        return modeling_qwen3_next.torch_recurrent_gated_delta_rule(
            *tokens, value[:, :num_tokens], **rest, initial_state=state.clone(),
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # type: ignore[no-any-return]  # fmt: skip

    torch.testing.assert_close(made, run(3)[0])
    of_layers = Additions(*(each[None] for each in vars(noted).values()))
    states, inputs = state[None].clone(), make(1, 1, 5, 4)
    before = inputs.clone()
    add_taken(states, inputs, of_layers, 2)
    torch.testing.assert_close(states[0], run(2)[1])
    assert torch.equal(inputs, torch.cat([before[..., 2:], new[None, ..., :2]], -1))
