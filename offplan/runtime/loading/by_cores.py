"""Modules of a model whose products the host's cores compute in decode steps.

Their classes are exchanged once the weights are there, before layers are compiled. In a phase that
the cores do not serve they compute as they would have.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from offplan.backends import Backend
from offplan.checkpoint.model_types import SHARED_BEHIND
from offplan.errors import PlanError
from offplan.expert_slots import ExpertSlots
from offplan.forms.form import RAW, Form, Part
from offplan.forms.host_kernels import CHUNK_COLUMNS
from offplan.placement import Phase, Placement
from offplan.runtime.forms import cores, tasks
from offplan.runtime.forms.expert_table import Runs, list_shares
from offplan.runtime.forms.reference import Parts
from offplan.runtime.forms.runnable import is_transposed
from offplan.runtime.forms.stored import StoredLinear, StoredWeight, part_name
from offplan.runtime.memory.servers import ByCores
from offplan.runtime.memory.store import Offloaded, WeightStore
from offplan.runtime.model.cached import divide, has_slots
from offplan.transformers_private import is_experts, is_of_transformers, name_first


class Held(NamedTuple):
    """A weight of a module, and the parameters that hold it."""

    form: Form
    parts: dict[Part, str]
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
            return Held(RAW, {Part.WEIGHT: f"{path}.{name}"})
        parts = {part: f"{path}.{part_name(name, part)}" for part in stored.parts}
        return Held(stored.form, {p: n for p, n in parts.items() if p is not Part.NESTED_OFFSET})

    return [find(name) for name in names]


def check_cores(
    skeleton: nn.Module,
    placement: Placement,
    offloaded: Offloaded,
    wanted: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """Raise an error where the host's cores cannot compute what a plan gives them.

    ``wanted`` are the parameters by name, on the meta device; ``dtype`` is the model's. Raises
    PlanError for a part of what one module multiplies by, OffplanError where there is no kernel.
    """
    entries = {(s.layer, e.offset): e for s in placement.slabs for e in s.entries}
    given = {
        name
        for name, place in offloaded.items()
        if place in entries and entries[place].decode.is_by_cores
    }
    if not given:
        return
    for path, module, weights in _list_modules(skeleton):
        names = [name for weight in weights for name in weight.parts.values()]
        if not given.intersection(names):
            continue
        if left := [name for name in names if name not in given]:
            raise PlanError(
                f"`decode: host` takes {path} without {', '.join(left)}, which it is multiplied "
                "with: name all of it in cpu_offload_params, or none"
            )
        if _is_wide(weights, wanted):
            continue
        for weight in weights:
            _check_weight(path, module, weight, wanted, dtype)
        if is_experts(module):
            cores.find_gate(module)


def _list_modules(skeleton: nn.Module) -> Iterator[tuple[str, Any, list[Held]]]:
    for path, module in skeleton.named_modules():
        if weights := list_weights(path, module):
            yield path, module, weights


def _is_wide(weights: list[Held], wanted: Mapping[str, torch.Tensor]) -> bool:
    """Return True if weights are float32 in a model of a shorter type: few, and read in place."""
    return all(
        each.form is RAW and wanted[each.parts[Part.WEIGHT]].dtype is torch.float32
        for each in weights
    )


def _check_weight(
    path: str, module: Any, weight: Held, wanted: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> None:
    codes = wanted[weight.parts[Part.WEIGHT]]
    num_in = codes.shape[-1] * codes.itemsize * 2 if weight.form is not RAW else codes.shape[-1]
    why = cores.why_not(weight.form, dtype, num_in)
    if weight.form is RAW and is_transposed(module):
        why = "has no kernel for experts whose rows are inputs"
    elif (
        Part.GROUP_INDEX in weight.parts
        and wanted[weight.parts[Part.GROUP_INDEX]].numel()
        != (wanted[weight.parts[Part.GROUP_INDEX]].shape[-1])
    ):
        why = "has no kernel for joined weights whose inputs have orders of their own"
    if why is not None:
        raise cores.refuse(f"{why} ({path})")


def give_to_cores(
    module: nn.Module, store: WeightStore, biases: Mapping[str, torch.Tensor]
) -> list[nn.Module]:
    """Have the modules computed by the host's cores whose weights a plan gives them.

    Of experts that lie in slots the cores compute the plan's share of those missed. ``biases`` are
    all parameters by name, wherever they lie. Returns the modules, which ``let_compute`` then
    switches from phase to phase.
    """
    names = store.by_cores[Phase.DECODE]
    server = store.servers.get(Backend.HOST)
    if server is None:
        return []
    assert isinstance(server, ByCores)
    given: list[nn.Module] = []
    for path, part, weights in [*_list_modules(module)]:
        parameters = [name for weight in weights for name in weight.parts.values()]
        if not names.issuperset(parameters):
            continue
        held = [
            (weight.form, {p: store.offloaded[name].data for p, name in weight.parts.items()})
            for weight in weights
        ]
        if held[0][0] is RAW and held[0][1][Part.WEIGHT].dtype is torch.float32:
            continue
        task: LinearTask | ExpertsTask
        if is_experts(part):
            task = _make_experts(server, path, part, held, biases)
        else:
            task = _make_linear(server, held[0], store.device)
        if has_slots(part):
            slots = store.placement.expert_slots[store.layer_of(parameters[0])]
            if slots.host_share == 0:
                continue
            assert isinstance(task, ExpertsTask)
            runs = _find_runs(task.experts, weights, store, slots) if slots.splits else None
            divide(part, list_shares(slots).to(store.device), runs)
        else:
            part.__class__ = _class_by_cores(cast(Any, type(part)))
        ends_in_block = is_experts(part) and _end_in_block(module, path, names)
        vars(part).update(cores=None, task=tasks.number(task), ends_in_block=ends_in_block)
        given.append(part)
    return given


def _find_runs(
    experts: cores.Experts, weights: Sequence[Held], store: WeightStore, slots: ExpertSlots
) -> dict[str, Runs]:
    """Find how values or codes of experts lie by inner columns, by the parameters' own names."""
    matrices = experts.up, experts.down
    assert slots.inner == experts.down.num_in
    numbers = 2 if experts.is_gated and not experts.is_interleaved else 1, experts.down.num_out
    found = {}
    for matrix, weight, number in zip(matrices, weights, numbers, strict=True):
        name = weight.parts[Part.WEIGHT]
        codes = store.offloaded[name]
        if codes.shape[1] == matrix.num_out:
            run_bytes = codes[0].nbytes // number
            chunk_bytes = run_bytes * CHUNK_COLUMNS // slots.inner
            found[name.rpartition(".")[2]] = Runs(number, chunk_bytes)
    return found


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


