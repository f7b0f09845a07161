"""GPU memory of what passes make and drop again."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from offplan.capabilities.drafts import (
    MOST_DRAFTED,
    PASS_TOKENS,
    Draft,
    list_pass_sizes,
    most_drafted,
)
from offplan.checkpoint.architecture import Attention
from offplan.checkpoint.layers import output_width
from offplan.checkpoint.model import Layer, Vectors
from offplan.checkpoint.parameter import Parameter, Role, role_of
from offplan.checkpoint.windows import Mixer
from offplan.costs.drafts import graph_bytes
from offplan.costs.work import (
    AttentionDims,
    PassShape,
    attention_dims,
    expands,
    gathers_codes,
    groups_codes,
    head_expands,
    is_absorbed,
    prefill_shapes,
)
from offplan.forms.form import Component
from offplan.held.held import hold_prediction
from offplan.held.stage import Stage
from offplan.kernel_sizes import (
    CODED_PROGRAMS,
    EXPERT_MULTIPLE,
    FUSED_DIM,
    KERNEL_TYPES,
    LATENT_HEADS,
    RULE_CHUNK,
    SPAN_TOKENS,
    are_ruled,
    eager_width,
    expert_scratch,
    is_power,
    next_power,
)
from offplan.placement import Phase
from offplan.plan import Workload

HIDDEN_COPIES = 6
"""Hidden states alive at once: the residual, the normed one, a block's output and their sum, and
what the allocator keeps of the layer before.

Source: transformers' decoder layer, read, and what prompts of 4,096 to 16,384 tokens of Qwen3-8B
took on an H200 beyond that.
"""

WAITING_COPIES = 2
"""Hidden states kept of each token in another chunk: its own, and what the allocator keeps of the
one before.

Source: measured as HIDDEN_COPIES was, on a prompt of 8,192 tokens in chunks of 512 and of 4,096.
"""

ATTENTION_COPIES = 2
"""Times the attention's products live: as they come out, and turned or laid out for the kernel.

Source: transformers' attention, read.
"""

LOGIT_COPIES = 2
"""Times the logits live: as the head gives them, and as some models scale or cap them. The greatest
is found without a copy.

Source: transformers' heads and torch's argmax, read.
"""

PER_LAYER_COPIES = 8
"""Copies of a token's per-layer inputs that live while they are made. One is projected, three are
in float32 as they are normed (each counts twice), and one is looked up.

Source: transformers' ``project_per_layer_inputs``, read.
"""

PREDICTION_COPIES = 5
"""Hidden states of a prompt's chunk ahead of a prediction layer's block, beside HIDDEN_COPIES: the
one behind the model's last norm, the embedding, both normed and joined.

Source: ``runtime.prediction.skeleton.JoinedInput``, read.
"""
MOST_DRAFTS = Draft(kind="mtp", tokens=MOST_DRAFTED)
"""The drafts whose passes a prediction layer captures, whatever the plan's number of them."""

JOINED_PARTS = 2
"""Outputs of attention alive beside the joined one, in a later chunk or with sinks: over the tokens
before the chunk and over its own, or before sinks take their share.

Source: ``runtime.model.attention._attend_by_library``.
"""

MASK_BYTES = 5
"""Bytes for each pair of a new token and one that a window may show it. They are two comparisons,
their conjunction, and a bias of two bytes.

Source: ``runtime.model.attention._window_mask``; kernels want the mask in the type of the query.
Torch's flash attention, which heads of 16 bits mostly get, needs none.
"""

SCORE_BYTES = 10
"""Bytes of one attention score that no kernel keeps to itself: in float32, as its softmax in
float32, and in bfloat16. They are those of a decode step over latents, or with sinks or soft caps,
without our kernels.

Source: ``runtime.model.latent.attend_latent``, ``runtime.model.scored.weigh``.
"""

ENCODING_BYTES = 13
"""Bytes of a value of a key or a value while it is encoded, at most: six of 16 bits, and a mask.

Source: ``runtime.model.cache_codes.encode``, uncompiled.
"""

SPLITS = 192
"""Splits of the cache that the kernel for latents joins, over all sequences and blocks of heads.

It makes as many as the GPU has multiprocessors (an H200: 132), or one for each of those blocks.
Source: ``runtime.model.latent_kernel.attend_filled``.
"""

