"""Needs of each attention of a model, found by running the model without weights.

transformers makes the masks of its own attentions from the config. They differ from one model to
the next: windows, chunks, prefixes, attention to both sides. Attention here makes its own, so what
those would hide is read off them, at the start of a text and far into it.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from offplan.checkpoint.jsontext import describe
from offplan.checkpoint.model import KVCache, Vectors
from offplan.errors import CheckpointError
from offplan.row_cache import RowCache, why_not_coded
from offplan.runtime.model.latent import expands_latents
from offplan.runtime.model.rewrites import find_linear
from offplan.runtime.refusal import refuse, refuse_config
from offplan.transformers_private import ExpertsInterface, choose_attention, name_cache

PROBE = "offplan_probe"
NUM_NEW = 4
"""Tokens that look at a text: enough to tell a window, which moves with them, from a chunk."""
NUM_TOKENS = 2**20
"""Tokens of the text; a window of more is none."""
HARMLESS = {"dropout", "is_causal", "logits_to_keep", "output_attentions"}
HARMLESS |= {"output_hidden_states", "output_router_logits", "position_ids", "scaling"}
HARMLESS |= {"sliding_window", "use_cache"}
"""Arguments of transformers' attentions that change nothing which the mask does not show."""


class Asked(NamedTuple):
    """The needs of one attention beyond a softmax of all tokens up to each one's own."""

    window: int | None = None
    """Tokens that each sees at most, its own included; None where nothing is hidden."""
    chunk: int | None = None
    """Tokens of a chunk of the text, in which alone each sees those up to its own."""
    sinks: bool = False
    """True if the softmax has a learned sink for each head."""
    soft_cap: float | None = None
    """Value that scores are softly capped at."""

    def is_plain_within(self, context: int) -> bool:
        """Return True if it asks for nothing in texts of so many tokens."""
        reach = min(self.window or context, self.chunk or context)
        plain = self._replace(window=None, chunk=None) == Asked()
        return plain and reach >= context


class _Attended(NamedTuple):
    """A call of an attention."""

    module: nn.Module
    asked: Asked
    reads: list[int]
    """Layers whose keys and values it was given as their cache returned them."""


def probe_attention(model: PreTrainedModel, layers: nn.ModuleList) -> dict[nn.Module, Asked]:
    """Find what each attention in the ``layers`` of a model on the meta device asks for.

    The model's attention and experts must be chosen again afterwards. Raises CheckpointError for a
    layer without an attention, be it linear or one that transformers lets be chosen. Raises
    CheckpointError for an attention that asks for something unknown here, that cannot be told
    without weights, or that the config's figures do not allow.
    """
    if "position_ids" not in inspect.signature(model.get_decoder().forward).parameters:
        raise refuse(f"{type(model).__name__} counts positions by its cache")
    _call(model, layers, 0)  # what only the start of a text has, such as a prefix, is refused
    found = _call(model, layers, NUM_TOKENS - NUM_NEW)
    asked = {each.module: each.asked for each in found}
    if unlike := [each.module for each in found if asked[each.module] != each.asked]:
        raise refuse(f"{type(unlike[0]).__name__} attends more than once, and not alike")
    return asked


def check_rings(name: str, layers: nn.ModuleList, caches: Sequence[KVCache]) -> None:
    """Check that layers see no further than the rings that keep their keys and values.

    ``layers`` are those of a model called ``name``, whose attentions were probed, ``caches`` what
    offplan read of its config. Raises CheckpointError where these differ.
    """
    row = RowCache(caches, sys.maxsize)
    for index, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        found = [vars(each)["asked"] for each in layer.modules() if "asked" in vars(each)]
        reads = vars(layer)["reads"]
        owner = index if row.window(index) is not None else row.owner(index)
        if owner is None:
            if any(row.window(each) is not None for each in chain(*reads)):
                raise refuse(
                    f"{name}: layer {index} reads another layer's window, which its config does "
                    "not say"
                )
            continue
        sees = [each.chunk or each.window for each in found]
        if sees != [cache.window]:
            raise refuse(
                f"{name}: by its config layer {index} sees {cache.window} tokens, by transformers' "
                f"class {' and '.join(str(each or 'all') for each in sees) or 'none'}"
            )
        if reads != [[owner]]:
            raise refuse(
                f"{name}: layer {index} has a window, and shares or changes what is cached"
            )


