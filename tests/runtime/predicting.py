"""Tiny checkpoints that store a layer which predicts further tokens, named as published ones are.

Source: the names of tensors of deepseek-ai/DeepSeek-V3 and zai-org/GLM-4.5.
"""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from offplan.capabilities.drafts import Draft
from offplan.plan import Offload
from offplan.runtime.joined import Added, Continued, JoinedTexts
from offplan.runtime.prediction.predictor import Predictor
from offplan.runtime.rows import Rows
from offplan.runtime.session import Session
from offplan.runtime.texts import Text
from tests.runtime.drafted import FED, PROMPT
from tests.runtime.families import make_config, save_model
from tests.runtime.quantise import save_stored
from tests.runtime.words import Words

FAMILIES = ("deepseek_v3", "glm4_moe")


def save_predicting(
    family: str, folder: Path, form: str | None = None, dtype: torch.dtype = torch.float32
) -> Path:
    """Save a tiny model whose last layer is its prediction layer; ``form`` stores it as codes."""
    if form is None:
        # GLM's class would keep a size that it does not have, and that tells of latents
        own = {"kv_lora_rank": None} if family == "glm4_moe" else {}
        save_model(make_config(family, own), AutoModelForCausalLM, dtype, 0, folder)
    else:
        folder, _ = save_stored(family, form, folder, dtype)
    add_prediction(folder, dtype)
    return folder


def add_prediction(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Make the last layer of a saved model its prediction layer."""
    told = json.loads((folder / "config.json").read_text())
    told["num_hidden_layers"] -= 1
    told["num_nextn_predict_layers"] = 1
    for key in ("layer_types", "mlp_layer_types", "num_mtp_layers"):
        told.pop(key, None)
    (folder / "config.json").write_text(json.dumps(told))
    tensors, hidden = load_file(folder / "model.safetensors"), told["hidden_size"]
    prefix, draw = f"model.layers.{told['num_hidden_layers']}.", torch.Generator().manual_seed(1)
    shapes = {"eh_proj": (hidden, 2 * hidden), "enorm": (hidden,), "hnorm": (hidden,)}
    shapes["shared_head.norm"] = (hidden,)
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=draw) * 0.3 + (len(shape) == 1)
        tensors[f"{prefix}{name}.weight"] = value.to(dtype)
    # copies, as published: other values would show who reads them
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"{prefix}{name}.weight"] = torch.full_like(tensors["model.embed_tokens.weight"], 7)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


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


def check_drafts(
    session: Session, reference: Reference, seed: int = 0, most_different: float = TOLERANCE
) -> int:
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
            difference = (torch.stack(noted).cpu() - expected).abs().max() / expected.abs().max()
            assert float(difference) < most_different
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
