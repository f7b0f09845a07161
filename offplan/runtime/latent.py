"""Multi-head latent attention in decode: attend to the cached latents, never expand them.

transformers multiplies every cached latent by ``kv_b_proj`` at each step, so a step's work and
memory grow with batch x context. Here that matrix is absorbed into the one query instead.
Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offplan.runtime.kv_cache import Position


def absorb_expansions(model: nn.Module, position: Position) -> None:
    """Make every latent attention of ``model`` keep latents as they are in decode.

    transformers' latent attentions call ``expand_kv(latent, rotary)`` between cache and
    attention; in decode (``position.start`` is None) it now returns its arguments.
    """
    for module in model.modules():
        if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj"):
            own: Any = module.expand_kv
            module.expand_kv = _Expansion(own, position)  # type: ignore[assignment]


class _Expansion:
    def __init__(self, expand: Callable[..., Any], position: Position) -> None:
        self._expand = expand
        self._position = position

    def __call__(self, latent: torch.Tensor, rotary: torch.Tensor) -> Any:
        if self._position.start is None:
            return latent, rotary
        return self._expand_all(latent, rotary)

    @torch.compiler.disable  # it would be compiled again for every position of a chunk
    def _expand_all(self, latent: torch.Tensor, rotary: torch.Tensor) -> Any:
        return self._expand(latent, rotary)


def attend_latent(
    module: nn.Module,
    query: torch.Tensor,
    latent: torch.Tensor,
    rotary: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Attend from one new token to latents.

    ``query`` is [batch, heads, 1, nope + rope], ``latent`` [batch, 1, kept, rank], ``rotary``
    [batch, 1, kept, rope], ``mask`` [1, 1, 1, kept]. Returns [batch, 1, heads, value_dim].
    """
    heads, rank = query.shape[1], latent.shape[-1]
    rope = rotary.shape[-1]
    nope = query.shape[-1] - rope
    weight: Any = module.get_parameter("kv_b_proj.weight")
    weight = weight.view(heads, -1, rank)
    q_nope, q_rope = query[:, :, 0].split([nope, rope], dim=-1)
    # [heads, batch, nope] @ [heads, nope, rank]
    q_latent = torch.bmm(q_nope.transpose(0, 1), weight[:, :nope]).transpose(0, 1)
    kept, angles = latent[:, 0], rotary[:, 0]
    scores = _product(q_latent, kept.mT) + _product(q_rope, angles.mT)
    scores = scores.mul(scaling).masked_fill(~mask[:, 0], -torch.inf)
    shares = scores.softmax(-1).to(query.dtype)
    mixed = torch.bmm(shares, kept)
    out = torch.bmm(mixed.transpose(0, 1), weight[:, nope:].mT)
    return out.transpose(0, 1).unsqueeze(1)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Batched product in float32: scores rounded to bf16 would move the softmax by percents."""
    if a.is_cuda and a.dtype is not torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b).float()
