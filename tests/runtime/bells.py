"""What kernels ring with, without a coordinator that listens."""

import re

import torch

from offplan.hostcores.library import Words
from offplan.runtime.forms.tasks import Bell

_ANSWER, _BELL = Words.answer.offset // 4, Words.bell.offset // 4
LAST = 2
"""An answer of before, which rings clear."""


def make_bell(device: str) -> Bell:
    words = torch.zeros(32, dtype=torch.int32, device=device)
    words[_ANSWER] = LAST
    return Bell(words, torch.zeros(1, dtype=torch.int32, device=device), 0)


def require_rung(bell: Bell, job: int) -> None:
    """It rang for a job, and nothing is left of that; the answer is then as one that came."""
    expected = torch.zeros(32, dtype=torch.int32)
    expected[_BELL] = job
    assert torch.equal(bell.words.cpu(), expected)
    assert int(bell.arrived) == 0
    bell.words[_ANSWER] = LAST


def require_one_bell(ptx: str) -> None:
    """One thread rings, which has waited for what all programs have written."""
    lines = [line.strip() for line in ptx.splitlines()]
    (bell,) = [at for at, line in enumerate(lines) if re.search(r"\bst\.global\.wt", line)]
    assert lines[bell].startswith("@"), lines[bell]
    atoms = [at for at, line in enumerate(lines) if "atom.global.sys.acq_rel" in line]
    assert len(atoms) == 2
    assert atoms[-1] < bell
    for atom in atoms:
        before = [line for line in lines[:atom] if "bar.sync" in line or "barrier.sync" in line]
        assert before
