"""All that offplan uses of transformers beyond what transformers documents.

``TRIED`` names the versions that it was tried with.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.convert_slow_tokenizer import bytes_to_unicode as bytes_to_unicode
from transformers.core_model_loading import Concatenate as Concatenate
from transformers.core_model_loading import MergeModulelist as MergeModulelist
from transformers.core_model_loading import Transpose as Transpose
from transformers.core_model_loading import WeightConverter as WeightConverter
from transformers.core_model_loading import (
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.dynamic_module_utils import (
    get_class_from_dynamic_module as get_class_from_dynamic_module,
)
from transformers.integrations import moe
from transformers.integrations.moe import ExpertsInterface as ExpertsInterface
from transformers.integrations.moe import use_experts_implementation as use_experts_implementation
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as modeling_deepseek_v2
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts as Llama4TextExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe as Llama4TextMoe
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding as Phi3RotaryEmbedding
from transformers.models.phimoe.modeling_phimoe import (
    PhimoeRotaryEmbedding as PhimoeRotaryEmbedding,
)
from transformers.pytorch_utils import Conv1D as Conv1D
from transformers.utils.chat_parsing import ResponseParser as ResponseParser

TRIED = ("5.17", "5.23", "5.24")
"""Versions of transformers that every name in this file was tried with, oldest first."""

GATED_DELTA_NETS = frozenset(
    {
        *("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
        "OlmoHybridGatedDeltaNet",
    }
)
"""Classes of linear attention that go on from what a ``LinearAttentionLayer`` keeps."""
RULE_OF_MANY = "torch_chunk_gated_delta_rule"
"""Function by which they compute the rule for more tokens than one."""
CONVOLUTION = "causal_conv1d_fn"
"""Function by which they mix each channel's neighbouring tokens."""
DELTA_RULE = (
    *(CONVOLUTION, "causal_conv1d_update"),
    *(RULE_OF_MANY, "torch_recurrent_gated_delta_rule"),
)
"""Functions of their modules that they compute by."""


def describe_untried(version: str) -> str | None:
    """Say that a version of transformers is newer than all that this file was tried with, if so."""
    found, newest = ([int(n) for n in re.findall(r"\d+", v)[:2]] for v in (version, TRIED[-1]))
    if found <= newest:
        return None
    return (
        f"offplan: found transformers {version}, and was tried with {TRIED[0]} to {TRIED[-1]}; if "
        f"something fails: pip install 'transformers<{newest[0]}.{newest[1] + 1}'"
    )


if _untried := describe_untried(transformers.__version__):  # once a process: a module runs once
    print(_untried, file=sys.stderr)


def rename(
    skeleton: PreTrainedModel, names: Iterable[str]
) -> Iterator[tuple[str, str | None, WeightConverter | None]]:
    """Yield the parameter that each stored tensor belongs to, its converter's pattern and that.

    The last two are None where the tensor is renamed and no more. Experts that are stored one by
    one go where their family has them fused, also where transformers itself would not find them.
    """
    transforms = get_model_conversion_mapping(skeleton)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    fusing = _fuse_experts()
    by_pattern = {p: c for c in (*fusing, *converters) for p in c.source_patterns}
    prefix, state = skeleton.base_model_prefix, skeleton.state_dict()
    for name in names:
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            # DeepSeek-V4's mapping takes the last norm for a layer's where transformers saved it
            renamed, pattern = name, None
        if renamed not in state and pattern is None:
            fused = rename_source_key(name, renamings, fusing, prefix, state)
            if fused[0] in state and _are_concatenated(skeleton, fused[0]):
                renamed, pattern = fused
        yield renamed, pattern, None if pattern is None else by_pattern[pattern]


