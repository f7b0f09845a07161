"""Renews the answers of all questions, or of the models named."""

import sys
import tempfile
from pathlib import Path

import yaml

from tests.golden import HERE, MODELS, answer, questions


class _Dumper(yaml.SafeDumper):
    pass


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)

for model in sys.argv[1:] or MODELS:
    answers = {}
    for question in questions(model):
        with tempfile.TemporaryDirectory() as folder:
            answers[question] = answer(model, question, Path(folder))
    text = yaml.dump(answers, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)
    (HERE / f"{model}.yaml").write_text(text, "utf-8")
