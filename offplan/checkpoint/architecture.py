"""The architecture that a ``config.json`` describes, read here and asked by everybody.

Source: the config classes and attention modules of transformers 5.24; what these know and the
file need not say stands in ``model_types``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from offplan.checkpoint import model_types
from offplan.checkpoint.config import MAX_COUNT, class_type, read_count, read_dtype, text_config
from offplan.checkpoint.jsontext import quote
from offplan.checkpoint.tensors import CONFIG_NAME, FLOAT_BITS
from offplan.checkpoint.windows import Mixer, read_windows
from offplan.errors import CheckpointError
from offplan.forms.methods import read_quantisation
from offplan.forms.quantisation import Quantisation

MAX_LAYERS = 10_000
"""Most layers of a model, past any there is; each costs time to understand and to plan."""
_OTHER_PARTS = ("vision_config", "audio_config")
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_NUM_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_STATED_STRETCHED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Types of rotary embeddings that engines take to be in the positions that a config states."""
_NUM_EXPERTS = """
num_experts n_routed_experts num_local_experts moe_num_experts num_moe_experts num_routed_experts
n_experts
"""
_NUM_PER_TOKEN = """
num_experts_per_tok num_experts_per_token experts_per_token moe_top_k moe_topk moe_k
num_selected_experts top_k_experts top_k
"""


@dataclass(frozen=True)
class Attention:
    """The heads of a layer's attention, and what its scores need beyond a causal softmax."""

    num_heads: int
    """Query heads; 0 where the config does not say."""
    num_kv_heads: int
    """Heads of keys and values; 0 where the config does not say."""
    head_dim: int
    """Elements of a query, key or value head; 0 where the config does not say."""
    sinks: bool
    """True if the softmax has a learned sink for each head."""
    changes_cached: bool
    """True if it changes cached keys or values in each pass, before it multiplies them."""
    soft_cap: float | None
    """Value that scores are softly capped at; None where they are not."""


class HeadSizes(NamedTuple):
    """Elements of a layer's heads; 0 where the config does not say."""

    key: int
    value: int


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention, which caches a latent in place of keys and values.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """

    dim: int
    """Elements of the latent of a token."""
    rope_dim: int
    """Elements of the rotary part of a key, which all heads share."""
    nope_dim: int
    """Elements of the other part of a query or key head."""
    value_dim: int
    """Elements of a value head."""
    index_dim: int
    """Elements of the further key a token that a sparse attention's indexer keeps; 0 without."""


