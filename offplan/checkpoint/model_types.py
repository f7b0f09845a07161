"""Facts of each model type that transformers knows and ``config.json`` need not say.

They stand in ``model_types.yaml``, with their sources, so that planning imports no transformers.
"""

from pathlib import Path
from typing import Any, NamedTuple

from offplan.files import load_facts

_FACTS: dict[str, Any] = load_facts(Path(__file__).with_suffix(".yaml"))

TIED_BY_DEFAULT = dict.fromkeys(_FACTS["tied"], True) | dict.fromkeys(_FACTS["untied"], False)
"""True if a model type's head is the embedding, not a matrix of its own, unless the config says."""
CONV1D_TYPES = frozenset(_FACTS["conv1d"])
"""Model types whose layers store their matrices as [in, out]."""
EXPERTS_IN_OUT = frozenset(_FACTS["experts_in_out"])
"""Model types whose fused experts are stored as [experts, in, out], not [experts, out, in]."""
TURNED_EXPERTS = frozenset(_FACTS["turned_experts"])
"""Model types of these whose experts are held as [experts, out, in]: loading turns them round."""
TABLE_EXPERTS = frozenset(_FACTS["table_experts"])
"""Model types whose experts are rows of embeddings, which no router sends tokens to."""
SHARED_BEHIND = frozenset(_FACTS["shared_behind"])
"""Model types that multiply shared experts behind the routed ones, and return the sum of both."""
FUSED_GATES = frozenset(_FACTS["fused_gates"])
"""Model types whose dense MLPs store gate and up apart, and multiply both as one matrix."""
SINK_TYPES = frozenset(_FACTS["sinks"])
"""Model types whose softmax has a learned sink for each head."""
CHANGES_CACHED = frozenset(_FACTS["changes_cached"])
"""Model types whose attention changes cached keys or values in each pass."""
SOFT_CAPS: dict[str, float] = _FACTS["soft_caps"]
"""Caps of attention scores where the config names none."""

HEAD_SIZES: dict[str, dict[str, int]] = _FACTS["head_sizes"]
"""Elements of heads where the config names none, by its keys, if those of a layer's keys and values
or of two layers may differ."""


def _float32_parts(table: str) -> dict[str, tuple[str, ...]]:
    return {name: tuple(row["parts"]) for row in _FACTS[table] for name in row["types"]}


FLOAT32_PARTS = _float32_parts("float32")
"""Parts of names whose parameters stay in float32 in a model computed in bfloat16 or float16."""
FLOAT32_PARTS_STORED = _float32_parts("float32_stored")
"""Such parts by the names that checkpoints store them under, if loading renames them. Those that a
class makes in float32 whatever the model is computed in are among them."""
FLOAT32_PARTS_IN_FLOAT16 = _float32_parts("float32_in_float16")
"""Parts of names whose parameters stay in float32 in a model computed in float16 only."""
WIDENED_ROUTERS = _float32_parts("widened_routers")
"""Parts of names of routers that every pass widens to float32, exactly: they stay as stored."""


class RowCount(NamedTuple):
    """A factor of the rows that a token needs of a table."""

    key: str
    """The key of ``config.json`` that it is read from."""
    usual: int
    """The value that the config class takes if the key is absent."""
    shift: int = 0
    """The number that is added to it."""


TABLE_ROWS: dict[str, dict[str, tuple[RowCount, ...]]] = {
    name: {row["module"]: tuple(RowCount(*each) for each in row.get("rows", ()))}
    for row in _FACTS["table_rows"]
    for name in row["types"]
}
"""Rows that a token needs of tables beside the input embedding: the product of these factors, by
model type and the name of the module."""
ROUTED_TO: dict[str, int] = _FACTS["routed_to"]
"""Experts that a token is sent to, whatever the config says."""
INDEX_TOPK: dict[str, int] = _FACTS["indexed"]
"""Tokens that an indexer chooses of a longer text where the config does not say how many."""
STOCK_CHUNKS = frozenset(_FACTS["stock_chunks"])
"""Model types whose prompts transformers' own passes read in chunks with the same result."""
STOCK_CHUNKS_WITHOUT_WINDOW = frozenset(_FACTS["stock_chunks_without_window"])
"""Model types of which they do so where the config names no window."""
TEXT_CLASSES: dict[str, str] = {
    family: text for family, text in _FACTS["text_parts"].items() if isinstance(text, str)
}
"""Multimodal model types whose text part has one model type, whatever the config calls it."""
TEXT_PARTS: dict[str, list[str]] = _FACTS["text_parts"] | {
    family: [text] for family, text in TEXT_CLASSES.items()
}
"""Multimodal model types whose text part runs alone, and the model types it may have there."""
HUB_TYPES: dict[str, str] = _FACTS["hub_types"]
"""Transformers' model types, by those that configs on the Hub give them."""
NOT_CAUSAL: dict[str, str] = _FACTS["not_causal"]
"""The words for models of a type that do not write text token by token."""
SINCE: dict[str, str] = {
    name: version for version, names in _FACTS["since"].items() for name in names
}
"""The version of transformers that first has a model type, where 5.17 has not."""
TEXT_SIZES: dict[str, dict[str, int]] = _FACTS["text_sizes"]
"""Sizes of text parts, by their model type, where a multimodal config leaves them out."""


class Pattern(NamedTuple):
    """The layers of a model type that see part of the context, where its config lists none."""

    cycle: str
    """One letter a layer, repeated: f(ull), s(liding), k (chunked), l(inear), ? (anything else)."""
    tokens: int | None = None
    """Window in tokens where the config has no key for it."""
    head: str = ""
    """Layers before the cycle."""
    last: str = ""
    """The last layer, where it does not follow the cycle."""
    key: str = "sliding_window"
    """Key of the window in ``config.json``."""
    switched: bool = False
    """True if the config must switch windows on with ``use_sliding_window``."""
    first: int | None = None
    """Layers before it are full; ``max_window_layers`` in the config goes before it."""
    stop: int | None = None
    """Layers from it on are full; ``max_window_layers`` in the config goes before it."""
    every: str = ""
    """Key of the number of layers from one of the rarer kind to the next, if there is one."""
    by_list: bool = False
    """True if a ``layer_types`` alone tells the layers with a window, whatever else is said."""
    by_rotary: bool = False
    """True if ``no_rope_layers`` tells layers of the cycle's first kind (1) from its last (0)."""


PATTERNS = {
    name: Pattern(**{key: value for key, value in row.items() if key != "types"})
    for row in _FACTS["windows"]
    for name in row["types"]
}
"""Layers with a window by model type; the others' attention always sees the whole context."""
