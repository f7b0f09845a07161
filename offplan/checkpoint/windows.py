"""The way each layer mixes tokens, and how many of them it sees."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from offplan.checkpoint.config import read_count
from offplan.checkpoint.model_types import PATTERNS, TIED_BY_DEFAULT, Pattern
from offplan.checkpoint.tensors import CONFIG_NAME


class Mixer(str, Enum):
    """The way in which a layer lets tokens see one another."""

    FULL = "f"
    """Attention to the whole context."""
    SLIDING = "s"
    """Attention to the last tokens."""
    CHUNKED = "k"
    """Attention within chunks of the text."""
    LINEAR = "l"
    """Linear attention, which keeps a state of fixed size."""
    NONE = "n"
    """Nothing: the layer is an MLP, or experts, alone."""
    UNKNOWN = "?"
    """Something else, such as a convolution or a state space."""


_NAMES = {
    Mixer.FULL: "full_attention attention indexed_attention deepseek_sparse_attention",
    Mixer.SLIDING: "sliding_attention hybrid_sliding",
    Mixer.CHUNKED: "chunked_attention",
    Mixer.LINEAR: "linear_attention",
    Mixer.NONE: "moe mlp",
}
"""Transformers' names of them in ``layer_types``."""
_MIXERS = {name: mixer for mixer, names in _NAMES.items() for name in names.split()}
_WINDOW_KEY = "sliding_window"
_CHUNK_KEY = "attention_chunk_size"
_HALVED = ("gemma3_text", "gemma4_text", "gemma4_unified_text")
"""Model types whose window reaches half as far to each side where attention goes both ways."""
_BOTH_WAYS = (True, "all")
_NOTE = (
    f"{CONFIG_NAME} has a sliding_window but does not say for which layers: the cache is counted "
    "as if every layer kept the whole context"
)


def read_windows(
    text: Mapping[str, Any], model_type: str, num_layers: int
) -> tuple[tuple[Mixer, ...], tuple[int | None, ...], tuple[str, ...]]:
    """Read the layers' mixers and windows from a language model's config, else by its model type.

    A window is the tokens that a layer's attention sees at most, None if nothing hides the
    context. The sentences returned last are on what the config leaves open.
    """
    pattern = PATTERNS.get(model_type)
    notes: tuple[str, ...] = ()
    mixers = _stated(text, pattern, num_layers)
    if mixers is None:
        guessed = pattern or _guess(text, model_type)
        if guessed is None and read_count(text, _WINDOW_KEY):
            notes = (_NOTE,)
        mixers = _repeat(text, guessed or Pattern("f"), num_layers)
    known = pattern or Pattern("f")
    tokens = {
        Mixer.SLIDING: _read_window(text, model_type, known),
        Mixer.CHUNKED: _read_chunk(text, known),
    }
    # a window that is switched off hides nothing
    seen = [Mixer.FULL if mixer in tokens and tokens[mixer] is None else mixer for mixer in mixers]
    return tuple(seen), tuple(tokens.get(mixer) for mixer in seen), notes


def _stated(
    text: Mapping[str, Any], pattern: Pattern | None, num_layers: int
) -> list[Mixer] | None:
    """Return what the config lists layer by layer, None if it lists nothing."""
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and len(kinds) >= num_layers:
        named = _MIXERS
        everywhere = pattern and pattern.first is None and not set("fk") & set(pattern.cycle)
        if pattern and everywhere and not pattern.by_list:
            named = _MIXERS | {"full_attention": Mixer.SLIDING}  # a window is every layer's
        return [named.get(str(kind), Mixer.UNKNOWN) for kind in kinds[:num_layers]]
    rotary = text.get("no_rope_layers")  # despite its name, true where positions are rotary
    if pattern and pattern.by_rotary and isinstance(rotary, list) and len(rotary) >= num_layers:
        return [Mixer(pattern.cycle[0 if each else -1]) for each in rotary[:num_layers]]
    return None


def _guess(text: Mapping[str, Any], model_type: str) -> Pattern | None:
    """Make a pattern for a model type without one, None if the config says too little."""
    if read_count(text, "full_attention_interval"):
        return Pattern("lf", every="full_attention_interval")
    if model_type in TIED_BY_DEFAULT or text.get("use_sliding_window") is False:
        return Pattern("f")
    if read_count(text, "sliding_window_pattern"):
        return Pattern("sf", every="sliding_window_pattern")
    return Pattern("s", first=0) if text.get("use_sliding_window") is True else None


def _repeat(text: Mapping[str, Any], pattern: Pattern, num_layers: int) -> list[Mixer]:
    """Return the mixers of a pattern, with what the config says of it."""
    cycle = pattern.cycle
    if pattern.every and (every := read_count(text, pattern.every)):
        between = min(every - 1, num_layers)
        # what stands alone keeps its end of the cycle
        is_last = cycle.count(cycle[-1]) == 1
        cycle = cycle[0] * (between if is_last else 1) + cycle[-1] * (1 if is_last else between)
    rest = max(0, num_layers - len(pattern.head))
    letters = (pattern.head + cycle * (rest // len(cycle) + 1))[:num_layers]
    if pattern.last:
        letters = letters[:-1] + pattern.last
    first, stop = pattern.first, pattern.stop
    bound = text.get("max_window_layers")
    if type(bound) is int and bound >= 0:
        first, stop = (each if each is None else bound for each in (first, stop))
    within = range(first or 0, num_layers if stop is None else stop)
    return [
        Mixer(letter) if index in within else Mixer.FULL for index, letter in enumerate(letters)
    ]


def _read_window(text: Mapping[str, Any], model_type: str, pattern: Pattern) -> int | None:
    """Return the tokens of the sliding layers, None if windows are switched off."""
    is_listed = pattern.by_list and isinstance(text.get("layer_types"), list)
    if pattern.switched and not is_listed and text.get("use_sliding_window") is not True:
        return None
    key = pattern.key
    tokens = read_count(text, _WINDOW_KEY if _WINDOW_KEY in text else key)
    if model_type == "mimo_v2_flash" and (before := read_count(text, "sliding_window_size")):
        return before + 1  # which leaves out the token itself
    if tokens is None and not {key, _WINDOW_KEY} & text.keys():
        tokens = pattern.tokens
    if tokens and key == "local_attention" and _WINDOW_KEY not in text:
        return tokens // 2  # which counts tokens on either side
    if tokens and model_type in _HALVED and text.get("use_bidirectional_attention") in _BOTH_WAYS:
        return tokens // 2 + 1
    return tokens


def _read_chunk(text: Mapping[str, Any], pattern: Pattern) -> int | None:
    """Return the tokens of a chunk, None if there are no chunks."""
    default = pattern.key == _CHUNK_KEY and _CHUNK_KEY not in text
    return pattern.tokens if default else read_count(text, _CHUNK_KEY)
