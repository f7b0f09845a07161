"""Executes transformers' own passes: the model as transformers builds it, and who runs it."""

from offplan.capabilities.stock import STOCK
from offplan.runtime.loading.capability import PassesExecutor
from offplan.runtime.stock.generation import StockGeneration
from offplan.runtime.stock.passes import try_to_count
from offplan.runtime.stock.runner import StockRunner
from offplan.runtime.stock.skeleton import build_stock


class StockPasses(PassesExecutor):
    """Runs a model by transformers' own passes."""

    way = STOCK
    build = staticmethod(build_stock)
    make_runner = StockRunner
    begin_texts = StockGeneration
    count_model = staticmethod(try_to_count)
