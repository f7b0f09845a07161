"""Logits of all positions of a prompt, held against stock transformers."""

from itertools import product
from pathlib import Path

import pytest
import torch

from offplan.errors import InputError
from offplan.runtime.model.layers import DecoderLayers
from tests.runtime.conftest import auto_class, save_tiny
from tests.runtime.families import load_stock
from tests.runtime.plans import CONTEXT, group, offload, open_session
from tests.tiers import each_value_once

PROMPT = torch.randint(1, 64, (2, 21), generator=torch.Generator().manual_seed(0))
NAMES = ["qwen3", "deepseek_v2", "qwen3_moe_tied", "soft_caps", "sinks", "chunked", "shared_keys"]
NAMES += ["linear", "gptj", "text_part", "mistral_windowed"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunk"), each_value_once(product(NAMES, [4, 64])))
def test_all_positions(tmp_path: Path, name: str, chunk: int) -> None:
    folder = save_tiny(name, tmp_path)
    with torch.inference_mode():
        expected = load_stock(folder, auto_class=auto_class(name))(input_ids=PROMPT).logits
    with open_session(folder, offload(group(2, 1), prefill_chunk=chunk)) as session:
        logits = torch.cat([*session.prefill_all(PROMPT)], 1)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        # the sequences are begun, as behind any prompt
        following = session.decode(logits[:, -1:].argmax(-1)).clone()
        session.prefill(PROMPT)
        again = session.decode(logits[:, -1:].argmax(-1))
        torch.testing.assert_close(following, again, rtol=1e-4, atol=1e-4)


def test_the_last_positions_in_small_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decision = offload(group(2, 1), prefill_chunk=8)
    with open_session(save_tiny("qwen3", tmp_path), decision) as session:
        whole = torch.cat([*session.prefill_all(PROMPT)], 1)
        heads, finish = [], DecoderLayers.finish
        monkeypatch.setattr(
            DecoderLayers,
            "finish",
            lambda own, hidden, forward: (
                heads.append(hidden.shape[1]) or finish(own, hidden, forward)
            ),
        )
        last = torch.cat([*session.prefill_all(PROMPT, 7)], 1)
        torch.testing.assert_close(last, whole[:, -7:])
        # 8 tokens of 32 values take the room of four logits of 64
        assert heads == [2, 4, 1]
        with pytest.raises(InputError, match=f"context is {CONTEXT}"):
            next(session.prefill_all(torch.zeros(1, CONTEXT + 1, dtype=torch.int64)))
