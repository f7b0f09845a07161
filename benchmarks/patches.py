"""Count the patches that packed weights of several distributions need, and print them as JSON.

    python -m benchmarks.patches [--seed 0]

Each matrix has values of a standard deviation of 0.02, or as its name says, rounded to bfloat16.
Counts are for 512 weights, for which a packed matrix has room for one patch: with a base of
exponents for each block of 256 inputs, as offplan packs, and, for comparison, with each row's
largest exponent as its base. No GPU is needed; the matrices are drawn in turn from one seed.
"""

import argparse
import json
from collections.abc import Callable

import torch
from torch.distributions import StudentT

from offplan.forms.form import Component
from offplan.runtime.forms.packing import pack

SHAPE = (1024, 4096)
DEVIATION = 0.02
OUTLIER_COLUMN = 1234
OUTLIER_ROWS = [3, 300, 500, 900]
NUM_CODES = 15
"""Exponents that a base by row reaches: its codes are 0 to 14 below, and one for what has none."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    torch.manual_seed(seed)
    matrices = []
    for name, draw in DRAWS.items():
        values = draw().to(torch.bfloat16)
        for_512 = 512 / values.numel()
        by_row, by_block = count_by_row(values) * for_512, count_by_block(values) * for_512
        matrices.append({"name": name, "base_by_row": by_row, "base_by_block": by_block})
    facts = {"seed": seed, "shape": SHAPE, "torch": torch.__version__}
    print(json.dumps({**facts, "patches_for_512_weights": matrices}, indent=2))


def normal() -> torch.Tensor:
    return torch.randn(SHAPE) * DEVIATION


def student(degrees: float) -> torch.Tensor:
    return StudentT(degrees).sample(torch.Size(SHAPE)) * DEVIATION


def scale_column(factor: float) -> torch.Tensor:
    values = normal()
    values[:, OUTLIER_COLUMN] *= factor
    return values


def put_outliers(outlier: float) -> torch.Tensor:
    values = normal()
    values[OUTLIER_ROWS, OUTLIER_COLUMN] = outlier
    return values


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "normal": normal,
    "Student-t, 3 degrees of freedom": lambda: student(3),
    "Student-t, 2 degrees of freedom": lambda: student(2),
    "Student-t, 1.5 degrees of freedom": lambda: student(1.5),
    "one column of 50 sigma": lambda: scale_column(50),
    "one column of 200 sigma": lambda: scale_column(200),
    "log-normal columns": lambda: normal() * torch.exp(torch.randn(1, SHAPE[1])),
    "1e30 in four rows": lambda: put_outliers(1e30),
    "NaN in four rows": lambda: put_outliers(float("nan")),
}


def count_by_row(values: torch.Tensor) -> int:
    """Return the patches needed where a row's largest exponent is the base of its weights."""
    bits = values.view(torch.int16)
    exponents = (bits.int() >> 7) & 0xFF
    is_below = exponents.amax(1, keepdim=True) - exponents >= NUM_CODES
    return int((is_below & ((bits << 1) != 0)).sum())


def count_by_block(values: torch.Tensor) -> int:
    """Return the patches needed in the form that offplan packs."""
    return int(pack(values, reserve=values.numel())[Component.PATCH_BLOCKS][-1, 1])


if __name__ == "__main__":
    main()
