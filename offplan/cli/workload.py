"""What a plan's workload runs on: random tokens and a device."""

from typing import TYPE_CHECKING

import torch

from offplan.checkpoint.config import read_count, text_config
from offplan.errors import InputError

if TYPE_CHECKING:
    from offplan.checkpoint.model import Model
    from offplan.plan import Plan


def random_prompt(plan: "Plan", model: "Model") -> torch.Tensor:
    """The plan's workload on random tokens, the same ones every time; int64, [batch, tokens].

    Raises InputError for a model whose vocabulary is not known.
    """
    vocabulary = read_count(text_config(model.config), "vocab_size")
    if vocabulary is None:
        raise InputError(f"the config of {model.source} has no vocab_size to draw tokens from")
    shape = (plan.workload.batch, plan.workload.prompt_tokens)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, shape, generator=generator)


def find_device(name: str | None) -> torch.device:
    """The device of this name, or the best there is; raises InputError if it is not here."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"{name!r} is not a device: write cuda, cuda:1 or cpu") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"there is no {name} here: {torch.cuda.device_count()} GPUs are visible")
    if device.type not in ("cuda", "cpu"):
        raise InputError(f"offplan runs on cuda and cpu; {name} is neither")
    return device


def device_name(device: torch.device) -> str:
    """What people call it: ``NVIDIA H200``, ``CPU``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
