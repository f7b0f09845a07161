"""Tiny checkpoints that store a layer which predicts further tokens, named as published ones are.

Source: the names of tensors of deepseek-ai/DeepSeek-V3, zai-org/GLM-4.5 and Qwen/Qwen3.5-27B.
"""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
)
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

HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_5")
FAMILIES = ("deepseek_v3", "glm4_moe", *HYBRIDS)
STORED = FAMILIES[:-1]
"""Families that tests store in forms: the last one is the text's beside a tower."""
WITH_EXPERTS = ("glm4_moe", "deepseek_v3", "qwen3_5_moe_text")
"""Families whose tiny prediction layer has routed experts."""
KINDS = [*["linear_attention"] * 3, *["full_attention"] * 2]
"""The layers of tiny models of Qwen3.5, of which the last predicts."""


def save_predicting(
    family: str,
    folder: Path,
    form: str | None = None,
    dtype: torch.dtype = torch.float32,
    **sizes: int,
) -> Path:
    """Save a tiny model whose last layer is its prediction layer; ``form`` stores it as codes."""
    own: dict[str, Any] = dict(sizes)
    if family in HYBRIDS:
        own["layer_types"] = KINDS if form is None else KINDS[1:]
    if form is not None:
        folder, _ = save_stored(family, form, folder, dtype, **own)
        add_prediction(folder, dtype)
        return folder
    # other classes would keep a size that they do not have, and that tells of latents
    own |= {} if family == "deepseek_v3" else {"kv_lora_rank": None}
    if family == "qwen3_5":
        config = make_config(family, own, "qwen3_5_text")
        save_model(config, AutoModelForMultimodalLM, dtype, 0, folder)
    else:
        save_model(make_config(family, own), AutoModelForCausalLM, dtype, 0, folder)
    add_prediction(folder, dtype)
    return folder


def add_prediction(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Make the last layer of a saved model its prediction layer."""
    told = json.loads((folder / "config.json").read_text())
    text = told.get("text_config", told)
    is_qwen = "qwen" in told["model_type"]
    text["num_hidden_layers"] = last = text["num_hidden_layers"] - 1
    text["mtp_num_hidden_layers" if is_qwen else "num_nextn_predict_layers"] = 1
    if is_qwen:
        text["layer_types"] = text["layer_types"][:-1]
    for key in ("mlp_layer_types", "num_mtp_layers"):
        text.pop(key, None)
    (folder / "config.json").write_text(json.dumps(told))
    tensors, hidden = load_file(folder / "model.safetensors"), text["hidden_size"]
    (embedding,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    prefix = f"{embedding.removesuffix('embed_tokens.weight')}layers.{last}."
    start, names = prefix, ["enorm", "hnorm", "shared_head.norm", "eh_proj"]
    if is_qwen:
        start, names = "mtp.", ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc"]
        tensors = {name.replace(prefix, "mtp.layers.0."): each for name, each in tensors.items()}
    draw, mean = torch.Generator().manual_seed(1), 0 if is_qwen else 1
    for name in names:
        is_norm = name != names[-1]
        value = torch.randn((hidden,) if is_norm else (hidden, 2 * hidden), generator=draw) * 0.3
        tensors[f"{start}{name}.weight"] = (value + mean * is_norm).to(dtype)
    # copies, as DeepSeek's and GLM's have: other values would show who reads them
    for name in () if is_qwen else ("embed_tokens", "shared_head.head"):
        tensors[f"{start}{name}.weight"] = torch.full_like(tensors[embedding], 7)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


TOLERANCE = 8e-6
"""Part of the largest logit by which drafts' logits may differ: see ``test_drafts``."""
HYBRID_WITH_EXPERTS = 4e-5
"""The same of a hybrid with experts, as of its passes on a GPU.

Source: on a Xeon with AMX transformers' logits in float32 differ by 1.5e-5 from those in float64.
"""


def predicting(
    decision: Offload, tokens: int = 3, experts: Literal["device", "host"] = "device"
) -> Offload:
    draft = Draft(kind="mtp", tokens=tokens, experts=experts)
    return decision.model_copy(update={"draft": draft})


class Reference:
    """A prediction layer behind transformers' own passes, which read each text anew."""

    def __init__(self, folder: Path) -> None:
        config = AutoConfig.from_pretrained(folder)
        auto_class = AutoModelForMultimodalLM if config.sub_configs else AutoModelForCausalLM
        self._main = auto_class.from_pretrained(folder, dtype=torch.float32).eval()
        stored = load_file(folder / "model.safetensors")
        self._make = _Qwen(self._main, stored) if "mtp.fc.weight" in stored else _Own(folder)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], number: int) -> torch.Tensor:
        """Logits of so many tokens behind a text, each but the first behind a draft."""
        text = torch.tensor([tokens])
        hidden = self._main(text[:, :-1], output_hidden_states=True).hidden_states[-1]
        following, made = text[:, 1:], []
        for _ in range(number):
            out = self._make(hidden, following)
            made.append(self._main.get_output_embeddings()(out[:, -1])[0])
            hidden = torch.cat([hidden, out[:, -1:]], 1)
            following = torch.cat([following, made[-1].argmax()[None, None]], 1)
        return torch.stack(made)


