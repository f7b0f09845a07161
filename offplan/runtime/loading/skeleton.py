"""The transformers model without its weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from offplan.checkpoint.model import Model
from offplan.checkpoint.transformers_config import build_config, cannot_build
from offplan.runtime.model.attention import ATTENTION_NAME
from offplan.runtime.model.probe import PROBE, probe_attention
from offplan.runtime.refusal import refuse
from offplan.runtime.transformers_private import choose_attention


def build_skeleton(model: Model) -> PreTrainedModel:
    """Build the model class for the checkpoint's config with every tensor on the meta device.

    Raises CheckpointError for an architecture or a stored type that this runtime cannot run.
    """
    if model.architecture.is_quantised:
        raise refuse(f"{model.source} is quantised; `run` executes bf16, f16 and f32 checkpoints")
    config = build_config(model.config, model.source)
    if model.tied:  # a head that is stored is used, whatever the config says
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    try:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, model.dtype), attn_implementation=ATTENTION_NAME
            )
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
            raise refuse(f"{model.source} chooses its attention in a way of its own") from None
        raise cannot_build(model.source, error) from error
    if model.architecture.num_sharing_layers:
        raise refuse(f"{model.source} has layers that share their keys and values")
    _check_attention(skeleton, model.source)
    # a model cut short (to time its layers) has fewer layers than its config says
    layers = decoder_layers(skeleton)
    del layers[len(model.layers) :]
    _keep_in_float32(skeleton, model)
    with _experts_without_weights(skeleton, model):
        for module, asked in probe_attention(skeleton, layers).items():
            vars(module)["asked"] = asked
    choose_attention(skeleton, ATTENTION_NAME)
    return skeleton.eval().requires_grad_(False)


def _keep_in_float32(skeleton: PreTrainedModel, model: Model) -> None:
    """Widen what stays in float32 in a model that is computed in a shorter type.

    Source: transformers 5.23, ``_keep_in_fp32_modules_strict`` and ``_keep_in_fp32_modules``.
    """
    keeps = partial(model.architecture.keeps_float32, dtype=model.compute_dtype)
    for name, tensor in [*skeleton.named_parameters(), *skeleton.named_buffers()]:
        if tensor.is_floating_point() and keeps(name):
            tensor.data = tensor.data.float()


def _check_attention(skeleton: PreTrainedModel, source: str) -> None:
    """Raise CheckpointError for layers that need more than the runtime's attention and cache."""
    text = skeleton.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise refuse(
            f"{source} has layers of the types {sorted(unknown)}; `run` knows full and sliding "
            "attention"
        )
    # not every config names them: DeepSeek-V3.2's indexers choose what attention sees
    if indexers := [name for name, _ in skeleton.named_modules() if name.endswith(".indexer")]:
        raise refuse(
            f"{source} has sparse attention ({indexers[0]}), whose keys have a cache of their own; "
            "`run` knows full and sliding attention"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    if changing := {part.get("rope_type") for part in ropes} & {"dynamic", "longrope"}:
        raise refuse(
            f"{source} has rotary embeddings of the type {changing.pop()}, which change with the "
            "text's length; `run` knows fixed ones"
        )


@contextmanager
def _experts_without_weights(skeleton: PreTrainedModel, model: Model) -> Iterator[None]:
    """Have routed experts give shapes alone; raises CheckpointError where that cannot be chosen."""
    if model.experts is None:
        yield
        return
    try:
        skeleton.set_experts_implementation("grouped_mm")
    except ValueError:
        raise refuse(
            f"{model.source} has experts that transformers multiplies in a way of their own"
        ) from None
    skeleton.set_experts_implementation(PROBE)
    yield
    skeleton.set_experts_implementation("grouped_mm")


def decoder_layers(skeleton: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder's layers, in order; raises CheckpointError where they are elsewhere."""
    layers = getattr(skeleton.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise refuse(
            f"{type(skeleton).__name__} keeps its layers where `run` does not look (expected a "
            "module list named layers)"
        )
    return layers