def _fuse_experts() -> list[WeightConverter]:
    """Return what fuses experts that quantisers store one by one, whatever the family saves.

    Source: transformers 5.23, the mapping of Qwen2-MoE; ModelOpt's and llm-compressor's exports of
    Gemma 4, which transformers itself does not load.
    """
    one_by_one = ("experts.*.gate_proj.weight", "experts.*.up_proj.weight")
    merge, down = MergeModulelist(dim=0), "experts.*.down_proj.weight"
    return [
        WeightConverter([*one_by_one], "experts.gate_up_proj", [merge, Concatenate(dim=1)]),
        WeightConverter(down, "experts.down_proj", [merge]),
    ]


def _are_concatenated(skeleton: PreTrainedModel, name: str) -> bool:
    """Return True if a parameter is of experts that have gate before up, in rows of outputs."""
    experts: Any = skeleton.get_submodule(name.rpartition(".")[0])
    is_usual = is_experts(experts) and experts.has_gate and not experts.is_transposed
    return bool(is_usual and getattr(experts, "is_concatenated", True))


def convert(
    converter: WeightConverter,
    skeleton: PreTrainedModel,
    name: str,
    sources: Iterable[tuple[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Return values by parameter name, made of tensors with the converter's pattern for each."""
    for pattern, tensor in sources:
        converter.collected_tensors[pattern].append(tensor)
    converted = converter.convert(name, model=skeleton, config=skeleton.config)
    # operations return a list where they pass on what they were given
    return {n: v[0] if isinstance(v, list) else v for n, v in converted.items()}


def compute_buffers(model: PreTrainedModel, module: nn.Module) -> None:
    """Give a module of ``model`` the values of its buffers, as after a load from files.

    Source: transformers builds on the meta device too, and recomputes them in ``_init_weights``.
    """
    model._init_weights(module)


INITIALISED = "_is_hf_initialized"
"""Attribute of a weight that ``_init_weights`` leaves as it is. Source: transformers 5.23,
``initialization``."""


def complete_outputs(model: Any) -> None:
    """Have Llama 4's language model return what the whole model reads of it, beside a text nothing.

    Source: transformers 5.24, ``Llama4ForConditionalGeneration.forward``, whose ``image_outputs``
    a ``Llama4ForCausalLM`` does not return: it fails on whatever it is given.
    """

    def complete(module: nn.Module, given: Any, made: Any) -> None:
        if not hasattr(made, "image_outputs"):
            made.image_outputs = None

    if type(model).__name__ == "Llama4ForConditionalGeneration":
        model.language_model.register_forward_hook(complete)


CACHES = ("cache", "past_key_values", "cache_params", "state", "mems")
"""Names under which models take and return their caches, transformers 5.24's own first."""


def name_cache(model: Any) -> str:
    """Return the name of the argument by which a model's ``forward`` takes its cache."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in CACHES if name in taken), CACHES[0])


@contextmanager
def on_meta() -> Iterator[None]:
    """Build modules on the meta device, and draw no values for them.

    A draw without values goes through Python, for which torch imports sympy.
    """
    own = {name: vars(nn.init)[name] for name in ("normal_", "uniform_", "kaiming_uniform_")}
    vars(nn.init).update(dict.fromkeys(own, lambda tensor, *_, **__: tensor))
    try:
        with torch.device("meta"):
            yield
    finally:
        vars(nn.init).update(own)


def build_eager(model_class: Any, config: Any) -> PreTrainedModel:
    """Build a model by its class, with no kernels that its config may ask to be fetched."""
    built: PreTrainedModel = model_class._from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    return built


def list_saved(model: Any) -> dict[str, torch.Tensor]:
    """Return what ``save_pretrained`` keeps of a model's state, by the names that it writes.

    Each tied weight is there once.
    Source: transformers 5.23, ``modeling_utils.remove_tied_weights_from_state_dict``, which tells
    ties by storage; on the meta device only the parameter objects tell them.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    targets = getattr(model, "all_tied_weights_keys", None) or {}
    named = model.state_dict(keep_vars=True)
    # Of one tensor's names the last stays: that of a tie's source, or else the model's first.
    names = (name for name in reversed(named) if name not in ignored)
    kept = {id(named[name]): name for name in sorted(names, key=lambda name: name not in targets)}
    saved: dict[str, torch.Tensor] = revert_weight_conversion(
        model, {name: named[name] for name in kept.values()}
    )
    return saved


class ModelWithOwnCache(PreTrainedModel, GenerationMixin):
    """A model that ``generate`` makes no cache for, and whose attention is its own affair."""

    _is_stateful = True  # transformers then refuses by name to go back in the text
    _supports_attention_backend = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False


def decoding(model: Any) -> Any:
    """Return the context in which ``generate`` runs a model's decode steps."""
    return model._optimize_model_for_decode()


def continue_arguments(model: Any, made: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the step behind the one that made ``made``, as ``generate`` does."""
    following: dict[str, Any] = model._update_model_kwargs_for_generation(
        made, arguments, is_encoder_decoder=False
    )
    return following


def chosen_attention(config: Any) -> str | None:
    """Return the name of the attention that a config's model calls."""
    name: str | None = config._attn_implementation
    return name


def chosen_experts(config: Any) -> str:
    """Return the name of the way in which a config's model multiplies its experts."""
    name: str = config._experts_implementation
    return name


def build_own(own_class: Any, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model of a class that a checkpoint's own code has, able to ``generate``.

    Source: transformers 5.23, ``_BaseAutoModelClass.from_config``.
    """
    own_class = add_generation_mixin_to_remote_model(own_class)
    built: PreTrainedModel = own_class._from_config(config, dtype=dtype)
    return built


REASONING = ("reasoning_content", "thinking")
"""Fields of a response template for a model's thoughts: the latter in older versions and files."""


def find_response_template(tokenizer: Any, model_type: str) -> Any:
    """Return what says how a model's answers are divided into text, thoughts and calls of tools.

    The tokenizer's own, or else what transformers knows of the family; None where neither has one
    that can be read.
    """
    from transformers.cli.serving.utils import get_response_template
    from transformers.utils.chat_parsing.response_templates import load_response_template

    model = SimpleNamespace(config=SimpleNamespace(model_type=model_type))
    try:
        found = get_response_template(tokenizer, model)
        return None if found is None else load_response_template(found)
    except (ValueError, TypeError, AttributeError):
        return None


def load_template(spec: dict[str, Any]) -> Any:
    """Return a response template; raises ValueError for one that cannot be read."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(spec)


def asks_for_decoders(auto_class: Any, config: Any) -> bool:
    """Return True if the class of a config sees both sides of a token unless ``is_decoder`` is
    true."""
    if type(config) not in auto_class._model_mapping:
        return False
    modeling = sys.modules[auto_class._model_mapping[type(config)].__module__]
    found = re.search(
        r"(self|if config|not config|self\.config)\.is_decoder", inspect.getsource(modeling)
    )
    return found is not None


@contextmanager
def decoding_as_on_gpu(model: Any) -> Iterator[None]:
    """Have a model on the CPU multiply its experts as transformers does in decode steps on a GPU.

    Source: transformers 5.23, ``GenerationMixin._optimize_model_for_decode``.
    """
    own = model.get_experts_implementation()
    names = {k: "batched_mm" if v == "grouped_mm" else v for k, v in own.items()}
    if names == own:
        yield
        return
    model.set_experts_implementation(names)
    try:
        yield
    finally:
        model.set_experts_implementation(own)


def rescale_layers(model: PreTrainedModel) -> None:
    """Have RWKV divide its weights for inference now, not in its first pass, wherever they lie.

    Source: transformers 5.23, ``RwkvModel._rescale_layers``.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "_rescale_layers"):
            module._rescale_layers()


def forget_states(model: PreTrainedModel) -> None:
    """Have RecurrentGemma forget the text before, whose states its modules keep, not its cache."""
    for module in model.modules():
        if "recurrent_states" in vars(module):
            vars(module)["recurrent_states"] = None


def choose_attention(model: PreTrainedModel, name: str) -> None:
    """Have all layers call the attention that is registered under ``name``.

    Do what ``set_attn_implementation`` does, without looking through all modules each time.
    Compiled layers are guarded by the name.
    """
    if model.config._attn_implementation != name:
        model.config._attn_implementation = name


def cut_by_constants(model: PreTrainedModel) -> None:
    """Have Gemma 3n's MLPs cut activations at a constant number of standard deviations.

    Theirs make it anew on the host in each call, which a pass that is captured must not do.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "_gaussian_topk") and module.activation_sparsity > 0:
            share = torch.tensor(module.activation_sparsity)
            number = torch.distributions.Normal(0, 1).icdf(share).to(module.gate_proj.weight.dtype)
            module._gaussian_topk = partial(_cut_below, number.item())


def _cut_below(number: float, inputs: torch.Tensor) -> torch.Tensor:
    """Cut ``inputs``, [..., width], below so many deviations. Source: ``Gemma3nTextMLP``."""
    mean = inputs.mean(-1, keepdim=True)
    deviation = inputs.std(-1, keepdim=True, unbiased=False)
    return nn.functional.relu(inputs - (mean + deviation * number))


def let_experts_be_chosen(model: PreTrainedModel) -> None:
    """Have ``set_experts_implementation`` serve a model whose own source does not mention it."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part._can_set_experts_implementation = lambda: True


def list_experts(module: nn.Module) -> list[Any]:
    """List the routed experts in a module that transformers lets be multiplied in another way."""
    return [part for part in module.modules() if is_experts(part)]


def is_experts(module: nn.Module) -> bool:
    """Return True if a module is routed experts that transformers lets be multiplied in another
    way."""
    return hasattr(module, "has_gate")


def is_of_transformers(module: nn.Module) -> bool:
    """Return True if transformers wrote a module's class, not a checkpoint's own code."""
    return type(module).__module__.startswith("transformers.models.")


def name_first(experts: Any) -> str:
    """Return the name of the weight that routed experts multiply their inputs by."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def apply_gate(experts: Any, made: torch.Tensor) -> torch.Tensor:
    """Return the gated activation of routed experts, [pairs, width], of [pairs, 2 x width]."""
    return experts._apply_gate(made)


def multiply_groups(experts: Any, name: str, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply rows, [pairs, in], each group by its own expert's weight; returns [pairs, out].

    ``ends``, int32 [experts], says where each expert's rows end.
    """
    weight, transposed = getattr(experts, name), experts.is_transposed
    return moe._grouped_linear(x, weight, ends, is_transposed=transposed)


def changes_by_positions(rotary: nn.Module) -> bool:
    """Return True if a rotary embedding's forward changes its frequencies by the positions it is
    given."""
    decorated = dynamic_rope_update(lambda: None).__code__  # all that it decorates share this
    forward: Any = type(rotary).forward
    while forward is not None and forward.__code__ is not decorated:
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None


def compute_frequencies(
    config: Any, rope_type: str, layer_type: str | None, num_tokens: int
) -> torch.Tensor:
    """Compute the rotary frequencies for a text of so many tokens, float32 on the host.

    Rounded as in a pass, where transformers has the length as a tensor.
    """
    compute, length = ROPE_INIT_FUNCTIONS[rope_type], torch.tensor(num_tokens)
    frequencies: torch.Tensor
    frequencies, _ = compute(config, length.device, seq_len=length, layer_type=layer_type)
    return frequencies


def compute_by_torch(linear: nn.Module, replaced: Mapping[str, Callable[[Any], Any]]) -> bool:
    """Have a Gated DeltaNet compute by transformers' own torch code; False where it is not found.

    transformers prefers the packages fla and causal_conv1d if they are installed. All of its class
    in the process compute so from here on, and call what ``replaced`` makes of functions, by name.
    Arguments that ``forward`` does not know reach these.
    """
    modeling = sys.modules[type(linear).__module__]
    for name in DELTA_RULE:
        found: Any = getattr(modeling, name, None)
        function = inspect.unwrap(found)
        code = getattr(function, "__code__", None)
        if code is None or code.co_filename != modeling.__file__:
            return False
        setattr(modeling, name, replaced[name](function) if name in replaced else function)
    return True