class LinearAttention(NamedTuple):
    """The gated delta rule, its fields named as in the config, where ``linear_`` precedes them.

    Source: transformers 5.23, ``Qwen3NextGatedDeltaNet``.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    """Elements of a key head."""
    value_head_dim: int
    """Elements of a value head."""
    conv_kernel_dim: int
    """Tokens that its convolution looks at."""

    @property
    def channels(self) -> int:
        """Channels of its convolution."""
        keys = self.num_key_heads * self.key_head_dim
        return 2 * keys + self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class Routing:
    """The routed experts, by the config; the tensors may know better (``model.Experts``)."""

    num_experts: int | None
    """Experts in a layer; None where the config does not say."""
    num_per_token: int | None
    """Experts that a token is sent to; None where neither config nor model type says."""
    has_idle: bool
    """True if there are experts beyond ``num_experts`` that compute nothing (LongCat)."""
    in_out: bool
    """True if fused experts are stored as [experts, in, out], not [experts, out, in]."""
    held_in_out: bool
    """True if they are held so, too, once they are loaded."""


@dataclass(frozen=True)
class Architecture:
    """The architecture of the language model, without what its tensors tell better."""

    model_type: str
    """Transformers' name of the language model's part, such as ``gemma3_text``."""
    is_multimodal: bool
    """True if the model reads more than text: images, video or sound."""
    runs_text_alone: bool
    """True if its text part is known to give alone what a multimodal model gives for a text."""
    class_names: tuple[str, ...]
    """Transformers' classes that the config names, such as ``Qwen3ForCausalLM``."""
    dtype: str | None
    """The dtype that the config names, as torch does: ``bfloat16``."""
    quantisation: Quantisation | None
    """How the checkpoint's modules are stored; None where the config says nothing of it."""
    hidden_size: int
    """Elements of a token's hidden state; 0 where the config does not say."""
    vocabulary_size: int | None
    """Tokens that the model knows; None where the config does not say."""
    trained_context: int | None
    """Tokens of the longest text it was made for; None where the config does not say."""
    engine_context: int | None
    """Tokens of the longest text that engines serve; None where the config does not say."""
    end_tokens: tuple[int, ...]
    """Tokens that end a text."""
    num_layers: int | None
    """Decoder layers; None where the config does not say."""
    num_prediction_layers: int
    """Layers after them that predict further tokens."""
    num_sharing_layers: int
    """Layers, the last ones, that read an earlier layer's keys and values."""
    num_streams: int
    """Hidden states that a token has between layers: one, or as many as AltUp keeps."""
    per_layer_width: int
    """Elements that a token hands to all layers beside its hidden states (Gemma 3n, Gemma 4)."""
    mixers: tuple[Mixer, ...]
    """How each decoder layer mixes tokens."""
    windows: tuple[int | None, ...]
    """Tokens that each decoder layer's attention sees at most; None where it sees all."""
    attention: Attention
    head_sizes: tuple[HeadSizes, ...]
    """The size of each decoder layer's heads of keys and values."""
    latents: LatentAttention | None
    """Latent attention, in the models that have it."""
    index_topk: int | None
    """Tokens of a longer text that each one sees, chosen by an indexer; None if it sees all. It is
    also None in families whose indexers leave out tokens of short texts, too."""
    linear: LinearAttention | None
    """Linear attention, in the models that have it in some layers."""
    tower_heads: int | None
    """Attention heads of the tower that reads images; None where the config does not say."""
    routing: Routing
    fused_experts: bool
    """True if the transformers that wrote the config has all experts of a layer in one parameter,
    though it saves them one by one."""
    matrices_in_out: bool
    """True if the layers' matrices are stored as [in, out], not [out, in] (Conv1D)."""
    fuses_gates: bool
    """True if dense MLPs store gate and up apart, and multiply both as one matrix."""
    float32_parts: tuple[str, ...]
    """Parts of names whose parameters stay in float32 when bfloat16 or float16 is computed in."""
    float32_parts_in_float16: tuple[str, ...]
    """Parts of names whose parameters stay in float32 when float16 is computed in."""
    routers: tuple[str, ...]
    """Parts of names of routers that every pass widens to float32: they stay as they are stored."""
    table_rows: Mapping[str, int]
    """Rows that a token needs of tables beside the input embedding, by the module's name."""
    head_is_tied: bool | None
    """True if the head is the input embedding; None where neither config nor model type says."""
    notes: tuple[str, ...]
    """Sentences on what the config leaves open."""

    def kept_bits(self, name: str, dtype: str, *, is_wide: bool) -> int:
        """Return the bits of an element of loaded floats in a model computed in ``dtype``.

        ``is_wide`` says whether they are stored in float32.
        """
        return 32 if self.keeps_float32(name, dtype, is_wide=is_wide) else FLOAT_BITS[dtype]

    def keeps_float32(self, name: str, dtype: str, *, is_wide: bool) -> bool:
        """Return True if a parameter stays in float32 in a model that is computed in ``dtype``."""
        parts = self.float32_parts if dtype in ("bfloat16", "float16") else ()
        parts += self.float32_parts_in_float16 if dtype == "float16" else ()
        parts += self.routers if is_wide and dtype in ("bfloat16", "float16") else ()
        return _has_part(name, parts)

    def find_table(self, name: str) -> tuple[str, int] | None:
        """Find the module of the table that a weight of this name is rows of, if it is of one.

        With it come the rows that a token needs. ``ngram_embedding.shard_3.weight`` is of
        ``ngram_embedding``.
        """
        if not self.table_rows:
            return None
        parts = name.split(".")
        at = next((at for at, part in enumerate(parts) if part in self.table_rows), None)
        if at is None or parts[-1] != "weight":
            return None
        return ".".join(parts[: at + 1]), self.table_rows[parts[at]]

    def is_router(self, name: str) -> bool:
        """Return True if a parameter is a router that every pass widens to float32."""
        return _has_part(name, self.routers)


