"""Counts what transformers' own passes take, by running them without weights.

Parameters have shapes and no values (``shaped.py``), and so has all that is computed with them.
Where values decide shapes that fails, and small passes run on weights of zeros that take no memory.

Source: torch's memory tracker, ``torch.distributed._tools.mem_tracker``, counts storages as they
come and go as ``LiveBytes`` does.
"""

import gc
import logging
import pickle
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from offplan.capabilities.stock import STOCK
from offplan.checkpoint.jsontext import describe
from offplan.checkpoint.model import Model
from offplan.checkpoint.quiet import quietly
from offplan.errors import CheckpointError
from offplan.held.counted import CountedPasses
from offplan.held.held import hold
from offplan.held.stock import encode_passes
from offplan.runtime.loading.checks import list_shared, map_tensors
from offplan.runtime.loading.loaded import assign, find_places, materialise_buffers
from offplan.runtime.loading.prepared import list_kinds, pin_split
from offplan.runtime.loading.skeleton import decoder_layers
from offplan.runtime.model.calls import LayerCalls
from offplan.runtime.refusal import refuse
from offplan.runtime.stock.bounded import skipping_repeats
from offplan.runtime.stock.generation import (
    BLOCK_TOKENS,
    StockGeneration,
    can_lengthen,
    keeps_all,
    keeps_views,
    lengthen,
    reads_chunks,
    tensors_within,
)
from offplan.runtime.stock.shaped import (
    CPU,
    DEVICE,
    ShapedTensor,
    drop_values,
    list_tensors,
    run_operator,
    storage_of,
    work_out,
)
from offplan.runtime.stock.skeleton import build_stock
from offplan.transformers_private import decoding_as_on_gpu

TOKENS = (126, 254, 1022, 4094)
"""Tokens of the prompts that are run without values: a window of more is taken for none.

A step then adds one, and where a layer compresses whole blocks of 4 or 128 tokens (DeepSeek-V4) it
holds as many tokens as it ever does that fill no block yet.
"""
FEW_TOKENS = (8, 16, 32, 64)
"""Tokens of those that are run on zeros."""
LEAST_SIZES, MANY_OPERATORS = 3, 5_000
"""Sizes that a fit needs, and operators of a prompt after which no longer one is run.

Seconds would make the answer depend on how busy the host is.
"""
CHUNKS = (128, 1024)
"""Tokens of the chunks that are read at the end of a context."""
CONTEXTS = (15_360, 131_072, 1_048_576)
"""Tokens of the contexts; no window may be longer than the first.

The last is read of models whose layers all have a window or a state: other masks would take GiB, as
they have values. DeepSeek-V4's attention copies most for a context just below 16,384 tokens: from
there on it runs in blocks.
"""
BLOCK_BYTES = 512
"""What the CUDA allocator rounds sizes up to. Source: c10/cuda/CUDACachingAllocator.cpp."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators make, while they live, and the operators."""

    def __init__(self, *, counts_operators: bool = True) -> None:
        super().__init__()
        self._counts_operators = counts_operators
        self.now = self.peak = 0
        """Bytes that live, and the most since ``begin``."""
        self.operators = Counter[int | None]()
        """Operators that launch something, by the layer that runs."""
        self.moved = Counter[int | None]()
        """Bytes that these read and write, weights left out, by the layer that runs."""
        self.layer: int | None = None
        self._seen = weakref.WeakKeyDictionary[Any, None]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Have torch call what follows as it is: nothing that runs meanwhile is compiled."""
        return False

    def begin(self) -> None:
        """Begin a pass; tensors in cycles of what ran before it live no longer."""
        gc.collect()
        self.peak = self.now
        self.operators.clear()
        self.moved.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and count what it makes."""
        if func is DEVICE:  # half of all that torch asks: there is nothing to work out
            (value,) = args
            storage = storage_of(value)
            self._seen.setdefault(storage, None)
            if self._counts_operators:
                self.operators[self.layer] += 1
                if not isinstance(value, nn.Parameter):
                    self.moved[self.layer] += min(value.nbytes, storage.nbytes())
            return CPU
        kwargs = kwargs or {}
        given = list_tensors((args, *kwargs.values()))
        for value in given:  # a weight's was there before
            self._seen.setdefault(storage_of(value), None)
        if ShapedTensor in types:
            made = work_out(func, args, kwargs, given)
        else:
            made = run_operator(func, args, kwargs)
        returned = list_tensors((made,))
        if self._counts_operators and not func.is_view:
            self.operators[self.layer] += 1
            # what is expanded is there once
            self.moved[self.layer] += sum(
                min(value.nbytes, storage_of(value).nbytes())
                for value in (*given, *returned)
                if not isinstance(value, nn.Parameter)
            )
        for value in returned:
            self._note(storage_of(value))
        return made

    def _note(self, storage: Any) -> None:
        if storage in self._seen:
            return
        self._seen[storage] = None
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.now -= size


