"""What chunks of a prompt run in: only those that come again are prepared for."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from offplan.runtime.model.attention import _attend_up_to, without_cudnn
from offplan.runtime.passes.chunks import as_planned


@pytest.mark.parametrize(
    ("num_tokens", "start", "with_cudnn"),
    [(512, 0, True), (512, 1024, True), (512, 700, False), (300, 0, False), (300, 512, False)],
)
def test_cudnn_plans_for_whole_chunks_alone(num_tokens: int, start: int, with_cudnn: bool) -> None:
    with as_planned(num_tokens, start, planned=512):
        assert torch.backends.cuda.cudnn_sdp_enabled() is with_cudnn
        assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(64, 64), (192, 128)], ids=["alike", "of MLA"])
@pytest.mark.parametrize("start", [0, 300])
def test_a_remainder_attends_as_its_part_of_the_whole(sizes: tuple[int, int], start: int) -> None:
    of_key, of_value = sizes
    kv_heads = 2 if of_key == of_value else 8
    query, key, value = (
        torch.randn(2, heads, 500, size, device="cuda").to(torch.bfloat16)
        for heads, size in ((8, of_key), (kv_heads, of_key), (kv_heads, of_value))
    )
    whole = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    asked = SimpleNamespace(window=None, soft_cap=None, chunk=None)
    module = SimpleNamespace(asked=asked)
    with without_cudnn():
        got = _attend_up_to(module, query[:, :, start:], key, value, start, 500, None, None)
    torch.testing.assert_close(got, whole[:, :, start:], rtol=0.02, atol=0.02)
