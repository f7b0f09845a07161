"""Sparse attention of DeepSeek-V3.2: an indexer chooses the tokens that each one sees.

If a text has no more tokens than the indexer chooses, it chooses all, and attention is as without
it. Such texts run, and longer ones are refused (``runtime.refusal.refuse_long_texts``).
"""

from typing import Any

from transformers import PreTrainedModel

from offplan.checkpoint.model import Model
from offplan.runtime.refusal import refuse


def leave_out_indexers(skeleton: PreTrainedModel, model: Model) -> None:
    """Have attentions see all of a text whose indexers would choose all of it.

    Raises CheckpointError if transformers' class would choose another number of tokens.
    """
    expected = model.architecture.index_topk
    if expected is None:
        return
    chosen = skeleton.config.get_text_config().index_topk
    if chosen != expected:
        raise refuse(
            f"{model.source}: found an index_topk of {chosen!r} in transformers' class, expected "
            f"{expected}: say a number of tokens in config.json"
        )
    for module in skeleton.modules():
        if hasattr(module, "indexer"):
            attention: Any = module
            if attention.indexer is None:  # it sees what was chosen for the layer before it
                attention.indexer = _choose_nothing
            else:
                attention.indexer.forward = _choose_nothing


def _choose_nothing(*arguments: Any, **others: Any) -> None:
    """Stand in for an indexer; attention of a name that transformers does not know asks no more."""
