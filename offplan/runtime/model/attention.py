"""Attention over the filled part of the cache, for transformers' attention interface.

Each way is registered under a name of its own, for none of which transformers builds a mask. In the
place of a mask, a pass tells all layers where the filled part ends.
"""

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from offplan.kernel_sizes import FUSED_DIM, next_power
from offplan.runtime.forms.stored import KERNEL_DTYPES
from offplan.runtime.gpu_limits import compute_capability, gpu_limits
from offplan.runtime.model.cache_codes import is_coded
from offplan.runtime.model.cache_mask import BLOCK_TOKENS, Way
from offplan.runtime.model.latent import attend_latent, keeps_latents
from offplan.runtime.model.probe import Asked

MAX_LENGTHS = 64
"""Compilations of attention for a kind of heads, by whether lengths are equal, 1, or whole blocks.
torch allows 8 by default, and runs what exceeds them uncompiled."""


def weigh(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend by whole products, as transformers' own attentions do.

    ``query`` is [batch, heads, new, dim], ``key`` and ``value`` [batch, kv_heads, kept, dim].
    ``mask`` is bool of [new, kept] or [batch, 1, new, kept], ``sinks`` [heads]. Returns [batch,
    heads, new, dim]. Source: transformers 5.23, ``eager_attention_forward`` of Gemma2 and GptOss.
    """
    batch, heads, num_new, dim = query.shape
    kv_heads, num_kept = key.shape[1:3]
    # the queries of a KV group are rows of one product
    products = torch.matmul(query.reshape(batch, kv_heads, -1, dim), key.mT)
    scores = products.view(batch, heads, num_new, num_kept).float()
    scores = scores * (dim**-0.5 if scaling is None else scaling)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, heads, 1, 1).expand(batch, heads, num_new, 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., :num_kept].to(value.dtype)
    out = torch.matmul(weights.reshape(batch, kv_heads, -1, num_kept), value)
    return out.view(batch, heads, num_new, value.shape[-1])


def attend_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    scaling: float | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from the last tokens of a text to all up to each one's own, compiled, on a GPU.

    ``query`` is [batch, heads, new, dim], ``key`` and ``value`` [batch, kv_heads, kept, dim], of
    which each token sees the last ``window``; ``sinks`` is [heads]. A sink takes its share of the
    softmax and gives nothing.
    """
    kind = (*query.shape[1::2], *key.shape[1::2], value.shape[3], query.dtype)
    attend = _compile_for(*kind, soft_cap is None, key.is_contiguous())
    for each in (query, key, value):
        torch._dynamo.mark_static(each, [1, 3])  # heads, which torch's choice of a kernel counts
    cap = None if soft_cap is None else _cap_by(soft_cap, query.device)
    seen = _mask_up_to_own(query.shape[2], key.shape[2], window, query.device)
    # uncompiled, as other parts of some passes run, it would hold every score
    stance = torch.compiler.set_stance("default")
    with stance, torch._dynamo.config.patch(recompile_limit=MAX_LENGTHS):
        out, found = attend(query, key, value, cap, seen, scaling)
    made: torch.Tensor = out
    return made if sinks is None else _leave_to_sinks(made, found.lse, sinks)


@cache
def _compile_for(*kind: object) -> Callable[..., Any]:
    """Compile attention once for all lengths, for each kind of heads and of caches.

    torch counts compilations by code, and runs what exceeds a limit uncompiled: other models of a
    process, and other layers of a model, would take all that there may be.
    """
    own = FunctionType(_attend_flexibly.__code__.replace(), globals(), "attend")
    compiled: Callable[..., Any] = torch.compile(own, dynamic=True)
    return compiled


def _attend_flexibly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cap: Any, seen: Any, scale: Any
) -> Any:
    options: Any = None
    if query.is_cuda and (dim := max(query.shape[3], value.shape[3])) > FUSED_DIM:
        shared_bytes, _ = gpu_limits(query.device.index)
        options = choose_wide_blocks(dim, query.element_size(), shared_bytes)
    return flex_attention(
        query,
        key,
        value,
        score_mod=cap,
        block_mask=seen,
        scale=scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
        kernel_options=options,
    )


