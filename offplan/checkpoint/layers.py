"""The stack of decoder layers, found from the tensors' names and shapes."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from offplan.checkpoint.architecture import MAX_LAYERS, Architecture
from offplan.checkpoint.jsontext import quote
from offplan.checkpoint.tensors import CONFIG_NAME, FLOATS, INDEX, TensorInfo, Tensors
from offplan.errors import CheckpointError

_ROTARY = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_CAUSAL_MASK = re.compile(r"(^|\.)(attn|attention)\.(bias|masked_bias|causal_mask)$")
"""Recomputed, never loaded, though old checkpoints store them (GPT-2, GPT-J, Pythia).
Source: transformers 4.57, ``PreTrainedModel._load_pretrained_model`` and the GPT-2, GPT-Neo,
GPT-NeoX, GPT-J and CodeGen models' ``_keys_to_ignore_on_load_unexpected`` or buffers."""
_MTP_PART = re.compile(r"mtp|mtp_\w+|nextn_\w+")
"""A name part that marks multi-token prediction outside the stack (``mtp.layers.0``)."""
_TOWER_PART = re.compile(
    r"(audio|image|video|vision|visual|vit)(_\w+)?|\w*_(audio|vision|resampler|projector(_\w+)?)|"
    r"connector|projector|resampler_model|sam_model|view_seperator|patch_merger|mlp_AR"
)
"""A name part that marks what reads images and sound, before any index.

Source: transformers 5.23, the classes of the model types in ``model_types.TEXT_PARTS``.
"""
_TOWER_START = re.compile(r"(blocks|(deepstack_)?merger(_list)?|patch_embed|pos_embed)\.")
"""How names begin of Cosmos 3's tower, which has no name."""
_TEXT_PARTS = [re.compile(name) for name in ("language_model", "llm", "text_model")]
"""Name parts that a language model has beside towers."""
_BESIDE_TEXT = re.compile(rf"{_MTP_PART.pattern}|lm_head")
"""What of a text's model is stored beside them."""
_OWN_KEYS = re.compile(r"\.self_attn\.[kv]_(proj|norm)\.")
"""What layers that share an earlier one's keys and values do not load, though Gemma 3n stores it.
Source: transformers 5.23, ``Gemma3nTextModel._keys_to_ignore_on_load_unexpected``."""

_CACHE_SCALE = re.compile(r"\.(k_proj\.k|v_proj\.v|attn\.k|attn\.v)_scale$")
"""Scales of an FP8 KV cache, which a cache in the model's own type does without.
Source: ModelOpt's and compressed-tensors' exports."""

_INDEX_PART = re.compile(rf"\.{INDEX}(?=\.)")
_MAX_DEPTH = 3
"""Indices in a name that may count layers: a hostile name of thousands would cost their square."""


@dataclass(frozen=True)
class Split:
    """The tensors of a checkpoint, told apart."""

    prefixes: tuple[str, ...]
    """The start of each layer's names: ``model.layers.3``."""
    layers: tuple[Tensors, ...]
    """The tensors of each decoder layer."""
    outside: Tensors
    """All others, sorted by name."""
    not_loaded: frozenset[str]
    """Names in ``outside`` that a causal language model does not load."""
    towers: frozenset[str]
    """Names among them of what reads images and sound."""
    notes: tuple[str, ...]


def split_layers(architecture: Architecture, tensors: Iterable[TensorInfo]) -> Split:
    """Find the decoder layers: of the ``<prefix>.<N>.`` that have the config's count, the largest.

    Layers past the config's count predict further tokens: they are outside and not loaded.
    Raises CheckpointError when no stack fits the config.
    """
    tensors = tuple(tensors)
    num_layers = architecture.num_layers
    towers = _find_towers(tensors) if architecture.runs_text_alone else frozenset()
    of_text = tuple(tensor for tensor in tensors if tensor.name not in towers)
    stacks = _find_stacks(of_text)
    if looped := _find_looped(stacks, num_layers):
        return _split_looped(tensors, looped, towers)
    prefix, num_stacked = _choose_stack(stacks, architecture)
    notes = []
    if num_layers is None:
        num_layers = min(num_stacked, MAX_LAYERS)
        notes.append(f"{CONFIG_NAME} does not say how many layers there are: took {prefix}.*")
    layers: list[list[TensorInfo]] = [[] for _ in range(num_layers)]
    outside: list[TensorInfo] = []
    not_loaded: set[str] = set()
    num_scales = 0
    num_keeping = num_layers - architecture.num_sharing_layers
    in_stack = re.compile(rf"{re.escape(prefix)}\.{INDEX}\..")
    for tensor in tensors:
        found = in_stack.match(tensor.name)
        index = int(found[1]) if found else num_layers
        is_idle = index >= num_keeping and _OWN_KEYS.search(tensor.name)
        is_scale = found is not None and _CACHE_SCALE.search(tensor.name) is not None
        num_scales += is_scale
        is_read_by_row = index < num_layers and is_rows(architecture, tensor)
        is_left = is_idle or is_scale or is_read_by_row or _is_recomputed(tensor)
        if index < num_layers and not is_left:
            layers[index].append(tensor)
            continue
        outside.append(tensor)
        if (found and not is_read_by_row) or _has_part(_MTP_PART, tensor.name):
            not_loaded.add(tensor.name)
    if num_stacked > num_layers:
        extra = f"{prefix}.{num_layers}"
        notes.append(f"layers from {extra} on predict further tokens and are not loaded")
    if num_scales:
        notes.append(
            f"{num_scales} scales of an FP8 KV cache are stored and not loaded: the cache has the "
            "type that the model computes in"
        )
    by_layer, outside = tuple(map(tuple, layers)), sorted(outside)
    prefixes = tuple(f"{prefix}.{index}" for index in range(num_layers))
    return Split(prefixes, by_layer, tuple(outside), towers | not_loaded, towers, tuple(notes))


