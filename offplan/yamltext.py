"""YAML in which no key is given twice."""

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Refuses a key given twice, of which YAML's loader takes the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for number, key in enumerate(keys):
            if any(key.value == other.value for other in keys[:number]):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
        return mapping


def load_yaml(text: str) -> Any:
    """Read a document of plain values; raises yaml.YAMLError, which says where it is wrong."""
    return yaml.load(text, _Loader)
