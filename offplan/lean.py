"""A process that plans: it computes with shapes alone, and torch and transformers import less.

Most of what they import is for compiling and for several processes, which planning never does: of
some 4.4 seconds of CPU this spares 1.6.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_MARKS = ("disable", "allow_in_graph", "assume_constant_result", "mark_static_address")
"""Functions of the compiler's that mark what it is given, and that are called without it."""
_ALONE = {f"{_COMPILER}.config", f"{_COMPILER}._trace_wrapped_higher_order_op"}
"""Modules of it that need none of the others."""


def import_less() -> None:
    """Have this process import less from here on: it must not compile, nor have peers.

    That must be before torch and transformers are imported; later it changes nothing.
    """
    if not imports_less():
        sys.meta_path.insert(0, _Lean())


def imports_less() -> bool:
    """Return True if this process imports less."""
    return any(isinstance(finder, _Lean) for finder in sys.meta_path)


class _Lean(MetaPathFinder):
    """Finds torch's compiler without running it, and has transformers look for no peers."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of torch's compiler; of all else other finders do."""
        if name == "transformers.models":
            _list_models_once()
        if name == "transformers.distributed":
            import torch

            # as in a build of torch without it, which transformers supports
            vars(torch.distributed)["is_available"] = bool
        parent = sys.modules.get(name.rpartition(".")[0])
        if isinstance(parent, _StandIn) and name not in _ALONE:
            parent.run_own()
        spec = PathFinder.find_spec(name, path, target) if name == _COMPILER else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Late(spec.loader)
        return spec


class _Late(Loader):
    """Loads a package as a stand-in, which runs the package's code when it is asked for more."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stand-in."""
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Give the stand-in marks that mark nothing."""
        vars(module).update(dict.fromkeys(_MARKS, _mark_nothing))


class _StandIn(ModuleType):
    """The package, until it is asked for more than marks."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.run_own()
        return getattr(self, name)

    def run_own(self) -> None:
        """Run the package's own code: it is the package from here on."""
        self.__class__ = ModuleType  # type: ignore[assignment]
        late: Any = vars(self)["__spec__"].loader
        late.loader.exec_module(self)


def _list_models_once() -> None:
    """Have transformers find what its models' files define once; it reads all of them twice."""
    import transformers
    from transformers.utils import import_utils

    folder = Path(transformers.__file__).with_name("models")
    listed = import_utils.define_import_structure
    found: Any = listed(folder, prefix="models")  # as transformers has asked, which it remembers

    def list_again(path: str, prefix: str | None = None) -> Any:
        if prefix is not None or Path(path) != folder / "__init__.py":
            return listed(path, prefix)
        return {
            needs: {
                name.removeprefix("models."): defined
                for name, defined in files.items()
                if name.startswith("models.")
            }
            for needs, files in found.items()
        }

    vars(import_utils)["define_import_structure"] = list_again


def _mark_nothing(given: Any = None, *_: object, **__: object) -> Any:
    """Return what a mark is put on, or a decorator that does."""
    if given is None:
        decorate: Callable[[Any], Any] = _mark_nothing
        return decorate
    return given
