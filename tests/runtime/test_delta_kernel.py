"""The gated delta rule by kernels, against a recurrence in float64 and transformers' own rule."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next

from offplan.runtime.model.delta_rule import EPSILON, fits, taking_additions
from tests.runtime.interpreted import (
    HAS_GPU,
    INTERPRETED,
    TARGETS,
    compile_kernel,
    need_triton,
    runs_kernels,
    spilled_bytes,
)

DEVICE = "cuda" if HAS_GPU else "cpu"
HALF = torch.float16 if INTERPRETED else torch.bfloat16
TOLERANCE = 2e-6
"""Part of the largest result that float32 differs by from float64. transformers' rule has 6e-7."""
CASES = {
    "one chunk": {"num_tokens": 32},
    "one token": {"num_tokens": 1},
    "a rest": {"num_tokens": 70, "batch": 2, "share": 2},
    "no state": {"num_tokens": 40, "has_state": False},
    "a state of 16 bits": {"num_tokens": 33, "state_dtype": HALF},
    "dims of no power of two": {"num_tokens": 50, "dims": (48, 80)},
    "large dims": {"num_tokens": 64, "dims": (128, 128), "share": 3},
    "three parts of keys": {"num_tokens": 40, "dims": (192, 16)},
    "strong decay": {"num_tokens": 70, "decay": 30.0},
    "no decay": {"num_tokens": 70, "decay": 0.0},
    "nearly equal keys": {"num_tokens": 100, "decay": 0.01, "spread": 0.01, "rate": 0.95},
    "rates up to two": {"num_tokens": 70, "decay": 0.1, "rate": 1.9},
}


def make(
    num_tokens: int,
    batch: int = 1,
    share: int = 1,
    dims: tuple[int, int] = (32, 16),
    decay: float = 1.0,
    rate: float = 0.5,
    spread: float = 1.0,
    has_state: bool = True,
    state_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Draw arguments of the rule; tokens are contiguous in queries and keys, as in models."""
    torch.manual_seed(0)
    heads, (key_dim, value_dim) = 2, dims

    def draw(num_heads: int, dim: int) -> torch.Tensor:
        drawn = torch.randn(batch, num_heads, dim, num_tokens, device=DEVICE)
        return drawn.to(dtype).permute(0, 3, 1, 2)

    key = draw(heads, key_dim)
    size = (batch, num_tokens, heads * share)
    state = torch.randn(batch, heads * share, key_dim, value_dim, device=DEVICE).to(state_dtype)
    return {
        "query": draw(heads, key_dim),
        "key": key[:, :1] + spread * (key - key[:, :1]),
        "value": draw(heads * share, value_dim).contiguous(),
        "g": -decay * torch.rand(size, device=DEVICE),
        "beta": (rate + 0.1 * torch.rand(size, device=DEVICE) - 0.05).to(dtype),
        "initial_state": state if has_state else None,
    }


def take_by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **others: Any
) -> Any:
    """Call transformers' rule, which in 5.17 takes a query and a key for each value head."""
    own: Any = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)
    share = value.shape[2] // key.shape[2]
    query, key = (each.repeat_interleave(share, 2) for each in (query, key))
    return own(query, key, value, **others)


