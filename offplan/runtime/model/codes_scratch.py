"""Memory in which the values of a cache's codes are made, one layer's at a time."""

import torch

from offplan.row_cache import SCALE_BYTES
from offplan.runtime.model.cache_codes import BITS, decode_to, scales_of


class Scratch:
    """Memory for the values of one layer's codes, which the next layer overwrites."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def expand(
        self, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the values of keys' and values' codes, [batch, heads, tokens, dim] of a ``dtype``.

        What an earlier call made is gone.
        """
        memory, made = self.memory.view(dtype), []
        for kept in (keys, values):
            shape = *kept.shape[:-1], kept.shape[-1] - SCALE_BYTES
            size = torch.Size(shape).numel()
            part, memory = memory[:size].view(shape), memory[size:]
            if kept.is_cuda and not torch.compiler.is_compiling():  # what is compiled is fused
                from offplan.runtime.model.codes_kernel import expand_codes  # needs triton

                whole = BITS[torch.float32]
                expand_codes(kept, part, whole.shift, whole.mask, whole.power)
            else:
                decode_to(part, kept[..., :-SCALE_BYTES], scales_of(kept))
            made.append(part)
        return made[0], made[1]