def count_passes(model: Model) -> CountedPasses:
    """Count what the passes of a model take; raises CheckpointError for one that cannot be run."""
    with _collecting_between_passes():
        return _count_somehow(model)


@contextmanager
def _collecting_between_passes() -> Iterator[None]:
    """Have ``begin`` alone collect garbage: when Python does depends on all that a process does."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # what is there by now need not be looked through
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _count_somehow(model: Model) -> CountedPasses:
    try:
        return _count(model, TOKENS, is_fake=True)
    except CheckpointError:
        raise
    except Exception as fake:  # whatever a model does with values
        try:
            return _count(model, FEW_TOKENS, is_fake=False)
        except CheckpointError:
            raise
        except Exception as error:
            raise refuse(
                f"{model.source}: transformers' own passes fail without weights "
                f"({describe(fake, 150)}; {describe(error, 150)})"
            ) from error


def _count(model: Model, sizes: Sequence[int], *, is_fake: bool) -> CountedPasses:
    skeleton = build_stock(model)
    pinned, borrowed = _find_pinned(skeleton, model)
    places, state = find_places(skeleton), skeleton.state_dict()
    materialise_buffers(skeleton, torch.device("cpu"), state)
    parameters = dict(skeleton.named_parameters())
    assign(
        places,
        {
            name: nn.Parameter(_make(value, is_fake=is_fake), requires_grad=False)
            for name, value in parameters.items()
        },
    )
    layers = decoder_layers(skeleton)
    kinds = list_kinds(model.layers, skeleton.config.get_text_config())
    _run(skeleton, layers, kinds, sizes[0])  # its imports leave frames behind, with their tensors
    gc.collect()
    gc.freeze()
    counted: list[_Counted] = []
    for num_tokens in sizes:
        counted.append(_run(skeleton, layers, kinds, num_tokens))
        if len(counted) >= LEAST_SIZES and counted[-1].prompt_operators > MANY_OPERATORS:
            break  # some read a prompt token by token
    first, sizes = counted[0], sizes[: len(counted)]
    kept = [num_tokens + 1 for num_tokens in sizes]  # the step's token is kept, too
    chunk_bytes, of_steps = None, [each.step_bytes for each in counted]
    if is_fake and counted[LEAST_SIZES - 1].prompt_operators <= 2 * MANY_OPERATORS:
        chunk_bytes, of_long = _try_chunks(skeleton, layers, kinds)
        of_steps += of_long
    return CountedPasses(
        is_estimated=not is_fake,
        calls=first.calls,
        caches=[
            _fit_cache(kept, [each.cache_bytes[index] for each in counted])
            for index in range(len(layers))
        ],
        prompt_bytes=_fit_square(sizes, [each.prompt_bytes for each in counted]),
        step_bytes=_fit_line([*sizes, *CONTEXTS], of_steps),
        chunk_bytes=chunk_bytes,
        pinned=pinned,
        borrowed=borrowed,
        operators=first.operators,
        prompt_moved=[
            _fit_square(sizes, [each.moved["prefill"][index] for each in counted])
            for index in range(len(layers) + 1)
        ],
        step_moved=[
            _fit_line(sizes, [each.moved["decode"][index] for each in counted])
            for index in range(len(layers) + 1)
        ],
    )


def _try_chunks(
    skeleton: Any, layers: nn.ModuleList, kinds: Sequence[object]
) -> tuple[tuple[float, float, float, float] | None, list[int]]:
    """Count the temporaries of chunks, and those of a step at the end of some of CONTEXTS.

    Returns None and no step if that cannot be.
    """
    if not reads_chunks(skeleton.config):
        return None, []
    text = StockGeneration(skeleton, torch.zeros(1, 1, dtype=torch.int64), 2**30)
    with torch.no_grad(), _running_once(layers, kinds, text.has_layers(len(layers))):
        text.prefill(0, 1)
    if not can_lengthen(text.cache, CONTEXTS[0]):
        return None, []
    contexts = CONTEXTS[:-1] if keeps_all(text.cache) else CONTEXTS
    try:
        return _count_chunks(skeleton, layers, kinds, contexts)
    except Exception:  # as where a table of positions ends before
        return None, []


def _count_chunks(
    skeleton: Any, layers: nn.ModuleList, kinds: Sequence[object], contexts: Sequence[int]
) -> tuple[tuple[float, float, float, float], list[int]]:
    """Count the temporaries of chunks, and of steps behind them, as one text grows.

    A window's cache keeps views of a whole chunk, which the next chunk replaces: so each is read
    twice. What lies between is not read: the cache is made as long as if it were.
    """
    live, done = LiveBytes(counts_operators=False), 0
    of_chunks, of_steps = dict[tuple[int, int], int](), list[int]()
    text = StockGeneration(skeleton, torch.zeros(1, contexts[-1] + 1, dtype=torch.int64), 2**30)
    is_alike = text.has_layers(len(layers))
    first = {kind: index for index, kind in reversed([*enumerate(kinds)])}

    def take(num_tokens: int) -> int:
        nonlocal done
        live.begin()
        logits = text.prefill(done, done + num_tokens)
        done += num_tokens
        taken = live.peak - text.cache_bytes
        del logits
        if not is_alike:
            return taken
        beside = _viewed_bytes(text, len(layers))
        ran = sum(beside[index] for index in first.values())
        return taken + sum(beside[first[kind]] for kind in kinds) - ran

    with torch.no_grad(), _running_once(layers, kinds, is_alike), skipping_repeats(), live:
        for context in contexts:
            stop = context - 1 - 2 * sum(CHUNKS)  # the step fills a block of any size
            take((stop - done) % BLOCK_TOKENS)
            lengthen(text.cache, stop - done)
            done = stop
            for chunk in reversed(CHUNKS):
                if keeps_views(text.cache):
                    take(chunk)
                of_chunks[chunk, context] = take(chunk)
            with decoding_as_on_gpu(skeleton):
                of_steps.append(take(1))
    return _fit_pairs(of_chunks), of_steps


def _viewed_bytes(text: StockGeneration, num_layers: int) -> list[int]:
    """Bytes of memory that each layer's part of the cache keeps by views, beside its own."""
    viewed = []
    for own, part in zip(text.layer_bytes(num_layers), text.cache.layers, strict=True):
        kept = {id(s): s.nbytes() for s in map(storage_of, tensors_within(part))}
        viewed.append(max(0, sum(kept.values()) - own))
    return viewed


