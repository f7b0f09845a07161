"""The decoder's layers as the runtime drives them: compiled, with a cache each, callable alone.

Each change to a layer is made once, and undone with the model.
"""

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from offplan.errors import OffplanError, Topic
from offplan.runtime.model.caches import ALL, LayerCaches, Ring
from offplan.runtime.model.rewrites import compile_as_real
from offplan.runtime.refusal import refuse

MAX_VARIANTS = 64
"""Compilations kept for one layer class: kinds of layers x phases x where their weights lie."""
COMPILE_OPTIONS = {"triton.autotune_pointwise": False, "deterministic": True}
"""No kernel is tried out in several shapes. Trying takes memory that the plan does not count: the
GPU's L2 cache, and copies of what the kernel changes, for a moment. By the shape of a reduction
tokens would differ from one start to the next.

Source: torch 2.11, ``InductorBenchmarker.benchmark_gpu`` and ``_persistent_reduction_configs``. 12
layers of Qwen3-8B on an H200 took 4,128 MiB at a first start with both, of a budget of 4,096. They
took 4,068 with reductions alone tried out and 4,051 with none, then as at every later start.
"""


def require_triton() -> None:
    """Raise OffplanError if layers cannot be compiled for a GPU."""
    if importlib.util.find_spec("triton") is None:
        raise OffplanError(
            "running on a GPU needs the package triton, with which its layers are compiled: "
            "pip install triton, on Windows triton-windows",
            topic=Topic.COMPILER,
        )


@dataclass(frozen=True)
class Call:
    """The arguments that a model calls one of its layers with."""

    hidden: torch.Tensor
    """Hidden states, [batch, tokens, hidden size]."""
    arguments: dict[str, Any]
    """Other arguments by name: masks, positions, rotary tables, the layer's cache."""


@cache  # torch compiles a layer again for options that do not equal another layer's
def _options() -> dict[str, Any]:
    """Return what all layers are compiled with."""
    from offplan.runtime.model.step_graph import FewerLaunches  # needs torch's compiler

    return {**COMPILE_OPTIONS, "post_grad_custom_pre_pass": FewerLaunches()}


See = Callable[[int, torch.Tensor, torch.Tensor], None]
"""A call is told a layer's index and its hidden states, before and after."""


def _with_own_code(method: Callable[..., Any], copies: dict[CodeType, CodeType]) -> Any:
    """Return the same bound method of a function whose code is a copy, that of ``copies`` if any.

    torch counts and keeps compilations by code, so that layers with the same ``copies`` share them.
    With the class's own code, layers of other sessions would count, too, and the last ones stay
    uncompiled.
    """
    if not (inspect.ismethod(method) and inspect.isfunction(method.__func__)):
        return method
    function = method.__func__
    code = copies.setdefault(function.__code__, function.__code__.replace())
    own = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    own.__kwdefaults__ = function.__kwdefaults__
    vars(own).update(vars(function))
    return MethodType(own, method.__self__)


class _AllNoted(Exception):
    """Ends a forward pass whose rest, the head above all, nobody asked for."""


