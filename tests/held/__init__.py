"""What one GPU holds of a model, lowered for tests that place or price a decision."""

from pathlib import Path

from offplan import placement
from offplan.capabilities.packing import Packing
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import TensorInfo
from offplan.costs import predict as costs
from offplan.engines.runner import find_runner
from offplan.forms.form import Kind
from offplan.held.held import hold, hold_whole, recode_stages
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Placement
from offplan.plan import Budget, Offload, Prediction, Workload


def hold_by(
    model: Model, engine: str | None = None, packing: Packing | None = None
) -> tuple[Stage, ...]:
    """What the only GPU of an engine holds; None is offplan's own runtime."""
    runner = find_runner(engine)
    return recode_stages([hold_whole(model, runner)], packing, runner)


def input_embedding(model: Model) -> TensorInfo | None:
    """Return the input embedding, if it is one of the tables that may lie on the host."""
    return next((each.tensors[0] for each in model.tables if each.is_input), None)


def place(model: Model, offload: Offload) -> Placement:
    """Place a decision as offplan's own runtime holds the model."""
    return placement.place(hold(model, offload.packing), offload)


def predict(
    model: Model,
    machine: MachineProfile,
    workload: Workload,
    budget: Budget,
    offload: Offload,
    engine: str | None = None,
) -> Prediction:
    """Predict what a decision costs on one GPU."""
    stages = hold_by(model, engine, offload.packing)
    return costs.predict(stages, machine, workload, budget, offload)


def open_stage(source: Path | str) -> Stage:
    """Open a checkpoint or a config, and lower it to what offplan's own runtime holds."""
    return hold(open_model(str(source)))


def is_packed(parameter: Parameter) -> bool:
    """Return True if a weight is held packed."""
    return parameter.form.kind is Kind.PACKED
