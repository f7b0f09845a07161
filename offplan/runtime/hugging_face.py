"""A session as a model of transformers: what takes a model takes it."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from offplan.errors import InputError
from offplan.runtime.rows import Rows
from offplan.runtime.session import Session

_NEVER = (
    *("inputs_embeds", "past_key_values", "position_ids"),
    *("output_attentions", "output_hidden_states"),
)
"""Arguments of a model's ``forward`` that a session cannot do anything with."""


class OffplanForCausalLM(PreTrainedModel, GenerationMixin):
    """A session behind the interface of transformers' causal language models.

    It has no parameters of its own: the session keeps the weights where its plan says, and moves
    what it is given. Logits come on the device of the tokens. ``generate`` keeps the cache in the
    session's rows, and reads only what they do not hold yet.
    """

    main_input_name = "input_ids"
    _is_stateful = True  # transformers then refuses by name to go back in the text
    _supports_attention_backend = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True

    def __init__(self, session: Session) -> None:
        """Stand for ``session``, which nobody else uses meanwhile, and which its owner closes."""
        module = session.loaded.module
        config = deepcopy(module.config.get_text_config())
        config._attn_implementation = "eager"  # what the session runs is its own affair
        super().__init__(config)
        self._session = session
        self._rows: Rows | None = None
        self._held: dict[int, tuple[int, list[int]]] = {}
        """The row of each sequence that is being generated, and the tokens that it holds."""
        self.eval()

    @property
    def device(self) -> torch.device:
        """Where tokens are expected: anywhere, and so on the CPU."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Type that the session computes in."""
        return next(
            each.dtype
            for each in self._session.loaded.module.parameters()
            if each.dtype.is_floating_point
        )

    def to(self, *args: Any, **options: Any) -> "OffplanForCausalLM":
        """Stay where the plan says; raises InputError for another type of the weights."""
        kinds = [each for each in (*args, *options.values()) if isinstance(each, torch.dtype)]
        if kinds and kinds[0] != self.dtype:
            raise InputError(
                f"the model computes in {self.dtype}, as its plan says, and not in {kinds[0]}"
            )
        return self

    def train(self, mode: bool = True) -> "OffplanForCausalLM":
        """Stay as it is; raises InputError where the model is to be trained."""
        if mode:
            raise InputError("a plan executes a model and cannot train it: load it by transformers")
        return super().train(False)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Have ``generate`` make no cache: the session has one."""
        return False

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return what a step of ``generate`` gives to ``forward``: all tokens so far."""
        _refuse(kwargs)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "is_generating": True}

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        is_generating: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[torch.Tensor, ...]:
        """Return the logits of tokens, int64 of [batch, tokens], on the tokens' device.

        ``attention_mask`` may leave tokens out at the beginning or the end of a sequence; their
        logits are 0. ``logits_to_keep`` are the positions at the end that are wanted, 0 for all, or
        the positions themselves. The head makes them in pieces. With ``labels`` the loss comes,
        without gradients. Raises InputError for what a session cannot do, and what a pass raises.
        """
        _refuse(kwargs)
        texts = _strip(input_ids, attention_mask)
        if is_generating:
            logits = self._continue([tokens for tokens, _ in texts])[:, None]
        else:
            logits = self._read(input_ids, texts, logits_to_keep)
        logits = logits.to(input_ids.device)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1])
        if return_dict is False:
            return (logits,) if loss is None else (loss, logits)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def _read(
        self,
        input_ids: torch.Tensor,
        texts: Sequence[tuple[list[int], int]],
        logits_to_keep: int | torch.Tensor,
    ) -> torch.Tensor:
        """Return logits of [batch, positions, vocabulary] on the host."""
        length = input_ids.shape[1]
        by_number = isinstance(logits_to_keep, int)
        first = range(length)[-int(logits_to_keep) :].start if by_number else 0
        self._forget()
        # sequences of one shape are read together: their weights cross the link once
        shapes = dict[tuple[int, int], list[int]]()
        for number, (tokens, start) in enumerate(texts):
            shapes.setdefault((start, start + len(tokens)), []).append(number)
        size = (len(texts), length - first, self.config.vocab_size)
        whole = torch.zeros(size, dtype=self.dtype)
        for (start, end), numbers in shapes.items():
            prompt = torch.tensor([texts[number][0] for number in numbers])
            at = max(start, first) - first
            if end <= first:
                continue
            for part in self._session.prefill_all(prompt, end - first - at):
                with self._session.stream():
                    whole[numbers, at : at + part.shape[1]] = part.cpu()
                at += part.shape[1]
        self._session.runner.length = 0  # so that rows may take the cache again
        return whole if by_number else whole[:, logits_to_keep]

    def _continue(self, texts: Sequence[list[int]]) -> torch.Tensor:
        """Return the logits that follow each text, [batch, vocabulary], on the host."""
        if self._rows is None or self._rows.num_rows != len(texts):
            self._rows, self._held = Rows(self._session, len(texts)), {}
        rows, stepped, joining = self._rows, dict[int, int](), list[int]()
        for number, tokens in enumerate(texts):
            row, held = self._held.get(number, (-1, []))
            if row in rows.in_use and held == tokens[:-1] and held:
                stepped[row] = number
            else:
                joining.append(number)
        for number in joining:
            row, _ = self._held.pop(number, (-1, []))
            if row in rows.in_use:
                rows.leave(row)
        parts = dict[int, torch.Tensor]()
        if stepped:
            logits = rows.step({row: texts[number][-1] for row, number in stepped.items()})
            with self._session.stream():
                parts |= {number: logits[row].cpu() for row, number in stepped.items()}
            self._session.check()
            self._held |= {number: (row, texts[number]) for row, number in stepped.items()}
        if joining:
            joined = rows.join_all([texts[number] for number in joining])
            with self._session.stream():
                for number, each in zip(joining, joined, strict=True):
                    parts[number] = each.logits.cpu()
                    self._held[number] = (each.row, texts[number])
        return torch.stack([parts[number] for number in range(len(texts))])

    def _forget(self) -> None:
        """Leave the rows: what reads all positions takes their cache."""
        self._rows, self._held = None, {}


def _refuse(given: dict[str, Any]) -> None:
    """Raise InputError for arguments that a session does not support."""
    for name in _NEVER:
        if given.get(name) is not None and given[name] is not False:
            raise InputError(f"{name} is not supported: a plan's session has tokens in, logits out")


def _strip(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> list[tuple[list[int], int]]:
    """Return the tokens of each sequence that are not masked, and where they begin.

    Raises InputError for a mask that leaves out tokens between others, or all of them.
    """
    if attention_mask is None:
        return [(tokens, 0) for tokens in input_ids.tolist()]
    texts = []
    for tokens, mask in zip(input_ids.tolist(), attention_mask.bool().tolist(), strict=True):
        start, num_seen = mask.index(True) if any(mask) else 0, sum(mask)
        if not num_seen or not all(mask[start : start + num_seen]):
            raise InputError(
                "attention_mask leaves out all tokens of a sequence, or some between others: "
                "leave out those at the beginning and the end alone"
            )
        texts.append((tokens[start : start + num_seen], start))
    return texts