ROUTED_COPIES = 2
"""Hidden states that each pair of a token and an expert has beside the expert's products.

For few tokens they are what an expert returns, weighted in float32. For many tokens they are the
hidden state gathered for the expert, and what returns put back in order.

Source: ``runtime.model.experts.forward_experts``; transformers' ``grouped_mm``, compiled.
"""

EXPANDED_COPIES = 2
"""Expanded weights alive at once: one that is multiplied, and what the allocator keeps of another.

Source: estimated.
"""

CODED_EXPERTS_BYTES = 136 * 2**20
"""Bytes that a model whose experts are stored as codes, other than packed, takes besides.

Source: eight plans of four such models on an H200, without the margin (``benchmarks.predictions``).
They took 34 MiB less to 161 MiB more than the other terms. The cause is not known.
"""

NESTED_SCALE_BYTES = 16
"""Bytes of what is made of a scale that is quantised too: its index, value, factor and itself.

Source: ``runtime.forms.reference.nested_scales``.
"""

RULE_STATES = 3
"""States of all sequences that linear attention holds: before, behind, and one on the way."""


class RuleTensors(NamedTuple):
    """What the delta rule holds in float32 for each value head, in numbers of tensors."""

    keys: int
    values: int
    pairs: int
    """Tensors of each token's pairs within its chunk."""
    chunk: int
    """Tokens of a chunk."""


RULE_OF_KERNELS = RuleTensors(3, 1, 1, RULE_CHUNK)
"""Source: ``runtime.model.delta_kernel``. For 512 and 2,048 tokens of 48 heads of 128 an H200 held
61 and 231 MiB, with what it returns; so counted they are 60 and 231. Counted as tensors come and
go, all of Qwen3-Next's linear attention takes 0.94 and 0.99 of ``linear_bytes``."""
RULE_OF_TORCH = RuleTensors(6, 4, 4, 64)
"""Of sizes that kernels do not take. A CPU's plans count those of kernels for all others.

Source: transformers 5.23, ``torch_chunk_gated_delta_rule``."""

_ATTENTION_ROLES = frozenset({Role.QKV, Role.ATTENTION_OUTPUT})
_MLP_ROLES = frozenset({Role.GATE_UP, Role.DOWN, Role.SHARED_EXPERTS})
_EXPERT_ROLES = frozenset({Role.EXPERTS_GATE_UP, Role.EXPERTS_DOWN})


SEGMENTS = 2.0
"""Memory that torch's allocator takes for transformers' own passes, as a multiple of what lives of
their temporaries at a time.

A part of the cache that a layer makes cuts the segment of a freed temporary, and the next layer's
does not fit there. Source: prompts of 512 tokens on an H200, resident and offloaded. Nemotron-H's
layers took 1.12 and 1.28 (5.05 GB of temporaries), Granite's hybrid 1.40 twice (24.1 GB). On an
H100 1.91 and 1.92 (Nemotron-H by transformers 5.17, 4.51 GB).
"""


def activation_bytes(
    stage: Stage,
    workload: Workload,
    prefill_chunk: int,
    draft: Draft | None = None,
    *,
    in_pieces: bool = False,
) -> int:
    """Bytes of all ``activation_parts``, where no layer's experts stream in pieces.

    With ``in_pieces`` all do, and what prompts take at them is left out.
    """
    parts = activation_parts(stage, workload, prefill_chunk, draft, in_pieces=in_pieces)
    return sum(parts.values())


