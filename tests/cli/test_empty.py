"""Tensors without elements, and workloads of one token, are planned like others."""

from itertools import product
from pathlib import Path

import pytest

from tests.checkpoint.files import DENSE_CONFIG, dense_shapes, write_folder
from tests.cli import CLI
from tests.tiers import each_value_once

ONE_TOKEN = ("--prompt-tokens", 1, "--output-tokens", 1, "--context", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "further"),
    each_value_once(
        product(
            ["no such part", "up_proj", "q_proj", "embed", "lm_head"],
            [(), ONE_TOKEN, ("--for", "vllm"), ("--frontier",)],
        )
    ),
)
def test_empty_tensors(cli: CLI, tmp_path: Path, part: str, further: tuple[object, ...]) -> None:
    shapes = {
        name: ("BF16", (0, 8)) if part in name else shape for name, shape in dense_shapes().items()
    }
    folder = write_folder(tmp_path / "model", DENSE_CONFIG, {"model.safetensors": shapes})
    machine = ("--machine", "cpu", "--host-memory", "1GiB")
    assert cli("plan", folder, *machine, *further).code == 0
    for gpu_memory in ("256KiB", "3KiB", "1KiB", "0"):
        code, _, err = cli("plan", folder, *machine, "--gpu-memory", gpu_memory, *further)
        assert code in (0, 3), err
