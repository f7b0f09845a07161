"""Servers: one of a real model in float32, one whose model says what a test wants."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.runtime.joined import JoinedTexts
from offplan.runtime.prompts import load_tokenizer
from offplan.runtime.rows import Rows
from offplan.runtime.session import Session
from tests.cli import TINY_MOE
from tests.runtime.plans import group, offload
from tests.serve import CONTEXT, ScriptedRows, Served, save_float32, scripted_texts, serving


class Tiny(NamedTuple):
    """The tiny checkpoint in float32."""

    folder: Path
    model: Model
    tokenizer: Any

    def open(self) -> Session:
        """Open a session that streams every second layer."""
        return Session(
            self.model,
            offload(group(2, 1), prefill_chunk=32),
            context=CONTEXT,
            device="cpu",
            folder=self.folder,
        )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = save_float32(TINY_MOE, tmp_path_factory.mktemp("served") / "model")
    model = open_model(str(folder))
    return Tiny(folder, model, load_tokenizer(model))


@pytest.fixture(scope="module")
def served(tiny: Tiny) -> Iterator[Served]:
    """A server of the tiny checkpoint, for four texts at a time."""
    with (
        tiny.open() as session,
        serving(JoinedTexts(Rows(session, 4)), tiny.model, tiny.tokenizer) as served,
    ):
        yield served


@pytest.fixture
def rows(tiny: Tiny) -> ScriptedRows:
    """What the scripted server says; each character beyond ASCII takes several tokens."""
    return ScriptedRows(tiny.tokenizer("Größe: 5 µm, ✓ 日本 🙂.").input_ids)


def set_script(rows: ScriptedRows, tiny: Tiny, text: str) -> None:
    """Have the scripted server say a text."""
    rows.script[:-1] = tiny.tokenizer(text).input_ids


@pytest.fixture
def scripted(rows: ScriptedRows, tiny: Tiny) -> Iterator[Served]:
    with serving(scripted_texts(rows), tiny.model, tiny.tokenizer, most_waiting=2) as served:
        yield served