def activation_parts(
    stage: Stage,
    workload: Workload,
    prefill_chunk: int,
    draft: Draft | None = None,
    *,
    in_pieces: bool = False,
) -> dict[str, int]:
    """Name the bytes of what passes make and drop again; ``in_pieces`` as for ``phase_bytes``.

    Passes that check a ``draft`` are captured beside steps, in the same memory.
    Captured graphs keep a step's temporaries beside an uncaptured prompt. Source:
    ``runtime.session.Session``, ``runtime.passes.captured.Passes``.
    """
    if stage.passes is not None:
        batch, context = workload.batch, workload.context
        prompt, step = stage.passes.activation_bytes(batch, prefill_chunk, context)
        return {
            "temporaries of transformers' passes": round(SEGMENTS * max(prompt, step)),
            "scratch": scratch_bytes(stage, batch * prefill_chunk),
            "experts stored as codes": coded_experts_bytes(stage),
        }
    prompt, step = phase_bytes(stage, workload, prefill_chunk, draft, in_pieces=in_pieces)
    layers, of_layers = hold_prediction(stage, draft), {}
    if layers is not None:
        own_prompt, own_step = phase_bytes(layers, workload, prefill_chunk, MOST_DRAFTS)
        hidden = _hidden_width(layers) * layers.element_bytes
        prompt = max(prompt, own_prompt + PREDICTION_COPIES * prefill_chunk * hidden)
        of_layers = {
            "temporaries of drafting, for captured graphs": own_step,
            "scratch of prediction layers": scratch_bytes(layers, prefill_chunk),
            "graphs of prediction layers": graph_bytes(layers, (1, *PASS_TOKENS)),
        }
    parts = {
        "temporaries of the larger phase": max(prompt, step),
        "temporaries of a step, for captured graphs": step,
        "scratch": scratch_bytes(stage, workload.batch * prefill_chunk),
        "experts stored as codes": coded_experts_bytes(stage),
    }
    if values := cached_value_bytes(stage, workload, prefill_chunk, draft):
        parts["values of one layer's cached codes"] = values
    if graphs := graph_bytes(stage, list_pass_sizes(draft)):
        parts["graphs of passes that check drafts"] = graphs
    return parts | of_layers


def cached_value_bytes(
    stage: Stage, workload: Workload, prefill_chunk: int, draft: Draft | None = None
) -> int:
    """Bytes of the scratch in which prompts make the values of one layer's codes, of all rows.

    Source: ``runtime.model.codes_scratch.Scratch``.
    """
    if not stage.is_own:
        return 0
    row = stage.row_cache(workload.context, most_drafted(draft))
    return workload.batch * row.most_values(prefill_chunk)


def scratch_bytes(stage: Stage, num_tokens: int) -> int:
    """Bytes of the memory that layers make the values of their codes in, for so many tokens.

    It holds those of the largest dense weight, as the runner fuses weights, or of a group of
    experts if they are more, and if so many tokens have them made. There are as many as the passes
    that run the model need. Source: ``runtime.forms.stored.SharedScratch``.
    """
    if stage.dtype not in KERNEL_TYPES:
        return 0
    coded = (p for layer in stage.layers for p in layer.parameters if not p.form.is_raw)
    most = max((p.num_weights for p in coded if not p.is_expert), default=0)
    of_experts = (_expert_values(stage, layer, num_tokens) for layer in stage.layers)
    most = max(most, stage.layout.fused_weights, *of_experts)
    return most * stage.element_bytes * stage.way.num_scratch


