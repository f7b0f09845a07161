"""Plans of models that are to run on this machine: made once, kept on disk, found again."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offplan.checkpoint.gguf.places import find_hub_id, parse_ollama
from offplan.checkpoint.model import Model
from offplan.checkpoint.weights import (
    missing_bytes,
    require_checkpoint,
    require_fetchable,
    require_weights,
)
from offplan.disk_cache import KeptAnswers, installed_versions
from offplan.errors import InfeasibleError, InputError, Topic
from offplan.kinds import find_kind
from offplan.library.analysis import Analysis, analyze_question
from offplan.library.asking import ask
from offplan.library.machines import Machine, find_machine, has_gpu, load_machine
from offplan.machine.name import parse_name
from offplan.machine.profile import load_profile
from offplan.plan import Goal, Plan, Workload
from offplan.progress import Stages, silent

ASKED_BYTES = 10**9
"""Bytes of a download beyond which a user is asked first."""
_MODELS = ("a model's config.json", "a folder with a model")
_MAX_BYTES = 2**20
_MOST_FREED = 1.05
"""Times the plan's budget that may be free by now: with more, another plan is the better one.
Source: chosen."""


def names_model(named: str) -> bool:
    """Return True if a name is a model's, and not a plan file's."""
    if os.path.exists(named):
        return find_kind(Path(named)) in _MODELS
    return Path(named).suffix.lower() not in (".yaml", ".yml") and named != "-"


def find_id(named: str) -> str:
    """Return the Hub's id of a model that has this name in Ollama's library, else the name."""
    name = None if os.path.exists(named) else parse_ollama(named)
    is_ollamas = name is not None and (name.is_command or name.tag is not None)
    return (find_hub_id(name) if name is not None and is_ollamas else None) or named


@dataclass(frozen=True)
class ModelQuestion:
    """The question which plan runs a model on this machine, before anything is measured."""

    model: Model
    workload: Workload
    machine: str | None = None
    """The profile's name or file; None for the GPU at hand, or the profile ``cpu`` on a CPU."""
    device: str | None = None
    """The device that is to run the model; None for a GPU."""
    gpu_memory: int | None = None
    """Bytes of GPU memory that the process may take; None for what is free."""
    goal: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``Goal``."""

    @property
    def profile(self) -> str | None:
        """The profile to plan with; None for a GPU that is to be measured.

        Raises InputError if there is no GPU, and neither profile nor device is named.
        """
        if self.machine is not None:
            return self.machine
        if self.device == "cpu":
            return "cpu"
        if not has_gpu():
            raise InputError(
                "no NVIDIA GPU that CUDA can use was found here: `device=cpu` runs the model on "
                "the CPU, much slower; `offplan analyze MODEL --machine rtx4090` plans for "
                "another machine",
                topic=Topic.NO_GPU,
            )
        return None

    def plan(self, on_stage: Stages = silent) -> Analysis:
        """Plan, and keep the plan if ``run`` can execute it; that none fits is a finding.

        Raises what ``find_machine`` and ``ask`` raise.
        """
        asked = Goal.from_arguments(**self.goal)
        machine = self._find_machine(asked, on_stage)
        question = ask(
            self.model, machine, self.workload, gpu_memory=self.gpu_memory, **dict(asked)
        )
        analysis = analyze_question(question)
        if analysis.result is not None and analysis.why_not_run is None:
            _PLANS.keep(self._key, analysis.result.plan)
        return analysis

    def find(self) -> Plan | None:
        """Find the plan that was kept; None if there is none that suits the memory of now."""
        plan = _PLANS.find(self._key)
        if plan is None or self.profile is not None:
            return plan
        free, taken = self._free_bytes(), plan.prediction.gpu_memory.total_bytes
        is_small = not plan.offload.rules or free <= _MOST_FREED * plan.budget.gpu_memory
        return plan if taken <= free and (is_small or self.gpu_memory is not None) else None

    @property
    def _key(self) -> dict[str, Any]:
        """Name all that the plan depends on but what is measured, which differs each time."""
        profile = self.profile
        if profile is None:
            from offplan.hostmem.hardware import name_hardware

            machine: Any = name_hardware(self._torch_device())
        else:
            machine = [profile, load_profile(profile).fingerprint]
        is_local = self.model.revision is None or not parse_name(profile or "cpu").is_shipped
        return {
            "model": [self.model.source, self.model.key, self.model.code],
            "machine": machine,
            "workload": self.workload.model_dump(mode="json"),
            "gpu_memory": self.gpu_memory,
            "goal": Goal.from_arguments(**self.goal).model_dump(mode="json"),
            # relative paths of the plan start here
            "folder": os.getcwd() if is_local else None,
            **installed_versions(),
        }

    def _find_machine(self, goal: Goal, on_stage: Stages) -> Machine:
        profile = self.profile
        if profile is not None:
            return load_machine(profile)
        from offplan.runtime.device import on_device
        from offplan.runtime.memory.gpu_memory import return_memory

        device = self._torch_device()
        with on_device(device):
            found = find_machine(None, self.model, self.workload, goal=goal, on_stage=on_stage)
        return_memory(device)  # the model is loaded by this process next
        assert found is not None, "a GPU is there"
        return found

    def _free_bytes(self) -> int:
        import torch

        from offplan.runtime.memory.gpu_memory import bytes_in_use

        device = self._torch_device()
        total: int = torch.cuda.get_device_properties(device).total_memory
        return total - bytes_in_use(device)

    def _torch_device(self) -> Any:
        from offplan.runtime.device import find_device

        return find_device(self.device)


def plan_to_run(
    asked: ModelQuestion,
    *,
    show: Callable[[Analysis | Plan], object],
    confirm: Callable[[int], object] | None,
    on_stage: Stages = silent,
) -> Plan:
    """Return the plan by which a model runs here: the one that was kept, else one that is made.

    ``show`` is given the kept plan, or what was found of a new one. ``confirm`` is then given the
    bytes that are to be downloaded, if they are more than ASKED_BYTES, and raises an error if they
    are not to be. It is None if the model's weights are not wanted.

    Raises InputError for a model that ``run`` cannot execute or that has no weights. Raises
    InfeasibleError if no plan fits, CheckpointError if the weights cannot be downloaded, and what
    ``ModelQuestion`` raises.
    """
    require_checkpoint(asked.model)
    if confirm is not None:
        require_weights(asked.model)
    plan = asked.find()
    if plan is not None:
        show(plan)
    else:
        analysis = asked.plan(on_stage)
        show(analysis)
        plan = _require_plan(analysis)
    if confirm is not None:
        require_fetchable(asked.model)
        missing = missing_bytes(asked.model)
        if missing > ASKED_BYTES:
            confirm(missing)
    return plan


def _require_plan(analysis: Analysis) -> Plan:
    if analysis.infeasible is not None:
        raise InfeasibleError(analysis.infeasible.facts, topic=analysis.infeasible.topic)
    assert analysis.result is not None, "without a plan there is a reason"
    if analysis.why_not_run is not None:
        raise InputError(f"{analysis.model.source} cannot be run: {analysis.why_not_run}")
    return analysis.result.plan


_PLANS: KeptAnswers[Plan] = KeptAnswers(
    "plans", _MAX_BYTES, lambda plan: plan.model_dump_json().encode(), Plan.model_validate_json
)
