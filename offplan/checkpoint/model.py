"""The model as the rest of offplan sees it: layers of parameters, and what lies outside them."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from offplan.checkpoint.architecture import Architecture, read_architecture
from offplan.checkpoint.config import fingerprint
from offplan.checkpoint.gguf.origin import GGUF
from offplan.checkpoint.group import group_outside, resize
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tables import INPUT_EMBEDDINGS, Table, group_rows
from offplan.checkpoint.tensors import TensorInfo, Tensors

FLOAT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of an element of each type that models compute in, as torch names them."""


class Vectors(NamedTuple):
    """Vectors of one size that a layer caches for each token."""

    number: int
    dim: int
    """Elements of each."""


@dataclass(frozen=True)
class KVCache:
    """The memory that one layer keeps for each sequence while it generates."""

    bytes_per_token: int = 0
    """Bytes of one token's keys and values, or of its MLA latent, as the model computes them."""
    window: int | None = None
    """Tokens kept at most (sliding window); None keeps the whole context."""
    state_bytes: int = 0
    """Bytes of a sequence's fixed state (linear attention's recurrent and convolution state)."""
    vectors: tuple[Vectors, ...] = field(default=(), compare=False)
    """Vectors that one token's bytes are: keys and values of the heads, or a latent and its rotary
    part; empty if that is not known."""
    value_bytes: int = 0
    """Bytes of one token as the model computes them, if they are kept as codes; else 0."""

    @property
    def is_coded(self) -> bool:
        """True if keys and values are kept as codes of eight bits."""
        return self.value_bytes > 0

    @property
    def as_computed(self) -> "KVCache":
        """The same with keys and values as the model computes them."""
        if not self.is_coded:
            return self
        return replace(self, bytes_per_token=self.value_bytes, value_bytes=0)

    def as_codes(self, element_bytes: int, scale_bytes: int) -> "KVCache":
        """Return the same with a byte for each element and ``scale_bytes`` for each vector."""
        num_vectors = sum(each.number for each in self.vectors)
        of_token = self.bytes_per_token // element_bytes + scale_bytes * num_vectors
        return replace(self, bytes_per_token=of_token, value_bytes=self.bytes_per_token)

    def nbytes(self, batch: int, context: int) -> int:
        """Bytes for ``batch`` sequences of ``context`` tokens."""
        tokens = context if self.window is None else min(context, self.window)
        return batch * (tokens * self.bytes_per_token + self.state_bytes)


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    index: int
    kind: str
    """``dense`` or ``moe``."""
    prefix: str
    """The start of its tensors' names in the checkpoint: ``model.layers.3``."""
    parameters: tuple[Parameter, ...]
    """Sorted by name."""
    kv_cache: KVCache = field(default_factory=KVCache)
    fuses_gates: bool = False
    """True if gate and up of its dense MLP are stored apart, and one matrix once loaded."""

    @property
    def as_stored(self) -> "Layer":
        """The same as the checkpoint stores it."""
        return replace(
            self,
            parameters=tuple(p.as_stored for p in self.parameters),
            kv_cache=self.kv_cache.as_computed,
        )

    @property
    def is_recoded(self) -> bool:
        """True if the plan, and not the checkpoint, chose the form of some of its weights."""
        return any(parameter.is_recoded for parameter in self.parameters)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all its parameters as stored."""
        return sum(parameter.nbytes for parameter in self.parameters)

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of its routed experts; 0 in a dense layer."""
        return sum(parameter.nbytes for parameter in self.parameters if parameter.is_expert)

    @cached_property
    def key(self) -> str:
        """Name what makes two layers cost the same: kind, parameters, their types, and the cache.

        Twelve hexadecimal digits, the same on every machine and for every source of the model.
        """
        parameters = [
            [p.name, len(p.tensors), p.kinds_read] + ([] if p.form.is_raw else [p.form])
            for p in self.parameters
        ]
        kept = self.kv_cache
        cache = [kept.bytes_per_token, kept.window, kept.state_bytes]
        # the same bytes of values would be another cache
        cache += kept.is_coded * [kept.value_bytes]
        content = json.dumps([self.kind, parameters, cache])
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @cached_property
    def segments(self) -> dict[str, int]:
        """Bytes by segment; they add up to ``nbytes``."""
        sums: Counter[str] = Counter()
        for parameter in self.parameters:
            sums[parameter.segment] += parameter.nbytes
        return dict(sums)