def _read_tower_heads(config: Mapping[str, Any]) -> int | None:
    """Return the heads of a tower of one kind of layers; others are left to what refuses them."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return None
    keys = ("num_heads", "num_attention_heads", "vt_num_attention_heads")
    return next((n for n in map(vision.get, keys) if isinstance(n, int)), None)


def _has_part(name: str, parts: Iterable[str]) -> bool:
    return any(f".{part}." in f".{name}." for part in parts)


def read_architecture(config: Mapping[str, Any], num_layers: int = 0) -> Architecture:
    """Read a ``config.json``, of which ``num_layers`` is used where it does not count its layers.

    Raises CheckpointError for values of another kind than their key's, for more layers than
    MAX_LAYERS, for encoder-decoder models and for others that are not causal.
    """
    family = str(config.get("model_type"))
    if family in model_types.NOT_CAUSAL:
        raise CheckpointError(
            f"{CONFIG_NAME}: found {model_types.NOT_CAUSAL[family]} ({quote(family)}), expected "
            "one that writes text token by token; offplan plans causal language models"
        )
    if config.get("is_encoder_decoder") is True:
        raise CheckpointError(
            f"{CONFIG_NAME}: found an encoder-decoder model ({quote(config.get('model_type'))}), "
            "expected a decoder-only one; offplan plans causal language models"
        )
    text = text_config(config)
    stated_type = str(text.get("model_type") or family)
    model_type = model_types.HUB_TYPES.get(stated_type, stated_type)
    is_nested = text is not config
    # a config of several parts that names none is transformers' own default, or is read so
    of_whole = family in model_types.TEXT_CLASSES and family not in model_types.TIED_BY_DEFAULT
    is_multimodal = is_nested or of_whole or any(key in config for key in _OTHER_PARTS)
    if is_multimodal:
        model_type = model_types.TEXT_CLASSES.get(family, model_type)
    if is_nested:
        text = {**model_types.TEXT_SIZES.get(model_type, {}), **text}
    else:
        model_type = class_type(model_type, config)
    if model_type == "dory":
        text = _without_mlps(text)
    stated_layers = _read_num_layers(text)
    mixers, windows, notes = read_windows(text, model_type, stated_layers or num_layers)
    tie, attention = _read_tie(config, text), _read_attention(text, model_type)
    quantisation = read_quantisation(config, model_type, read_dtype(config))
    if quantisation is None and is_nested:
        found = read_quantisation(text, model_type, read_dtype(config))
        quantisation = found and replace(found, takes_text_alone=True)
    return Architecture(
        model_type=model_type,
        is_multimodal=is_multimodal,
        runs_text_alone=is_multimodal and model_type in model_types.TEXT_PARTS.get(family, ()),
        class_names=_read_names(config.get("architectures")),
        dtype=read_dtype(config),
        quantisation=quantisation,
        hidden_size=_read_hidden_size(text),
        vocabulary_size=read_count(text, "vocab_size"),
        trained_context=_read_trained_context(text),
        engine_context=_read_engine_context(text),
        end_tokens=_read_end_tokens(config, text),
        num_layers=stated_layers,
        num_prediction_layers=read_count(text, "num_nextn_predict_layers", "num_mtp_layers") or 0,
        num_sharing_layers=read_count(text, "num_kv_shared_layers") or 0,
        num_streams=read_count(text, "altup_num_inputs") or 1,
        per_layer_width=(read_count(text, "hidden_size_per_layer_input") or 0)
        * (stated_layers or num_layers),
        mixers=mixers,
        windows=windows,
        attention=attention,
        head_sizes=_read_head_sizes(text, model_type, attention.head_dim, mixers),
        latents=_read_latents(text),
        index_topk=_read_index_topk(text, model_type),
        linear=_read_linear(text),
        tower_heads=_read_tower_heads(config),
        routing=Routing(
            num_experts=None
            if model_type in model_types.TABLE_EXPERTS
            else _read_nested(text, "ffn_config", *_NUM_EXPERTS.split()),
            num_per_token=model_types.ROUTED_TO.get(model_type)
            or _read_nested(text, "ffn_config", *_NUM_PER_TOKEN.split()),
            has_idle=read_count(text, "zero_expert_num") is not None,
            in_out=model_type in model_types.EXPERTS_IN_OUT,
            held_in_out=model_type in model_types.EXPERTS_IN_OUT - model_types.TURNED_EXPERTS,
        ),
        fused_experts=_read_version(config) >= 5,
        matrices_in_out=model_type in model_types.CONV1D_TYPES,
        fuses_gates=model_type in model_types.FUSED_GATES,
        float32_parts=model_types.FLOAT32_PARTS.get(model_type, ())
        + model_types.FLOAT32_PARTS_STORED.get(model_type, ()),
        float32_parts_in_float16=model_types.FLOAT32_PARTS_IN_FLOAT16.get(model_type, ()),
        routers=model_types.WIDENED_ROUTERS.get(model_type, ()),
        table_rows=_read_table_rows(text, model_type),
        head_is_tied=model_types.TIED_BY_DEFAULT.get(model_type) if tie is None else tie,
        notes=notes if quantisation is None else (*notes, *quantisation.dropped),
    )


def _without_mlps(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config of Dory's as its class reads it: each MLP is a part of the layer before it.

    Source: transformers 5.24, ``DoryConfig``, which saves both as layers.
    """
    kinds = text.get("layer_types")
    if not isinstance(kinds, list) or "mlp" not in kinds:
        return text
    return {**text, "layer_types": kinds[::2], "num_hidden_layers": len(kinds) // 2}


def _read_num_layers(text: Mapping[str, Any]) -> int | None:
    keys: tuple[str, ...] = _NUM_LAYERS
    if text.get("model_type") == "longcat_flash":  # transformers 5.17 counts its halves, too
        keys = ("num_layers", *keys)
    num_layers = read_count(text, *keys)
    for key in _NUM_LAYERS:
        if text.get(key) is not None and not 0 < (read_count(text, key) or 0) <= MAX_LAYERS:
            raise CheckpointError(
                f"{CONFIG_NAME}: found {quote(text[key])} as {key}, expected a positive whole "
                f"number of layers, {MAX_LAYERS} at most; correct the file or fetch it again"
            )
    return num_layers


def _read_hidden_size(text: Mapping[str, Any]) -> int:
    return read_count(text, "hidden_size", "n_embd", "d_model") or 0


def _read_trained_context(text: Mapping[str, Any]) -> int | None:
    """Read the positions that it was trained for, those that scaled rotary embeddings add included.

    Source: transformers 5.23, ``modeling_rope_utils``: YaRN stretches
    ``original_max_position_embeddings`` by ``factor``, whatever ``max_position_embeddings`` says.
    """
    stated = read_count(text, *_NUM_POSITIONS)
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return stated
    original, factor = read_count(rope, "original_max_position_embeddings"), rope.get("factor")
    if original is None or isinstance(factor, bool) or not isinstance(factor, (int, float)):
        return stated
    return max(stated or 0, int(original * factor)) if 1 <= factor < MAX_COUNT else stated


def _read_engine_context(text: Mapping[str, Any]) -> int | None:
    """Read the positions beyond which vLLM and SGLang do not start: where they differ, the more.

    They take what the config states, times the factor of rotary embeddings of most types.
    Source: vLLM 0.33.0, ``config/model._get_and_verify_max_len``; SGLang 0.5.23,
    ``get_context_length``.
    """
    stated = [count for key in _NUM_POSITIONS if (count := read_count(text, key)) is not None]
    if not stated or text.get("model_max_length") is not None:
        return None
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    parts = [rope, *rope.values()] if isinstance(rope, Mapping) else []  # of each type of layer
    factors: list[Any] = [
        part.get("factor")
        for part in parts
        if isinstance(part, Mapping)
        and part.get("rope_type", part.get("type")) not in _STATED_STRETCHED
    ]
    known = (each for each in factors if type(each) in (int, float) and 1 <= each < MAX_COUNT)
    return int(max(stated) * max(known, default=1))


def _read_attention(text: Mapping[str, Any], model_type: str) -> Attention:
    num_heads = read_count(text, "num_attention_heads", "n_head", "n_heads", "num_heads") or 0
    num_kv_heads = _read_nested(text, "attn_config", *_NUM_KV_HEADS, "kv_n_heads")
    if text.get("multi_query") is True and text.get("new_decoder_architecture") is not True:
        num_kv_heads = 1
    head_dim = read_count(text, "head_dim", "kv_channels", "attention_head_dim")
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads or num_heads,
        head_dim=head_dim or (_read_hidden_size(text) // num_heads if num_heads else 0),
        sinks=model_type in model_types.SINK_TYPES,
        changes_cached=model_type in model_types.CHANGES_CACHED,
        soft_cap=_read_soft_cap(text, model_type),
    )


def _read_head_sizes(
    text: Mapping[str, Any], model_type: str, head_dim: int, mixers: Iterable[Mixer]
) -> tuple[HeadSizes, ...]:
    """Read the size of each layer's heads; ``head_dim`` is what the config says of all of them.

    Source: transformers 5.23, ``Gemma4TextConfig`` and ``MiMoV2FlashConfig``. What the former is
    made with, it saves as ``per_layer_config``.
    """
    usual = model_types.HEAD_SIZES.get(model_type, {})
    sizes = {key: read_count(text, key) or default for key, default in usual.items()}
    key = sizes.get("head_dim", head_dim)
    layers = text.get("per_layer_config")
    if not isinstance(layers, Mapping):
        of_full = {"head_dim": sizes.get("global_head_dim", key)}
        layers = {str(n): of_full for n, each in enumerate(mixers) if each is Mixer.FULL}
    found = []
    for index, _ in enumerate(mixers):
        own = layers.get(str(index))
        size = (read_count(own, "head_dim") if isinstance(own, Mapping) else None) or key
        found.append(HeadSizes(size, sizes.get("v_head_dim", size)))
    return tuple(found)


def _read_soft_cap(text: Mapping[str, Any], model_type: str) -> float | None:
    cap = text.get("attn_logit_softcapping", model_types.SOFT_CAPS.get(model_type))
    return float(cap) if type(cap) in (int, float) and 0 < cap < MAX_COUNT else None


def _read_table_rows(text: Mapping[str, Any], model_type: str) -> dict[str, int]:
    """Read how many rows a token needs of each table: a product of the config's counts."""
    return {
        module: prod((read_count(text, each.key) or each.usual) + each.shift for each in counts)
        for module, counts in model_types.TABLE_ROWS.get(model_type, {}).items()
    }


def _read_latents(text: Mapping[str, Any]) -> LatentAttention | None:
    dim = read_count(text, "kv_lora_rank")
    if dim is None:
        return None
    return LatentAttention(
        dim=dim,
        rope_dim=read_count(text, "qk_rope_head_dim") or 0,
        nope_dim=read_count(text, "qk_nope_head_dim") or 0,
        value_dim=read_count(text, "v_head_dim") or 0,
        index_dim=read_count(text, "index_head_dim") or 0,
    )


def _read_index_topk(text: Mapping[str, Any], model_type: str) -> int | None:
    chosen = model_types.INDEX_TOPK.get(model_type)
    return chosen and (read_count(text, "index_topk") or chosen)


def _read_linear(text: Mapping[str, Any]) -> LinearAttention | None:
    sizes = [read_count(text, f"linear_{field}") or 0 for field in LinearAttention._fields]
    return LinearAttention(*sizes) if all(sizes) else None


def _read_nested(text: Mapping[str, Any], part: str, *keys: str) -> int | None:
    """Read the first of these keys, here or in a nested part (DBRX)."""
    nested = text.get(part)
    found = read_count(text, *keys)
    return read_count(nested, *keys) if found is None and isinstance(nested, Mapping) else found


def _read_tie(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool | None:
    """Return what the config says; the outer one decides where it speaks, as in transformers."""
    stated = (part.get("tie_word_embeddings") for part in (config, text))
    return next((value for value in stated if isinstance(value, bool)), None)


def _read_version(config: Mapping[str, Any]) -> int:
    """Return the first number of the version of transformers that wrote a config; 0 without one."""
    number, _, _ = str(config.get("transformers_version")).partition(".")
    return int(number) if number.isdecimal() and len(number) < 20 else 0


def _read_names(value: Any) -> tuple[str, ...]:
    return tuple(name for name in value if isinstance(name, str)) if isinstance(value, list) else ()


def _read_end_tokens(config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, ...]:
    values = (part.get("eos_token_id") for part in (config, text))
    tokens = [
        token for value in values for token in (value if isinstance(value, list) else [value])
    ]
    return tuple(dict.fromkeys(token for token in tokens if type(token) is int))
