"""Ranks: the GPUs of an engine that a model is divided among."""

from typing import NamedTuple

from pydantic import model_validator
from typing_extensions import Self

from offplan.capabilities.goal import GoalBase
from offplan.capabilities.rule import Count

OPTIONS = {"tensor_parallel": "--tp", "pipeline_parallel": "--pp", "expert_parallel": "--ep"}
"""The command line's options by a goal's keys, in the order of ``Ranks``."""


class Ranks(NamedTuple):
    """The processes of an engine, one for each GPU, that a model is divided among."""

    tensor: int = 1
    """Ranks that each layer is divided among."""
    pipeline: int = 1
    """Stages that follow one another, each with a run of the layers."""
    expert: int = 1
    """Groups of a stage's ranks among which whole experts are divided; it divides ``tensor``."""

    @property
    def label(self) -> str:
        """Name them as the command line does: ``--tp 2 --ep 2``; empty for one rank."""
        named = zip(OPTIONS.values(), self, strict=True)
        return " ".join(f"{name} {number}" for name, number in named if number > 1)


ONE_RANK = Ranks()
"""A model that is not divided."""


class RanksGoal(GoalBase):
    """A question whose plans may be for several GPUs of an engine."""

    tensor_parallel: Count = 1
    """GPUs that each layer is divided among."""
    pipeline_parallel: Count = 1
    """Stages of layers, one after the other, on GPUs of their own."""
    expert_parallel: Count = 1
    """Groups of ``tensor_parallel`` GPUs that routed experts are divided among, as whole ones."""

    @model_validator(mode="after")
    def _can_be_divided(self) -> Self:
        if self.num_gpus > 1 and self.engine is None:
            raise ValueError(
                f"{self.ranks.label} without an engine: offplan's own runtime runs on one GPU; "
                "name the engine that runs the plan, `engine=vllm` or `engine=sglang`"
            )
        if self.pipeline_parallel > 1 and self.objective != "latency":
            raise ValueError(
                f"`pipeline_parallel={self.pipeline_parallel}` with the objective throughput: how "
                "many batches are under way in several stages is the engine's affair, and not "
                "predicted; choose one with `batch`"
            )
        if self.tensor_parallel % self.expert_parallel:
            raise ValueError(
                f"`expert_parallel={self.expert_parallel}` does not divide "
                f"`tensor_parallel={self.tensor_parallel}`: groups "
                "of experts are groups of the ranks that divide a layer"
            )
        return self

    @property
    def ranks(self) -> Ranks:
        """The GPUs that the plan is for, one of which holds what it says."""
        return Ranks(self.tensor_parallel, self.pipeline_parallel, self.expert_parallel)

    @property
    def num_gpus(self) -> int:
        """The number of GPUs that the plan is for."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def num_copying(self) -> int:
        """The number of GPUs that copy at once: those of one stage."""
        return self.tensor_parallel

    @property
    def gpus(self) -> str:
        """The GPUs in words: ``2 GPUs (--tp 2)``, or ``one GPU``."""
        return f"{self.num_gpus} GPUs ({self.ranks.label})" if self.num_gpus > 1 else "one GPU"
