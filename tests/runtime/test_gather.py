"""How the kernel is launched that copies chosen experts, without a GPU."""

from typing import Any

import pytest
import torch

from offplan.forms.form import Component
from tests.runtime.interpreted import need_triton


def test_the_kernel_takes_no_tuple(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile ends its graph there, and logits in place were no longer the resident ones."""
    need_triton()
    from offplan.runtime.forms import gather

    launched: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: object) -> Any:
            return lambda *arguments, **_: launched.extend(arguments)

    monkeypatch.setattr(gather, "_gather", Kernel())
    parts = {
        Component.WEIGHT: torch.zeros(4, 64, 32, dtype=torch.uint8),
        Component.SCALE: torch.zeros(4, 64, 1, dtype=torch.bfloat16),
    }
    order, starts = torch.arange(2), torch.tensor([0, 1, 1, 1, 2])
    gathered, _ = gather.gather(parts, torch.tensor([0, 3]), order, starts)
    seen = [each.data_ptr() for each in launched if isinstance(each, torch.Tensor)]
    assert all(each is None or isinstance(each, int | torch.Tensor) for each in launched)
    assert {value.data_ptr() for value in gathered.values()} <= set(seen)
