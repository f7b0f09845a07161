"""Gated activations that a kernel knows, found out by what a module of experts computes."""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from offplan.transformers_private import apply_gate

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "relu": functional.relu,
}
QUICK = 1.702
"""The factor of "quick" gelu."""
MOST = 100
"""Attributes of experts that may be a limit or a factor are no larger."""
PLAIN = (bool, int, float, str)
"""Types of attributes by which layers' experts may differ in their gate."""


class Gate(NamedTuple):
    """A gated activation of rows, each of gates and of what they let through."""

    activation: str = "silu"
    """One of ACTIVATIONS."""
    is_interleaved: bool = False
    """True if each gate lies beside what it lets through; otherwise all gates come first."""
    limited: str = ""
    """When gates are limited, "before" or "after" the activation; empty for never."""
    limit: float = 0.0
    """Gates are no more, and what they let through is of no larger magnitude."""
    factor: float = 1.0
    """Factor of what silu takes the sigmoid of."""
    added: float = 0.0
    """A number that is added to what gates let through."""


def compute_gate(gate: Gate, made: torch.Tensor) -> torch.Tensor:
    """Return the gated activation, [rows, width], of [rows, 2 x width]."""
    if gate.is_interleaved:
        gates, up = made[..., ::2], made[..., 1::2]
    else:
        gates, up = made.chunk(2, -1)
    if gate.limited == "before":
        gates = gates.clamp(max=gate.limit)
    if gate.activation == "silu":
        gates = gates * torch.sigmoid(gates * gate.factor)
    else:
        gates = ACTIVATIONS[gate.activation](gates)
    if gate.limited == "after":
        gates = gates.clamp(max=gate.limit)
    if gate.limited:
        up = up.clamp(-gate.limit, gate.limit)
    return gates * (up + gate.added)


def find_gates(layers: Iterable[Any]) -> list[Gate | None]:
    """Find what ``find_gate`` does of each layer's experts, once for layers that are alike."""
    found: dict[Any, Gate | None] = {}

    def find(experts: Any) -> Gate | None:
        plain = {name: value for name, value in vars(experts).items() if type(value) in PLAIN}
        key = type(experts), tuple(plain.items()), repr(getattr(experts, "act_fn", None))
        if key not in found:
            found[key] = find_gate(experts)
        return found[key]

    return [find(experts) for experts in layers]


def find_gate(experts: Any) -> Gate | None:
    """Find the gate that computes what a module of experts does; None if the kernel knows none.

    Both are asked for random numbers, on the CPU. Numbers that gates may have are among the
    module's attributes.
    """
    if not experts.has_gate:
        return None
    attributes = [value for value in vars(experts).values() if type(value) in (int, float)]
    numbers = sorted({float(value) for value in attributes if 0 < value <= MOST})
    generator = torch.Generator("cpu").manual_seed(0)
    sample = torch.rand(64, 64, generator=generator, device="cpu") * 2 - 1
    # of many sizes: a limit that is no attribute is noticed, too
    sample = torch.cat([size * sample for size in (4, 2 * max(numbers, default=1.0), 1e3, 1e6)])
    try:
        expected = apply_gate(experts, sample)
    except Exception:  # of whatever code a checkpoint brings
        return None
    if expected.shape != (len(sample), sample.shape[1] // 2) or expected.device.type != "cpu":
        return None
    for gate in _candidates(numbers):
        if torch.allclose(compute_gate(gate, sample), expected, rtol=1e-5, atol=1e-6):
            return gate
    return None


def _candidates(numbers: list[float]) -> Iterator[Gate]:
    limits = [("", 0.0), *product(("before", "after"), numbers)]
    for limited, added, is_interleaved in product(limits, (0.0, 1.0), (False, True)):
        for name in ACTIVATIONS:
            for factor in (1.0, QUICK, *numbers) if name == "silu" else (1.0,):
                yield Gate(name, is_interleaved, *limited, factor, added)