def _expert_values(stage: Stage, layer: Layer, num_tokens: int) -> int:
    """Values that a layer's experts, stored as codes, are made at a time in the scratch.

    Values that are put in order once they are made, as of GPTQ's groups, count twice. The rows
    that are multiplied by them are among ROUTED_COPIES.
    """
    if stage.experts is None or stage.pass_rules is not None:
        return 0
    coded = [p for p in layer.parameters if p.is_expert and not p.form.is_raw]
    kinds = {p.form.kind.value for p in coded}
    if not kinds or not groups_codes(stage.experts, num_tokens, kinds):
        return 0
    of_role, num_experts = Counter[Role | None](), stage.experts.num_experts
    for p in coded:
        of_role[role_of(p)] += p.num_weights
    copies = 1 + any(Component.GROUP_INDEX in p.components for p in coded)
    values = (expert_scratch(num_experts, each // num_experts) for each in of_role.values())
    return copies * max(values, default=0)


def coded_experts_bytes(stage: Stage) -> int:
    """CODED_EXPERTS_BYTES where offplan runs experts stored as codes, other than packed; else 0."""
    if stage.pass_rules is not None:
        return 0
    experts = (p for layer in stage.layers for p in layer.parameters if p.is_expert)
    coded = any(p.form.is_rounded for p in experts)
    return coded * CODED_EXPERTS_BYTES


def phase_bytes(
    stage: Stage,
    workload: Workload,
    prefill_chunk: int,
    draft: Draft | None = None,
    *,
    in_pieces: bool = False,
) -> tuple[int, int]:
    """Bytes of the temporaries of a prompt, and of a decode step or a larger pass.

    A prompt's are its largest chunk's, and what waits meanwhile. A chunk has hidden states + the
    largest block + logits: of a layer only one block, attention or MLP, is alive at a time. Of a
    layer that keeps a window, attention takes ``joined_bytes``, too. A chunk that is not as long as
    the plan's runs uncompiled. ``in_pieces`` leaves out what a prompt's routed experts take, as
    where all of them stream in pieces.
    """
    layers = _distinct_layers(stage)
    row = stage.row_cache(workload.context, most_drafted(draft))

    def attend(stage: Stage, layer: Layer, shape: PassShape) -> int:
        owner = row.owner(layer.index)
        index = layer.index if owner is None else owner
        is_ring = stage.is_own and row.window(index) is not None
        joined = joined_bytes(stage.layers[index], shape) if is_ring else 0
        return attention_bytes(stage, layer, shape) + joined

    # of chunks with as many tokens, the last one reaches furthest and takes most
    last = {shape.tokens: shape for shape in prefill_shapes(workload, prefill_chunk)}

    def of_chunk(shape: PassShape) -> int:
        is_apart = in_pieces and shape.phase is Phase.PREFILL
        blocks = [attend, dense_bytes if is_apart else mlp_bytes, per_layer_bytes]
        if shape.phase is Phase.PREFILL and shape.tokens != prefill_chunk and not is_apart:
            blocks.append(eager_expert_bytes)
        most = max(block(stage, layer, shape) for block in blocks for layer in layers)
        expanded = max(expanded_bytes(stage, layer, shape) for layer in layers)
        return hidden_bytes(stage, shape) + most + expanded + logits_bytes(stage, shape)

    prompt = max(of_chunk(shape) + waiting_bytes(stage, workload, shape) for shape in last.values())

    # of decode steps the last one takes most
    sizes = (1, *list_pass_sizes(draft))
    steps = [PassShape(Phase.DECODE, workload.batch, n, workload.context) for n in sizes]
    return prompt, max(map(of_chunk, steps))


def expanded_bytes(stage: Stage, layer: Layer, shape: PassShape) -> int:
    """Bytes of values that are made of stored codes in memory of their own, not in the scratch.

    They are EXPANDED_COPIES of those of the largest weight: of what latent attention absorbs in
    decode, and in types that no kernel multiplies. Scales that are quantised too are made for every
    product, NESTED_SCALE_BYTES of each at once. Source: ``runtime.forms.stored``.
    """
    size = stage.element_bytes
    made = [p for p in layer.parameters if expands(p, shape, size)]
    if stage.dtype in KERNEL_TYPES:  # the others are made in the scratch
        is_step = shape.phase is Phase.DECODE
        made = [p for p in made if is_step and is_absorbed(p)]
    largest = max((p.num_weights for p in made), default=0)
    return EXPANDED_COPIES * largest * size + _nested_bytes(layer.parameters)


def _nested_bytes(parameters: Iterable[Parameter]) -> int:
    nested = (
        p.of(Component.SCALE)[0] for p in parameters if Component.NESTED_SCALE in p.components
    )
    return NESTED_SCALE_BYTES * max((scales.num_elements for scales in nested), default=0)


def waiting_bytes(stage: Stage, workload: Workload, chunk: PassShape) -> int:
    """Bytes that a prompt keeps while ``chunk`` is in a layer.

    They are WAITING_COPIES of a hidden state of every other token, since all chunks pass a layer
    before the next layer runs. Layers are handed per-layer inputs of each token beside it. The
    rotary table of the whole prompt has a cosine and a sine for each element of a query head.
    Chunks of latent attention add the keys and values that they expand, of all heads. Layers that
    read another layer's ring add the keys and values that it caches of each token.
    """
    dims = attention_dims(stage.architecture, chunk.phase)
    others = workload.batch * (workload.prompt_tokens - chunk.tokens)
    kept = WAITING_COPIES * others * _hidden_width(stage)
    kept += workload.batch * workload.prompt_tokens * stage.architecture.per_layer_width
    kept += 2 * workload.prompt_tokens * dims.query_dim
    if chunk.is_part and stage.architecture.latents is not None:
        width = dims.num_heads * (dims.query_dim + dims.value_dim)
        kept += workload.batch * workload.prompt_tokens * width
    waiting = stage.row_cache(workload.context).waiting_token_bytes if stage.is_own else 0
    return kept * stage.element_bytes + workload.batch * workload.prompt_tokens * waiting


def hidden_bytes(stage: Stage, shape: PassShape) -> int:
    """Bytes of hidden states: HIDDEN_COPIES x new tokens x hidden size x element size.

    A token has as many of them as AltUp keeps.
    """
    return HIDDEN_COPIES * shape.num_tokens * _hidden_width(stage) * stage.element_bytes


def _hidden_width(stage: Stage) -> int:
    return stage.architecture.num_streams * stage.architecture.hidden_size


def per_layer_bytes(stage: Stage, layer: Layer, shape: PassShape) -> int:
    """Bytes of what is handed to layers, while it is made: PER_LAYER_COPIES x new tokens x width.

    It is made ahead of the layers, for all of them.
    """
    width = stage.architecture.per_layer_width
    return PER_LAYER_COPIES * shape.num_tokens * width * stage.element_bytes


def logits_bytes(stage: Stage, shape: PassShape) -> int:
    """Bytes of the logits of ``head_rows``, each of the vocabulary: LOGIT_COPIES of them.

    With them live the values of a head that is stored as codes, where these are made.
    """
    head, whole, size = stage.head, stage.model.head, stage.element_bytes
    if head is None or whole is None:
        return 0
    made = head.num_weights if head_expands(head, shape, size) else 0
    # GPUs gather those of the whole vocabulary
    num_logits = shape.head_rows * whole.shape[0]
    return (LOGIT_COPIES * num_logits + made) * size + _nested_bytes([head])


def attention_bytes(stage: Stage, layer: Layer, shape: PassShape) -> int:
    """Bytes of attention's temporaries.

    They are ATTENTION_COPIES x new tokens x the width of its products. In prefill a window adds its
    mask where no kernel knows windows. Sinks, a chunk that is not the first, or one that meets
    several chunks of the text, add JOINED_PARTS of what attention returns. In decode splits add
    ``split_bytes``; sinks or soft caps without a kernel add their scores. Latent attention adds
    ``latent_bytes``. Linear attention has none of these.
    """
    if layer.kv_cache.state_bytes:
        return linear_bytes(stage, layer, shape)
    width = _output_width(stage, layer, _ATTENTION_ROLES)
    total = ATTENTION_COPIES * shape.num_tokens * width * stage.element_bytes
    dims = attention_dims(stage.architecture, shape.phase, layer.index)
    window = layer.kv_cache.window
    if window is not None and window >= shape.context:
        window = None
    heads, has_kernels = stage.architecture.attention, stage.is_own and stage.dtype in KERNEL_TYPES
    is_chunked = stage.architecture.mixers[layer.index] is Mixer.CHUNKED
    if shape.phase is Phase.PREFILL:
        is_served = is_chunked or (has_kernels and _serves_windows(dims, heads))
        if window is not None and not is_served:
            total += MASK_BYTES * shape.tokens * min(shape.context, shape.tokens + window - 1)
        elif window is not None or heads.sinks or shape.tokens < shape.context:
            made = shape.num_tokens * dims.num_heads * dims.value_dim
            total += JOINED_PARTS * made * stage.element_bytes
    elif stage.architecture.latents is None:
        is_plain = window is None and not heads.sinks and heads.soft_cap is None
        if has_kernels and (layer.kv_cache.is_coded or not is_plain):
            total += split_bytes(stage, layer, shape)
        elif heads.sinks or heads.soft_cap is not None:
            kept = stage.row_cache(shape.context).window(layer.index) if stage.is_own else None
            total += SCORE_BYTES * shape.num_tokens * (kept or shape.context) * heads.num_heads
    if stage.architecture.latents is not None:
        total += latent_bytes(stage, layer, shape)
    encoded = layer.kv_cache.value_bytes // stage.element_bytes
    return total + ENCODING_BYTES * shape.num_tokens * encoded * stage.is_own


def _serves_windows(dims: AttentionDims, heads: Attention) -> bool:
    """Return True if a kernel reads prompts of such heads through a window, without a mask.

    It is torch's own, or that of compiled attention. Source: ``runtime.model.attention``.
    """
    is_even = dims.query_dim == dims.value_dim and dims.query_dim % 8 == 0
    in_blocks = heads.sinks or heads.soft_cap is not None or heads.num_heads != heads.num_kv_heads
    return in_blocks or (is_even and 0 < dims.query_dim <= FUSED_DIM)


def split_bytes(stage: Stage, layer: Layer, shape: PassShape) -> int:
    """Bytes of what each split of a cache mixes in a step, with one softmax sum.

    Source: ``runtime.model.coded_kernel.attend_one``.
    """
    heads = stage.architecture.attention
    by_config = Vectors(max(1, heads.num_kv_heads), heads.head_dim)
    values = (layer.kv_cache.vectors or [by_config])[-1]
    group = -(-heads.num_heads // values.number)
    programs = shape.num_tokens * values.number * -(-group // LATENT_HEADS)
    width = next_power(max(16, values.dim))
    return 4 * (width + 1) * LATENT_HEADS * max(CODED_PROGRAMS * SPLITS, programs)


def joined_bytes(layer: Layer, shape: PassShape) -> int:
    """Bytes of a chunk's keys and values, copied behind those of the window before the chunk.

    A prompt's first chunk has none before it. Source: ``runtime.model.caches.Ring.extend``.
    """
    window = layer.kv_cache.window
    if window is None or shape.phase is not Phase.PREFILL or shape.tokens == shape.context:
        return 0
    num_tokens = min(shape.context, shape.tokens + window - 1)
    return shape.batch * num_tokens * layer.kv_cache.bytes_per_token


def linear_bytes(stage: Stage, layer: Layer, shape: PassShape) -> int:
    """Bytes of linear attention's temporaries.

    They are ATTENTION_COPIES x new tokens x the width of what it returns. A span of the tokens adds
    as many copies of its inputs' products, and in prefill what the delta rule holds. The states of
    all sequences count RULE_STATES times.
    """
    span = min(shape.tokens, SPAN_TOKENS)
    returned = shape.num_tokens * _output_width(stage, layer, {Role.ATTENTION_OUTPUT})
    multiplied = shape.batch * span * _output_width(stage, layer, {Role.QKV})
    total = ATTENTION_COPIES * (returned + multiplied) * stage.element_bytes
    total += RULE_STATES * shape.batch * layer.kv_cache.state_bytes
    linear = stage.architecture.linear
    if linear is not None and shape.phase is Phase.PREFILL:
        keys, values, rule = linear.key_head_dim, linear.value_head_dim, RULE_OF_TORCH
        if are_ruled(keys, values):  # kernels take powers of two
            keys, values, rule = next_power(keys), next_power(values), RULE_OF_KERNELS
        of_head = rule.keys * keys + rule.values * values + rule.pairs * rule.chunk
        padded = shape.batch * -(-span // rule.chunk) * rule.chunk
        total += 4 * padded * linear.num_value_heads * of_head
    return total


def latent_bytes(stage: Stage, layer: Layer, shape: PassShape) -> int:
    """Bytes that latent attention takes besides.

    In prefill the keys and values of every head for the new tokens (twice: the product, and keys
    with their rotary part joined). In decode what each split of the cache mixes, in float32, with
    one softmax sum; without the kernel SCORE_BYTES for every head and cached token.
    Source: ``runtime.model.latent``.
    """
    dims = attention_dims(stage.architecture, shape.phase)
    if shape.phase is Phase.PREFILL:
        width = 2 * dims.num_heads * (dims.query_dim + dims.value_dim)
        return shape.num_tokens * width * stage.element_bytes
    latent, rope = dims.value_dim, dims.query_dim - dims.value_dim
    in_kernel = stage.dtype in KERNEL_TYPES and layer.kv_cache.window is None
    if not in_kernel or not (is_power(latent) and is_power(rope)):
        return shape.num_tokens * shape.context * dims.num_heads * SCORE_BYTES
    blocks = shape.num_tokens * -(-dims.num_heads // LATENT_HEADS)
    return 4 * (latent + 1) * LATENT_HEADS * max(SPLITS, blocks)


def mlp_bytes(stage: Stage, layer: Layer, shape: PassShape) -> int:
    """Bytes of the temporaries of the MLP, of shared and of routed experts.

    They are new tokens x the width of the products (gate, up, down). Each of a token's experts adds
    the same with ROUTED_COPIES of its hidden state. If the runtime gathers experts' weights, those
    count too.
    """
    routed = gathered = 0
    if layer.expert_bytes and stage.experts is not None:
        hidden = stage.architecture.hidden_size
        width = _output_width(stage, layer, _EXPERT_ROLES)
        routed = stage.experts.num_experts_per_token * (width + ROUTED_COPIES * hidden)
        pairs = shape.num_tokens * stage.experts.num_experts_per_token
        gathered = pairs * _gathered_bytes(stage, layer, shape)
    of_experts = shape.num_tokens * routed * stage.element_bytes + gathered
    return dense_bytes(stage, layer, shape) + of_experts


def dense_bytes(stage: Stage, layer: Layer, shape: PassShape) -> int:
    """Bytes of the temporaries of the MLP and of shared experts: new tokens x the width."""
    return shape.num_tokens * _output_width(stage, layer, _MLP_ROLES) * stage.element_bytes


def eager_expert_bytes(stage: Stage, layer: Layer, shape: PassShape) -> int:
    """Bytes of the temporaries of many tokens' routed experts, uncompiled."""
    return pair_bytes(stage, layer, shape, eager_width)


def pair_bytes(
    stage: Stage, layer: Layer, shape: PassShape, width: Callable[[int, int], int]
) -> int:
    """Bytes of the temporaries of pairs of a token and a routed expert, each ``width`` elements."""
    if not layer.expert_bytes or stage.experts is None:
        return 0
    hidden = stage.architecture.hidden_size
    inside = _output_width(stage, layer, _EXPERT_ROLES) - hidden
    pairs = shape.num_tokens * stage.experts.num_experts_per_token
    return pairs * width(hidden, inside) * stage.element_bytes


def _gathered_bytes(stage: Stage, layer: Layer, shape: PassShape) -> int:
    """Bytes of an expert's weights that are copied for each pair of a token and an expert.

    They are those of ``batched_mm``; of experts that are stored as codes, the largest weight's, as
    if it were in place. Source: ``runtime.model.kernels.ExpertKernels`` and
    ``runtime.forms.experts.forward_stored``.
    """
    assert stage.experts is not None
    experts = [parameter for parameter in layer.parameters if parameter.is_expert]
    if any(not parameter.form.is_raw for parameter in experts):
        if not gathers_codes(stage.experts, shape.num_tokens):
            return 0
        by_role = Counter[Role | None]()
        for parameter in experts:
            by_role[role_of(parameter)] += parameter.nbytes
        return max(by_role.values()) // stage.experts.num_experts
    served = stage.dtype in KERNEL_TYPES and all(
        len(p.shape) > 1 and not any(size % EXPERT_MULTIPLE for size in p.shape[-2:])
        for p in experts
    )
    looped = shape.phase is Phase.DECODE and stage.dtype != "bfloat16"
    copies = not served and (shape.num_tokens == 1 or looped)
    return stage.experts.bytes_per_expert if copies else 0


def _output_width(stage: Stage, layer: Layer, roles: Collection[Role]) -> int:
    """Elements that a token's products with a layer's matrices of these roles have.

    They are one expert's where the roles are the routed experts'.
    """
    return sum(
        output_width(parameter, stage.architecture)
        for parameter in layer.parameters
        if role_of(parameter) in roles
    )


def _distinct_layers(stage: Stage) -> list[Layer]:
    """One layer of each kind of structure: same names, first shapes and forms."""
    distinct = {
        (
            layer.kv_cache,
            layer.kv_cache.vectors,
            tuple((p.name, p.shape, p.form) for p in layer.parameters),
        ): layer
        for layer in stage.layers
    }
    return list(distinct.values())
