"""The checkpoint's layers that predict further tokens (MTP), as a model of one layer.

A prediction layer joins the embedding of a token with the hidden state before it. A projection of
both enters a block as the decoder's layers are, behind which are a norm and the model's own head.

Source: transformers 5.23, ``modeling_layers.MtpLayer`` and ``MTPCandidateGenerator``; SGLang,
``deepseek_nextn.py`` and ``glm4_moe_nextn.py``. In both the embedding's half comes first. The
hidden state is the one behind the model's last norm, and what is behind the layer's own norm enters
its next use. vLLM differs in how often it uses a norm for a second draft, and in a text's first
token. For Qwen3.5: vLLM, ``qwen3_5_mtp.py``; SGLang, ``qwen3_5_mtp.py``, which agree in all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from offplan.checkpoint.architecture import Architecture, read_architecture
from offplan.checkpoint.assemble import describe_experts, describe_kv_caches
from offplan.checkpoint.config import read_count, text_config
from offplan.checkpoint.group import group_parameters, resize
from offplan.checkpoint.layers import is_prediction
from offplan.checkpoint.model import Layer, Model
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import Tensors
from offplan.errors import CheckpointError


class _Names(NamedTuple):
    """The names of a family's prediction layer, each behind its start."""

    block: str
    """Start of its block, the stack's name and the number of layers in braces."""
    around: str
    """Start of what lies around the block."""
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    copies: tuple[str, ...] = ()
    """Copies of the model's own embedding and head, which nobody reads."""

    @property
    def read(self) -> tuple[str, ...]:
        """What is read around the block."""
        return self.embedding_norm, self.hidden_norm, self.projection, self.norm


_LAST = "{stack}.{number}"
_DEEPSEEK = _Names(
    *(_LAST, _LAST, "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    copies=("embed_tokens", "shared_head.head"),
)
_QWEN = _Names(
    *("mtp.layers.{prediction}", "mtp", "pre_fc_norm_embedding", "pre_fc_norm_hidden"),
    *("fc", "norm"),
)
_FAMILIES: Mapping[str, _Names] = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
}
"""Names by the model type of families whose prediction layers run."""
_ALONE: Mapping[str, Any] = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
    "layer_types": ["full_attention"],
}
"""Keys of a config by which its class builds the one layer, as it builds the model's last."""


@dataclass(frozen=True)
class PredictionLayers:
    """The prediction layer of a checkpoint: one, which is used once for each drafted token."""

    model: Model
    """The layer as a model of its own, with its KV cache; it has neither embedding nor head.

    ``layers`` is the one block, ``outside`` the projection and the three norms. Their parameters
    have the names, forms and bytes that they are stored in."""
    projection: str
    """Module of the checkpoint that projects embedding and hidden state, in this order."""
    embedding_norm: str
    """Module of the norm of a token's embedding, which is the model's own."""
    hidden_norm: str
    """Module of the norm of the hidden state before that token, behind the model's last norm."""
    norm: str
    """Module of the norm behind the block; what it gives enters the model's own head, and the next
    use of the layer."""

    @property
    def block(self) -> Layer:
        """The layer between projection and norm."""
        (layer,) = self.model.layers
        return layer

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All its parameters: the block's first, then projection and norms by whole names."""
        return (*self.block.parameters, *self.model.outside_parameters)

    @property
    def loaded_bytes(self) -> int:
        """Bytes of all its parameters once loaded."""
        return sum(
            resize(p, self.model.architecture, self.model.dtype).loaded_bytes
            for p in self.parameters
        )


def find_prediction_layers(model: Model) -> PredictionLayers | str:
    """Return the prediction layers of a model that can draft, or say why there are none.

    Grouping hundreds of experts takes milliseconds: it is done once for each model.
    """
    # as functools.cached_property would; imports of files form no circle
    known = vars(model)
    if "_prediction_layers" not in known:
        known["_prediction_layers"] = _find(model)
    found: PredictionLayers | str = known["_prediction_layers"]
    return found


