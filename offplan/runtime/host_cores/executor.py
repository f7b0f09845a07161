"""Executes products by the host's cores: modules whose weights they multiply in decode steps.

Classes of modules are exchanged once the weights are there, before layers are compiled. In a phase
that the cores do not serve they compute as they would have.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from typing_extensions import Self

from offplan.backends import Backend
from offplan.checkpoint.model_types import SHARED_BEHIND
from offplan.errors import PlanError
from offplan.forms.form import RAW, Component, Form
from offplan.placement import Phase
from offplan.runtime.forms import tasks
from offplan.runtime.forms.declared import declare
from offplan.runtime.forms.experts import SHARE
from offplan.runtime.forms.reference import Components
from offplan.runtime.forms.runnable import is_transposed
from offplan.runtime.forms.stored import StoredLinear, StoredWeight, component_name
from offplan.runtime.host_cores import cores
from offplan.runtime.host_cores.server import ByCores
from offplan.runtime.loading.capability import CapabilityExecutor, Prepared
from offplan.runtime.memory.store import Server, WeightStore
from offplan.transformers_private import is_experts, is_of_transformers, name_first


class Held(NamedTuple):
    """A weight of a module, and the parameters that hold it."""

    form: Form
    components: dict[Component, str]
    """Names of parameters in the whole model."""


def list_weights(path: str, module: Any) -> list[Held]:
    """List the weights that a linear layer or routed experts multiply by; none of other modules."""
    own = vars(module)
    if is_experts(module):
        names = [name_first(module), "down_proj"]
    elif type(module) in (nn.Linear, StoredLinear):
        names = ["weight"]
    else:
        return []

    def find(name: str) -> Held:
        stored: StoredWeight | None = own.get("stored_experts", {}).get(name, own.get("stored"))
        if stored is None:
            return Held(RAW, {Component.WEIGHT: f"{path}.{name}"})
        parts = {part: f"{path}.{component_name(name, part)}" for part in stored.components}
        return Held(
            stored.form, {p: n for p, n in parts.items() if p is not Component.NESTED_OFFSET}
        )

    return [find(name) for name in names]


class HostCores(CapabilityExecutor):
    """Has the host's cores compute modules in decode, and the device in prefill."""

    servers: Mapping[Backend, Callable[[torch.device], Server]] = {Backend.HOST: ByCores}

    def __init__(self, prepared: Prepared) -> None:
        """Check the modules whose weights a plan gives the cores.

        Raises PlanError for a part of what one module multiplies by, OffplanError where there is no
        kernel.
        """
        self._module, entries = prepared.module, prepared.placement.entries
        places = {(e.unit.layer, e.offset) for e in entries if e.decode.is_by_cores}
        self._names = {name for name, place in prepared.offloaded.items() if place in places}
        """Parameters that the plan gives the cores."""
        self._given: list[nn.Module] = []
        """Modules that the cores compute."""
        self._server: ByCores | None = None
        """Asks the cores for them, once there is memory."""
        wanted, dtype = prepared.wanted, getattr(torch, prepared.stage.model.dtype)
        for path, module, weights in _list_modules(self._module):
            names = [name for weight in weights for name in weight.components.values()]
            if not self._names.intersection(names):
                continue
            if left := [name for name in names if name not in self._names]:
                raise PlanError(
                    f"`decode: host` takes {path} without {', '.join(left)}, which it is "
                    "multiplied with: name all of it in cpu_offload_params, or none"
                )
            if _is_wide(weights, wanted):
                continue
            for weight in weights:
                _check_weight(path, module, weight, wanted, dtype)
            if is_experts(module):
                cores.find_gate(module)

    @classmethod
    def find(cls, prepared: Prepared) -> Self | None:
        """Return an executor if a plan gives the cores anything."""
        is_used = any(entry.decode.is_by_cores for entry in prepared.placement.entries)
        return cls(prepared) if is_used else None

    def prepare(self, device: torch.device, host_threads: int | None) -> None:
        """Load the library, compiled first where it is not there yet; raises OffplanError."""
        cores.load()
        if host_threads is not None:
            self.servers = {Backend.HOST: partial(ByCores, num_threads=host_threads)}

    def attach(self, store: WeightStore) -> None:
        """Have the cores compute the modules.

        Of experts that lie in several places the cores compute a share, as these say themselves.
        """
        names = self._names & store.in_place[Phase.DECODE]
        server = store.servers.get(Backend.HOST)
        if server is None:
            return
        assert isinstance(server, ByCores)
        self._server = server
        biases = store.resident | store.offloaded
        for path, part, weights in [*_list_modules(self._module)]:
            parameters = [name for weight in weights for name in weight.components.values()]
            if not names.issuperset(parameters):
                continue
            held = [
                (each.form, {p: store.offloaded[n].data for p, n in each.components.items()})
                for each in weights
            ]
            _check_order(path, held)
            if held[0][0] is RAW and held[0][1][Component.WEIGHT].dtype is torch.float32:
                continue
            task: LinearTask | ExpertsTask
            if is_experts(part):
                task = _make_experts(server, path, part, held, biases)
            else:
                task = _make_linear(server, held[0], store.device)
            if (share := vars(part).get(SHARE)) is not None:
                assert isinstance(task, ExpertsTask)
                if not share(task):
                    continue
            else:
                part.__class__ = _class_by_cores(cast(Any, type(part)))
            server.keep(task)
            ends_in_block = is_experts(part) and _end_in_block(self._module, path, names)
            vars(part).update(cores=None, task=tasks.number(task), ends_in_block=ends_in_block)
            self._given.append(part)

    def enter(self, phase: Phase) -> None:
        """Have the cores compute in decode, and the device in prefill."""
        for module in self._given:
            vars(module)["cores"] = vars(module)["task"] if phase is Phase.DECODE else None

    def begin_step(self) -> None:
        """Have the cores listen, who doze where nothing was asked for a while."""
        if self._server is not None:
            self._server.wake()

    def close(self) -> None:
        """Have the modules computed by nobody any more: their weights are given back."""
        for module in self._given:
            tasks.forget(vars(module)["task"])
            vars(module)["cores"] = None
        self._server = None


