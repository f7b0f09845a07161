"""Which modules a config's lists of names mean: what the tools that read them would say."""

import pytest

from offplan.errors import CheckpointError
from offplan.forms.matching import matches_wildcard, skips, targets

MODULES = (
    "lm_head",
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.gate_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.11.self_attn.q_proj",
    "model.layers.1.mlp.experts.3.up_proj",
    "visual.blocks.1.attn.qkv",
)


@pytest.mark.parametrize(
    "pattern",
    [
        *("lm_head", "model.layers.1", "model.layers.*", "mlp.gate", "gate", "q_proj", "visual"),
        *("model.layers.*.self_attn", r".*\.(gate|q_proj)$", "model.layers.1.mlp.gate", "model"),
        *(r"model\.layers\.[0-9]\.", "head", "model.layers.1.", "a|model.layers.11"),
    ],
)
def test_modules_not_to_convert_are_those_of_transformers(pattern: str) -> None:
    transformers = pytest.importorskip("transformers")
    quantizers = pytest.importorskip("transformers.quantizers.quantizers_utils")
    if transformers.__version__.startswith("5.17."):
        pytest.skip("transformers 5.17 leaves other modules unconverted")
    for module in MODULES:
        converted = quantizers.should_convert_module(module, [pattern])
        assert skips((pattern,), module) != converted, module


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("Linear", "model.layers.1.mlp.up_proj", True),
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", False),
        (r"re:.*mlp\.gate$", "model.layers.1.mlp.gate", True),
        (r"re:.*mlp\.gate$", "model.layers.1.mlp.gate_proj", False),
        (r"re:mlp\.gate$", "model.layers.1.mlp.gate", False),
    ],
)
def test_targets(pattern: str, module: str, expected: bool) -> None:
    assert targets((pattern,), module) is expected


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.*.mlp.gate", "model.layers.11.mlp.gate", True),
        ("model.layers.*.mlp.gate", "model.layers.11.mlp.gate_proj", False),
        ("model.layers.1.self_attn*", "model.layers.1.self_attn.q_proj", True),
        ("model.layers.1", "model.layers.11.self_attn.q_proj", False),
        ("*q_proj", "model.layers.1.self_attn.q_proj", True),
    ],
)
def test_wildcards(pattern: str, module: str, expected: bool) -> None:
    assert matches_wildcard((pattern,), module) is expected


@pytest.mark.parametrize("pattern", ["(a+)+$", "(", r"(a)\1", "a*" * 9, "a" * 5_000, "(a|a){9}"])
def test_patterns_that_are_wrong_or_may_hang_are_refused(pattern: str) -> None:
    with pytest.raises(CheckpointError, match="expected a simple regular expression"):
        targets((f"re:{pattern}",), "model")
