"""The transformers model without its weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from offplan.checkpoint.config import text_config
from offplan.checkpoint.jsontext import quote
from offplan.checkpoint.model import Model
from offplan.checkpoint.transformers_config import build_config, cannot_build
from offplan.runtime.model.attention import ATTENTION_NAME
from offplan.runtime.model.frequencies import hold_frequencies
from offplan.runtime.model.probe import PROBE, check_rings, probe_attention
from offplan.runtime.model.rewrites import (
    INLINED_TYPES,
    find_linear,
    hand_over,
    leave_out_indexers,
    route,
    take_in_spans,
)
from offplan.runtime.model.routers import choose_by_kernel
from offplan.runtime.refusal import refuse
from offplan.transformers_private import (
    choose_attention,
    complete_outputs,
    cut_by_constants,
    on_meta,
)

LAYER_LISTS = ("layers", "h")
"""Names of the list of a decoder's layers. Where encoders keep theirs, ``layer``, positions count
from the padding's (RoBERTa)."""


_LAYERS = "offplan_layers"
_STORED = "offplan_stored"


def build_skeleton(model: Model) -> PreTrainedModel:
    """Build the model class for the checkpoint's config with every tensor on the meta device.

    Raises CheckpointError for an architecture or a stored type that this runtime cannot run.
    """
    config = build_config(model.config, model.source)
    check_read(config, model)
    if model.stores_head:  # it is used, whatever the config says
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    auto_class = find_auto_class(model)
    # GPT-J chooses a class by the attention's name, and knows none that is registered
    attention = "eager" if config.model_type in INLINED_TYPES else ATTENTION_NAME
    try:
        with on_meta():
            skeleton = auto_class.from_config(
                config, dtype=getattr(torch, model.dtype), attn_implementation=attention
            )
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
            raise refuse(f"{model.source} chooses its attention in a way of its own") from None
        raise cannot_build(model.source, error) from error
    if model.architecture.is_multimodal:
        remove_towers(skeleton)
    _check_attention(skeleton, model)
    leave_out_indexers(skeleton, model)
    hold_frequencies(skeleton)
    cut_by_constants(skeleton)
    # a model cut short (to time its layers) has fewer layers than its config says
    layers = decoder_layers(skeleton)
    del layers[len(model.layers) :]
    take_in_spans(layers)
    route(skeleton)
    hand_over(skeleton)
    choose_by_kernel(skeleton)
    set_types(skeleton, model)
    with _experts_without_weights(skeleton, model):
        for module, asked in probe_attention(skeleton, layers).items():
            vars(module)["asked"] = asked
    check_rings(model.source, layers, [layer.kv_cache for layer in model.layers])
    choose_attention(skeleton, ATTENTION_NAME)
    return skeleton.eval().requires_grad_(False)


_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "layer_types", "sliding_window"),
)
"""Keys of a language model that its class takes as they are stated, or not at all."""


def check_read(config: PreTrainedConfig, model: Model) -> None:
    """Raise CheckpointError for a language model whose sizes its class would not read.

    Step-3.7's stand beside its model type: the class reads a part of the config for text, and would
    build the model that it has by default.
    """
    text = config.get_text_config()
    if text is config or text_config(model.config) is not model.config:
        return
    stated = {key: model.config[key] for key in _SIZES if model.config.get(key) is not None}
    unread = [key for key, value in stated.items() if getattr(text, key, value) != value]
    if unread:
        raise refuse(
            f"{model.source}: its config has {', '.join(unread)} beside model_type "
            f"{quote(model.model_type)}, where transformers' class does not read them: it reads "
            "them of a part for text (text_config)"
        )


def find_auto_class(model: Model) -> Any:
    """Return what builds the model; raises CheckpointError where its text may not run alone."""
    architecture = model.architecture
    if not architecture.is_multimodal:
        return AutoModelForCausalLM
    if not architecture.runs_text_alone:
        raise refuse(
            f"{model.source} is multimodal ({model.model_type}), and its text part "
            f"({architecture.model_type}) is not known to run alone"
        )
    return AutoModelForMultimodalLM


def remove_towers(skeleton: PreTrainedModel) -> None:
    """Remove what reads images and sound: all beside the decoder and the head."""
    complete_outputs(skeleton)
    kept = [skeleton.get_decoder(), skeleton.get_output_embeddings()]
    for part in [*skeleton.modules()]:
        children = [*part.named_children()]
        holding = [name for name, child in children if _holds_one(child, kept)]
        if part in kept or not holding:
            continue
        for name, child in children:
            # what has no weights, such as a cap of logits, may be the text's
            if name not in holding and child.state_dict(keep_vars=True):
                setattr(part, name, None)  # a pass asks for some whether they are there
        for name, _ in [*part.named_parameters(recurse=False)]:
            delattr(part, name)
            setattr(part, name, torch.empty(0))  # which a class may initialise


