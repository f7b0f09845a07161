"""A process that plans imports less of torch and transformers, and what it asks for works."""

import subprocess
import sys

import pytest
import transformers
from packaging.version import Version

BEFORE = "from offplan.lean import import_less; import_less()\n"


def run(code: str) -> str:
    command = [sys.executable, "-c", BEFORE + code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="it imports what compiles itself"
)
def test_a_config_is_built_without_what_compiles_and_what_has_peers() -> None:
    code = """
import sys, offplan.transformers_private
print(*sorted({"sympy", "torch._dynamo.convert_frame", "torch.distributed.fsdp"} & {*sys.modules}))
import torch
print(torch._dynamo.is_compiling(), "torch._dynamo.convert_frame" in sys.modules)
"""
    assert run(code) == "\nFalse True\n"


@pytest.mark.slow
def test_models_are_listed_as_transformers_lists_them() -> None:
    code = """
from pathlib import Path
import transformers
from transformers.utils import import_utils
file = str(Path(transformers.__file__).with_name("models") / "__init__.py")
before = import_utils.define_import_structure(file)
import transformers.models
print(import_utils.define_import_structure.__name__, len(before) > 5)
print(import_utils.define_import_structure(file) == before)
"""
    assert run(code) == "list_again True\nTrue\n"