def check_codes(name: str, layers: nn.ModuleList, caches: Sequence[KVCache]) -> None:
    """Check that what layers cache as codes has the heads that offplan counts scales for.

    ``layers`` and ``name`` are as for ``check_rings``. Raises CheckpointError where that differs,
    or what is cached does not reach attention as it is.
    """
    if not any(cache.is_coded for cache in caches):
        return
    for index, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        found = [each for each in layer.modules() if "asked" in vars(each)]
        is_latent = [*map(expands_latents, found)] == [True]
        reads = [[index]] if is_latent else vars(layer)["reads"]
        # attention reads codes of any layer, but nothing else can
        if (reads != [[index]]) if cache.is_coded else any(len(each) != 1 for each in reads):
            raise refuse(
                f"{name}: layer {index} changes what is cached, which a cache in FP8 does not "
                "allow: leave kv_cache_dtype out"
            )
        if not cache.is_coded:
            continue
        if (why := why_not_coded(cache.vectors)) is not None:
            raise refuse(f"{name}: layer {index} {why}: leave kv_cache_dtype out")
        if (cached := vars(layer)["cached"]) != cache.vectors:
            by_class, by_config = (
                " and ".join(f"{count} of {dim} elements" for count, dim in each)
                for each in (cached, cache.vectors)
            )
            raise refuse(
                f"{name}: by its config layer {index} caches {by_config}, by transformers' class "
                f"{by_class}: leave kv_cache_dtype out"
            )


def _call(model: PreTrainedModel, layers: nn.ModuleList, start: int) -> list[_Attended]:
    """Call a model on the tokens from ``start`` on; return what its attentions were asked for."""
    found: list[_Attended] = []
    masks: list[tuple[Any, Asked | str]] = []
    """Masks, of which layers share few, and what they leave."""
    tried: list[object] = []
    """Shapes and scales that attention takes."""
    chunk = getattr(model.config.get_text_config(), "attention_chunk_size", None)

    def find_reach(mask: Any) -> Asked | str:
        known = [reach for other, reach in masks if other is mask]
        if not known:
            known = [_find_reach(mask, start, chunk)]
            masks.append((mask, known[0]))
        return known[0]

    def attend(
        module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **others: Any
    ) -> tuple[torch.Tensor, None]:
        reads = [
            index
            for index, part in enumerate(parts)
            if isinstance(part, _Kept) and part.made and _is_same(part.made, key, value)
        ]
        found.append(_Attended(module, _read(module, find_reach(attention_mask), others), reads))
        scaling = others.get("scaling")
        shapes = query.shape, key.shape, value.shape, scaling
        if shapes not in tried:  # it takes a millisecond, and most layers ask for the same
            scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
            tried.append(shapes)
        batch, heads, new, _ = query.shape
        return query.new_empty(batch, new, heads, value.shape[-1]), None

    AttentionInterface.register(PROBE, attend)
    choose_attention(model, PROBE)
    tokens = torch.zeros(1, NUM_NEW, dtype=torch.int64, device="meta")
    linear = find_linear(layers)
    parts = [LinearAttentionLayer() if each else _Kept(start) for each in linear]
    cache = Cache(layers=parts)
    unpadded = _Unpadded(getattr(model.config.get_text_config(), "pad_token_id", None))
    with _checked(layers, cache, found), torch.inference_mode(), unpadded:
        try:
            model(
                input_ids=tokens,
                position_ids=torch.arange(start, start + NUM_NEW, device="meta")[None],
                use_cache=True,
                logits_to_keep=slice(-1, None),
                **{name_cache(model): cache},
            )
        except CheckpointError:
            raise
        except Exception as error:  # whatever a config may ask for that a model cannot do
            if not _lacks_values(error):
                raise refuse_config(model, error) from error
            raise refuse(
                f"what attention of {type(model).__name__} sees cannot be told without its weights "
                f"({describe(error, 200)})"
            ) from error
    return found


def _is_same(made: tuple[Any, Any], key: Any, value: Any) -> bool:
    return made[0] is key and made[1] is value


def _lacks_values(error: Exception) -> bool:
    """Return True if a call failed on the meta device alone, where there are no values.

    Source: torch 2.13 has no kernels there for what depends on values, or says the device's name.
    """
    return isinstance(error, NotImplementedError) or "meta" in str(error)


class _Unpadded(TorchFunctionMode):
    """Answers what transformers asks of tokens for its masks as of a text without padding."""

    def __init__(self, pad_token: int | None) -> None:
        super().__init__()
        self._pad_token = pad_token

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Say that no token is the padding's; keep the values of how much padding there is."""
        if func is torch.Tensor.__contains__ and args[0].is_meta and args[1] == self._pad_token:
            return False
        if func is torch.zeros and kwargs and kwargs.get("dtype") is int:
            kwargs = kwargs | {"device": "cpu"}  # left_padding_tokens of chunked masks
        return func(*args, **(kwargs or {}))


@contextmanager
def _checked(layers: nn.ModuleList, cache: Cache, found: list[_Attended]) -> Iterator[None]:
    """Check each layer called meanwhile: that it is given the cache, attends, returns states."""
    for index, layer in enumerate(layers):
        layer.forward = _make_checked(index, layer, cache, found)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # its class has it


