"""SGLang's own prefetching offloader on a model without weights, with the GPU's streams faked."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock, patch

import torch
from sglang.srt.utils import offloader

NUM_WARMUPS = 2
"""Passes before a graph is captured.

Source: SGLang 0.5.23, ``FullCudaGraphBackend.capture_one``."""


def copied_layers(num_layers: int, step: int) -> tuple[list[int], list[int]]:
    """Return the layers that a pass copies in order, of a prompt and of a captured step."""
    copied: list[int] = []

    class Recorder:
        def __init__(self, layer: int) -> None:
            self.layer = layer

        def post_init(self) -> None:
            pass

        def create_device_tensor(self) -> torch.Tensor:
            copied.append(self.layer)
            return torch.zeros(1, 1, device="meta")

    def create(mode: str, module: torch.nn.Linear, param_name: str) -> Recorder:
        return Recorder(modules.index(module))

    def run() -> list[int]:
        copied.clear()
        for module in modules:
            module(torch.zeros(1, 1, device="meta"))
        return [*copied]

    modules = [torch.nn.Linear(1, 1, bias=False, device="meta") for _ in range(num_layers)]
    fakes: dict[str, Any] = {
        "is_current_stream_capturing": Mock(return_value=False),
        "current_stream": Mock(),
        "stream": lambda _: nullcontext(),
        "Event": Mock(),
    }
    with (
        patch.multiple(torch.cuda, **fakes),
        patch.object(offloader._BaseParamOffloader, "create", staticmethod(create)),
    ):
        offloaders = [
            offloader._ModuleOffloader("cpu", module, Mock(), ["weight"], set())
            for module in modules
        ]
        for index, module in enumerate(modules):
            offloader._hook_module_forward_for_offloader(index, module, offloaders, step)
        prefetching = offloader.OffloaderV2.__new__(offloader.OffloaderV2)
        prefetching.offloaders, prefetching.prefetch_step = offloaders, step
        prefetching.post_init()
        eager = [run() for _ in range(NUM_WARMUPS)][-1]
        fakes["is_current_stream_capturing"].return_value = True
        return eager, run()
