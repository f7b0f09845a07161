"""Ranks: the GPUs of an engine that a model is divided among."""

from pydantic import model_validator
from typing_extensions import Self

from offplan.capabilities.goal import GoalBase
from offplan.capabilities.rule import Count
from offplan.ranks import Ranks


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
        if self.ranks.num_gpus > 1 and self.engine is None:
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
