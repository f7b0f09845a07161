"""Executes transformers' own passes: the model as transformers builds it, and who runs it."""

from offplan.held.stage import Stage
from offplan.runtime.loading.capability import PassesExecutor
from offplan.runtime.stock.runner import StockRunner
from offplan.runtime.stock.skeleton import build_stock


class StockPasses(PassesExecutor):
    """Runs a model by transformers' own passes."""

    build = staticmethod(build_stock)
    make_runner = StockRunner

    @classmethod
    def runs(cls, stage: Stage) -> bool:
        """Return True for a stage that is held for these passes."""
        return stage.is_stock
