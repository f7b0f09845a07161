"""The table of ways in which offplan's own runtime runs a model."""

from offplan.capabilities.stock import STOCK
from offplan.capabilities.way import OWN, Way
from offplan.held.runner import OWN_RUNTIME, OwnRuntime
from offplan.held.stock import StockRuntime

RUNTIMES: dict[Way, OwnRuntime] = {OWN: OWN_RUNTIME, STOCK: StockRuntime()}
"""Runner of each way, in the order in which they are tried for a model."""