@dataclass(frozen=True)
class Experts:
    """The routed experts of a mixture-of-experts model."""

    num_experts: int
    """Experts in one layer."""
    num_experts_per_token: int
    """Experts of a layer that a token is sent to."""
    bytes_per_expert: int
    """Bytes of one expert of one layer, as stored; the largest where layers differ."""
    groups: int = 1
    """Groups of GPUs that a layer's experts are divided among; ``num_experts`` is one group's."""

    @property
    def num_in_all(self) -> int:
        """Experts in one layer over all groups, of which a token is sent to some."""
        return self.num_experts * self.groups

    def touched(self, num_tokens: int) -> float:
        """Expected number of distinct experts that ``num_tokens`` tokens use in one layer.

        Assumes uniform, independent routing: E (1 - (1 - k/E)^T).
        """
        share = self.num_experts_per_token / self.num_in_all
        return float(self.num_experts * (1 - (1 - share) ** num_tokens))


@dataclass(frozen=True)
class Model:
    """A checkpoint understood: everything that planning needs, without a byte of weights."""

    source: str
    """The name that the user gave: a Hub id, a folder or a ``config.json``."""
    revision: str | None
    """The Hub commit; None off the Hub."""
    model_type: str
    config: Mapping[str, Any]
    """``config.json``, as read."""
    dtype: str
    """The dtype that weights stand for and are computed with, as torch names it: ``bfloat16``."""
    layers: tuple[Layer, ...]
    """The decoder layers in the order of execution, without multi-token-prediction layers."""
    outside: Tensors
    """Tensors outside the layers, as stored: embeddings, norm, head, vision tower, MTP layers."""
    tied: frozenset[str]
    """Names in ``outside`` of heads stored though the config ties them; they are loaded."""
    not_loaded: frozenset[str]
    """Names in ``outside`` that a causal language model does not load (MTP layers, towers)."""
    experts: Experts | None
    headers_sha256: str
    """Fingerprint of the sorted names, dtypes and shapes, the same on the Hub and in a folder."""
    num_tensors: int
    generation: str | None = None
    """Fingerprint of ``generation_config.json``, ``NO_GENERATION`` where the model has none; None
    where that is not known."""
    towers: frozenset[str] = frozenset()
    """Names in ``outside`` of what reads images and sound beside a text part that runs alone."""
    code: str | None = None
    """Fingerprint of the checkpoint's own Python files where the caller lets offplan run them; None
    where they are never run."""
    notes: tuple[str, ...] = ()
    """Sentences for the reader: what was not understood, what a config cannot show."""
    gguf: GGUF | None = None
    """The GGUF file whose shape this is: it can be planned, and not run. It is None for a
    checkpoint."""

    @cached_property
    def parameter_names(self) -> frozenset[str]:
        """Names of the layers' parameters, relative to their layers."""
        return frozenset(p.name for layer in self.layers for p in layer.parameters)

    @cached_property
    def architecture(self) -> Architecture:
        """The architecture that the config describes."""
        last = max((layer.index for layer in self.layers), default=-1)
        return read_architecture(self.config, last + 1)

    def keeps_float32(self, name: str) -> bool:
        """Return True if a parameter stays in float32, whatever the model is computed in."""
        return self.architecture.keeps_float32(name, self.dtype, is_wide=self._has_wide_routers)

    @cached_property
    def _has_wide_routers(self) -> bool:
        routers = (p for layer in self.layers for p in layer.parameters)
        routers = (p for p in routers if self.architecture.is_router(p.name))
        return any(tensor.dtype == "F32" for router in routers for tensor in router.tensors)

    @cached_property
    def config_sha256(self) -> str:
        """Fingerprint of all in the config that may change what the model gives."""
        return fingerprint(self.config)

    @cached_property
    def key(self) -> str:
        """Name what every answer about the model depends on, for answers that are kept on disk.

        That is all that the model was made of. It is stored names, types and shapes, the whole
        config, the type of computing, and code of its own. ``config_sha256`` leaves types out.
        """
        content = [self.headers_sha256, dict(self.config), self.dtype, self.generation, self.code]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def generation_config_sha256(self) -> str | None:
        """Fingerprint of the generation config; None where there is none, or none is known."""
        return self.generation or None

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of hidden states and of the KV cache."""
        return FLOAT_BYTES[self.dtype]

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(layer.nbytes for layer in self.layers) + sum(t.nbytes for t in self.outside)

    @property
    def tensors(self) -> Iterator[TensorInfo]:
        """All tensors as stored, those of the layers first."""
        for layer in self.layers:
            for parameter in layer.parameters:
                yield from parameter.stored
        yield from self.outside

    @cached_property
    def outside_parameters(self) -> tuple[Parameter, ...]:
        """The weights outside the layers, each with its scales, by their whole names."""
        return group_outside(self.outside, self.architecture)

    @cached_property
    def tower_bytes(self) -> int:
        """Bytes of what reads images and sound."""
        return sum(tensor.nbytes for tensor in self.outside if tensor.name in self.towers)

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The tables that may lie on the host, since a pass reads a few rows of them.

        The input embedding is among it where no head is tied to it. Left out are tables that are
        stored in another form than their values, since they cannot be read by row. So are those of
        a type of another size than they are used in.
        """
        inputs = find_matrices(self._loaded_outside, INPUT_EMBEDDINGS)
        is_apart = len(inputs) == 1 and self.stores_head
        tables = group_rows(self.architecture, self._loaded_outside, inputs if is_apart else ())
        return tuple(each for each in tables if all(map(self._keeps_rows, each.parameters)))

    def _keeps_rows(self, parameter: Parameter) -> bool:
        """Return True if a loaded matrix has the rows that the checkpoint stores."""
        is_matrix = parameter.form.is_raw and len(parameter.shape) == 2
        return is_matrix and resize(parameter, self.architecture, self.dtype).resized is None

    @cached_property
    def stores_head(self) -> bool:
        """True if the head is a tensor of its own."""
        return bool(find_matrices(self._loaded_outside, OUTPUT_HEADS))

    @cached_property
    def head(self) -> Parameter | None:
        """The matrix that turns hidden states into logits: the head, or what it is tied to."""
        named = find_matrices(self._loaded_outside, OUTPUT_HEADS)
        named = named or find_matrices(self._loaded_outside, INPUT_EMBEDDINGS)
        return named[0] if named else None

    @property
    def _loaded_outside(self) -> Iterable[Parameter]:
        return (p for p in self.outside_parameters if p.tensors[0].name not in self.not_loaded)

    @cached_property
    def num_parameters(self) -> int:
        """Weights that are stored, whatever their form: scales and the like are none."""
        in_layers = (p for layer in self.layers for p in layer.parameters)
        return sum(p.num_weights for p in (*in_layers, *self.outside_parameters))


OUTPUT_HEADS = frozenset(
    ("lm_head", "embed_out", "output", "output_layer", "output_projection", "head", "decoder")
)
"""Names that models give to the module that turns hidden states into logits."""


def compute_dtype(stored: str, stated: str | None) -> str:
    """Return what a model is computed in: floats as they are stored, whatever the config states.

    Quantised weights are computed with in the float type that the config states, else in bfloat16.
    """
    floats = (dtype for dtype in (stored, stated) if dtype in FLOAT_BYTES)
    return next(floats, "bfloat16")


def find_matrices(parameters: Iterable[Parameter], owners: frozenset[str]) -> list[Parameter]:
    """List the matrices among parameters outside the layers that belong to such modules."""
    return [p for p in parameters if owner(p.name) in owners and len(p.shape) == 2]


def owner(name: str) -> str:
    """Return the module of a weight: ``embed_tokens`` of ``model.embed_tokens.weight``."""
    module, _, last = name.rpartition(".")
    return module.rpartition(".")[2] if last == "weight" else ""
