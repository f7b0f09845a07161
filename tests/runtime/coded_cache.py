"""A cache in FP8, a prompt that fills some of it, and attention to it by torch alone."""

from dataclasses import replace

import torch

from offplan.capabilities.way import OWN
from offplan.runtime.model.attention import weigh
from offplan.runtime.model.codes_scratch import Scratch
from tests.runtime.seen import find_seen

FP8 = replace(OWN, kv_cache_dtype="fp8")
PROMPT = torch.tensor([[number * number % 61 for number in range(23)]] * 2)
"""Of two sequences."""


def weigh_codes(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    scaling: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    sees: int,
    reach: int,
    *,
    modulus: int = 0,
) -> torch.Tensor:
    """What the kernel for codes computes, by the places that each query sees."""
    from offplan.runtime.model.coded_kernel import SEES

    made, where = [], position.flatten().tolist()
    for row, at in enumerate(where):
        first, stop = find_seen(SEES[sees], at, reach)
        seen = torch.ones(1, stop - first, dtype=torch.bool)
        places = torch.arange(first, stop) % (modulus or keys.shape[2])
        of = min(row, len(keys) - 1)
        key, value = (each[of : of + 1, :, places] for each in (keys, values))
        scratch = Scratch(8 * (key.numel() + value.numel()), key.device)
        given = *scratch.expand(key, value, query.dtype), seen, scaling, soft_cap, sinks
        made.append(weigh(query[row : row + 1, :, None], *given)[:, :, 0])
    return torch.cat(made)


def weigh_latents(
    query: torch.Tensor,
    query_rotary: torch.Tensor,
    latents: torch.Tensor,
    rotaries: torch.Tensor,
    position: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    scratch = Scratch(8 * (latents.numel() + rotaries.numel()), latents.device)
    kept, angles = scratch.expand(latents, rotaries, query.dtype)
    scores = scaling * (query @ kept.mT + query_rotary @ angles.mT)
    beyond = torch.arange(kept.shape[1]) > position.view(-1, 1, 1)
    return scores.masked_fill(beyond, -torch.inf).softmax(-1) @ kept
