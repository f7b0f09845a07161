"""The work of one decoder layer, whatever the machine: bytes to read, products to compute."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

from offplan.checkpoint.architecture import Architecture, HeadSizes
from offplan.checkpoint.model import Experts, KVCache, Layer
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.windows import Mixer
from offplan.costs.calls import count_calls
from offplan.held.stage import Stage
from offplan.kernel_sizes import CODES_ROWS, are_gathered, are_grouped
from offplan.placement import Phase
from offplan.plan import Workload


class Codes(NamedTuple):
    """A number for weights whose codes have four bits, and one for those of eight."""

    half: float = 0.0
    whole: float = 0.0


MATRIX_ELEMENTS = 2**20
"""Weights of a matrix whose product takes longer than another small kernel. Source: estimated."""


@dataclass(frozen=True)
class PassShape:
    """The shape of one forward pass."""

    phase: Phase
    batch: int
    """Sequences in the pass."""
    tokens: int
    """New tokens in each sequence."""
    context: int
    """Tokens that each sequence's attention can reach, the new ones included."""
    is_part: bool = False
    """True if it is one of several chunks of a prompt."""
    is_rest: bool = False
    """True if it is what remains of a prompt behind whole chunks."""

    @property
    def num_tokens(self) -> int:
        """New tokens over all sequences."""
        return self.batch * self.tokens

    @property
    def head_rows(self) -> int:
        """Tokens that the head gives logits of: all of a step, the last ones of a prompt."""
        return self.num_tokens if self.phase is Phase.DECODE else self.batch


def decode_shape(workload: Workload, tokens: int = 1) -> PassShape:
    """The shape of an average decode step, whose attention reads what is filled of the cache.

    A pass that checks drafts has several ``tokens`` of each sequence.
    """
    context = workload.decode_context + tokens - 1
    return PassShape(Phase.DECODE, workload.batch, tokens, context)


def prefill_shapes(workload: Workload, prefill_chunk: int) -> tuple[PassShape, ...]:
    """The shapes of the passes that read the prompt; the last chunk is what remains."""
    prompt = workload.prompt_tokens
    return tuple(
        PassShape(
            Phase.PREFILL,
            workload.batch,
            min(prefill_chunk, prompt - start),
            min(start + prefill_chunk, prompt),
            is_part=prefill_chunk < prompt,
            is_rest=prefill_chunk < prompt and prompt - start < prefill_chunk,
        )
        for start in range(0, prompt, prefill_chunk)
    )


def step_tokens(workload: Workload, prefill_chunk: int) -> int:
    """Tokens that a step of an engine has at most: a chunk of each prompt."""
    return workload.batch * min(prefill_chunk, workload.context)


@dataclass(frozen=True)
class AttentionDims:
    """Heads of one attention layer; zeros where the config does not say."""

    num_heads: int = 0
    """Query heads."""
    query_dim: int = 0
    """Elements of a query or key head."""
    value_dim: int = 0
    """Elements of a value head."""


def attention_dims(
    architecture: Architecture, phase: Phase, index: int | None = None
) -> AttentionDims:
    """Return the heads that a layer's attention works on in a phase; the widest if none is named.

    Latent attention expands keys and values in prefill; in decode its heads look at the cached
    latents themselves. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2.
    """
    heads, latents = architecture.attention, architecture.latents
    if latents is None:
        sizes, by_config = architecture.head_sizes, HeadSizes(heads.head_dim, heads.head_dim)
        own = max(sizes, default=by_config) if index is None else sizes[index]
        return AttentionDims(heads.num_heads, own.key, own.value)
    if phase is Phase.DECODE:
        return AttentionDims(heads.num_heads, latents.dim + latents.rope_dim, latents.dim)
    query_dim = latents.nope_dim + latents.rope_dim
    return AttentionDims(heads.num_heads, query_dim, latents.value_dim)


class Likeness(NamedTuple):
    """The traits of layers whose estimates are off alike."""

    passes: str
    """Name of the passes that run the layer."""
    mixer: str
    dense: str
    """Form of most dense weights; of plain values their type."""
    experts: str | None
    """Form of the routed experts, likewise; None without them."""


