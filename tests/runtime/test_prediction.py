"""Drafts by prediction layers: as transformers' own layers make them, and texts as without."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from offplan.capabilities.drafts import Draft
from offplan.errors import PlanError
from offplan.plan import Offload
from offplan.runtime.joined import Added, Continued, JoinedTexts
from offplan.runtime.prediction.predictor import Predictor
from offplan.runtime.rows import Rows
from offplan.runtime.session import Session
from offplan.runtime.texts import Text
from tests.runtime.cached import Abort, abort_in
from tests.runtime.drafted import FED, PROMPT, open_drafted
from tests.runtime.plans import CONTEXT, group, offload
from tests.runtime.predicting import FAMILIES, save_predicting
from tests.runtime.words import DRAWN, Words
from tests.tiers import first_quick

TOLERANCE = 8e-6
"""Part of the largest logit by which drafts' logits may differ: see ``test_drafts``."""


def predicting(decision: Offload, tokens: int = 3) -> Offload:
    return decision.model_copy(update={"draft": Draft(kind="mtp", tokens=tokens)})


class Reference:
    """Transformers' own prediction layer behind its own passes, which read each text anew."""

    def __init__(self, folder: Path) -> None:
        config = AutoConfig.from_pretrained(folder)
        self._prefix = f"model.layers.{config.num_hidden_layers}"
        # a class knows the number of its published models' layers
        own = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with patch.object(own, "_keys_to_ignore_on_load_unexpected", [rf"{self._prefix}\."]):
            main = own.from_pretrained(folder, dtype=torch.float32).eval()
            self._layer = MtpModel.from_pretrained(main).eval()
        self._main, self._stored = main, load_file(folder / "model.safetensors")

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], number: int) -> torch.Tensor:
        """Logits of so many tokens behind a text, each but the first behind a draft."""
        text = torch.tensor([tokens])
        hidden = self._main(text[:, :-1], output_hidden_states=True).hidden_states[-1]
        following, made = text[:, 1:], []
        for _ in range(number):
            positions = 1 + torch.arange(following.shape[1])[None]
            cache = MtpCache(config=self._main.config.get_mtp_config())
            out = self._layer.forward_layer(0, hidden, positions, cache, input_ids=following)
            self._check_joined(hidden, following)
            made.append(self._main.lm_head(out[:, -1])[0])
            hidden = torch.cat([hidden, out[:, -1:]], 1)
            following = torch.cat([following, made[-1].argmax()[None, None]], 1)
        return torch.stack(made)

    def _check_joined(self, hidden: torch.Tensor, following: torch.Tensor) -> None:
        """Compare what enters the block with what SGLang's ``deepseek_nextn.py`` has enter it."""
        weights, config = self._stored, self._main.config
        norm = partial(functional.rms_norm, normalized_shape=(config.hidden_size,))
        embedded = weights["model.embed_tokens.weight"][following]
        parts = [
            norm(x, weight=weights[f"{self._prefix}.{name}.weight"], eps=config.rms_norm_eps)
            for name, x in (("enorm", embedded), ("hnorm", hidden))
        ]
        expected = torch.cat(parts, -1) @ weights[f"{self._prefix}.eh_proj.weight"].T
        layer = self._layer.layers[0]
        halves = layer.enorm(self._layer.embed_tokens(following)), layer.hnorm(hidden)
        torch.testing.assert_close(layer.eh_proj(torch.cat(halves, -1)), expected)


@contextmanager
def noting_logits() -> Iterator[list[torch.Tensor]]:
    """Note the logits of each draft, [vocabulary]."""
    noted: list[torch.Tensor] = []
    choose = Predictor._choose

    def note(predictor: Predictor, made: torch.Tensor) -> torch.Tensor:
        noted.append(predictor._head(made)[0, 0].clone())
        return choose(predictor, made)

    with patch.object(Predictor, "_choose", note):
        yield noted


def check_drafts(session: Session, reference: Reference, seed: int = 0) -> int:
    """Compare drafts with the reference's, behind steps and passes of which some are taken."""
    draw, rows, fed = random.Random(seed), Rows(session, 1), FED.tolist()
    row, at, compared = rows.join(PROMPT).row, 0, 0
    while at < len(fed):
        most = min(rows.count_checked(row), len(fed) - at)
        drafts = draw.randint(0, max(0, min(3, most - 1)))
        if drafts:
            with noting_logits() as noted:
                proposed = rows._predict(fed[at], drafts)
            expected = reference.logits([*PROMPT, *fed[: at + 1]], drafts)
            assert proposed == expected.argmax(-1).tolist()
            difference = (torch.stack(noted) - expected).abs().max() / expected.abs().max()
            assert float(difference) < TOLERANCE
            compared += drafts
        if draw.random() < 0.4:  # steps between, more than wait at a time
            for _ in range(min(draw.randint(1, 12), len(fed) - at)):
                rows.step({row: fed[at]})
                at += 1
        elif most > 1:
            number = draw.randint(2, most)
            right = draw.randint(1, number)
            wrong = [(token + 1) % 60 for token in fed[at + right : at + number]]
            rows.check(row, [*fed[at : at + right], *wrong])
            rows.take(row, number, right, has_nan=False)
            at += right
    rows.leave(row)
    return compared


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("family", first_quick(FAMILIES))
def test_drafts_are_those_of_transformers_own_layer(
    tmp_path: Path, family: str, chunk: int
) -> None:
    folder = save_predicting(family, tmp_path)
    reference, decision = Reference(folder), offload(group(2, 1), prefill_chunk=chunk)
    with open_drafted(folder, predicting(decision)) as session:
        compared = sum(check_drafts(session, reference, seed) for seed in range(4))
    assert compared > 20


def continue_text(
    session: Session | Rows,
    prompt: Sequence[int] = PROMPT,
    num_tokens: int = 30,
    right: Sequence[bool] = (),
    expected: Sequence[int] = (),
    **given: object,
) -> tuple[list[int], Continued]:
    """Continue a text; drafts of random layers are replaced by ``right`` ones of the expected.

    The layer runs all the same.
    """
    propose = Predictor.propose

    def script(predictor: Predictor, token: int, length: int, most: int) -> list[int]:
        drafts, at = propose(predictor, token, length, most), length + 1 - len(prompt)
        return [
            wanted if right[(at + place) % len(right)] else (wanted + 1) % 60
            for place, wanted in enumerate(expected[at : at + len(drafts)])
        ]

    replaced = patch.object(Predictor, "propose", script if right else propose)
    made: list[int] = []
    with replaced:
        texts = JoinedTexts(Rows(session, 1) if isinstance(session, Session) else session)
        each = Continued(Text(Words(), prompt, num_tokens=num_tokens), **given)  # type: ignore[arg-type]
        texts.join([each])
        while len(texts):
            for _, added in texts.step():
                assert isinstance(added, Added)
                made.append(added.token)
    return made, each


RIGHT = {"right": [True], "half": [True, True, True, False, True, True, False]}


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, "fp8_block"])
@pytest.mark.parametrize("family", first_quick(FAMILIES))
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


@pytest.mark.parametrize(("name", "why"), [("qwen3", "stores no layers that predict")])
def test_refused_before_anything_is_loaded(tmp_path: Path, name: str, why: str) -> None:
    from tests.runtime.conftest import save_tiny

    with pytest.raises(PlanError, match=f"`draft=mtp:3`: .* {why}"):
        open_drafted(save_tiny(name, tmp_path), predicting(offload()))
