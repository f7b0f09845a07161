"""Prompts as tokens: a text by the model's tokenizer, or a workload's number of random ones."""

import operator
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig

from offplan.checkpoint.jsontext import describe
from offplan.checkpoint.model import Model
from offplan.errors import InputError
from offplan.plan import Workload


def random_prompt(model: Model, workload: Workload) -> torch.Tensor:
    """Draw a workload's prompts, the same ones every time: int64, [batch, tokens], on the CPU.

    Raises InputError for a model whose vocabulary is not known.
    """
    vocabulary = model.architecture.vocabulary_size
    if vocabulary is None:
        raise InputError(f"the config of {model.source} has no vocab_size to draw tokens from")
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (workload.batch, workload.prompt_tokens), generator=generator)


def load_tokenizer(model: Model) -> Any:
    """Load a model's tokenizer, which transformers reads from where the model was read.

    Raises InputError where there is none that can be read without running code of its own.
    """
    try:
        # whether to trust code, left open, would be asked on the terminal
        return AutoTokenizer.from_pretrained(
            model.source, revision=model.revision or "main", trust_remote_code=False
        )
    except Exception as error:  # whatever a file of odd types raises in there
        raise InputError(
            f"{model.source} has no tokenizer for --prompt that can be read: {describe(error)}"
        ) from None


def read_prompt(model: Model, tokenizer: Any, text: str) -> torch.Tensor:
    """Turn a text into tokens: int64, [1, tokens].

    Raises InputError where there are none, and where they are not the model's.
    """
    try:
        tokens: torch.Tensor = tokenizer(text, return_tensors="pt").input_ids
    except Exception as error:  # as for ``load_tokenizer``: some files fail only when they are used
        raise InputError(f"the tokenizer of {model.source} fails: {describe(error)}") from None
    if not tokens.numel():
        raise InputError("the prompt is empty: type some text, or leave --prompt out")
    vocabulary, last = model.architecture.vocabulary_size, int(tokens.max())
    if vocabulary is not None and last >= vocabulary:
        raise InputError(
            f"the tokenizer of {model.source} makes token {last} of the prompt, where the model "
            f"knows {vocabulary}: fetch the tokenizer of this model"
        )
    return tokens


def find_end_tokens(model: Model, tokenizer: Any) -> frozenset[int]:
    """Return tokens that end a text, by the model's config, generation config and tokenizer.

    Raises InputError for a generation config that names no tokens.
    """
    named = [*model.architecture.end_tokens, tokenizer.eos_token_id]
    try:
        # chat models may name what ends a turn only there
        generation = GenerationConfig.from_pretrained(
            model.source, revision=model.revision or "main"
        )
        ends = generation.eos_token_id
        named += ends if isinstance(ends, list) else [ends]
        return frozenset(map(operator.index, (token for token in named if token is not None)))
    except (OSError, ValueError):  # not every model has one, and not every one is consistent
        return frozenset(token for token in named if token is not None)
    except Exception as error:
        raise InputError(
            f"generation_config.json of {model.source} cannot be understood "
            f"({describe(error)}): fetch it again, or remove it"
        ) from None
