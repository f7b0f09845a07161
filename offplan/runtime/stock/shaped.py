"""Tensors that have shapes and no values, and what operators make of them.

What an operator makes of such tensors follows from their shapes, strides and types. torch is asked
that once for each: a model asks the same in each layer, for each expert and for each token.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Layout:
    """How a tensor lies in its storage; all tensors that lie alike share one.

    Where it begins there is left out: nothing that operators make depends on that.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class ShapedTensor(torch.Tensor):
    """A tensor without values, which models take for one on the CPU."""

    lies: Layout
    kept_in: torch.UntypedStorage
    """Stands for its storage: a view has its base's, which lives as long as they do."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def make(cls, layout: Layout, storage: torch.UntypedStorage) -> "ShapedTensor":
        """Make a tensor that lies so in a storage."""
        made: ShapedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            layout.shape,
            strides=layout.strides,
            dtype=layout.dtype,
            device=CPU,
            dispatch_device=True,  # as FakeTensor asks for it
        )
        made.lies, made.kept_in = layout, storage
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that models see."""
        return CPU

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return what an operator makes."""
        kwargs = kwargs or {}
        return work_out(func, args, kwargs, list_tensors((args, *kwargs.values())))


def drop_values(tensor: torch.Tensor) -> ShapedTensor:
    """Return a contiguous tensor of the same shape and type without values."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return ShapedTensor.make(_find_layout(made), _make_storage(made.nbytes))


def list_tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """List the tensors among what an operator takes or gives."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += list_tensors(value)
    return found


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor with values, or what stands for it of one without."""
    return tensor.kept_in if isinstance(tensor, ShapedTensor) else tensor.untyped_storage()


def work_out(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[torch.Tensor]
) -> Any:
    """Return what an operator makes of its arguments; ``given`` are the tensors among them.

    Raises what torch raises, as where values decide.
    """
    if func is DEVICE:
        return CPU
    if func in _EQUIVALENTS:
        args = _EQUIVALENTS[func](*args)
    key = (func, *map(_key, args), *[(name, _key(value)) for name, value in kwargs.items()])
    answer = _ANSWERS.get(key)
    if answer is None:
        answer = _ANSWERS[key] = _ask(func, args, kwargs)
    return _make(answer, given)


@dataclass(frozen=True)
class _Made:
    """A tensor that an operator makes."""

    layout: Layout
    nbytes: int
    """Bytes of its storage."""
    base: int | None
    """Which of the tensors given has that storage; None if it is new."""
    is_base: bool
    """True if it is that tensor, written in place."""


DEVICE = torch.ops.prim.device.default
CPU, _META = torch.device("cpu"), torch.device("meta")
_MODE = FakeTensorMode()
_LAYOUTS: dict[tuple[Any, ...], Layout] = {}
_ANSWERS: dict[tuple[Any, ...], Any] = {}
"""What operators make of what they are given; it depends on nothing else."""


def _select_first(tensor: torch.Tensor, dim: int, index: int) -> tuple[Any, ...]:
    size = tensor.shape[dim]
    return tensor, dim, 0 if -size <= index < size else index


def _slice_first(
    tensor: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> tuple[Any, ...]:
    start, end, _ = slice(start, end).indices(tensor.shape[dim])
    return tensor, dim, 0, max(0, end - start), step


_EQUIVALENTS: dict[Any, Callable[..., tuple[Any, ...]]] = {
    aten.select.int: _select_first,
    aten.slice.Tensor: _slice_first,
}
"""Arguments that make the like of what others do elsewhere: a loop's steps ask one question."""


def _key(value: Any) -> Any:
    """Return what of an argument decides what an operator makes of it."""
    if isinstance(value, torch.Tensor):
        return value.lies if isinstance(value, ShapedTensor) else _find_layout(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, (bool, float, complex)):
        return type(value), value  # they equal integers, and make other types
    return value


def _find_layout(tensor: torch.Tensor) -> Layout:
    key = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
    found = _LAYOUTS.get(key)
    if found is None:
        found = _LAYOUTS[key] = Layout(*key)
    return found


def _make_storage(nbytes: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(nbytes, device="meta")


def _make(answer: Any, given: Sequence[torch.Tensor]) -> Any:
    """Make what was answered, of the tensors that are given this time."""
    if isinstance(answer, _Made):
        if answer.base is None:
            return ShapedTensor.make(answer.layout, _make_storage(answer.nbytes))
        base = given[answer.base]
        if answer.is_base and isinstance(base, ShapedTensor):
            return base
        return ShapedTensor.make(answer.layout, storage_of(base))
    if isinstance(answer, (list, tuple)):
        return type(answer)(_make(each, given) for each in answer)
    return answer


_VALUES_DECIDE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_NOT_AS_ON_META = {aten.view.default, aten.native_layer_norm.default}
"""Operators that make other strides or types on the meta device than on the CPU."""


def _is_unlike_on_meta(func: Any, args: Sequence[Any]) -> bool:
    """Return True if the meta device may make something else; views of what is dense are alike."""
    if func is not aten.view.default:
        return func in _NOT_AS_ON_META
    lies: Layout = _key(args[0])
    return lies.strides != _dense_strides(lies.shape)


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor whose elements lie behind one another, in order."""
    strides, size = [], 1
    for length in reversed(shape):
        strides.append(size)
        size *= max(1, length)
    return tuple(reversed(strides))


def _ask(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Ask torch's kernels of the meta device, or ``FakeTensorMode`` where these do not know.

    The latter takes several times as long. It raises where values decide what an operator makes.
    """
    if torch.Tag.inplace_view in func.tags:
        raise NotImplementedError(f"{func} changes how a tensor lies")
    if not _is_unlike_on_meta(func, args) and not _VALUES_DECIDE & {*func.tags}:
        try:
            return _run_empty(func, args, kwargs, _META)
        except Exception:  # whatever an operator without a kernel raises
            pass
    with _MODE:
        return _run_empty(func, args, kwargs, CPU)


def run_operator(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator, whatever the types that its kernel knows."""
    if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
        return args[0].new_empty(*args[0].shape[:-1], args[1].shape[-1])
    return func(*args, **kwargs)


def _run_empty(func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> Any:
    """Run an operator on tensors of a device that keeps no values, and describe what it makes."""
    given: list[torch.Tensor] = []

    def replace(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            lies: Layout = _key(value)
            given.append(
                torch.empty_strided(lies.shape, lies.strides, dtype=lies.dtype, device=device)
            )
            return given[-1]
        if isinstance(value, torch.device):
            return device
        return type(value)(map(replace, value)) if isinstance(value, (list, tuple)) else value

    args, kwargs = replace(args), {name: replace(value) for name, value in kwargs.items()}
    made = run_operator(func, args, kwargs)
    bases = {
        StorageWeakRef(each.untyped_storage()).cdata: index for index, each in enumerate(given)
    }

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.is_conj() or value.is_neg():
                raise NotImplementedError(f"{func} leaves work to whatever reads its result")
            storage = value.untyped_storage()
            base = bases.get(StorageWeakRef(storage).cdata)
            is_base = base is not None and value is given[base]
            return _Made(_find_layout(value), storage.nbytes(), base, is_base)
        return type(value)(map(describe, value)) if isinstance(value, (list, tuple)) else value

    return describe(made)
