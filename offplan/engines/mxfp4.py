"""Experts stored as MXFP4, as engines lay them out for their kernels: with sizes rounded up.

Source: vLLM 0.33.0, ``fused_moe/oracle/mxfp4`` and ``third_party/triton_kernels``; SGLang 0.5.23,
``layers/quantization/mxfp4``.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from offplan.engines.names import EngineParameter
from offplan.forms.form import Kind

NOTE = (
    "experts stored as MXFP4 are counted as the largest that any of the engine's kernels for "
    "NVIDIA GPUs makes of them: which ones it takes depends on the GPU"
)


@dataclass(frozen=True)
class Kernels:
    """The sizes that kernels give experts, or the largest that any of several gives them."""

    hidden: int = 256
    """Weights that the hidden size is rounded up to a multiple of."""
    gate_up: int = 256
    """Weights that gate and up round the intermediate size up to a multiple of."""
    down: int = 256
    """Weights that down rounds it up to a multiple of."""
    bias_growth: int = 2
    """Times the bytes that biases are stored in: 2 where they are widened to float32."""
    code_growth: int = 1
    """Times the bytes of codes and scales: 4 where they are expanded to bfloat16."""

    def lay_out(self, each: EngineParameter) -> EngineParameter:
        """Return an engine's parameter that holds experts, with the bytes that it takes."""
        *_, rows, columns = (1, *each.parameters[0].shape)
        is_down, is_bias = ".w2_" in each.name, each.name.endswith("_bias")
        out, into = (self.hidden, self.down) if is_down else (self.gate_up, self.hidden)
        if is_bias:
            rows, columns, into = columns, 1, 1
        if not is_down:  # which has rows of gate and up, unless they are stored apart
            rows //= 2 // len(each.parameters)
        rounded = _round_up(rows, out) * _round_up(columns, into)
        growth = self.bias_growth if is_bias else self.code_growth
        return replace(each, nbytes=each.nbytes * rounded * growth // (rows * columns))


def lay_out_experts(
    parameters: Iterable[EngineParameter], kernels: Kernels
) -> dict[EngineParameter, EngineParameter]:
    """Return what kernels make of each parameter of experts stored as MXFP4, and of no other."""
    experts = [each for each in parameters if each.parameters[0].is_expert]
    coded = {each.layer for each in experts if each.parameters[0].form.kind is Kind.MXFP4}
    return {each: kernels.lay_out(each) for each in experts if each.layer in coded}


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
