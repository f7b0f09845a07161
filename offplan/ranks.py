"""How many GPUs share a model, and in which way."""

from typing import NamedTuple


class Ranks(NamedTuple):
    """The processes of an engine, one for each GPU, that a model is divided among."""

    tensor: int = 1
    """Ranks that each layer is divided among."""
    pipeline: int = 1
    """Stages that follow one another, each with a run of the layers."""
    expert: int = 1
    """Groups of a stage's ranks among which whole experts are divided; it divides ``tensor``."""

    @property
    def num_gpus(self) -> int:
        """All ranks, and so GPUs."""
        return self.tensor * self.pipeline

    @property
    def label(self) -> str:
        """Name them as the command line does: ``--tp 2 --ep 2``; empty for one rank."""
        named = (("--tp", self.tensor), ("--pp", self.pipeline), ("--ep", self.expert))
        return " ".join(f"{name} {number}" for name, number in named if number > 1)


ONE_RANK = Ranks()
"""A model that is not divided."""
