"""Attention in blocks: compiled for lengths and caches of any kind, and never left uncompiled."""

from functools import partial

import pytest
import torch

from offplan.runtime.model import attention

LENGTHS = [(64, 64, None), (64, 96, 16), (1, 50, None), (128, 128, 16), (128, 256, 16)]
LENGTHS += [(5, 5, None), (7, 133, 16), (200, 300, 16), (130, 260, None)]
"""New and kept tokens, and those that each sees."""


@pytest.mark.slow
def test_attention_is_compiled_for_rings_and_for_whole_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # what inductor makes of it runs on a GPU; how often torch asks for it is the same
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    attention._compile_for.cache_clear()
    generator = torch.Generator().manual_seed(0)
    make = partial(torch.randn, generator=generator)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for heads in (2, 4):
            sinks = make(heads)
            for num_new, num_kept, window in LENGTHS:
                query, value = make(1, heads, num_new, 16), make(1, 2, num_kept, 16)
                ring = make(1, 2, num_kept, 16)
                seen = attention._window_mask(
                    num_new, num_kept, window or num_kept, torch.device("cpu")
                )
                for key in (ring, torch.cat([ring, ring], dim=2)[:, :, :num_kept]):
                    asked = (None, None, sinks)
                    got = attention.attend_in_blocks(query, key, value, window, *asked)
                    expected = attention.weigh(query, key, value, seen, *asked)
                    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    attention._compile_for.cache_clear()
