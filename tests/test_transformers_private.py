"""The private names of transformers that offplan uses, and the versions they were tried with."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.core_model_loading import WeightConverter, rename_source_key
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from offplan import transformers_private
from offplan.runtime.model.caches import _State
from offplan.transformers_private import describe_untried

DOCUMENTED = {"transformers.cache_utils", "transformers.modeling_outputs"}
"""Modules of transformers that its reference has pages of."""
OTHERS = ("torch.", "ctypes.", "sys.", "os.")
OF_PYTHON = {"_asdict", "_fields", "_replace", "_buffers", "_modules"}
"""Names of named tuples and of torch's modules."""
"""What names that begin with ``_`` belong to that is not of transformers."""


def private_imports(path: Path, package: str) -> list[tuple[str, str]]:
    """Modules and names that a file imports of a package, the top-level ones left out."""
    return [
        (node.module or "", alias.name)
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}.")
        for alias in node.names
    ]


def test_what_is_imported_is_there() -> None:
    names = private_imports(Path(transformers_private.__file__), "transformers")
    assert names
    missing = [
        f"{where}.{name}" for where, name in names if not hasattr(import_module(where), name)
    ]
    assert not missing, f"found transformers {version('transformers')}"


def test_the_installed_version_is_one_that_was_tried_or_is_said_not_to_be() -> None:
    """Whoever allows another version runs the suite with it and adds it to ``TRIED``."""
    assert transformers_private.TRIED == ("5.17", "5.23", "5.24")
    for name in (*transformers_private.TRIED, "5.24.3", "5.9.0"):
        assert describe_untried(name) is None
    for name in ("5.25.0", "5.100.1", "6.0.0.dev0"):
        assert f"found transformers {name}, and was tried with 5.17 to 5.24" in (
            describe_untried(name) or ""
        )


@pytest.mark.slow
def test_a_version_that_was_not_tried_prints_one_line() -> None:
    script = (
        "import transformers; transformers.__version__ = '5.999.0'\n"
        "import offplan.transformers_private, offplan.runtime.hugging_face"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    assert [line for line in done.stderr.splitlines() if "5.999.0" in line] == [
        describe_untried("5.999.0")
    ]


@pytest.mark.slow
def test_no_other_file_reaches_for_what_transformers_does_not_document() -> None:
    """Neither modules beyond those of its reference, nor names of objects that begin with ``_``."""
    package = Path(transformers_private.__file__).parent
    trees = {path: ast.parse(path.read_text("utf-8")) for path in package.rglob("*.py")}
    own = {name for tree in trees.values() for name in defined_names(tree)}
    # lean runs before transformers can be imported; the latter are of vLLM
    for name in ("transformers_private", "lean", "vllm", "vllm_packed"):
        del trees[package / f"{name}.py"]
    wrong = set()
    for path, tree in trees.items():
        modules = {where for where, _ in private_imports(path, "transformers")}
        wrong |= {f"{path.name}: {each}" for each in modules - DOCUMENTED}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and node.attr.startswith("_")
                and not node.attr.startswith("__")
                and node.attr not in own | OF_PYTHON
                and not ast.unparse(node).startswith(OTHERS)
            ):
                wrong.add(f"{path.name}: {ast.unparse(node)}")
    assert not wrong


def defined_names(tree: ast.AST) -> set[str]:
    """Names that begin with ``_`` and that a file defines, its objects' among them."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in names if name.startswith("_")}


def test_private_parts_of_transformers_are_there() -> None:
    """What is not imported but reached from an object."""
    assert callable(PreTrainedModel._init_weights)
    assert callable(PreTrainedModel._can_set_experts_implementation)
    assert callable(Qwen3MoeExperts._apply_gate)
    assert "_attn_implementation" in dir(PreTrainedConfig)
    assert callable(WeightConverter.convert)
    converter = WeightConverter("a", "b", operations=[transformers_private.Concatenate(dim=0)])
    assert converter.source_patterns == ["a"]
    assert converter.collected_tensors == {}
    inspect.signature(rename_source_key).bind(*["name", [], [], "prefix", {}])


def test_linear_attentions_and_what_they_compute_by_are_there() -> None:
    known: set[str] = set()
    for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"):
        names = vars(import_module(f"transformers.models.{name}.modeling_{name}")).keys()
        known |= transformers_private.GATED_DELTA_NETS & names
        assert set(transformers_private.DELTA_RULE) <= names
    assert known == transformers_private.GATED_DELTA_NETS


def test_a_linear_attentions_state_is_allocated_as_before() -> None:
    own, theirs = (
        inspect.signature(each.lazy_initialization).parameters
        for each in (_State, LinearAttentionLayer)
    )
    assert own.keys() == theirs.keys()