def let_compute(given: Iterable[nn.Module], phase: Phase) -> None:
    """Have the cores compute these modules in decode, and the device in prefill."""
    for module in given:
        vars(module)["cores"] = vars(module)["task"] if phase is Phase.DECODE else None


def take_from_cores(given: Iterable[nn.Module]) -> None:
    """Have these modules computed by nobody any more: their weights are given back."""
    for module in given:
        tasks.forget(vars(module)["task"])
        vars(module)["cores"] = None


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
    keeps: Parts
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


def _make_linear(server: ByCores, held: tuple[Form, Parts], device: torch.device) -> LinearTask:
    form, parts = held
    order = parts.get(Part.GROUP_INDEX)
    flat = None if order is None else order.flatten().long().to(device)
    return LinearTask(server, cores.describe(form, parts), flat, parts)


def _make_experts(
    server: ByCores,
    path: str,
    module: Any,
    held: list[tuple[Form, Parts]],
    biases: Mapping[str, torch.Tensor],
) -> ExpertsTask:
    up, down = (cores.describe(*each) for each in held)
    own = None
    if module.has_bias:
        named = (f"{path}.{name}_bias" for name in (name_first(module), "down_proj"))
        own = [biases[name].to("cpu", torch.bfloat16).contiguous() for name in named]
    experts = cores.describe_experts(module, up, down, own)
    return ExpertsTask(server, experts, [held, own])


def _compute(task: torch.Tensor, inputs: list[torch.Tensor], num_out: int) -> torch.Tensor:
    made: torch.Tensor = tasks.find(task).compute(*inputs)
    return made


_operator = torch.library.custom_op(
    "offplan::by_cores",
    _compute,
    mutates_args=(),
    schema="(Tensor task, Tensor[] inputs, int num_out) -> Tensor",
)
_operator.register_fake(
    lambda task, inputs, num_out: inputs[0].new_empty(*inputs[0].shape[:-1], num_out)
)


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
        compute = _operator if torch.compiler.is_compiling() else _compute
        out: torch.Tensor = compute(task, inputs, num_out)
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