def _find_pinned(skeleton: Any, model: Model) -> tuple[list[str], list[int]]:
    """List the stored tensors of layers that no rule takes, and what layers read of others'.

    Raises CheckpointError.
    """
    stage = hold(model, way=STOCK)
    targets, state = map_tensors(skeleton, stage), skeleton.state_dict()
    shared, borrowed = list_shared(skeleton, targets), [0] * len(stage.layers)
    for name, readers in shared.items():
        for index in {*readers} - {targets[name].pieces[0].source.layer}:
            borrowed[index] += state[name].numel() if state[name].ndim > 1 else 0
    if any(not p.form.is_raw for p in stage.parameters):  # codes are held as they are stored
        return sorted(p.tensor.name for name in shared for p in targets[name].pieces), borrowed
    held = pin_split(stage, targets, state, shared)
    pinned = (
        tensor.name
        for before, after in zip(stage.layers, held.layers, strict=True)
        for p, q in zip(before.parameters, after.parameters, strict=True)
        if p is not q
        for tensor in p.tensors
    )
    return sorted(pinned), borrowed


def _make(value: torch.Tensor, *, is_fake: bool) -> torch.Tensor:
    if is_fake:
        return drop_values(value)
    return torch.zeros((), dtype=value.dtype).expand(value.shape)