@dataclass(frozen=True)
class LayerWork:
    """Bytes and operations of one layer, summed once so that shapes are cheap to price."""

    key: str
    """Name of its times in a profile: ``Stage.time_key``."""
    dense_bytes: int
    """Bytes of the weights that every pass reads whole."""
    expert_bytes: int
    """Bytes of the routed experts, of which a pass reads those that its tokens are sent to."""
    expanded_elements: int
    """Weights whose values are made of their codes for passes of many tokens."""
    absorbed_elements: int
    """``expanded_elements`` that are expanded in every decode step."""
    coded_bytes: int
    """Bytes of ``dense_bytes`` that ``expanded_elements`` are stored in."""
    dense_codes: Codes
    """Dense weights that the checkpoint stores as codes."""
    expert_codes: Codes
    """Weights of routed experts that the checkpoint stores as codes."""
    num_matrices: int
    """Dense weights of MATRIX_ELEMENTS and more."""
    grouped_elements: int
    """Weights of routed experts whose values prompts of many tokens make of codes."""
    grouped_values: tuple[int, ...]
    """Weights of one expert in each matrix that these are of."""
    grouped_kinds: frozenset[str]
    """Kinds of the forms that these are stored in."""
    token_elements: float
    """Elements that each new token is multiplied by; of routed experts, only its own."""
    routed_elements: float
    """``token_elements`` of routed experts."""
    expert_elements: int
    """Weights of all routed experts."""
    row_elements: float
    """Elements of rows that each new token's products read and write."""
    element_bytes: int
    """Bytes of an element of what is computed with."""
    kv_cache: KVCache
    mixer: Mixer
    attention: Mapping[Phase, AttentionDims]
    experts: Experts | None
    likeness: Likeness
    is_handed: bool = False
    """True if offplan's passes hand it inputs of its own beside hidden states."""
    operators: Mapping[Phase, float] | None = None
    """Operators that transformers' own pass launches, by phase; None if offplan's passes run."""
    moved: Callable[[PassShape], float] | None = None
    """Bytes that these read and write in a call beside weights, the cache's among them."""
    overhead_s: float | None = None
    """Seconds that an engine's layer takes beside its roofline; None for the machine's figure."""
    is_recoded: bool = False
    """True if the plan, and not the checkpoint, chose the form of some of its weights."""
    expands_cache: bool = False
    """True if a prompt has the values made of what it caches as codes."""
    stored: "LayerWork | None" = None
    """The work of the same layer as the checkpoint stores it, with a cache as the model computes
    it; None if it is held so."""

    def weight_bytes(self, shape: PassShape) -> float:
        """Bytes of weights that a pass reads, each once."""
        if not self.expert_bytes or self.experts is None:
            return self.dense_bytes
        share = self.experts.touched(shape.num_tokens) / self.experts.num_experts
        return self.dense_bytes + share * self.expert_bytes

    def device_bytes(self, shape: PassShape) -> float:
        """Bytes to and from GPU memory of a pass with everything resident.

        They are the weights and the cache, and values that are made of codes and then read.
        """
        cache = self.kv_cache.nbytes(shape.batch, shape.context)
        made = self.made_elements(shape)
        return self.weight_bytes(shape) + 2 * self.element_bytes * made + cache

    def made_elements(self, shape: PassShape) -> int:
        """Dense weights whose values a pass makes of their codes before it multiplies."""
        if makes_values(shape.num_tokens, self.element_bytes):
            return self.expanded_elements
        return self.absorbed_elements if shape.phase is Phase.DECODE else 0

    def groups_experts(self, shape: PassShape) -> bool:
        """Return True if a pass makes values of experts' codes, group by group."""
        kinds = self.grouped_kinds
        return bool(kinds) and groups_codes(self.experts, shape.num_tokens, kinds)

    def flops(self, shape: PassShape) -> float:
        """Operations of a pass: two for each weight and token, and causal attention."""
        products = self.token_elements * shape.num_tokens
        return 2 * products + self._attention(shape, shape.batch * self._pairs(shape))

    def attention_flops(self, shape: PassShape, beyond: int) -> float:
        """Operations of attention that take as long as it does.

        A new token takes as long as looking at ``beyond`` tokens more than its window has.
        """
        pairs = self._pairs(shape)
        if self.mixer is Mixer.SLIDING and self.kv_cache.window is not None:
            blocks = self.kv_cache.window + beyond
            pairs = attended_pairs(shape, blocks)
        return self._attention(shape, shape.batch * pairs)

    def _attention(self, shape: PassShape, pairs: int) -> float:
        dims = self.attention[shape.phase]
        return 2.0 * dims.num_heads * (dims.query_dim + dims.value_dim) * pairs

    def _pairs(self, shape: PassShape) -> int:
        """Pairs of a new token and one it looks at, in one sequence; linear attention has none."""
        if self.mixer is Mixer.CHUNKED:
            return pairs_in_chunks(shape, self.kv_cache.window)
        attends = self.mixer in (Mixer.FULL, Mixer.SLIDING)
        return attended_pairs(shape, self.kv_cache.window) if attends else 0


