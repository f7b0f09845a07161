"""Offload decisions for tests, made without the planner, and sessions that carry them out."""

from pathlib import Path
from typing import Literal

from offplan.checkpoint.open import open_model
from offplan.plan import Offload, Rule
from offplan.runtime.session import Session

CONTEXT = 48


def group(
    group_size: int,
    num_in_group: int,
    *segments: str,
    prefill: str = "prefetch",
    decode: str = "prefetch",
) -> Rule:
    return Rule.model_validate(
        {
            "cpu_offload_params": segments,
            "group_size": group_size,
            "num_in_group": num_in_group,
            "prefill": prefill,
            "decode": decode,
        }
    )


def offload(
    *rules: Rule,
    prefetch_step: int = 2,
    prefill_chunk: int = 64,
    embeddings: Literal["device", "host"] = "device",
    store: Literal["host", "peer"] = "host",
) -> Offload:
    return Offload(
        prefetch_step=prefetch_step,
        prefill_chunk=prefill_chunk,
        embeddings=embeddings,
        store=store,
        rules=rules,
    )


def open_session(folder: Path, decision: Offload, device: str = "cpu", **options: bool) -> Session:
    model = open_model(str(folder))
    return Session(model, decision, context=CONTEXT, device=device, folder=folder, **options)
