"""What benchmarks of vLLM ask of the GPU before vLLM starts."""

import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.vllm_worker import read_used_bytes


def test_memory_in_use_is_read_without_initialising_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """After that vLLM could not fork its engine, and would import everything anew."""

    def refuse() -> None:
        pytest.fail("CUDA was initialised")

    used = [3, 4]
    opened: list[int] = []
    driver = SimpleNamespace(
        nvmlInit=lambda: opened.append(1),
        nvmlShutdown=lambda: opened.pop(),
        nvmlDeviceGetHandleByIndex=lambda place: place,
        nvmlDeviceGetMemoryInfo=lambda place: SimpleNamespace(used=used[place]),
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert read_used_bytes() == [4, 3]
    assert not opened
