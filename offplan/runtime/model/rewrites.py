"""Parts of models that offplan computes in another way than transformers' own modules do.

- DeepSeek-V3.2's indexer chooses the tokens that each one sees. If a text has no more tokens than
  that, it chooses all, and attention is as without it. Such texts run, and longer ones are refused
  (``runtime.refusal.refuse_long_texts``).
- A family that computes attention in a method of its own is handed to transformers' interface.
- Llama 4's tokens pass those experts alone that they are sent to. transformers multiplies every
  token by every expert, by most of them as zeros.
- Rotary embeddings that transformers writes with complex numbers are compiled as real ones. The
  compiler makes no code of its own for complex products. Each is a kernel, and so is every copy
  around it, 5 us a layer and decode step on an H200.
- Linear attention by the gated delta rule takes long prompts in spans. It goes on from the state
  that the cache keeps. On a GPU ``delta_kernel`` takes a prompt's tokens. Passes that check drafts
  compute it by ``delta_rule``, and leave the state.
  Source: Gated DeltaNet (arXiv 2412.06464).
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from offplan.checkpoint.model import Model
from offplan.kernel_sizes import SPAN_TOKENS
from offplan.runtime.model.delta_rule import Additions, serves, taking_additions
from offplan.runtime.refusal import refuse
from offplan.transformers_private import (
    CACHES,
    CONVOLUTION,
    GATED_DELTA_NETS,
    RULE_OF_MANY,
    Llama4TextExperts,
    Llama4TextMoe,
    chosen_attention,
    compute_by_torch,
    let_experts_be_chosen,
    modeling_deepseek_v2,
    use_experts_implementation,
)


def leave_out_indexers(skeleton: PreTrainedModel, model: Model) -> None:
    """Have attentions see all of a text whose indexers would choose all of it.

    Raises CheckpointError if transformers' class would choose another number of tokens.
    """
    expected = model.architecture.index_topk
    if expected is None:
        return
    chosen = skeleton.config.get_text_config().index_topk
    if chosen != expected:
        raise refuse(
            f"{model.source}: found an index_topk of {chosen!r} in transformers' class, expected "
            f"{expected}: say a number of tokens in config.json"
        )
    for module in skeleton.modules():
        if hasattr(module, "indexer"):
            attention: Any = module
            if attention.indexer is None:  # it sees what was chosen for the layer before it
                attention.indexer = _choose_nothing
            else:
                attention.indexer.forward = _choose_nothing


def _choose_nothing(*arguments: Any, **others: Any) -> None:
    """Stand in for an indexer; attention of a name that transformers does not know asks no more."""


INLINED_TYPES = ("codegen", "gpt_neox_japanese", "gptj")
"""Model types whose attention calls ``self._attn(query, key, value, mask)``. It divides scores by
the root of the heads' size and hides what the mask says, nothing else.

Source: transformers 5.23, ``GPTJAttention`` and those like it.
"""
_INTERFACE = AttentionInterface()


def hand_over(skeleton: PreTrainedModel) -> None:
    """Have such attentions of a model call the attention that its config names."""
    if skeleton.config.model_type in INLINED_TYPES:
        for module in skeleton.modules():
            if hasattr(module, "_attn"):
                vars(module)["_attn"] = partial(_attend, module, skeleton.config)


def _attend(
    module: nn.Module,
    config: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
) -> tuple[torch.Tensor, None]:
    """Return [batch, heads, new, dim] for tensors of this layout; rotary queries may be wider."""
    attend = _INTERFACE.get_interface(chosen_attention(config), None)
    out, _ = attend(module, query.to(value.dtype), key, value, attention_mask)
    return out.transpose(1, 2), None


@use_experts_implementation(is_transposed=True)
class _Experts(Llama4TextExperts):
    """The same weights, multiplied as transformers is told to multiply all families' experts."""


class _Routed(Llama4TextMoe):
    """Weighs what goes into an expert, not what comes out of it, as the family does."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send hidden states, [..., hidden], through their experts and the shared one.

        Returns [tokens, hidden] and the router's logits, [tokens, experts].
        """
        hidden = hidden_states.reshape(-1, self.hidden_dim)
        _, logits = self.router(hidden)
        scores, chosen = logits.topk(self.top_k, dim=1)
        weights = scores.float().sigmoid().to(hidden.dtype).unsqueeze(-1)
        pairs = (hidden.unsqueeze(1) * weights).flatten(0, 1)
        made = self.experts(pairs, chosen.view(-1, 1), torch.ones_like(weights).view(-1, 1))
        out = self.shared_expert(hidden) + made.view(-1, self.top_k, self.hidden_dim).sum(1)
        return out, logits