def recur(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the rule token by token in float64."""
    share = value.shape[2] // key.shape[2]
    query, key = (each.double().repeat_interleave(share, 2) for each in (query, key))
    query, key = (each / (each.square().sum(-1, True) + EPSILON).sqrt() for each in (query, key))
    query = query * query.shape[-1] ** -0.5
    state = value.new_zeros(*value.shape[:1], value.shape[2], key.shape[-1], value.shape[-1])
    state = (state if initial_state is None else initial_state).double()
    made = []
    for at in range(value.shape[1]):
        state = state * g[:, at, :, None, None].double().exp()
        seen = (state * key[:, at, ..., None]).sum(-2)
        delta = (value[:, at].double() - seen) * beta[:, at, :, None].double()
        state = state + key[:, at, ..., None] * delta[..., None, :]
        made.append((state * query[:, at, ..., None]).sum(-2))
    return torch.stack(made, 1), state


def differ(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_are_as_near_to_float64_as_transformers_rule(case: str) -> None:
    from offplan.runtime.model.delta_kernel import take_tokens

    given = make(**CASES[case])  # type: ignore[arg-type]
    got = take_tokens(**given, epsilon=EPSILON)
    theirs = take_by_torch(**given, output_final_state=True, use_qk_l2norm_in_kernel=True)
    for ours, own, expected in zip(got, theirs, recur(**given), strict=True):
        assert ours.dtype == own.dtype == torch.float32
        assert ours.shape == own.shape
        assert differ(ours, expected) < TOLERANCE
        assert differ(own, expected) < TOLERANCE


@pytest.mark.gpu
@runs_kernels
def test_inputs_of_16_bits_are_computed_in_float32() -> None:
    from offplan.runtime.model.delta_kernel import take_tokens

    given = make(num_tokens=70, share=2, dtype=HALF)
    made, states = take_tokens(**given, epsilon=EPSILON)
    expected, expected_states = recur(**given)
    assert made.dtype == HALF
    torch.testing.assert_close(made, expected.to(HALF), rtol=0.01, atol=1e-5)
    assert differ(states, expected_states) < TOLERANCE


@pytest.mark.gpu
@runs_kernels
def test_a_text_in_spans_and_beside_another_text() -> None:
    from offplan.runtime.model.delta_kernel import take_tokens

    given = make(num_tokens=96, batch=2)
    whole = take_tokens(**given, epsilon=EPSILON)
    text = {name: each[1:] for name, each in given.items()}
    alone = take_tokens(**text, epsilon=EPSILON)
    assert all(torch.equal(a, b[1:]) for a, b in zip(alone, whole, strict=True))
    state, made = text.pop("initial_state"), []
    for begin in (0, 64):
        span = {name: each[:, begin : begin + 64] for name, each in text.items()}
        each, state = take_tokens(**span, initial_state=state, epsilon=EPSILON)
        made.append(each)
    assert torch.equal(torch.cat(made, 1), alone[0])
    assert torch.equal(state, alone[1])


@pytest.mark.gpu
@runs_kernels
def test_nothing_is_written_behind_a_tensor_or_read_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from offplan.runtime.model.delta_kernel import take_tokens

    behind: list[torch.Tensor] = []
    own: Any = torch.Tensor.new_empty

    def make_room(
        tensor: torch.Tensor, *size: Any, dtype: Any = None, device: Any = None
    ) -> torch.Tensor:
        if device is not None:  # the interpreter's own
            return own(tensor, *size, device=device)
        kind = torch.empty(*size, dtype=dtype or tensor.dtype, device="meta")
        room = torch.full((kind.numel() + 4096,), torch.nan, dtype=kind.dtype, device=DEVICE)
        behind.append(room[kind.numel() :])
        return room[: kind.numel()].view(kind.shape)

    given = make(num_tokens=70, share=2, dims=(48, 80))
    expected = take_tokens(**given, epsilon=EPSILON)
    monkeypatch.setattr(torch.Tensor, "new_empty", make_room)
    got = take_tokens(**given, epsilon=EPSILON)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert len(behind) == 8
    assert all(each.isnan().all() for each in behind)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA device here")
def test_the_rule_on_a_gpu_is_captured() -> None:
    rule = taking_additions(take_by_torch)
    given = make(num_tokens=130, batch=2, share=2, dims=(128, 128), dtype=HALF)
    places = [given.pop(name) for name in ("query", "key", "value")]

    def take() -> tuple[torch.Tensor, torch.Tensor | None]:
        return rule(*places, **given, output_final_state=True, use_qk_l2norm_in_kernel=True)

    expected = take()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = take()
    graph.replay()
    theirs = take_by_torch(*places, **given, output_final_state=True, use_qk_l2norm_in_kernel=True)
    for ours, eager, own in zip(got, expected, theirs, strict=True):
        assert ours is not None
        assert eager is not None
        assert torch.equal(ours, eager)
        torch.testing.assert_close(ours, own, rtol=0.01, atol=1e-5)


@pytest.mark.skipif(INTERPRETED, reason="asks no kernel")
def test_other_sizes_are_left_to_transformers() -> None:
    assert fits(HALF, 4, 128, 128)
    assert fits(torch.float32, 4, 96, 192)
    assert not fits(HALF, 4, 8, 16)
    assert not fits(HALF, 4, 16, 24)
    assert not fits(HALF, 4, 16, 272)
    assert not fits(torch.float64, 4, 16, 16)
    assert not fits(HALF, 2**16 + 1, 16, 16)


KEPT = ("queries", "keys", "seen_keys", "new_values", "pairs", "kept")
STRIDES = ("query", "key", "value")
FEW_BYTES = 32
"""Bytes of a thread that may not find a register."""
SHARED_BYTES = 101376
"""Shared memory that compute capabilities 8.9 and 12.0 have for a program."""


def compile_solving(target: int, dim: int, dtype: str, contiguous: str) -> Any:
    from offplan.runtime.model import delta_kernel

    kinds = dict.fromkeys((*KEPT, "decays"), "*fp32") | {"scale": "fp32", "epsilon": "fp32"}
    kinds |= dict.fromkeys((*STRIDES, "rates"), f"*{dtype}")
    sizes = {"KEYS": dim, "VALUES": dim, "CHUNK": delta_kernel.CHUNK}
    sizes |= dict.fromkeys(("BLOCK_K", "BLOCK_V"), min(dim, delta_kernel.SOLVED_DIMS))
    sizes |= {f"{name}_{contiguous}": 1 for name in STRIDES}
    others = ("batch", "head", *{"token", "step"} - {contiguous})
    aligned = [f"{name}_{of}" for name in STRIDES for of in others]
    aligned += [name for name in kinds if name not in ("scale", "epsilon")]
    aligned += ["key_dim", "value_dim"]
    kernel: Any = delta_kernel.solve_chunk
    return compile_kernel(kernel, target, kinds, sizes, {"num_warps": 4}, aligned)


def compile_scan(target: int, dim: int) -> Any:
    from offplan.runtime.model import delta_kernel

    kinds = dict.fromkeys((*KEPT, "initial", "final"), "*fp32") | {"out": "*bf16"}
    sizes = {"KEYS": dim, "VALUES": dim, "CHUNK": delta_kernel.CHUNK, "HAS_INITIAL": True}
    sizes |= {"BLOCK_K": min(dim, delta_kernel.STATE_KEYS), "BLOCK_V": delta_kernel.STATE_VALUES}
    kernel: Any = delta_kernel.scan_chunks
    aligned = (*kinds, "key_dim", "value_dim")
    options = delta_kernel.scanning_options(dim)
    return compile_kernel(kernel, target, kinds, sizes, options, aligned)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles kernels")
@pytest.mark.parametrize("target", TARGETS)
def test_gpus_have_registers_and_shared_memory_for_the_kernels(target: int, tmp_path: Path) -> None:
    """Heads of 128 elements, as published models have, and of the fewest and most there may be."""
    need_triton()
    kinds = (("bf16", "token"), ("bf16", "step"), ("fp32", "token"))
    made = [compile_solving(target, 128, *kind) for kind in kinds]
    made += [compile_solving(target, dim, "bf16", "token") for dim in (16, 256)]
    made += [compile_scan(target, dim) for dim in (16, 128, 256)]
    spilled = [spilled_bytes(each, target, tmp_path) for each in made]
    assert max(spilled) <= FEW_BYTES, spilled
    assert max(each.metadata.shared for each in made) <= SHARED_BYTES


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles kernels")
def test_gpus_without_tf32_multiply_float32(tmp_path: Path) -> None:
    need_triton()
    made = [compile_solving(75, 128, kind, "token") for kind in ("fp16", "bf16")]
    made += [compile_solving(75, dim, "fp16", "token") for dim in (16, 256)]
    made += [compile_scan(75, dim) for dim in (16, 128, 256)]
    assert not any("tf32" in each.asm["ptx"] for each in made)
    assert max(spilled_bytes(each, 75, tmp_path) for each in made) <= 256
    assert max(each.metadata.shared for each in made) <= 48 << 10