def _holds_one(part: nn.Module, wanted: Sequence[nn.Module]) -> bool:
    return any(module is each for module in part.modules() for each in wanted)


def set_types(skeleton: PreTrainedModel, model: Model) -> None:
    """Widen what stays in float32 in a model that is computed in a shorter type.

    Routers that every pass widens stay as they are stored, also where their class has them wide.
    Source: transformers 5.24, ``_keep_in_fp32_modules_strict`` and ``_keep_in_fp32_modules``.
    """
    for name, tensor in [*skeleton.named_parameters(), *skeleton.named_buffers()]:
        if tensor.is_floating_point() and model.keeps_float32(name):
            tensor.data = tensor.data.float()
        elif model.architecture.is_router(name):
            tensor.data = tensor.data.to(getattr(torch, model.dtype))


def _check_attention(skeleton: PreTrainedModel, model: Model) -> None:
    """Raise CheckpointError for layers that need more than the runtime's attention and cache."""
    source, is_indexed = model.source, model.architecture.index_topk is not None
    text = skeleton.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    known = {"full_attention", "sliding_attention", "chunked_attention"}
    if any(find_linear(decoder_layers(skeleton))):
        known = {"full_attention", "linear_attention"}
    if is_indexed:
        # the latter is transformers 5.17's name
        known = {"full_attention", "indexed_attention", "deepseek_sparse_attention"}
    if unknown := kinds - known:
        raise refuse(
            f"{source} has layers of the types {sorted(unknown)}; `run` knows full, sliding and "
            "chunked attention, and the linear attention of Gated DeltaNet"
        )
    # not every config names them
    indexers = [name for name, _ in skeleton.named_modules() if name.endswith(".indexer")]
    if indexers and not is_indexed:
        raise refuse(
            f"{source} has sparse attention ({indexers[0]}), whose keys have a cache of their own; "
            "`run` knows full and sliding attention"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    changing = {part.get("rope_type") for part in ropes} & {"dynamic", "longrope"}
    if changing and not any(hasattr(module, "rope_type") for module in skeleton.modules()):
        raise refuse(
            f"{source} has rotary embeddings of the type {changing.pop()}, which change with the "
            "text's length, in a way of its own"
        )


@contextmanager
def _experts_without_weights(skeleton: PreTrainedModel, model: Model) -> Iterator[None]:
    """Have routed experts give shapes alone; raises CheckpointError where that cannot be chosen."""
    if model.experts is None:
        yield
        return
    decoder = skeleton.get_decoder()  # a multimodal class may not let them be chosen
    try:
        decoder.set_experts_implementation("grouped_mm")
    except ValueError:
        raise refuse(
            f"{model.source} has experts that transformers multiplies in a way of their own"
        ) from None
    decoder.set_experts_implementation(PROBE)
    yield
    decoder.set_experts_implementation("grouped_mm")


def name_layers(skeleton: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
    """Note which modules are the layers of a model where they are found by the checkpoint's."""
    vars(skeleton)[_LAYERS] = nn.ModuleList(layers)  # not registered: it would name them anew


def name_stored(skeleton: PreTrainedModel, paths: Mapping[str, str]) -> None:
    """Note which modules of a model hold what the checkpoint stores under other modules' names."""
    vars(skeleton)[_STORED] = {f"{name}.": f"{path}." for name, path in paths.items()}


def model_name(skeleton: PreTrainedModel, name: str) -> str:
    """Return the name of a stored tensor where the model's own class would have stored it."""
    starts: Mapping[str, str] = vars(skeleton).get(_STORED, {})
    # the longest first: a norm may be named within its layer
    found = max((each for each in starts if name.startswith(each)), key=len, default="")
    return starts[found] + name[len(found) :] if found else name


def has_named_layers(skeleton: PreTrainedModel) -> bool:
    """Return True if ``name_layers`` has said which modules are the layers."""
    return _LAYERS in vars(skeleton)


def decoder_layers(skeleton: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder's layers, in order; raises CheckpointError where they are elsewhere."""
    named: nn.ModuleList | None = vars(skeleton).get(_LAYERS)
    if named is not None:
        return named
    lists = [
        part
        for name, part in skeleton.get_decoder().named_modules()
        if isinstance(part, nn.ModuleList) and name.rpartition(".")[2] in LAYER_LISTS
    ]
    if len(lists) != 1:
        raise refuse(
            f"{type(skeleton).__name__} keeps its layers where `run` does not look (expected one "
            f"module list named {' or '.join(LAYER_LISTS)})"
        )
    return lists[0]