def _list_modules(skeleton: nn.Module) -> Iterator[tuple[str, Any, list[Held]]]:
    for path, module in skeleton.named_modules():
        if weights := list_weights(path, module):
            yield path, module, weights


def _is_wide(weights: list[Held], wanted: Mapping[str, torch.Tensor]) -> bool:
    """Return True if weights are float32 in a model of a shorter type: few, and read in place."""
    return all(
        each.form is RAW and wanted[each.components[Component.WEIGHT]].dtype is torch.float32
        for each in weights
    )


def _check_weight(
    path: str, module: Any, weight: Held, wanted: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> None:
    codes = wanted[weight.components[Component.WEIGHT]]
    num_in = codes.shape[-1] * codes.itemsize * 2 if weight.form is not RAW else codes.shape[-1]
    why = cores.why_not(weight.form, dtype, num_in)
    if weight.form is RAW and is_transposed(module):
        why = "has no kernel for experts whose rows are inputs"
    if why is not None:
        raise cores.refuse(f"{why} ({path})")


def _check_order(path: str, held: list[tuple[Form, Components]]) -> None:
    """Raise OffplanError for joined weights whose files order each one's inputs in its own way."""
    for _, parts in held:
        index = parts.get(Component.GROUP_INDEX)
        if index is not None and index.numel() != index.shape[-1]:
            why = "has no kernel for joined weights whose inputs have orders of their own"
            raise cores.refuse(f"{why} ({path})")


def _end_in_block(module: nn.Module, path: str, by_cores: Set[str]) -> bool:
    """Have the block of routed experts wait for the cores, behind its shared experts.

    Returns False, and changes nothing, where the cores multiply the shared experts, too, or the
    block is not known to add them last.
    """
    outer = path.rpartition(".")[0]
    block: Any = module.get_submodule(outer)
    config = cast(PreTrainedModel, module).config.get_text_config()
    if config.model_type not in SHARED_BEHIND or not is_of_transformers(block):
        return False
    if getattr(block, "shared_experts", None) is None:
        return False
    if any(name.startswith(f"{outer}.shared_experts.") for name in by_cores):
        return False
    block.__class__ = _class_of_block(cast(Any, type(block)))
    return True


def task_of(module: "ByCoresModule") -> "LinearTask | ExpertsTask":
    """Return what the cores compute of a module that a plan gives them."""
    found: LinearTask | ExpertsTask = tasks.find(vars(module)["task"])
    return found


class LinearTask(NamedTuple):
    """The product of a linear layer."""

    server: ByCores
    weight: cores.Matrix
    order: torch.Tensor | None
    """The inputs in the order that the weight has them in; None if that is their own."""
    keeps: Components
    """Objects that addresses point to."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply ``x``, [..., in], by the weight: [..., out]."""
        rows = x.flatten(0, -2)
        if self.order is not None:
            rows = rows.index_select(-1, self.order)
        return self.server.multiply(self.weight, rows).unflatten(0, x.shape[:-1])


@dataclass
class ExpertsTask:
    """Tokens sent through a layer's experts."""

    server: ByCores
    experts: cores.Experts
    keeps: list[Any]
    """Objects that addresses point to."""
    begun: Any = None
    """Work that was begun last, until it is ended."""

    def compute(self, *arguments: torch.Tensor) -> torch.Tensor:
        """Send tokens, as ``cores.send`` does."""
        return self.server.send(self.experts, *arguments)

    def begin(self, *arguments: torch.Tensor) -> None:
        """Begin to send tokens, as the server does."""
        self.begun = self.server.begin(self.experts, *arguments)

    def begin_by(self, sizes: Sequence[int], launch: tasks.Launch) -> None:
        """Begin to send what a kernel writes, as the server does."""
        self.begun = self.server.begin_by(self.experts, sizes, launch)

    def end(self, made: torch.Tensor) -> torch.Tensor:
        """Wait on the stream until that is done, and add it to ``made``, [tokens, hidden]."""
        begun, self.begun = self.begun, None
        return self.server.end(begun, made)


def _make_linear(
    server: ByCores, held: tuple[Form, Components], device: torch.device
) -> LinearTask:
    form, parts = held
    order = parts.get(Component.GROUP_INDEX)
    flat = None if order is None else order.flatten().long().to(device)
    return LinearTask(server, cores.describe(form, parts), flat, parts)


def _make_experts(
    server: ByCores,
    path: str,
    module: Any,
    held: list[tuple[Form, Components]],
    biases: Mapping[str, torch.Tensor],
) -> ExpertsTask:
    up, down = (cores.describe(*each) for each in held)
    own = None
    if module.has_bias:
        named = (f"{path}.{name}_bias" for name in (name_first(module), "down_proj"))
        own = [biases[name].to("cpu", torch.bfloat16).contiguous() for name in named]
    experts = cores.describe_experts(module, up, down, own)
    return ExpertsTask(server, experts, [held, own])


@declare(
    "by_cores",
    "(Tensor task, Tensor[] inputs, int num_out) -> Tensor",
    lambda task, inputs, num_out: inputs[0].new_empty(*inputs[0].shape[:-1], num_out),
)
def _compute(task: torch.Tensor, inputs: list[torch.Tensor], num_out: int) -> torch.Tensor:
    made: torch.Tensor = tasks.find(task).compute(*inputs)
    return made


class ByCoresModule(nn.Module):
    """Stands before the class of a module whose products the host's cores may compute."""

    cores: torch.Tensor | None
    """The number of what computes them in this phase; None if the module does so itself."""
    ends_in_block = False
    """True if they are routed experts, and an ``EndsByCores`` waits for what is begun here."""

    def forward(self, *arguments: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """Compute as the module does."""
        task = self.cores
        if task is None:
            made: torch.Tensor = super().forward(*arguments, **named)
            return made
        inputs = [*arguments, *named.values()]
        is_linear = len(inputs) == 1
        own: Any = self
        if own.ends_in_block:
            return tasks.begin(task, inputs)
        num_out = own.out_features if is_linear else inputs[0].shape[-1]
        out = _compute(task, inputs, num_out)
        return out + own.bias if is_linear and own.bias is not None else out


@cache  # layers of two classes would be compiled twice
def _class_by_cores(own: Any) -> Any:
    return type(own.__name__, (ByCoresModule, own), {})


class EndsByCores(nn.Module):
    """Stands before the class of a block of which the host's cores multiply routed experts.

    The device multiplies shared experts meanwhile. The products of the cores are added last.
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute as the block does, [..., hidden]."""
        made: torch.Tensor = super().forward(hidden_states)
        own: Any = self
        task = own.experts.cores
        return made if task is None else tasks.end(task, made.flatten(0, -2)).view_as(made)


@cache
def _class_of_block(own: Any) -> Any:
    return type(own.__name__, (EndsByCores, own), {})