def _find_looped(stacks: "Stacks", num_layers: int | None) -> list[tuple[str, int]]:
    """Return several equal stacks whose layers a pass calls again and again, with their sizes.

    The config then counts calls: a multiple of the layers, where no stack has as many.
    """
    counts = {count for count, _ in stacks.values()}
    if num_layers is None or len(stacks) < 2 or len(counts) > 1 or max(counts) >= num_layers:
        return []
    (count,) = counts
    nested = any(one.startswith(f"{other}.") for one in stacks for other in stacks)
    is_multiple = num_layers % (count * len(stacks)) == 0
    return [(prefix, count) for prefix in sorted(stacks)] if is_multiple and not nested else []


def _split_looped(tensors: Tensors, looped: list[tuple[str, int]], towers: frozenset[str]) -> Split:
    """Split the layers of several stacks, one stack after the other."""
    prefixes = tuple(f"{prefix}.{index}" for prefix, count in looped for index in range(count))
    numbers = {prefix: number for number, prefix in enumerate(prefixes)}
    layers: list[list[TensorInfo]] = [[] for _ in prefixes]
    outside: list[TensorInfo] = []
    in_stacks = re.compile(rf"((?:{'|'.join(re.escape(each) for each, _ in looped)})\.{INDEX})\..")
    for tensor in tensors:
        found = in_stacks.match(tensor.name)
        (outside if found is None else layers[numbers[found[1]]]).append(tensor)
    note = f"a pass calls the layers of {' and '.join(each for each, _ in looped)} several times"
    by_layer = tuple(map(tuple, layers))
    return Split(prefixes, by_layer, tuple(sorted(outside)), towers, towers, (note,))


def _choose_stack(stacks: "Stacks", architecture: Architecture) -> tuple[str, int]:
    """Return the prefix of the decoder's stack and the number of layers stored under it."""
    num_layers = architecture.num_layers
    num_extra = architecture.num_prediction_layers
    fitting = [
        # An exact count before one with layers to spare, then the most bytes.
        (count in (num_layers, (num_layers or 0) + num_extra), num_bytes, prefix, count)
        for prefix, (count, num_bytes) in stacks.items()
        if num_layers is None or count >= num_layers
    ]
    if fitting:
        _, _, prefix, count = max(fitting)
        if num_layers is not None and count > num_layers + num_extra:
            raise CheckpointError(
                f"found {count} layers {quote(prefix)}, expected {num_layers} as {CONFIG_NAME} "
                f"says, and {num_extra} more that predict further tokens: {CONFIG_NAME} was "
                "edited, or belongs to another model"
            )
        return prefix, count
    largest = sorted(stacks.items(), key=lambda item: -item[1][1])[:3]
    found = ", ".join(f"{quote(prefix)} with {count}" for prefix, (count, _) in largest)
    raise CheckpointError(
        f"found no stack of {num_layers or 'any'} layers among the tensors (stacks: "
        f"{found or 'none'}), expected one as {CONFIG_NAME} says; the checkpoint is incomplete, or "
        f"{CONFIG_NAME} belongs to another model"
    )


Stacks = dict[str, tuple[int, int]]
"""Layers and bytes of each stack, by the start of its layers' names before the index."""


def _find_stacks(tensors: Tensors) -> Stacks:
    """Count the layers and the bytes under every ``<prefix>.<N>.`` of the names without a gap.

    Routed experts are none, however many.
    """
    indices: defaultdict[str, set[int]] = defaultdict(set)
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        for found in islice(_INDEX_PART.finditer(tensor.name), _MAX_DEPTH):
            prefix = tensor.name[: found.start()]
            indices[prefix].add(int(found[1]))
            sizes[prefix] += tensor.nbytes
    return {
        prefix: (len(counted), sizes[prefix])
        for prefix, counted in indices.items()
        if max(counted) == len(counted) - 1 and not prefix.endswith(".experts")
    }


def is_rows(architecture: Architecture, tensor: TensorInfo) -> bool:
    """Whether a tensor is rows of a table, which passes gather: it lies outside the layers."""
    is_matrix = tensor.dtype in FLOATS and len(tensor.shape) == 2
    return is_matrix and architecture.find_table(tensor.name) is not None


def is_of_tower(name: str) -> bool:
    """Whether a tensor of this name belongs to what reads images and sound."""
    before_index, *_ = _INDEX_PART.split(name, 1)
    return bool(_TOWER_START.match(name)) or _has_part(_TOWER_PART, before_index)


def _find_towers(tensors: Tensors) -> frozenset[str]:
    """Name what reads images and sound: all beside a part for text and its head, if one is named.

    Elsewhere names of towers tell.
    """
    names = [tensor.name for tensor in tensors]
    for part in _TEXT_PARTS:
        if any(_has_part(part, name) for name in names):
            beside = (name for name in names if not _has_part(part, name))
            return frozenset(name for name in beside if not _has_part(_BESIDE_TEXT, name))
    return frozenset(filter(is_of_tower, names))


def _is_recomputed(tensor: TensorInfo) -> bool:
    if _ROTARY.search(tensor.name):
        return True
    # A mask is a scalar or [1, 1, n, n]; a real bias of such a name has one dimension.
    is_mask = tensor.shape == () or (len(tensor.shape) == 4 and tensor.shape[:2] == (1, 1))
    return is_mask and _CAUSAL_MASK.search(tensor.name) is not None


def _has_part(part: re.Pattern[str], name: str) -> bool:
    return any(map(part.fullmatch, name.split(".")))