def attended_pairs(shape: PassShape, window: int | None) -> int:
    """Pairs of a new token and one it looks at, in one sequence.

    The new tokens are the last of the context: n of them look at n c - n (n - 1) / 2 tokens. They
    look at fewer if a window hides the older ones.
    """
    first = shape.context - shape.tokens + 1  # tokens that the first new one can look at
    if window is None or window >= shape.context:
        return shape.tokens * (first + shape.context) // 2
    growing = max(0, min(window, shape.context) - first + 1)
    return growing * (2 * first + growing - 1) // 2 + (shape.tokens - growing) * window


def pairs_in_chunks(shape: PassShape, size: int | None) -> int:
    """Pairs as in ``attended_pairs`` where tokens look no further than their chunk of the text."""

    def up_to(num_tokens: int) -> int:
        chunk = size or shape.context
        whole, rest = divmod(num_tokens, chunk)
        return (whole * chunk * (chunk + 1) + rest * (rest + 1)) // 2

    return up_to(shape.context) - up_to(shape.context - shape.tokens)


def layer_work(stage: Stage, layer: Layer) -> LayerWork:
    """Sum up what a layer reads and multiplies."""
    dense = [p for p in layer.parameters if not p.is_expert]
    expert_elements = sum(_matrix_elements(p) for p in layer.parameters if p.is_expert)
    dense_elements = sum(map(_matrix_elements, dense))
    experts = stage.experts
    share = experts.num_experts_per_token / experts.num_in_all if experts else 1.0
    borrowed = 0 if stage.passes is None else stage.passes.borrowed[layer.index]
    engine = stage.pass_rules
    is_routed = layer.expert_bytes > 0
    grouped = [p for p in layer.parameters if p.is_expert and not p.form.is_raw and engine is None]
    return LayerWork(
        key=stage.time_key(layer.key),
        dense_bytes=layer.nbytes - layer.expert_bytes + borrowed * stage.element_bytes,
        expert_bytes=layer.expert_bytes,
        expanded_elements=sum(p.num_weights for p in dense if not p.form.is_raw),
        absorbed_elements=sum(p.num_weights for p in dense if is_absorbed(p)),
        coded_bytes=sum(p.nbytes for p in dense if not p.form.is_raw),
        dense_codes=_count_codes(dense),
        expert_codes=_count_codes(p for p in layer.parameters if p.is_expert),
        num_matrices=sum(_matrix_elements(p) >= MATRIX_ELEMENTS for p in dense),
        grouped_elements=sum(p.num_weights for p in grouped),
        grouped_values=tuple(p.num_weights // experts.num_experts for p in grouped)
        if experts
        else (),
        grouped_kinds=frozenset(p.form.kind.value for p in grouped),
        element_bytes=stage.element_bytes,
        token_elements=dense_elements + borrowed + share * expert_elements,
        routed_elements=share * expert_elements,
        expert_elements=expert_elements,
        row_elements=sum(sum(p.shape[-2:]) for p in dense if len(p.shape) > 1)
        + share * sum(_row_elements(p, experts) for p in layer.parameters if p.is_expert),
        kv_cache=layer.kv_cache,
        mixer=stage.architecture.mixers[layer.index],
        attention={
            phase: attention_dims(stage.architecture, phase, layer.index) for phase in Phase
        },
        is_handed=stage.is_own and stage.architecture.per_layer_width > 0,
        experts=experts,
        likeness=_likeness(stage, layer),
        operators=None
        if stage.passes is None
        else {
            phase: stage.passes.operators[phase.value][layer.index]
            / _num_calls(stage, layer.index, phase)
            for phase in Phase
        },
        moved=None if stage.passes is None else partial(moved_bytes, stage, layer.index),
        overhead_s=None
        if engine is None
        else engine.overhead_s(is_routed=is_routed, num_gpus=stage.num_gpus),
        is_recoded=layer.is_recoded,
        expands_cache=stage.is_own and layer.kv_cache.is_coded,
        stored=layer_work(stage, layer.as_stored)
        if layer.is_recoded or layer.kv_cache.is_coded
        else None,
    )


def _likeness(stage: Stage, layer: Layer) -> Likeness:
    def main_form(*, is_expert: bool) -> str:
        sizes: Counter[str] = Counter()
        for each in layer.parameters:
            if each.is_expert is is_expert:
                form = stage.dtype if each.form.is_raw else each.form.kind.value
                sizes[form] += _matrix_elements(each)
        return max(sizes, key=sizes.__getitem__, default=stage.dtype)

    mixer = stage.architecture.mixers[layer.index]
    attends = mixer in (Mixer.FULL, Mixer.SLIDING, Mixer.CHUNKED)
    return Likeness(
        passes=stage.way.name if stage.pass_rules is None else "engine",
        mixer="attention" if attends else mixer.name.lower(),
        dense=main_form(is_expert=False),
        experts=main_form(is_expert=True) if layer.expert_bytes else None,
    )


def moved_bytes(stage: Stage, index: int, shape: PassShape) -> float:
    """Bytes that operators of transformers' own passes read and write beside weights.

    They are of one call of a layer or, for the index -1, of what lies outside the layers.
    """
    assert stage.passes is not None, "offplan's own passes are priced by formulas"
    size = shape.batch, shape.tokens, shape.context
    moved = stage.passes.moved_bytes(index, shape.phase.value, *size)
    return moved / (1 if index < 0 else _num_calls(stage, index, shape.phase))


def _num_calls(stage: Stage, index: int, phase: Phase) -> int:
    return max(1, count_calls(stage, phase)[index])


def expands(parameter: Parameter, shape: PassShape, element_bytes: int) -> bool:
    """Return True if a pass has a layer's weight made of its codes before it is multiplied.

    Latent attention's ``kv_b_proj`` is absorbed into queries, and so expanded in every decode step.
    """
    if parameter.form.is_raw or parameter.is_expert:
        return False
    absorbed = shape.phase is Phase.DECODE and is_absorbed(parameter)
    return absorbed or makes_values(shape.num_tokens, element_bytes)


def head_expands(head: Parameter, shape: PassShape, element_bytes: int) -> bool:
    """Return True if a pass has the head made of its codes: it meets ``head_rows`` alone."""
    return not head.form.is_raw and makes_values(shape.head_rows, element_bytes)


def makes_values(num_rows: int, element_bytes: int) -> bool:
    """Return True if a product of so many rows is one of values: codes meet two-byte elements.

    Source: ``runtime.forms.stored.StoredLinear``.
    """
    return num_rows > CODES_ROWS or element_bytes > 2


def groups_codes(experts: Experts | None, num_tokens: int, kinds: Collection[str]) -> bool:
    """Return True if a pass of so many tokens makes values of experts' codes of these kinds."""
    if experts is None:
        return False
    return are_grouped(num_tokens * experts.num_experts_per_token, experts.num_in_all, kinds)


def gathers_codes(experts: Experts | None, num_tokens: int) -> bool:
    """Return True if a pass of so few tokens copies its experts' codes that it reads in place."""
    if experts is None:
        return False
    num_pairs = num_tokens * experts.num_experts_per_token
    return are_gathered(num_pairs, experts.num_in_all)


def _count_codes(parameters: Iterable[Parameter]) -> Codes:
    coded = [p for p in parameters if not p.form.is_raw and not p.is_recoded]
    half = sum(p.num_weights for p in coded if _is_half_byte(p))
    return Codes(half, sum(p.num_weights for p in coded) - half)


def _row_elements(parameter: Parameter, experts: Experts | None) -> int:
    """Elements of the rows in and out of a weight of all experts; 0 for biases."""
    number, last = 1 if experts is None else experts.num_experts, parameter.shape[-2:]
    return number * sum(last) if number * prod(last) == parameter.num_weights else 0


def _is_half_byte(parameter: Parameter) -> bool:
    """Return True if a weight's code has four bits, or but little more with its scales."""
    return parameter.nbytes < 0.75 * parameter.num_weights


def is_absorbed(parameter: Parameter) -> bool:
    """Return True if it is a latent attention's ``kv_b_proj`` that is stored as codes."""
    return not parameter.form.is_raw and parameter.name.endswith("kv_b_proj.weight")


def _matrix_elements(parameter: Parameter) -> int:
    """Weights that take part in matrix products: biases and norms do not."""
    return parameter.num_weights if len(parameter.shape) > 1 else 0
