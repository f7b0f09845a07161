"""Rotary embeddings that transformers writes with complex numbers, compiled as real ones.

The compiler makes no code of its own for complex products. Each is a kernel, and so is every copy
around it, 5 us a layer and decode step on an H200.
"""

import inspect
from collections.abc import Iterable
from functools import cache

import torch
from torch import nn

from offplan.transformers_private import modeling_deepseek_v2


def apply_rotary_emb(
    xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn neighbouring pairs of queries and keys, [batch, heads, tokens, dim], by their angles.

    ``freqs_cis`` is complex, [batch, tokens, dim / 2]. Does what DeepSeek-V2's function of this
    name does, but for the last bits.
    """
    real, imaginary = torch.view_as_real(freqs_cis.unsqueeze(1)).unbind(-1)

    def turn(x: torch.Tensor) -> torch.Tensor:
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((a * real - b * imaginary, a * imaginary + b * real), -1)
        return turned.flatten(-2).type_as(x)

    return turn(xq), turn(xk)


def compile_as_real(layers: Iterable[nn.Module]) -> None:
    """Have such layers turn by real numbers where they are compiled from here on.

    Others of DeepSeek-V2 in the process do too; what runs eagerly does not.
    """
    if any(type(layer).__module__ == modeling_deepseek_v2.__name__ for layer in layers):
        _substitute()


@cache  # torch refuses a second substitute
def _substitute() -> None:
    own = modeling_deepseek_v2.apply_rotary_emb
    if inspect.signature(own).parameters.keys() == {"xq", "xk", "freqs_cis"}:
        torch.compiler.substitute_in_graph(own)(apply_rotary_emb)