class _Own:
    """Transformers' own prediction layer."""

    def __init__(self, folder: Path) -> None:
        config = AutoConfig.from_pretrained(folder)
        prefix = f"model.layers.{config.num_hidden_layers}"
        # a class knows the number of its published models' layers
        own = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with patch.object(own, "_keys_to_ignore_on_load_unexpected", [rf"{prefix}\."]):
            main = own.from_pretrained(folder, dtype=torch.float32).eval()
            self._layer = MtpModel.from_pretrained(main).eval()

    def __call__(self, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        positions = 1 + torch.arange(following.shape[1])[None]
        cache = MtpCache(config=self._layer.config)
        made: torch.Tensor = self._layer.forward_layer(
            0, hidden, positions, cache, input_ids=following
        )
        return made


_PARTS = "gate", "up", "down"


class _Qwen:
    """Qwen3.5's, as SGLang's ``qwen3_5_mtp.py`` makes it: a model of one layer behind ``fc``."""

    def __init__(self, main: Any, stored: dict[str, torch.Tensor]) -> None:
        config = deepcopy(main.config.get_text_config())
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        self._embedding = main.get_input_embeddings()
        self._weights = {
            name.removeprefix("mtp."): each
            for name, each in stored.items()
            if name.startswith("mtp.")
        }
        self._eps = config.rms_norm_eps
        self._layer = AutoModel.from_config(config, dtype=torch.float32).eval()
        own = dict(self._weights)
        experts = "layers.0.mlp.experts."
        stacks: dict[str, list[torch.Tensor]] = {"gate_up": [], "down": []}
        while (first := f"{experts}{len(stacks['down'])}.") + "up_proj.weight" in own:
            gate, up, down = (own.pop(f"{first}{each}_proj.weight") for each in _PARTS)
            stacks["gate_up"].append(torch.cat([gate, up]))
            stacks["down"].append(down)
        own |= {f"{experts}{each}_proj": torch.stack(of) for each, of in stacks.items() if of}
        missing, _ = self._layer.load_state_dict(own, strict=False)
        assert missing == ["embed_tokens.weight"], missing

    def __call__(self, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        halves = []
        for name, x in (("embedding", self._embedding(following)), ("hidden", hidden)):
            weight = 1 + self._weights[f"pre_fc_norm_{name}.weight"]
            halves.append(functional.rms_norm(x, weight.shape, weight, self._eps))
        joined = torch.cat(halves, -1) @ self._weights["fc.weight"].T
        made: torch.Tensor = self._layer(inputs_embeds=joined).last_hidden_state
        return made


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