class _Counted:
    """What a prompt of so many tokens and a step behind it took."""

    def __init__(self, num_layers: int) -> None:
        self.calls: dict[str, list[int]] = {"prefill": [], "decode": []}
        self.operators: dict[str, list[int]] = {}
        self.moved: dict[str, list[int]] = {}
        self.cache_bytes = [0] * num_layers
        self.prompt_bytes = self.step_bytes = self.prompt_operators = 0


def _run(
    skeleton: Any, layers: nn.ModuleList, kinds: Sequence[object], num_tokens: int
) -> _Counted:
    """Run a prompt and a step; of equal layers the first one runs, and others give its output."""
    counted, live, calls = _Counted(len(layers)), LiveBytes(), LayerCalls(layers)
    phase = "prefill"

    def enter(index: int) -> None:
        live.layer = index
        counted.calls[phase].append(index)

    def leave(index: int) -> None:
        live.layer = None

    calls.enter, calls.leave = enter, leave
    first = {kind: index for index, kind in reversed([*enumerate(kinds)])}
    text = StockGeneration(skeleton, torch.zeros(1, num_tokens, dtype=torch.int64), 2**30)
    is_alike = text.has_layers(len(layers))
    try:
        with torch.no_grad(), _running_once(layers, kinds, is_alike), live:
            for phase, forward in _passes(skeleton, text, num_tokens):
                live.begin()
                logits = forward()
                kept = text.cache_bytes
                taken = live.peak - kept
                del logits
                if phase == "prefill":
                    counted.prompt_bytes = taken
                    counted.prompt_operators = live.operators.total()
                else:
                    counted.step_bytes = taken
                ran = [first[k] if is_alike else n for n, k in enumerate(kinds)]
                counted.operators[phase] = [live.operators[each] for each in (*ran, None)]
                counted.moved[phase] = [live.moved[each] for each in (*ran, None)]
    finally:
        calls.close()
    of_layers = text.layer_bytes(len(layers))
    counted.cache_bytes = [
        of_layers[first[kind] if is_alike else index] for index, kind in enumerate(kinds)
    ]
    return counted