def choose_wide_blocks(dim: int, itemsize: int, shared_bytes: int) -> dict[str, int]:
    """Choose blocks of a prompt's attention for vectors of more than FUSED_DIM elements.

    torch's own take 262,144 bytes of shared memory for 512 of 2 bytes, which no GPU has for a
    program. These take 135,168 to 196,608 where there are as many, else 67,584, and their threads
    keep all but a few bytes in registers. Source: a kernel of the same blocks, compiled by triton
    3.7 for compute capabilities 8.0 to 12.0.
    """
    scale, width = itemsize // 2, 2 * FUSED_DIM
    while width < dim:
        scale, width = 2 * scale, 2 * width
    rows, stages = (64, 2) if shared_bytes > 140_000 else (32, 1)
    sizes = {"BLOCK_M": rows // scale, "BLOCK_N": 32 // scale}
    return sizes | {"num_stages": stages, "num_warps": 8}


def _cap_by(soft_cap: float, device: torch.device) -> Callable[..., torch.Tensor]:
    """Return what caps a score. Lengths and caps are tensors: attention is compiled for any."""
    cap = torch.full((), soft_cap, device=device)

    def cap_softly(score: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return cap_softly


def _mask_up_to_own(
    num_new: int, num_kept: int, window: int | None, device: torch.device
) -> BlockMask:
    """Make the blocks that tokens see of those up to each one's own, the last ones of the kept."""
    offset = torch.full((), num_kept - num_new, device=device)
    reach = torch.full((), num_kept if window is None else window, device=device)

    def sees(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        behind = query + offset - key
        return (behind >= 0) & (behind < reach)

    first_query = torch.arange(0, num_new, BLOCK_TOKENS, device=device)[:, None] + offset
    first_key = torch.arange(0, num_kept, BLOCK_TOKENS, device=device)[None, :]
    behind = first_query - first_key
    some = (behind > -BLOCK_TOKENS) & (behind < reach + BLOCK_TOKENS)
    number = some.sum(-1, dtype=torch.int32)
    order = torch.argsort(~some, dim=-1, stable=True).to(torch.int32)
    return BlockMask.from_kv_blocks(
        number[None, None],
        order[None, None],
        BLOCK_SIZE=(BLOCK_TOKENS, BLOCK_TOKENS),
        mask_mod=sees,
        seq_lengths=(num_new, num_kept),
    )


ATTENTION_NAME = Way.CHUNK.value
"""Name of the attention that a model is built with; each pass chooses its own."""

without_cudnn = partial(
    sdpa_kernel,
    [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
)
"""Makes a context in which torch's attention leaves cuDNN's kernels out.

cuDNN builds a plan for each shape that it has not met, which took 33 to 45 ms on an H100 with torch
2.11. Its kernels then take 0.6 to 0.8 of the others' time: they pay where shapes come again.
"""


def _register(way: Way) -> None:
    """Register attention that is told what is filled in this way, under the way's name."""

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend from new tokens to those cached ones that ``attention_mask`` says are filled.

        ``query`` is [batch, heads, new, head_dim]. ``key`` and ``value`` are the whole cache,
        [batch, kv_heads, context, ...], or MLA's latents and their rotary parts. ``s_aux`` are the
        softmax's sinks, [heads]. The layer's module was told when the model was built what else the
        layer asks for (``runtime.model.probe``). Returns [batch, new, heads, value_dim] and None.
        Runs on the current stream, synchronises nothing.
        """
        if way is Way.MASK and is_coded(key):
            scratch: Any = module.scratch
            key, value = scratch.expand(key, value, query.dtype)
        # no function in between: it would be one more frame that the graph's break goes through
        if way is Way.CHUNK:
            out = _attend_chunk(module, query, key, value, attention_mask, scaling, s_aux)
        elif way is Way.BLOCKS:
            out = _attend_up_to_last(query, key, value, attention_mask, scaling)
        elif keeps_latents(module):
            assert scaling is not None
            return attend_latent(module, query, key, value, attention_mask, scaling, way), None
        elif way is Way.POSITION:
            out = _attend_in_place(module, query, key, value, attention_mask, scaling, s_aux)
        else:
            out = _attend_few(module, query, key, value, attention_mask, scaling, s_aux)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(way.value, attend)


for _way in Way:
    _register(_way)


@torch.compiler.disable  # it would be compiled again for every position of a chunk
def _attend_chunk(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    before: torch.Tensor,
    scaling: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from a chunk of a prompt to the tokens up to each one's own.

    In a layer that sees chunks of the text, each that the prompt's meets is a text of its own. Of a
    layer with a ring, its own or another's, ``key`` and ``value`` are the chunk's alone.
    """
    start, num_tokens, begun = before.flatten().tolist()
    size = module.asked.chunk
    if (ring := module.ring) is not None:
        behind = start % size if size else min(start, module.asked.window - 1)
        key, value = ring.extend(key, value, start, behind, begun)
        start = behind  # as if the text began with the first of them
    if size is None:
        return _attend_up_to(module, query, key, value, start, num_tokens, scaling, sinks)
    parts = []
    while query.shape[2]:
        behind = start % size
        keys, values = (kept[:, :, start - behind :] for kept in (key, value))
        new = query[:, :, : size - behind]
        parts.append(_attend_up_to(module, new, keys, values, behind, size, scaling, sinks))
        query, start = query[:, :, new.shape[2] :], start + new.shape[2]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _attend_up_to(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    num_tokens: int,
    scaling: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from the tokens of a text from ``start`` on, which has ``num_tokens`` in the end."""
    num_new, window, soft_cap = query.shape[2], module.asked.window, module.asked.soft_cap
    # what no window reaches would only make the mask, and the work, grow with the context
    first = max(0, start - window + 1) if window is not None else 0
    key, value = (part[:, :, first : start + num_new] for part in (key, value))
    if is_coded(key):
        key, value = module.scratch.expand(key, value, query.dtype)
    if keeps_latents(module):
        key, value = module.expansion.extend(key, value, start, num_tokens)
    num_kept = key.shape[2]
    is_windowed = window is not None and num_kept > window
    if soft_cap is None and (is_windowed or sinks is not None or num_kept > num_new):
        reach = window if is_windowed else None
        if (found := _attend_by_library(query, key, value, reach, scaling)) is not None:
            out, sums = found
            return out if sinks is None else _leave_to_sinks(out, sums, sinks)
    is_plain = sinks is None and soft_cap is None
    sees_all = num_kept == num_new and not is_windowed
    if query.is_cuda and not (is_plain and _has_kernel(query, key, value, sees_all=sees_all)):
        return attend_in_blocks(query, key, value, window, scaling, soft_cap, sinks)
    if not is_plain:
        seen = _window_mask(num_new, num_kept, window or num_kept, query.device)
        return weigh(query, key, value, seen, scaling, soft_cap, sinks)
    mask = None
    if is_windowed:
        mask = _window_mask(num_new, num_kept, window, query.device)
    elif num_kept > num_new:
        mask = causal_lower_right(num_new, num_kept)
    causal = mask is None and num_new > 1
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=True
    )


def _has_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, sees_all: bool
) -> bool:
    """Return True if torch has a kernel for a prompt of such heads: else it holds every score.

    Heads of 512 have none, nor on most GPUs have KV groups whose keys are wider than their values.
    Compiled attention is no faster with float32, knows no heads of fewer than 16, and below compute
    capability 8.0 no bfloat16: True, too. ``sees_all`` is True if tokens see all up to their own;
    what others see takes a mask.
    """
    is_half, is_small = query.dtype in KERNEL_DTYPES, min(query.shape[3], value.shape[3]) < 16
    if not is_half or is_small or compute_capability(query.device.index) < (8, 0):
        return True
    wanted, cuda = SDPAParams(query, key, value, None, 0.0, True, True), torch.backends.cuda
    if cuda.can_use_efficient_attention(wanted):
        return True
    others = cuda.can_use_flash_attention(wanted), cuda.can_use_cudnn_attention(wanted)
    return sees_all and any(others)


def _attend_by_library(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    scaling: float | None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Attend from the last tokens to all up to each one's own, by kernels that return softmax sums.

    ``window`` is None where it hides nothing. Returns what is made and the logarithms of the sums,
    float32 of [batch, heads, new]; or None where torch has no such kernel, as on the CPU.
    """
    if not query.is_cuda:
        return None
    wanted = SDPAParams(query, key, value, None, 0.0, False, True)
    if (
        window is None
        and query.shape[2] > 1
        and torch.backends.cuda.can_use_cudnn_attention(wanted)
    ):
        return _attend_in_two(query, key, value, scaling)
    if query.shape[3] % 8 or not torch.backends.cuda.can_use_flash_attention(wanted):
        return None
    behind = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    lengths = query.shape[2], key.shape[2]
    parts = (part.transpose(1, 2) for part in (query, key, value))
    # causal from the last key, unlike torch's public call of the same kernel
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        *parts, None, None, *lengths, 0.0, True, False, scale=scaling, **behind
    )
    return out.transpose(1, 2), sums


def _leave_to_sinks(out: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Take the sinks' share of the softmax from what was made without them.

    ``out`` is [batch, heads, new, dim], ``sums`` the logarithms of its softmax sums, ``sinks``
    [heads]. The share left of the others is a sigmoid of how far they exceed the sink.
    """
    share = torch.sigmoid(sums.reshape(*out.shape[:-1]) - sinks.float().view(-1, 1))
    return out * share.unsqueeze(-1).to(out.dtype)


def _attend_in_two(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the tokens before a chunk, then to its own, by cuDNN, and weigh the two.

    No kernel of torch with a causal mask aligned to the last key is as fast as one aligned to the
    first. A chunk of 2,048 takes 0.65 ms instead of 0.25 on an H200. Returns the logarithms of the
    softmax sums besides, [batch, heads, new]. Source: the online softmax (Milakov and Gimelshein,
    2018).
    """

    def attend_to(key: torch.Tensor, value: torch.Tensor, *, causal: bool) -> Any:
        out, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scaling
        )
        return out, sums.reshape(*out.shape[:-1])

    start = key.shape[2] - query.shape[2]
    own, own_sums = attend_to(key[:, :, start:], value[:, :, start:], causal=True)
    if not start:
        return own, own_sums
    past, past_sums = attend_to(key[:, :, :start], value[:, :, :start], causal=False)
    share = torch.sigmoid(past_sums - own_sums).unsqueeze(-1)
    sums = torch.logaddexp(past_sums, own_sums)
    return torch.lerp(own, past, share.to(own.dtype)), sums


def choose_block_warps(num_queries: int, dim: int) -> int:
    """Choose the warps of a program for so many queries of a KV group, and heads of ``dim``.

    The compiler takes 2 for all. Their threads store 456 bytes each in local memory for heads of
    256, 800 with 32 queries, and 7,160 for heads of 512. A GPU sets that aside for all threads that
    it can run. Source: a kernel of the same blocks, compiled by triton 3.7 for compute capabilities
    8.0 to 9.0; torch 2.13, ``get_flex_decode_configs``. On an H200, 8,192 tokens of 2 KV heads of
    512 take 26 us so, and 200 by 2 warps; of 4 of 256 they take 16 and 19.
    """
    rows = max(16, next_power(num_queries))
    return min(16, max(2, dim // 64, rows * dim // 2048))


def _attend_up_to_last(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    filled: BlockMask,
    scaling: float | None,
) -> torch.Tensor:
    """Attend from a step's new tokens by blocks: each head's tokens are heads of one token.

    KV groups get heads of zeros up to a power of two. Of others torch takes its kernel for prompts:
    with 24 heads of 256 on 4 KV heads, 8,192 tokens take 237 us on an H200; with 8 on 4, 16 us.

    Source: torch 2.11 and 2.13, ``_use_flex_decoding`` and ``create_flex_decoding_kernel``. The
    latter reads a query's strides before the compiler decides them. Rotary embeddings leave other
    ones, which for one token are as good.
    """
    batch, heads, num_new, dim = query.shape
    num_kv, num_values = key.shape[1], value.shape[-1]
    group = heads // num_kv
    padded = next_power(group)
    if padded > group:
        grouped = query.reshape(batch, num_kv, group, num_new, dim)
        query = pad(grouped, (0, 0, 0, 0, 0, padded - group)).flatten(1, 2)
    rows = query if num_new == 1 else query.reshape(batch, num_kv * padded * num_new, 1, dim)
    out = flex_attention(
        rows,
        key,
        value,
        block_mask=filled,
        scale=scaling,
        enable_gqa=True,
        kernel_options={"num_warps": choose_block_warps(padded * num_new, max(dim, num_values))},
    )
    made: torch.Tensor = out
    if padded > group:
        made = made.view(batch, num_kv, padded, num_new, num_values)[:, :, :group]
    return made.reshape(batch, heads, num_new, num_values)


def _attend_few(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from a step's new tokens: the queries of a KV group are rows of one product.

    Repeating the keys for each head, as the mask would otherwise make SDPA do, costs up to 100
    times more at batch 64.
    """
    batch, heads, num_new, head_dim = query.shape
    kv_heads, soft_cap = key.shape[1], module.asked.soft_cap
    mask = _hide(mask, key.shape[2], module.asked)
    if sinks is not None or soft_cap is not None:
        return weigh(query, key, value, mask, scaling, soft_cap, sinks)
    folded = query.reshape(batch, kv_heads, heads // kv_heads * num_new, head_dim)
    if num_new > 1:
        mask = mask.repeat(1, 1, heads // kv_heads, 1)
    out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, num_new, value.shape[-1])


def _attend_in_place(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position: torch.Tensor,
    scaling: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from a step's new tokens to the cache, by a kernel that knows their positions."""
    from offplan.runtime.model import coded_kernel  # needs triton, so a GPU

    asked = module.asked
    sees, reach = coded_kernel.ALL, key.shape[2]
    if asked.chunk is not None:
        sees, reach = coded_kernel.CHUNK, asked.chunk
    elif asked.window is not None:
        sees, reach = coded_kernel.WINDOW, asked.window
    modulus = 0
    if module.is_ring and key.shape[2] > reach:  # its places are those of drafts besides
        modulus = key.shape[2]
    elif module.is_ring:
        sees = coded_kernel.RING if asked.chunk is None else coded_kernel.RING_OF_CHUNK
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    num_new = query.shape[2]
    rows = query[:, :, 0] if num_new == 1 else query[0].transpose(0, 1)
    out = coded_kernel.attend_one(
        *(rows.contiguous(), key, value, position, scale, asked.soft_cap, sinks, sees, reach),
        modulus=modulus,
    )
    return out.unsqueeze(2) if num_new == 1 else out.transpose(0, 1).unsqueeze(0)


def _hide(mask: torch.Tensor, num_kept: int, asked: Asked) -> torch.Tensor:
    """Mask the kept tokens that a layer's new tokens see; ``mask`` is of all up to each."""
    context, window, size = mask.shape[-1], asked.window, asked.chunk
    reach = window if size is None else size
    if num_kept < context and reach is not None and num_kept > reach:
        return _find_in_ring(mask, num_kept, reach, is_chunk=size is not None)
    if size is not None and size < context:
        position = mask.sum(-1, keepdim=True) - 1
        place = torch.arange(num_kept, device=mask.device)
        if num_kept < context:  # a ring, whose last places are the chunk's before
            return place <= position % size
        return mask & (place >= position - position % size)
    if num_kept < context:  # a ring, of which all is seen once it is full
        return mask[..., :num_kept]
    if window is not None and window < context:
        # position j is in the window of the last position p iff j <= p and not j + window <= p
        beyond = torch.zeros_like(mask)
        beyond[..., :-window] = mask[..., window:]
        return mask & ~beyond
    return mask


def _find_in_ring(
    mask: torch.Tensor, num_places: int, reach: int, *, is_chunk: bool
) -> torch.Tensor:
    """Mask the places of a ring that has some for drafts beside the ``reach`` tokens that are seen.

    The last new token was written before. What a place holds of a rejected draft lies, as if it
    were of the last round, before all that is seen.
    """
    position = mask.sum(-1, keepdim=True) - 1
    last = position[..., -1:, :]
    held = last - (last - torch.arange(num_places, device=mask.device)) % num_places
    first = position - position % reach if is_chunk else position - reach + 1
    return (held >= first.clamp(min=0)) & (held <= position)


def _window_mask(num_new: int, num_kept: int, window: int, device: torch.device) -> torch.Tensor:
    position = torch.arange(num_kept - num_new, num_kept, device=device)[:, None]
    other = torch.arange(num_kept, device=device)[None, :]
    return (other <= position) & (other > position - window)
