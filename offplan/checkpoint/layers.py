"""The stack of decoder layers, found from the tensors' names and shapes, and their matrices."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from offplan.checkpoint.architecture import MAX_LAYERS, Architecture
from offplan.checkpoint.jsontext import quote
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import CONFIG_NAME, FLOATS, INDEX, TensorInfo, Tensors, sum_bytes
from offplan.errors import CheckpointError

_ROTARY = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_CAUSAL_MASK = re.compile(r"(^|\.)(attn|attention)\.(bias|masked_bias|causal_mask)$")
"""Recomputed, never loaded, though old checkpoints store them (GPT-2, GPT-J, Pythia).
Source: transformers 4.57, ``PreTrainedModel._load_pretrained_model`` and the GPT-2, GPT-Neo,
GPT-NeoX, GPT-J and CodeGen models' ``_keys_to_ignore_on_load_unexpected`` or buffers."""
_MTP = r"mtp|mtp_\w+|nextn_\w+"


def _name_part(pattern: str) -> re.Pattern[str]:
    """Return a pattern to search a tensor's name for a part of it, between dots."""
    return re.compile(rf"(?:^|\.)(?:{pattern})(?:\.|\Z)")


_MTP_PART = _name_part(_MTP)
"""A name part that marks multi-token prediction outside the stack (``mtp.layers.0``)."""
_TOWER_PART = _name_part(
    r"(audio|image|video|vision|visual|vit)(_\w+)?|\w*_(audio|vision|resampler|projector(_\w+)?)|"
    r"connector|projector|resampler_model|sam_model|view_seperator|patch_merger|mlp_AR"
)
"""A name part that marks what reads images and sound, before any index.

Source: transformers 5.23, the classes of the model types in ``model_types.TEXT_PARTS``.
"""
_TOWER_START = re.compile(r"(blocks|(deepstack_)?merger(_list)?|patch_embed|pos_embed)\.")
"""How names begin of Cosmos 3's tower, which has no name."""
_TEXT_PARTS = [_name_part(name) for name in ("language_model", "llm", "text_model")]
"""Name parts that a language model has beside towers."""
_BESIDE_TEXT = _name_part(rf"{_MTP}|lm_head")
"""The parts of a text's model that are stored beside them."""
_OWN_KEYS = re.compile(r"\.self_attn\.[kv]_(proj|norm)\.")
"""The names that layers which share an earlier one's keys and values do not load, though Gemma 3n
stores them. Source: transformers 5.23, ``Gemma3nTextModel._keys_to_ignore_on_load_unexpected``."""

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
    of_text = tuple(each for each in tensors if each.name not in towers) if towers else tensors
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
    marks: dict[str, _Marks] = {}
    for tensor in tensors:
        found = in_stack.match(tensor.name)
        is_read_by_row = False
        if found is not None:
            index, end = int(found[1]), tensor.name[found.end(1) :]
            if end not in marks:
                marks[end] = _read_marks(end)
            marked = marks[end]
            is_idle = index >= num_keeping and marked.is_own_key
            num_scales += marked.is_cache_scale
            is_read_by_row = index < num_layers and is_rows(architecture, tensor)
            is_left = is_idle or marked.is_cache_scale or marked.is_recomputed(tensor.shape)
            if index < num_layers and not (is_left or is_read_by_row):
                layers[index].append(tensor)
                continue
        outside.append(tensor)
        if (found and not is_read_by_row) or is_prediction(tensor.name):
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
    # experts of one layer lie in the same stacks: each name is taken apart once for all of them
    by_start: defaultdict[str, list[TensorInfo]] = defaultdict(list)
    for tensor in tensors:
        start, is_expert, end = tensor.name.partition(".experts.")
        holds_more = not is_expert or _INDEX_PART.search(end) is not None
        by_start[tensor.name if holds_more else f"{start}."].append(tensor)
    indices: defaultdict[str, set[int]] = defaultdict(set)
    sizes: Counter[str] = Counter()
    for name, alike in by_start.items():
        num_bytes = sum_bytes(alike)
        for found in islice(_INDEX_PART.finditer(name), _MAX_DEPTH):
            prefix = name[: found.start()]
            indices[prefix].add(int(found[1]))
            sizes[prefix] += num_bytes
    return {
        prefix: (len(counted), sizes[prefix])
        for prefix, counted in indices.items()
        if max(counted) == len(counted) - 1 and not prefix.endswith(".experts")
    }