def _make_checked(
    index: int, layer: Any, cache: Cache, found: list[_Attended]
) -> Callable[..., Any]:
    forward, kept = layer.forward, cache.layers[index]
    attends = isinstance(kept, _Kept)

    def checked(hidden: torch.Tensor, *others: Any, **arguments: Any) -> Any:
        if not any(value is cache for value in (*others, *arguments.values())):
            raise refuse(f"layer {index} is given another cache than the model, or none")
        before = len(found)
        try:
            made = forward(hidden, *others, **arguments)
        except CheckpointError:
            raise
        except Exception as error:
            # behind attention a layer may look at values
            if len(found) == before or not _lacks_values(error):
                raise
            return hidden
        finally:
            if isinstance(kept, _Kept) and kept.made is not None:
                vars(layer)["cached"] = tuple(Vectors(*each.shape[1::2]) for each in kept.made)
            vars(layer)["reads"] = [each.reads for each in found[before:]]
        if attends and len(found) == before:
            raise refuse(f"layer {index} has no attention that transformers lets be chosen")
        if not attends and len(found) > before:
            raise refuse(f"layer {index} has linear attention beside another one")
        states, beside = (made[0], made[1:]) if isinstance(made, tuple) else (made, None)
        if not isinstance(states, torch.Tensor) or any(each is not None for each in beside or ()):
            raise refuse(f"layer {index} returns more than hidden states, which is not handed on")
        vars(layer)["beside"] = beside
        return made

    return checked


class _Kept(CacheLayerMixin):
    """The shapes of a cache that keeps so many tokens before the new ones, and nothing else."""

    is_compileable = False
    is_sliding = False

    def __init__(self, start: int) -> None:
        super().__init__()
        self._start = start
        self.made: tuple[torch.Tensor, torch.Tensor] | None = None
        """The keys and values that the last update returned."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate nothing."""
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all tokens, [batch, heads, kept + new, dim], without values."""
        kept = self._start
        keys, values = (
            states.new_empty(*states.shape[:2], kept + states.shape[2], states.shape[3])
            for states in (key_states, value_states)
        )
        self.made = keys, values
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of what is kept, the new tokens included."""
        return self._start + query_length, 0

    def get_seq_length(self) -> int:
        """Return the tokens before the new ones."""
        return self._start

    def get_max_length(self) -> int:
        """Return the number of tokens that it can keep."""
        return NUM_TOKENS


def _make_mask(
    mask_function: Callable[..., Any],
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    **others: Any,
) -> torch.Tensor:
    """Make the mask, bool of [1, 1, new, kept], that transformers says by a function."""
    query = torch.arange(q_offset, q_offset + q_length).view(1, 1, -1, 1)
    key = torch.arange(kv_offset, kv_offset + kv_length).view(1, 1, 1, -1)
    none = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    mask: torch.Tensor = mask_function(none, none, query, key)
    return mask.expand(1, 1, q_length, kv_length)


AttentionMaskInterface.register(PROBE, _make_mask)
ExpertsInterface.register(PROBE, lambda experts, hidden, *routing: torch.empty_like(hidden))


def _read(module: nn.Module, reach: Asked | str, others: dict[str, Any]) -> Asked:
    """Read what an attention is asked for off what its mask leaves and its other arguments."""
    given = {name: value for name, value in others.items() if value is not None}
    sinks, soft_cap = given.pop("s_aux", None), given.pop("softcap", None)
    if unknown := sorted(given.keys() - HARMLESS):
        raise refuse(f"{type(module).__name__} needs attention with {unknown[0]}")
    if isinstance(reach, str):
        raise refuse(f"{type(module).__name__} attends to {reach}")
    if reach != Asked() and hasattr(module, "kv_b_proj"):
        raise refuse(f"{type(module).__name__} has latents and a sliding window, or chunks")
    return reach._replace(sinks=sinks is not None, soft_cap=soft_cap)


def _find_reach(mask: Any, start: int, chunk: int | None) -> Asked | str:
    """Find the window that a mask, bool of [1, 1, new, kept], leaves, or say what it shows.

    ``chunk`` is the config's number of tokens of a chunk, which few masks would tell.
    """
    if not isinstance(mask, torch.Tensor) or mask.is_meta or mask.dtype is not torch.bool:
        return "what a mask of its own says"
    rows = mask[0, 0].numpy()  # which finds the first of a million booleans without a copy of them
    own = np.arange(start, start + len(rows))
    first = rows.argmax(-1)
    last = rows.shape[1] - 1 - rows[:, ::-1].argmax(-1)
    width = own - first + 1
    if not np.array_equal(last, own):
        return "tokens behind its own"
    if not np.array_equal(np.count_nonzero(rows, axis=-1), width):
        return "some of the tokens before its own"
    if not start or not first.any():  # the start of a text is in every window
        return Asked()
    if chunk and np.array_equal(first, own // chunk * chunk):
        return Asked(chunk=chunk)
    return Asked(int(width[0])) if (width == width[0]).all() else "chunks of the text"