def _passes(
    skeleton: Any, text: StockGeneration, num_tokens: int
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    yield "prefill", lambda: text.prefill(0, num_tokens)
    with decoding_as_on_gpu(skeleton):
        yield "decode", lambda: text.decode(torch.zeros(1, 1, dtype=torch.int64))


@contextmanager
def _running_once(layers: nn.ModuleList, kinds: Sequence[object], is_alike: bool) -> Iterator[None]:
    """Have layers of one kind give what the first of them gave in the same pass."""
    made: dict[object, Any] = {}

    def replace(index: int, kind: object, own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            owner, output = made.get(kind, (index, None))
            if owner == index:
                output = own(*args, **kwargs)
                made[kind] = index, output
            return output

        return forward

    if is_alike:
        for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
            layer.forward = replace(index, kind, layer.forward)
    try:
        yield
    finally:
        for layer in layers if is_alike else ():
            del layer.forward  # its class has it


def _fit_cache(sizes: Sequence[int], found: Sequence[int]) -> tuple[int, int | None, int]:
    """Fit a layer's cache of texts of so many tokens: bytes a token, a window, a state's bytes."""
    slopes = [
        (after - before) / (more - fewer)
        for fewer, more, before, after in zip(sizes, sizes[1:], found, found[1:], strict=False)
    ]
    if slopes[-1] > 0:
        of_token = ceil(slopes[-1])
        state = max(size - of_token * num for num, size in zip(sizes, found, strict=True))
        return of_token, None, max(0, state)
    growing = [slope for slope in slopes if slope > 0]
    if not growing:
        return 0, None, found[-1]
    # the first slope is too small where the window ends within it
    per_token = max(growing[0], found[0] / sizes[0])
    return ceil(per_token), ceil(found[-1] / per_token), 0


def _fit_square(sizes: Sequence[int], found: Sequence[float]) -> tuple[float, float, float]:
    """Fit bytes for any prompt, for each token and for each pair, none of them below zero.

    They grow as those of the three longest prompts do, and reach what was found of each.
    """
    points = torch.tensor([[1.0, n, n * n] for n in sizes[-3:]], dtype=torch.float64)
    _, of_token, of_pair = torch.linalg.solve(
        points, torch.tensor(found[-3:], dtype=torch.float64)
    ).tolist()
    if of_pair < 0:  # it grows more slowly
        of_pair, of_token = 0.0, max(0.0, (found[-1] - found[-3]) / (sizes[-1] - sizes[-3]))
    of_token = max(0.0, of_token)
    fixed = max(each - of_token * n - of_pair * n * n for n, each in zip(sizes, found, strict=True))
    return max(0.0, fixed), of_token, of_pair


def _fit_pairs(found: Mapping[tuple[int, int], int]) -> tuple[float, float, float, float]:
    """Fit bytes for any chunk, for each of its tokens, for each of its context's, and each pair.

    They grow as those of the longest contexts do, and reach what was found of each.
    """
    (few, many), (short, long) = CHUNKS, sorted({context for _, context in found})[-2:]
    of_few = (found[few, long] - found[few, short]) / (long - short)
    of_many = (found[many, long] - found[many, short]) / (long - short)
    of_pair = max(0.0, (of_many - of_few) / (many - few))
    of_kept = max(0.0, of_few - of_pair * few)
    of_chunk = (found[many, short] - found[few, short]) / (many - few)
    of_token = max(0.0, of_chunk - of_pair * short)
    fixed = max(
        each - of_token * chunk - of_kept * context - of_pair * chunk * context
        for (chunk, context), each in found.items()
    )
    return max(0.0, fixed), of_token, of_kept, of_pair


def _fit_line(sizes: Sequence[int], found: Sequence[float]) -> tuple[float, float]:
    """Fit bytes for any number of tokens and for each; ``found`` may be of the first sizes."""
    points = [*zip(sizes, found, strict=False)]
    (fewer, before), (more, after) = points[-2:]
    of_token = max(0.0, (after - before) / (more - fewer))
    return max(0.0, max(f - of_token * n for n, f in points)), of_token


def answer() -> None:
    """Read a model of our own making from stdin, and print what its passes take, or why not."""
    sys.stdout.buffer.write(encode_passes(try_to_count(pickle.load(sys.stdin.buffer))))


def try_to_count(model: Model) -> CountedPasses | str:
    """Return what ``count_passes`` counts, or the reason why it cannot; libraries write nothing."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)  # torch tells of fakes that fail
    try:
        with quietly(transformers.logging):
            return count_passes(model)
    except CheckpointError as error:
        return str(error)
    finally:
        logging.disable(before)