def route(skeleton: PreTrainedModel) -> None:
    """Have Llama 4's layers in a model on the meta device multiply chosen experts alone."""
    layers: list[Any] = [part for part in skeleton.modules() if type(part) is Llama4TextMoe]
    for layer in layers:
        layer.__class__ = _Routed
        with torch.device("meta"):
            layer.experts = _Experts(skeleton.config.get_text_config()).to(skeleton.dtype)
    if layers:
        let_experts_be_chosen(skeleton)


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


def find_linear(layers: Iterable[nn.Module]) -> list[nn.Module | None]:
    """Return each layer's linear attention, None if it has none that is known here."""
    return [
        next((part for part in layer.modules() if type(part).__name__ in GATED_DELTA_NETS), None)
        for layer in layers
    ]


def may_be_linear(layers: Iterable[nn.Module]) -> bool:
    """Return True if a class of these layers may have linear attention, be it not in these."""
    modules = {type(layer).__module__ for layer in layers}
    return any(vars(sys.modules[name]).keys() & GATED_DELTA_NETS for name in modules)


def take_in_spans(layers: Iterable[nn.Module]) -> None:
    """Have linear attentions take prompts in spans.

    They compute by transformers' code in torch, with ``delta_rule`` in place of its rule for many
    tokens, and ``joining_taps`` in that of its convolution. Raises CheckpointError if that code is
    not found.
    """
    linear: Any
    replaced = {RULE_OF_MANY: taking_additions, CONVOLUTION: joining_taps}
    for linear in filter(None, find_linear(layers)):
        if not compute_by_torch(linear, replaced):
            raise refuse(
                f"{type(linear).__name__} is a linear attention whose code in torch is not found "
                f"in transformers {transformers.__version__}"
            )
        own: Any = type(linear)
        linear.__class__ = _class_in_spans(own)


class _InSpans(nn.Module):
    """Stands before the class of a linear attention, whose forward it calls."""

    head_k_dim: int
    head_v_dim: int

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Mix new tokens, [batch, new, hidden size], with those before; returns the same shape."""
        made: torch.Tensor
        if hidden_states.shape[1] == 1:
            made = super().forward(hidden_states, **arguments)
            return made
        (given,) = (arguments[name] for name in CACHES if name in arguments)
        state = given.layers[self.layer_idx]
        additions: Additions | None = getattr(state, "additions", None)
        if additions is not None:
            made = super().forward(hidden_states, additions=additions, **arguments)
            return made
        is_served = serves(hidden_states, self.head_k_dim, self.head_v_dim)
        if is_served and hidden_states.shape[1] <= SPAN_TOKENS:  # an operator, which has no loop
            made = super().forward(hidden_states, **arguments)
            return made
        return self.take(hidden_states, **arguments)

    @torch.compiler.disable  # a loop over chunks, where torch's rule has one, would be unrolled
    def take(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Compute the same span by span."""
        own, spans = super().forward, hidden_states.split(SPAN_TOKENS, dim=1)
        return torch.cat([own(span, **arguments) for span in spans], 1)


@cache
def joining_taps(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return transformers' causal convolution, which torch.compile joins with what is around it.

    Of a prompt it is a sum over the few inputs of each output. torch's convolution of bf16 took 119
    us on an H200 for 1,024 tokens of 10,240 channels, whose bytes take 10. Passes that check drafts
    keep that, to round as steps do.
    """

    @wraps(own)
    def convolve(
        hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
        activation: str | None = None, **others: Any,
    ) -> torch.Tensor:  # fmt: skip
        is_prompt = "additions" not in others and torch.compiler.is_compiling()
        if not is_prompt or bias is not None or activation != "silu":
            made: torch.Tensor = own(hidden_states, weight, bias, activation, **others)
            return made
        num_tokens, size = hidden_states.shape[-1], weight.shape[-1]
        inputs = functional.pad(hidden_states.to(weight.dtype), (size - 1, 0)).float()
        summed = torch.zeros_like(hidden_states, dtype=torch.float32)
        for place, tap in enumerate(weight.float().unbind(-1)):
            summed = summed + inputs[..., place : place + num_tokens] * tap[:, None]
        return functional.silu(summed.to(weight.dtype)).to(hidden_states.dtype)

    return convolve


@cache  # layers of two classes would be compiled twice
def _class_in_spans(own: Any) -> Any:
    return type(own.__name__, (_InSpans, own), {})
