"""Passes that check drafts on a GPU, where they are compiled and captured."""

from functools import partial
from pathlib import Path

import pytest
import torch

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
from tests.runtime.quantise import save_stored
from tests.runtime.words import DRAWN, Words

pytestmark = pytest.mark.gpu

FLOAT32 = ["qwen3_wide", "deepseek_v2", "mistral_windowed", "sinks", "chunked", "shared_rings"]
FLOAT32 += ["longrope", "qwen3_moe_tied"]
TOLERANCE = 1e-5
"""Part of the largest logit by which a pass of float32 may differ from steps."""
STORED = {
    "ring": ("qwen3", "fp8_block", offload(group(1, 1), prefetch_step=3), OWN),
    "in place": ("qwen3", "nvfp4", offload(group(2, 1, prefill="uva", decode="uva")), OWN),
    "window": ("gpt_oss", "mxfp4", offload(group(2, 1)), OWN),
    "FP8 window": ("gpt_oss", "mxfp4", offload(group(2, 1)), FP8),
    "FP8 latents": ("deepseek_v3", "fp8_block", offload(group(2, 1)), FP8),
    "kept experts": ("qwen3_moe", "fp8_block", offload(keeping(2)), OWN),
    "few slots": ("gpt_oss", "mxfp4", offload(keeping(1, every=1)), OWN),
}
ROUNDED = 0.05
"""The same of bfloat16 on average, relative to the logits' spread: experts may be others."""


@pytest.mark.parametrize("name", FLOAT32)
def test_a_pass_gives_what_steps_give(tmp_path: Path, name: str) -> None:
    folder, decision = save_tiny(name, tmp_path), offload(group(2, 1), prefill_chunk=4)
    with open_drafted(folder, decision, device="cuda") as session:
        expected = feed_steps(session)
    for tokens in (1, 3, 7):
        with open_drafted(folder, drafting(decision, tokens), device="cuda") as session:
            for seed in (1, 2):  # the second time what was captured is replayed
                made, _ = feed_passes(session, seed)
                difference = (made - expected).abs().max() / expected.abs().max()
                assert float(difference) < TOLERANCE


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


def test_alternating_lengths_are_captured_once(tmp_path: Path) -> None:
    folder, decision = save_tiny("qwen3_wide", tmp_path), drafting(offload(group(2, 1)))
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
def test_a_text_is_the_same_whatever_is_drafted(tmp_path: Path, sampling: object) -> None:
    folder, decision = save_tiny("qwen3_wide", tmp_path), drafting(offload(group(2, 1)))
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
