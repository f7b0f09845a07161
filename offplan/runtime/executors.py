"""The table of capabilities that the runtime executes."""

from offplan.runtime.cached_experts.executor import CachedExperts
from offplan.runtime.host_cores.executor import HostCores
from offplan.runtime.loading.capability import CapabilityExecutor
from offplan.runtime.parts.executor import PartsExecutor
from offplan.runtime.peer import PeerExecutor
from offplan.runtime.stock.runner import StockPasses

EXECUTORS: dict[str, type[CapabilityExecutor]] = {
    "parts": PartsExecutor,
    "peer": PeerExecutor,
    "cached_experts": CachedExperts,
    "host_cores": HostCores,
    "stock": StockPasses,
}
"""Executor of each capability, by its name, in the order in which they are asked.

Experts are laid out before the host's cores are given a share of them."""
