"""How the compiler's kernel for a step's attention reads queries, where no GPU is."""

import shutil
from functools import partial
from typing import Any

import pytest
import torch
from torch._inductor import ir
from torch._inductor.kernel.flex import flex_attention as lowering
from torch._inductor.lowering import lowerings
from torch._inductor.utils import fresh_inductor_cache
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from offplan.runtime.model import attention
from offplan.runtime.model.cache_mask import Way, filled_blocks, filled_mask

CONTEXT, KV_HEADS, DIM = 48, 2, 16
GROUPS = [(6, 2, 1, 3), (14, 2, 8, 1), (5, 1, 4, 1), (8, 2, 2, 1)]
"""Heads, KV heads, new tokens and sequences."""


def _read_as_decoding(query: Any, key: Any, value: Any, *_: Any) -> Any:
    """Return the query in the place of what attention makes, as the kernel for few tokens reads it.

    Source: torch 2.11 and 2.13, ``_use_flex_decoding`` and ``create_flex_decoding_kernel``.
    """
    query, value = lowering.maybe_realize([query, value])
    batch, heads, num_new, dim = query.get_size()
    group = heads // value.get_size()[1]
    assert int(group).bit_count() == 1  # of other groups torch takes the kernel for prompts
    query = ir.ExternKernel.realize_input(query)
    row, head, token, one = query.get_stride()
    packed = (batch, heads // group, group, num_new, dim), (row, head * group, head, token, one)
    as_strided, view = torch.ops.aten.as_strided.default, torch.ops.aten.view.default
    read = lowerings[as_strided](query, *packed)
    out = lowerings[torch.ops.aten.clone.default](read)
    out = lowerings[view](out, [batch, heads, num_new, dim])
    sums = lowering.empty_strided(
        [batch, heads, num_new], None, dtype=torch.float32, device=query.get_device()
    )
    return out, sums, sums


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler here")
@pytest.mark.parametrize("heads", [4, 6, 14])
@pytest.mark.parametrize("num_new", [1, 2, 8])
def test_the_kernel_for_few_tokens_reads_each_query(
    monkeypatch: pytest.MonkeyPatch, num_new: int, heads: int
) -> None:
    """Rotary embeddings leave the queries in memory token by token."""
    monkeypatch.setattr(lowering, "lower_cpu", _read_as_decoding)
    attend: Any = AttentionInterface()[Way.BLOCKS.value]
    position = torch.arange(5, 5 + num_new)[None]
    mask = filled_blocks(position, CONTEXT).mask
    kept = torch.rand(1, KV_HEADS, CONTEXT, DIM)
    hidden, angle = torch.rand(1, num_new, heads * DIM), torch.rand(1, 1, num_new, DIM)

    def rotate(hidden: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        return hidden.view(1, num_new, heads, DIM).transpose(1, 2) * angle

    def layer(hidden: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = attend(None, rotate(hidden, angle), kept, kept, mask)[0]
        return made

    torch.compiler.reset()
    with torch.inference_mode(), fresh_inductor_cache():
        made = torch.compile(layer, dynamic=False)(hidden, angle)
    torch.compiler.reset()
    assert torch.equal(made, rotate(hidden, angle).transpose(1, 2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("heads", "kv_heads", "num_new", "batch"), GROUPS)
def test_any_number_of_heads_attends_up_to_its_token(
    device: str, heads: int, kv_heads: int, num_new: int, batch: int
) -> None:
    """On a GPU compiled, by whichever kernel torch takes."""
    torch.manual_seed(heads)
    make = partial(torch.randn, device=device)
    position = torch.arange(5, 5 + num_new)[None] + torch.arange(batch)[:, None]
    position = position.to(device)
    query = make(batch, num_new, heads, DIM).transpose(1, 2)
    key, value = (make(batch, kv_heads, CONTEXT, dim) for dim in (DIM, 2 * DIM))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mask: Any = filled_blocks(position, CONTEXT).mask
        return attention._attend_up_to_last(query, key, value, mask, None)

    run = torch.compile(attend, dynamic=False) if device == "cuda" else attend
    seen: Any = filled_mask(position, CONTEXT).mask
    expected = scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
    with torch.inference_mode():
        torch.testing.assert_close(run(query, key, value), expected, rtol=2e-3, atol=2e-3)
