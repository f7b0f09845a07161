"""Multi-head latent attention: cached latents are expanded once a prompt, and never in decode.

transformers multiplies every cached latent by ``kv_b_proj`` in each pass, so a pass's work and
memory grow with batch x context. Here a prompt's chunks expand their own tokens alone, and in
decode that matrix is absorbed into the one query.
Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offplan.row_cache import SCALE_BYTES
from offplan.runtime.forms.stored import weight_of
from offplan.runtime.model.cache_codes import is_coded
from offplan.runtime.model.cache_mask import Way


def keep_latents(model: nn.Module) -> "list[Expansion]":
    """Have every latent attention of ``model`` pass its cached latents on as they are.

    transformers' latent attentions call ``expand_kv(latent, rotary)`` between cache and
    attention. It is left to ours, which expands where that pays: by what is returned.
    """
    expansions = []
    for module in model.modules():
        if expands_latents(module):
            attention: Any = module
            attention.expansion = Expansion(attention.expand_kv)
            attention.expand_kv = _pass_on
            expansions.append(attention.expansion)
    return expansions


def expands_latents(module: nn.Module) -> bool:
    """Return True for a latent attention, which expands what it caches."""
    return hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj")


def keeps_latents(module: nn.Module) -> bool:
    """Return True if ``keep_latents`` has prepared this attention."""
    return hasattr(module, "expansion")


Expanded = tuple[torch.Tensor, torch.Tensor]
"""Keys, [batch, heads, tokens, nope + rope], and values, [batch, heads, tokens, value_dim]."""


class Expansion:
    """One layer's latents as keys and values, which grow while the chunks of a prompt pass it."""

    def __init__(self, expand: Callable[[torch.Tensor, torch.Tensor], Expanded]) -> None:
        """Expand by ``expand``, which takes latents and their rotary parts."""
        self._expand = expand
        self._kept: Expanded | None = None
        """Keys and values of the whole prompt: memory of each chunk's own size would not serve the
        next one."""

    def extend(
        self, latents: torch.Tensor, rotaries: torch.Tensor, start: int, num_tokens: int
    ) -> Expanded:
        """Expand the tokens from ``start`` on; return all of the prompt's until there.

        ``latents`` is [batch, 1, kept, latent] and ``rotaries`` [batch, 1, kept, rope], both from
        the prompt's first token on, ``num_tokens`` its length. Chunks come in order; the first one
        expands what the cache has kept before it as well.
        """
        stop = latents.shape[2]
        if self._kept is None:
            start = 0
        new = self._expand(latents[:, :, start:], rotaries[:, :, start:])
        if not start and stop == num_tokens:
            return new
        if not start:
            keys, values = (
                part.new_empty(*part.shape[:2], num_tokens, part.shape[3]) for part in new
            )
            self._kept = keys, values
        assert self._kept is not None
        for kept, part in zip(self._kept, new, strict=True):
            kept[:, :, start:stop] = part
        keys, values = (kept[:, :, :stop] for kept in self._kept)
        if stop == num_tokens:
            self._kept = None
        return keys, values

    def invalidate(self) -> None:
        """Give up a prompt that did not end."""
        self._kept = None


def _pass_on(latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latent, rotary


def attend_latent(
    module: nn.Module,
    query: torch.Tensor,
    latent: torch.Tensor,
    rotary: torch.Tensor,
    filled: torch.Tensor,
    scaling: float,
    way: Way,
) -> torch.Tensor:
    """Attend from a step's new tokens to latents.

    ``query`` is [batch, heads, new, nope + rope], ``latent`` [batch, 1, kept, latent], ``rotary``
    [batch, 1, kept, rope], or codes of both; ``new`` is 1 or ``batch`` is. ``filled`` is a mask,
    [batch, 1, new, kept], or, as ``way`` says, the last filled positions. Returns [batch, new,
    heads, value_dim].
    """
    scale_bytes = SCALE_BYTES if is_coded(latent) else 0
    _, heads, num_new, _ = query.shape
    latent_dim, rope = latent.shape[-1] - scale_bytes, rotary.shape[-1] - scale_bytes
    nope = query.shape[-1] - rope
    expanding: Any = module.get_submodule("kv_b_proj")
    weight = weight_of(expanding, query.dtype).view(heads, -1, latent_dim)
    rows = query[:, :, 0] if num_new == 1 else query[0].transpose(0, 1)
    q_nope, q_rope = rows.split([nope, rope], dim=-1)
    # [heads, rows, nope] @ [heads, nope, latent]
    q_latent = torch.bmm(q_nope.transpose(0, 1), weight[:, :nope]).transpose(0, 1)
    kept, angles = latent[:, 0], rotary[:, 0]
    if way is Way.MASK:
        is_seen = filled[:, 0]
        if num_new > 1:  # all of them read one row
            q_latent, q_rope = (part.flatten(0, 1)[None] for part in (q_latent, q_rope))
            is_seen = is_seen.repeat_interleave(heads, 1)
        scores = _product(q_latent, kept.mT) + _product(q_rope, angles.mT)
        scores = scores.mul(scaling).masked_fill(~is_seen, -torch.inf)
        mixed = torch.bmm(scores.softmax(-1).to(kept.dtype), kept)
        mixed = mixed.view(-1, heads, latent_dim)
    else:
        # both need triton, so a GPU
        if is_coded(kept):
            from offplan.runtime.model.coded_kernel import attend_latent_codes as attend
        else:
            from offplan.runtime.model.latent_kernel import attend_filled as attend

        mixed = attend(q_latent.contiguous(), q_rope.contiguous(), kept, angles, filled, scaling)
    out = torch.bmm(mixed.transpose(0, 1), weight[:, nope:].mT).transpose(0, 1)
    return out.unsqueeze(1 if num_new == 1 else 0)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply batches in float32: scores rounded to bf16 would move the softmax by percents."""
    if a.is_cuda and a.dtype is not torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b).float()
