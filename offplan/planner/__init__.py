"""The search: which plan of a stated space is the fastest that fits. Pure and deterministic."""

from offplan.planner.floor import Floor
from offplan.planner.make import PlanResult, make_plan

__all__ = ["Floor", "PlanResult", "make_plan"]