class DecoderLayers:
    """All decoder layers of a model, in order."""

    def __init__(self, layers: nn.ModuleList, *, compiled: bool) -> None:
        """Take the layers over; ``compiled`` compiles their forward for the shapes it meets.

        A pass that is not worth a compilation runs in ``torch.compiler.set_stance("force_eager")``.
        """
        self._attentions = [
            [module for module in layer.modules() if "asked" in vars(module)] for layer in layers
        ]
        self.cache = None
        self._steps: list[Callable[..., Any]] = []
        self._beside: list[tuple[None, ...] | None] = []
        """Values that each layer returns behind hidden states if it returns a tuple, as was
        probed."""
        self._see: See | None = None
        self.call: Callable[[int, Call], torch.Tensor] = self.step
        """Runs where the model calls a layer, whose index it is told."""
        self._stand_in: Callable[[int, Call], torch.Tensor] | None = None
        """Runs in its place."""
        if compiled:
            compile_as_real(layers)
        # A layer compiled up to a break, as where experts hand over, is guarded by nothing behind
        # it: its code would serve layers of other classes, whose rest is then compiled once more.
        copies: dict[tuple[type, ...], dict[CodeType, CodeType]] = {}
        # set for each call and taken back after it: what else the process compiles keeps its limit
        self._limit = torch._dynamo.config.patch(recompile_limit=MAX_VARIANTS)
        self._is_compiled, self._is_compiling = compiled, False
        for index, layer in enumerate(layers):
            # torch.compile guards on every integer that it reads from a module
            for module in layer.modules():
                # transformers 5.17 hands a few layers' keys on to later ones by their indices
                if hasattr(module, "layer_idx") and not getattr(
                    module, "store_full_length_kv", False
                ):
                    vars(module)["layer_idx"] = 0
            own: Callable[..., Any] = layer.forward
            signature = inspect.signature(own)
            if compiled:
                alike = copies.setdefault(tuple(map(type, layer.modules())), {})
                own = torch.compile(_with_own_code(own, alike), dynamic=False, options=_options())
            self._steps.append(own)
            self._beside.append(vars(layer).get("beside"))
            layer.forward = self._make_forward(index, signature)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def cache(self) -> LayerCaches | None:
        """The cache of the sequences at hand; every layer is given its own part of it."""
        return self._cache

    @cache.setter
    def cache(self, cache: LayerCaches | None) -> None:
        self._cache = cache
        parts = [None] * len(self._attentions) if cache is None else cache.by_layer
        for part, attentions in zip(parts, self._attentions, strict=True):
            for each in attentions:
                vars(each)["ring"] = part if isinstance(part, Ring) else None
                # beside the ring, since compiled code would be guarded by the object
                vars(each)["is_ring"] = isinstance(part, Ring)
                vars(each)["scratch"] = None if cache is None else cache.scratch

    def step(self, index: int, call: Call) -> torch.Tensor:
        """Run one layer, compiled where it is.

        Raises CheckpointError for a layer that returns more than hidden states.
        """
        with self.compiling():
            made = self._steps[index](call.hidden, **call.arguments)
        hidden, beside = (made[0], made[1:]) if isinstance(made, tuple) else (made, None)
        if not isinstance(hidden, torch.Tensor) or beside != self._beside[index]:
            raise refuse(f"layer {index} returns more than hidden states, which is not handed on")
        if self._see is not None:
            self._see(index, call.hidden, hidden)
        return hidden

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Context in which layers may be compiled; within itself it does nothing.

        Layers that are left in the middle would otherwise take each other's limits back.
        """
        if self._is_compiling or not self._is_compiled:
            yield
            return
        self._is_compiling = True
        try:
            with self._limit:
                yield
        finally:
            self._is_compiling = False

    @contextmanager
    def seen_by(self, see: See) -> Iterator[None]:
        """Context in which ``see`` is told of each layer once it has run; nothing is captured."""
        self._see = see
        try:
            yield
        finally:
            self._see = None

    def note_calls(self, forward: Callable[[], Any]) -> list[Call]:
        """Return what ``forward`` would call each layer with; neither they run nor what follows."""
        calls: list[Call] = []

        def note(_: int, call: Call) -> torch.Tensor:
            calls.append(call)
            if len(calls) == len(self):
                raise _AllNoted
            return call.hidden

        with suppress(_AllNoted), self._calling(note):
            forward()
        return calls

    def finish(self, hidden: torch.Tensor, forward: Callable[[], Any]) -> Any:
        """Return what ``forward`` makes of ``hidden`` as the last layer's output."""
        with self._calling(lambda *_: hidden):
            return forward()

    @contextmanager
    def _calling(self, call: Callable[[int, Call], torch.Tensor]) -> Iterator[None]:
        self._stand_in = call
        try:
            yield
        finally:
            self._stand_in = None

    def invalidate(self) -> None:
        """Know of no rows of the cache that layers write to; what these hold stays."""
        self._stand_in, self._is_compiling = None, False
        if self.cache is not None:
            self.cache.invalidate()

    def forget_from(self, position: int, rows: slice = ALL) -> None:
        """Clear ``rows`` of the cache from ``position`` on.

        Attention weighs what lies there by zero, which does not hide a NaN of an earlier request.
        """
        if self.cache is not None:
            self.cache.clear_from(position, rows)

    def forget_states(self, rows: slice = ALL) -> None:
        """Clear the states of linear attention, before a text begins.

        They are what they were left as, be it by a pass that only allocated or measured.
        """
        if self.cache is not None:
            self.cache.clear_states(rows)

    def _make_forward(self, index: int, signature: inspect.Signature) -> Callable[..., Any]:
        # by name: some models pass more than hidden states by their place
        first, *names = signature.parameters

        def forward(*others: Any, **arguments: Any) -> Any:
            assert self.cache is not None
            arguments = dict(zip((first, *names), others, strict=False)) | arguments
            hidden = arguments.pop(first)
            for name, value in arguments.items():
                if value is self.cache:
                    arguments[name] = self.cache.layers[index]
            hidden = (self._stand_in or self.call)(index, Call(hidden, arguments))
            beside = self._beside[index]
            return hidden if beside is None else (hidden, *beside)

        return forward
