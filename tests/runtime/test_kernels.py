"""Our own kernels against plain products, and a model of bfloat16 that runs through all of them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM, DeepseekV2Config
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from offplan.kernel_sizes import EXPERT_MULTIPLE
from offplan.runtime.forms.experts import are_plain
from tests.runtime.conftest import LATENTS, SIZES
from tests.runtime.interpreted import HAS_GPU, INTERPRETED, need_triton, runs_kernels
from tests.runtime.plans import group, offload, open_session

DEVICE, DTYPE = ("cpu", torch.float16) if INTERPRETED else ("cuda", torch.bfloat16)
LIMITS = (232448, 132)
"""An H200's, for the interpreter: shared memory of a program, multiprocessors."""

needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no CUDA device here")

WIDE = {"hidden_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 8}
TOKENS = [(1, 2), (1, 1), (3, 2), (20, 2), (200, 2), (600, 2)]
LATENT_CASES = [(4, 0), (16, 130), (20, 499)]
LATENT_SIZES = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}


def random(*shape: int, device: str = DEVICE) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(DTYPE)


def make_experts(
    num_experts: int, hidden: int, width: int, *, device: str = DEVICE, **others: bool
) -> Any:
    form = {"has_bias": False, "is_transposed": False, "has_post_expert_norm": False} | others
    return SimpleNamespace(
        gate_up_proj=random(num_experts, 2 * width, hidden, device=device) / 8,
        down_proj=random(num_experts, hidden, width, device=device) / 8,
        num_experts=num_experts,
        has_gate=True,
        _is_expert_parallel=False,
        _apply_gate=lambda both: silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1],
        **form,
    )


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(("num_tokens", "num_chosen"), TOKENS)
def test_experts_equal_gathered_products(
    num_tokens: int, num_chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offplan.runtime.model import experts as ours

    if INTERPRETED:
        monkeypatch.setattr(ours, "gpu_limits", lambda index: LIMITS)
    torch.manual_seed(0)
    num_experts, hidden = 8, 64
    experts = make_experts(num_experts, hidden, width=48)
    assert are_plain(experts)
    tokens = random(num_tokens, hidden)
    chosen = torch.rand(num_tokens, num_experts, device=DEVICE).topk(num_chosen, -1).indices
    weights = torch.rand(num_tokens, num_chosen, device=DEVICE)
    got = ours.forward_experts(experts, tokens, chosen, weights)
    expected = ALL_EXPERTS_FUNCTIONS["batched_mm"](experts, tokens, chosen, weights)
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.002)


@pytest.mark.skipif(INTERPRETED, reason="asks no kernel")
@pytest.mark.parametrize(
    ("width", "others"),
    [(24, {}), (8, {}), (48, {"has_bias": True}), (48, {"is_transposed": True})],
)
def test_other_experts_are_left_to_transformers(width: int, others: dict[str, bool]) -> None:
    assert not are_plain(make_experts(2, 64, width, device="cpu", **others))


@pytest.mark.skipif(INTERPRETED, reason="asks no kernel")
@pytest.mark.parametrize(
    ("shared_bytes", "blocks", "tokens"),
    [
        (232448, (128, 128, 4), 64),
        (166912, (128, 128, 3), 32),
        (101376, (128, 128, 2), 32),
        (65536, (128, 64, 2), 16),
        (32768, (128, 32, 2), 16),
    ],
)
def test_blocks_fit_what_a_program_may_share(
    shared_bytes: int, blocks: tuple[int, int, int], tokens: int
) -> None:
    need_triton()
    from offplan.runtime.model.experts import choose_blocks
    from offplan.runtime.model.latent_kernel import choose_block

    assert choose_blocks(1408, 2048, 2, shared_bytes) == blocks
    assert choose_block(512 + 64, shared_bytes) == tokens


@pytest.mark.skipif(INTERPRETED, reason="asks no kernel")
def test_kernels_for_experts_know_the_sizes_that_memory_is_predicted_for() -> None:
    need_triton()
    from offplan.runtime.model.experts import block_size

    sizes = range(1, 200)
    known = [size for size in sizes if block_size(size)]
    assert known == [size for size in sizes if size % EXPERT_MULTIPLE == 0]


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(("heads", "position"), LATENT_CASES)
def test_latents_beyond_each_position_do_not_count(
    heads: int, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offplan.runtime.model import latent_kernel

    if INTERPRETED:
        monkeypatch.setattr(latent_kernel, "gpu_limits", lambda index: LIMITS)
    query, query_rotary = random(3, heads, 64), random(3, heads, 16)
    latents, rotaries = random(3, 500, 64), random(3, 500, 16)
    scores = query.float() @ latents.float().mT + query_rotary.float() @ rotaries.float().mT
    where = torch.tensor([position, position // 2, 0], device=DEVICE)
    beyond = torch.arange(500, device=DEVICE) > where[:, None]
    shares = (scores * 0.1).masked_fill(beyond[:, None], -torch.inf).softmax(-1)
    expected = (shares @ latents.float()).to(DTYPE)
    latents[beyond] = torch.nan
    got = latent_kernel.attend_filled(query, query_rotary, latents, rotaries, where, 0.1)
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("chunk", [4, 12])
def test_bfloat16_logits_equal_resident(chunk: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = DeepseekV2Config(**{**SIZES, **LATENTS, **WIDE, **LATENT_SIZES}, q_lora_rank=None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    prompts = torch.randint(0, 64, (3, 12))

    def run(*rules: object) -> list[torch.Tensor]:
        decision = offload(*rules, prefill_chunk=chunk)  # type: ignore[arg-type]
        logits: list[torch.Tensor] = []
        with open_session(tmp_path, decision, "cuda") as session, session.stream():
            for prompt in (prompts[:1], prompts):
                logits.append(session.prefill(prompt).clone())
                for _ in range(4):
                    logits.append(session.decode(logits[-1].argmax(-1, keepdim=True)).clone())
            return [entry.cpu() for entry in logits]

    resident = run()
    assert all(torch.isfinite(entry).all() for entry in resident)
    for decode in ("prefetch", "uva"):
        got = run(group(2, 1, "experts", decode=decode))
        assert all(torch.equal(a, b) for a, b in zip(got, resident, strict=True))


@pytest.mark.skipif(INTERPRETED, reason="asks no kernel")
@pytest.mark.parametrize("num_experts", [60, 32767, 32768, 70000])
def test_many_pairs_are_sorted_by_however_many_experts(num_experts: int) -> None:
    need_triton()
    from offplan.kernel_sizes import MAX_PAIRS
    from offplan.runtime.forms.gather import sort_pairs

    torch.manual_seed(0)
    chosen = torch.randint(num_experts, (2 * MAX_PAIRS,))
    chosen[:2] = torch.tensor([num_experts - 1, 0])
    _, order, starts = sort_pairs(chosen, num_experts)
    assert torch.equal(order.long(), chosen.argsort(stable=True))
    expected = torch.bincount(chosen, minlength=num_experts).cumsum(0)
    assert torch.equal(starts.long(), torch.cat([torch.zeros(1, dtype=torch.long), expected]))
