"""The private names of transformers that offplan uses, and the versions they were tried with."""

import ast
import inspect
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.core_model_loading import WeightConverter, rename_source_key
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from offplan.runtime import transformers_private
from offplan.runtime.model.caches import _State

TRIED = ("5.17", "5.23")
"""Versions of transformers. Beyond these it is this file that says what is missing."""


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
    assert not missing, f"transformers {version('transformers')}; tried with {', '.join(TRIED)}"


def test_the_versions_of_transformers_are_those_that_the_module_names() -> None:
    assert f"transformers {' and '.join(TRIED)};" in (transformers_private.__doc__ or "")


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