def _find(model: Model) -> PredictionLayers | str:
    architecture, names = model.architecture, _FAMILIES.get(model.architecture.model_type)
    text = text_config(model.config)
    first, second = (_start(model, _LAST if names is None else names.block, n) for n in (0, 1))
    block = tuple(each for each in model.outside if _is_of(each.name, [first]))
    if not block:
        if any(is_prediction(each.name) for each in model.outside):
            return _unknown(model)
        stated = architecture.num_prediction_layers or read_count(text, "mtp_num_hidden_layers")
        if stated and all(each.shard is None for each in model.tensors):
            return (
                f"a config alone does not tell the prediction layers of {model.source}: name its "
                "folder or its Hub id"
            )
        return f"{model.source} stores no layers that predict further tokens"
    if names is None or model.gguf is not None:
        return _unknown(model)
    if any(_is_of(each.name, [second]) for each in model.outside):
        return (
            f"{model.source} stores several layers that predict further tokens, and drafts are "
            "made by one"
        )
    start = _start(model, names.around)
    around, copies = ([f"{start}.{name}" for name in each] for each in (names.read, names.copies))
    outside = tuple(sorted(each for each in model.outside if _is_of(each.name, around)))
    missing = [name for name in around if not any(_is_of(each.name, [name]) for each in outside)]
    if missing:
        return f"{model.source} lacks {missing[0]}, which its prediction layer needs"
    known = [*around, *copies]
    beside = [each.name for each in model.outside if _is_of(each.name, [start])]
    other = [name for name in beside if not _is_of(name, [*known, first])]
    if other or text.get("mtp_use_dedicated_embeddings") is True:
        what = other[0] if other else "an embedding of its prediction layer's own"
        return f"{model.source} has {what}, which drafts do not know"
    block = tuple(each for each in block if not _is_of(each.name, known))
    embedding_norm, hidden_norm, projection, norm = around
    try:
        described = _describe(model, first, block, outside)
    except CheckpointError as error:
        return str(error)
    return PredictionLayers(described, projection, embedding_norm, hidden_norm, norm)


def _start(model: Model, name: str, prediction: int = 0) -> str:
    """Return the start of names that a family gives to a prediction layer, the first being 0."""
    stack, number = model.layers[-1].prefix.rpartition(".")[0], len(model.layers) + prediction
    return name.format(stack=stack, number=number, prediction=prediction)


def _alone(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config by which its class builds the prediction layer alone."""
    text = text_config(config)
    if text is config:
        return {**config, **_ALONE}
    return {
        key: _alone(value) if isinstance(value, Mapping) and text_config(value) is text else value
        for key, value in config.items()
    }


def _describe(model: Model, prefix: str, block: Tensors, outside: Tensors) -> Model:
    """Describe a model of one layer, whose tensors are the block's, as ``assemble`` does."""
    config = _alone(model.config)
    architecture: Architecture = read_architecture(config)
    parameters = tuple(
        resize(each, architecture, model.dtype)
        for each in group_parameters(prefix, block, model.architecture)
    )
    caches, notes = describe_kv_caches(architecture, [parameters], model.element_bytes)
    if notes:
        raise CheckpointError(f"the KV cache of {prefix} of {model.source} was not understood")
    kind = "moe" if any(each.is_expert for each in parameters) else "dense"
    layer = Layer(0, kind, prefix, parameters, caches[0], fuses_gates=architecture.fuses_gates)
    experts, _ = describe_experts(architecture.routing, (layer,))
    return replace(
        model,
        config=config,
        layers=(layer,),
        outside=outside,
        tied=frozenset(),
        not_loaded=frozenset(),
        towers=frozenset(),
        experts=experts,
        num_tensors=len(block) + len(outside),
        notes=(),
    )


def _is_of(name: str, modules: list[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _unknown(model: Model) -> str:
    family = model.architecture.model_type
    return f"the prediction layers of {family} ({model.source}) are not supported"
