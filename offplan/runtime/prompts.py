"""Prompts as tokens: a text by the model's tokenizer, or a workload's number of random ones."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoTokenizer

from offplan.checkpoint.jsontext import describe
from offplan.checkpoint.model import Model
from offplan.checkpoint.transformers_config import build_config_of
from offplan.checkpoint.weights import find_small_files, has_weights
from offplan.errors import InputError
from offplan.plan import Workload
from offplan.runtime.rendering import Renderer, TemplateError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
)
"""Files that the tokenizers of causal language models are read from.

Source: transformers 5.23, ``vocab_files_names`` of its tokenizers.
"""
_PLACEHOLDERS = [f"{kind}_token_id" for kind in ("image", "video", "audio")]
_PLACEHOLDERS += [f"{kind}_token_index" for kind in ("image", "video", "audio")]
"""Keys of the tokens that stand for an image, a video or sound in a prompt.

Source: transformers 5.23, the configs of the model types in ``model_types.TEXT_PARTS``.
"""


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
    """Load a model's tokenizer from where the model was read, fetched from the Hub if need be.

    Raises InputError if there is none that can be read without running code of its own, and
    HubError.
    """
    folder = find_small_files(model, _TOKENIZER_FILES)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        lacking, instead = "no tokenizer", "give no prompts"
        if not has_weights(model):
            lacking = "neither weights nor a tokenizer"
            instead = "name a folder that has both (`model=DIR`)"
        raise InputError(
            f"{model.source} has {lacking}: expected files such as {_TOKENIZER_FILES[0]} in "
            f"{folder}; fetch them, or {instead}"
        )
    try:
        # whether to trust code, left open, would be asked on the terminal
        return AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    # what stands in the files may be anything, and so are the errors
    except Exception as error:
        raise InputError(
            f"{model.source} has no tokenizer that can be read ({describe(error)}); fetch it "
            "again, or give no prompts"
        ) from None


def tokenizer_sha256(model: Model) -> str:
    """Sum up the files that a model's tokenizer and its chat template were read from.

    Raises HubError.
    """
    folder = find_small_files(model, _TOKENIZER_FILES)
    sums = [
        (name, hashlib.sha256((folder / name).read_bytes()).hexdigest())
        for name in _TOKENIZER_FILES
        if (folder / name).is_file()
    ]
    return hashlib.sha256(repr(sums).encode()).hexdigest()


def read_prompt(
    model: Model, tokenizer: Any, text: str, *, add_special_tokens: bool = True
) -> torch.Tensor:
    """Turn a text into tokens: int64, [1, tokens].

    Raises InputError if there are none, if the model does not know one, and if one stands
    for an image, a video or sound.
    """
    try:
        encoded = tokenizer(text, return_tensors="pt", add_special_tokens=add_special_tokens)
        tokens: torch.Tensor = encoded.input_ids
    except Exception as error:  # some files fail only when they are used
        raise InputError(f"the tokenizer of {model.source} fails: {describe(error)}") from None
    if not tokens.numel():
        raise InputError("the prompt is empty: expected some text")
    vocabulary = model.architecture.vocabulary_size
    if vocabulary is not None and (largest := int(tokens.max())) >= vocabulary:
        raise InputError(
            f"the tokenizer of {model.source} makes token {largest} of the prompt, and the model "
            f"has tokens up to {vocabulary - 1}: they do not belong together, fetch both again"
        )
    _check_placeholders(model, tokens)
    return tokens


def read_chat(
    model: Model,
    tokenizer: Any,
    renderer: Renderer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> torch.Tensor:
    """Turn messages (``role``, ``content``) into tokens by the chat template: int64, [1, tokens].

    Raises what ``render_chat`` and ``read_prompt`` raise.
    """
    return read_rendered(model, tokenizer, render_chat(model, tokenizer, renderer, messages, tools))


def render_chat(
    model: Model,
    tokenizer: Any,
    renderer: Renderer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Turn messages (``role``, ``content``) into a text by the chat template.

    The answer is to follow. The template is given ``tools`` and ``variables``, too. Raises
    InputError if the model has no chat template, and if its own does not take the messages or
    exceeds a limit.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"{model.source} has no chat template, and so continues prompts and reads no messages"
        )
    try:
        return renderer.render(tokenizer, messages, tools, variables)
    except TemplateError as error:
        raise InputError(f"the chat template of {model.source} {error}") from None


def read_rendered(model: Model, tokenizer: Any, text: str) -> torch.Tensor:
    """Turn what a chat template made into tokens: int64, [1, tokens]."""
    # it has written all special tokens
    return read_prompt(model, tokenizer, text, add_special_tokens=False)


def _check_placeholders(model: Model, tokens: torch.Tensor) -> None:
    if not model.architecture.is_multimodal:
        return
    config = build_config_of(model)
    for key in _PLACEHOLDERS:
        token = getattr(config, key, None)
        if token is not None and token in tokens:
            raise InputError(
                f"the prompt has token {token} ({key}), which stands for what the model would see "
                "or hear, and offplan runs the text part alone: leave it out of the prompt"
            )
