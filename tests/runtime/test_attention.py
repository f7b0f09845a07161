"""Attention of prompts: in compiled blocks, and by torch's kernels that return softmax sums."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from offplan.runtime.model import attention
from offplan.runtime.model.attention import choose_block_warps, choose_wide_blocks
from offplan.runtime.model.probe import Asked

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


def test_attention_is_compiled_for_known_heads_and_any_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch 2.11 fails to choose a kernel where it does not know how many heads there are."""
    shapes: list[tuple[int | torch.SymInt, ...]] = []

    def attend(query: torch.Tensor, *_: object, **others: object) -> tuple[torch.Tensor, None]:
        return query + 1, None

    def note(module: torch.fx.GraphModule, _: object) -> object:
        for node in module.graph.nodes:
            value = node.meta.get("example_value")
            if node.op == "placeholder" and isinstance(value, torch.Tensor):
                shapes.append(tuple(value.shape))
        return module.forward

    monkeypatch.setattr(attention, "flex_attention", attend)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=note))
    attention._compile_for.cache_clear()
    query, kept = torch.zeros(3, 4, 64, 32), torch.zeros(3, 2, 64, 32)
    attention.attend_in_blocks(query, kept, kept.clone(), None, None, None, None)
    attention._compile_for.cache_clear()
    ((_, heads, length, dim),) = shapes
    assert (type(heads), type(dim)) == (int, int)
    assert isinstance(length, torch.SymInt)


@contextmanager
def cudnn_used(is_used: bool, /) -> Iterator[None]:
    """Let torch's attention use cuDNN's kernels meanwhile, or not."""
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(is_used)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(allowed)


def weigh_with_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    scaling: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as torch's kernels on a GPU do, by whole products."""
    num_new, num_kept = query.shape[2], key.shape[2]
    seen = attention._window_mask(num_new, num_kept, window or num_kept, query.device)
    heads = query.shape[1] // key.shape[1]
    scores = query.float() @ key.float().repeat_interleave(heads, 1).mT
    scores = (scores * query.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return attention.weigh(query, key, value, seen, scaling, None, None), scores.logsumexp(-1)


def attend_and_weigh(
    sizes: tuple[int, int, int | None],
    sinks: torch.Tensor | None,
    make: partial[torch.Tensor],
    dims: tuple[int, int] = (64, 64),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a chunk of a prompt attends to, and the same by whole products in float32."""
    num_new, num_kept, window = sizes
    query = make(2, 4, num_new, dims[0])
    key, value = (make(2, 2, num_kept + 8, dim) for dim in dims)
    module = SimpleNamespace(asked=Asked(window=window))
    start = num_kept - num_new
    got = attention._attend_up_to(module, query, key, value, start, num_kept, None, sinks)
    seen = attention._window_mask(num_new, num_kept, window or num_kept, query.device)
    query, key, value = (
        query.float(),
        key[:, :, :num_kept].float(),
        value[:, :, :num_kept].float(),
    )
    return got, attention.weigh(query, key, value, seen, None, None, sinks)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("sizes", LENGTHS)
def test_what_torch_makes_without_sinks_leaves_them_their_share(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int | None], has_sinks: bool
) -> None:
    monkeypatch.setattr(attention, "_attend_by_library", weigh_with_sums)
    make = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    got, expected = attend_and_weigh(sizes, make(4) if has_sinks else None, make)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("cudnn", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("sizes", [*LENGTHS, (768, 2048, None), (1000, 1500, 128)])
def test_torchs_kernels_attend_as_whole_products_do(
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int, int | None],
    has_sinks: bool,
    cudnn: bool,
) -> None:
    monkeypatch.setattr(attention, "attend_in_blocks", None)  # is not asked
    make = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    with cudnn_used(cudnn):
        got, expected = attend_and_weigh(sizes, make(4) if has_sinks else None, make)
    torch.testing.assert_close(got.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("capability", "dtype", "dim", "has_kernel"),
    [
        *(((8, 9), torch.bfloat16, 512, False), ((7, 5), torch.bfloat16, 512, True)),
        *(((8, 9), torch.float32, 512, True), ((8, 9), torch.bfloat16, 8, True)),
    ],
)
def test_blocks_serve_where_they_compile_and_torch_has_no_kernel(
    capability: tuple[int, int],
    dtype: torch.dtype,
    dim: int,
    has_kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of tensors on a CPU, for which torch has none of these kernels."""
    monkeypatch.setattr(attention, "compute_capability", lambda index: capability)
    query, key = torch.zeros(1, 4, 8, dim, dtype=dtype), torch.zeros(1, 2, 8, dim, dtype=dtype)
    assert attention._has_kernel(query, key, key, sees_all=True) == has_kernel


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(512, 512), (192, 128)])
@pytest.mark.parametrize("sizes", [(64, 64, None), (130, 260, None), (1000, 1500, 128)])
def test_heads_without_a_kernel_attend_in_blocks(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int | None], dims: tuple[int, int]
) -> None:
    """As on a GPU whose cuDNN knows no such heads."""
    monkeypatch.setattr(attention, "scaled_dot_product_attention", None)  # is not asked
    make = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    with cudnn_used(False):
        got, expected = attend_and_weigh(sizes, None, make, dims)
    torch.testing.assert_close(got.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_no_score_of_wide_heads_is_held() -> None:
    make = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    # of their own: torch cannot compile again for keys that are a view of the queries
    query, key, value = (make(1, heads, 4096, 512) for heads in (4, 2, 2))
    module = SimpleNamespace(asked=Asked())
    for _ in range(2):  # what compiling takes is not asked
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention._attend_up_to(module, query, key, value, 0, 4096, None, None)
        taken = torch.cuda.max_memory_allocated() - before
    assert taken < 2 * query.nbytes


def test_blocks_of_wide_heads_have_room_in_shared_memory() -> None:
    """As they compile: where programs have 99 KiB of it, and where they have 163 and more."""
    sizes = [(512, 2, 99 << 10), (320, 2, 163 << 10), (512, 4, 227 << 10)]
    blocks = [tuple(choose_wide_blocks(*size).values()) for size in sizes]
    assert blocks == [(32, 32, 1, 8), (64, 32, 2, 8), (32, 16, 2, 8)]


def test_warps_of_block_attention_have_registers_for_their_heads() -> None:
    """As blocks of these sizes compile: by fewer warps they keep 350 to 7,000 bytes a thread."""
    sizes = [(1, 64), (16, 64), (8, 128), (32, 128), (64, 128), (128, 128)]
    assert [choose_block_warps(*size) for size in sizes] == [2, 2, 2, 2, 4, 8]
    sizes = [(6, 256), (24, 256), (48, 256), (6, 512), (24, 512)]
    assert [choose_block_warps(*size) for size in sizes] == [4, 4, 8, 8, 8]
