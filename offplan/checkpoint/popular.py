"""Popular checkpoints, planned with from facts that come with offplan: no network is asked."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from offplan.checkpoint.config_only import size_config
from offplan.checkpoint.model import Model
from offplan.files import load_facts

_FACTS = Path(__file__).with_name("popular.yaml")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the Hub, by the facts that planning needs."""

    name: str
    """Its id on the Hub."""
    form: str
    """The form that most of its weights are stored in, as repositories name it."""
    num_bytes: int
    """Bytes as stored."""
    date: str
    """The day by which its facts were so."""
    config: Mapping[str, Any]
    """The facts of its config.json."""

    def open(self) -> Model:
        """Size the model, which the disk cache then keeps; raises CheckpointError."""
        return size_config(self.config, self.name, lambda *_: None)


@cache
def list_checkpoints() -> tuple[Checkpoint, ...]:
    """List the checkpoints whose facts come with offplan, the smallest one first."""
    rows = load_facts(_FACTS).items()
    return tuple(
        Checkpoint(name, row["form"], row["bytes"], str(row["date"]), unpack(row["config"]))
        for name, row in rows
    )


def unpack(value: Any) -> Any:
    """Write out what the facts of a config abbreviate."""
    if isinstance(value, list):
        named = any(isinstance(each, str) and "{" in each for each in value)
        return [name for each in value for name in _expand(each)] if named else value
    if not isinstance(value, dict):
        return value
    if "cycle" in value:
        return value["cycle"] * value["times"]
    if "runs" in value:
        runs = (each.partition("*") for each in value["runs"].split())
        return [_read(one) for one, _, count in runs for _ in range(int(count or 1))]
    if "by_algorithm" in value:
        return {
            name: {"quant_algo": algorithm}
            for algorithm, names in value["by_algorithm"].items()
            for each in names
            for name in _expand(each)
        }
    return {key: unpack(each) for key, each in value.items()}


def _read(word: str) -> int | str:
    return int(word) if word.lstrip("-").isdecimal() else word


def _expand(name: str) -> list[str]:
    """List the names that one with ranges of numbers stands for."""
    parts = re.split(r"\{([\d,-]+)\}", name)
    choices = [[part] for part in parts]
    for at in range(1, len(parts), 2):
        ends = [[int(end) for end in each.split("-")] for each in parts[at].split(",")]
        choices[at] = [str(n) for each in ends for n in range(each[0], each[-1] + 1)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]