def is_rows(architecture: Architecture, tensor: TensorInfo) -> bool:
    """Return True if a tensor is a table's rows, which passes gather: it is in no layer."""
    is_matrix = tensor.dtype in FLOATS and len(tensor.shape) == 2
    return is_matrix and architecture.find_table(tensor.name) is not None


def is_prediction(name: str) -> bool:
    """Return True if a tensor outside the stack belongs to layers that predict further tokens."""
    return _MTP_PART.search(name) is not None


def is_of_tower(name: str) -> bool:
    """Return True if a tensor of this name belongs to what reads images and sound."""
    before_index, *_ = _INDEX_PART.split(name, 1)
    return bool(_TOWER_START.match(name)) or _TOWER_PART.search(before_index) is not None


def _find_towers(tensors: Tensors) -> frozenset[str]:
    """Name what reads images and sound: all beside a part for text and its head, if one is named.

    Elsewhere names of towers tell.
    """
    names = [tensor.name for tensor in tensors]
    for part in _TEXT_PARTS:
        if any(part.search(name) for name in names):
            beside = (name for name in names if not part.search(name))
            return frozenset(name for name in beside if not _BESIDE_TEXT.search(name))
    return frozenset(filter(is_of_tower, names))


class _Marks(NamedTuple):
    """The facts that the name of a tensor tells behind its layer's index."""

    is_own_key: bool
    """True if layers that share an earlier one's keys and values do not load it."""
    is_cache_scale: bool
    is_rotary: bool
    may_be_mask: bool

    def is_recomputed(self, shape: tuple[int, ...]) -> bool:
        """Return True if a tensor of this shape is recomputed, and never loaded."""
        # a mask is a scalar or [1, 1, n, n]; a real bias of such a name has one dimension
        is_mask = shape == () or (len(shape) == 4 and shape[:2] == (1, 1))
        return self.is_rotary or (self.may_be_mask and is_mask)


def _read_marks(end: str) -> _Marks:
    patterns = _OWN_KEYS, _CACHE_SCALE, _ROTARY, _CAUSAL_MASK
    return _Marks(*(pattern.search(end) is not None for pattern in patterns))


_BESIDE = ("bias", "scale", "scales", "scale_inv")
"""Ends of the names of what is stored beside a matrix."""
_STACKED_INPUTS = ("w1", "v1")
"""Matrices of DBRX's experts, each [experts x inner, hidden], whose rows are what they give.

Source: transformers 5.23, ``DbrxExpertGLU``: the third, ``w2``, is multiplied from the other side.
"""


def output_width(parameter: Parameter, architecture: Architecture) -> int:
    """Elements that a token's product with a parameter has, one expert's where it is of experts.

    0 for what is no matrix: biases, norms, and what was left of a quantiser's.
    """
    last, shape = parameter.name.rpartition(".")[2], parameter.shape
    if len(shape) < 2 or last.endswith(_BESIDE):
        return 0
    if shape != parameter.tensors[0].shape:  # of packed ones, [..., out, in] is known
        return shape[-2]
    if not parameter.is_fused:
        return shape[-1 if architecture.matrices_in_out else -2]
    if len(shape) == 2:
        num_experts = architecture.routing.num_experts or 1
        return shape[0] // num_experts if last in _STACKED_INPUTS else shape[1]
    return shape[-1 if is_in_out(parameter, architecture) else -2]


def is_in_out(parameter: Parameter, architecture: Architecture) -> bool:
    """Return True if a parameter has the matrices of all experts as [experts, in, out].

    What loading turns round may be stored either way. Source: transformers 5.23, whose
    ``Transpose`` leaves what has the shape that it wants, square matrices among them. It saves the
    experts as it holds them.
    """
    routing = architecture.routing
    if not (routing.in_out and parameter.is_fused):
        return False
    if routing.held_in_out:
        return True
    is_second = "down_proj" in parameter.name.split(".")
    return parameter.shape[-2 if is_second else -1] != architecture.hidden_size


def held_shape(parameter: Parameter, architecture: Architecture) -> tuple[int, ...]:
    """Return the shape that values have once they are loaded: loading may turn matrices round."""
    if architecture.routing.held_in_out or not is_in_out(parameter, architecture):
        return parameter.shape
    *stack, rows, columns = parameter.shape
    return (*stack, columns, rows)
