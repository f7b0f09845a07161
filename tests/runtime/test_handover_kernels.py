"""The kernels that hand products over, against copies."""

from typing import Any

import pytest
import torch

from tests.runtime.bells import make_bell, require_one_bell, require_rung
from tests.runtime.interpreted import INTERPRETED, TARGETS, compile_ptx, need_triton, runs_kernels

DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(("num_rows", "length"), [(1, 40), (1, 2880), (3, 2048), (40, 5120)])
def test_inputs_come_whole_before_the_bell(num_rows: int, length: int) -> None:
    from offplan.runtime.forms.handover_kernels import hand_over

    torch.manual_seed(0)
    inputs = [
        torch.randn(length, num_rows, device=DEVICE).to(torch.float16).T,
        torch.randint(0, 99, (num_rows, 4), device=DEVICE),
        torch.rand(num_rows, 4, device=DEVICE).to(torch.float16),
    ]
    types = torch.float16, torch.int64, torch.float32
    bell = make_bell(DEVICE)
    for job, number in enumerate((3, 1, 0, 2), 1):
        memory = [torch.full_like(x, 77, dtype=t) for x, t in zip(inputs, types, strict=True)]
        memory = [each.contiguous() for each in memory[:number]]
        hand_over(inputs[:number], memory, bell._replace(job=job))
        require_rung(bell, job)
        for made, wanted in zip(memory, inputs, strict=False):
            assert torch.equal(made.to(wanted.dtype), wanted)


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("num", [1, 2880, 70000])
def test_what_the_cores_made_is_fetched(num: int) -> None:
    from offplan.runtime.forms.handover_kernels import fetch

    made = torch.randn(1, num, device=DEVICE).to(torch.float16)
    assert torch.equal(fetch(made), made)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles kernels")
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target: int) -> None:
    """For GPUs that are not here."""
    need_triton()
    from offplan.runtime.forms import handover_kernels

    kinds = dict.fromkeys(("a", "to_a", "source", "target", "c"), "*bf16")
    kinds |= {"b": "*i64", "to_b": "*i64", "to_c": "*fp32", "words": "*i32", "arrived": "*i32"}

    def compile_for(kernel: Any, **constants: Any) -> str:
        return compile_ptx(kernel, target, kinds, constants)

    nothing: dict[str, Any] = {"c": None, "to_c": None, "num_c": 0, "BLOCK": 2048}
    for constants in ({"BLOCK": 2048}, nothing):
        require_one_bell(compile_for(handover_kernels._hand_over, **constants))
    assert "entry" in compile_for(handover_kernels._fetch, BLOCK=2048)
