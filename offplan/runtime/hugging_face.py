"""A session as a model of transformers: what takes a model takes it."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from offplan.checkpoint.transformers_config import build_config_of
from offplan.errors import InputError
from offplan.runtime.rows import Rows
from offplan.runtime.session import Session
from offplan.transformers_private import ModelWithOwnCache

_NEVER = (
    *("inputs_embeds", "cache", "past_key_values", "position_ids"),
    *("output_attentions", "output_hidden_states"),
)
"""Arguments of a model's ``forward`` that a session cannot do anything with."""

_WITHOUT_WEIGHTS = (
    *("parameters", "named_parameters", "buffers", "named_buffers", "named_non_persistent_buffers"),
    *("state_dict", "load_state_dict", "gather_sharded_state_dict_for_save"),
    *("from_pretrained", "save_pretrained", "save_distributed_checkpoint", "push_to_hub"),
    *("get_memory_footprint", "init_weights", "dequantize", "to_empty", "share_memory", "apply"),
    *("get_input_embeddings", "set_input_embeddings", "resize_token_embeddings"),
    *("get_output_embeddings", "set_output_embeddings", "resize_position_embeddings"),
    *("get_position_embeddings", "get_decoder", "set_decoder", "get_encoder", "set_encoder"),
    *("add_adapter", "load_adapter", "set_adapter", "delete_adapter", "get_adapter_state_dict"),
    *("enable_adapters", "disable_adapters", "active_adapters"),
    *("set_attn_implementation", "set_experts_implementation", "set_use_kernels", "kernelize"),
    *("compile", "generate_batch", "init_continuous_batching"),
)
"""Methods that read or change weights or modules, of which this model has none."""
_TRAINING = (
    *("gradient_checkpointing_enable", "activation_checkpointing_enable"),
    *("enable_input_require_grads", "enable_peft_hotswap"),
)
"""Methods that prepare a model to be trained."""
_UNTRAINED = "a plan executes a model and cannot train it"


class OffplanConfig(PreTrainedConfig):
    """The config under which transformers' registry lists ``OffplanForCausalLM``, and no more."""

    model_type = "offplan"


class OffplanForCausalLM(ModelWithOwnCache):
    """A session behind the interface of transformers' causal language models.

    It has no parameters of its own: the session keeps the weights where its plan says, and moves
    what it is given. Methods that would read or change parameters raise InputError. Logits come on
    the device of the tokens. ``generate`` keeps the cache in the session, and reads only what it
    does not hold yet.
    """

    config_class = OffplanConfig
    main_input_name = "input_ids"

    def __init__(self, session: Session) -> None:
        """Stand for ``session``, which nobody else uses meanwhile, and which its owner closes."""
        # not the module's, which names attention and experts that the session has registered
        super().__init__(build_config_of(session.loaded.model).get_text_config())
        self._session = session
        self._rows: Rows | None = None
        self._held: dict[int, tuple[int, list[int]]] = {}
        """The row of each sequence that is being generated, and the tokens that it holds."""
        self._read_together: list[list[int]] = []
        """The sequences that other passes than offplan's own have read, where these are run."""
        self.eval()

    @property
    def device(self) -> torch.device:
        """Device on which tokens are expected: any, and so the CPU."""
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

    def cpu(self) -> "OffplanForCausalLM":
        """Stay where the plan says."""
        return self

    def cuda(self, device: Any = None) -> "OffplanForCausalLM":
        """Stay where the plan says."""
        return self

    def half(self, *args: Any) -> "OffplanForCausalLM":
        """Do what ``to(torch.float16)`` does."""
        return self.to(torch.float16)

    def bfloat16(self) -> "OffplanForCausalLM":
        """Do what ``to(torch.bfloat16)`` does."""
        return self.to(torch.bfloat16)

    def float(self, *args: Any) -> "OffplanForCausalLM":
        """Do what ``to(torch.float32)`` does."""
        return self.to(torch.float32)

    def double(self) -> "OffplanForCausalLM":
        """Do what ``to(torch.float64)`` does."""
        return self.to(torch.float64)

    def type(self, dst_type: Any) -> "OffplanForCausalLM":
        """Do what ``to`` does."""
        return self.to(dst_type)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of the checkpoint's parameters; raises InputError for some of them."""
        if only_trainable or exclude_embeddings:
            raise InputError("num_parameters: a plan's model counts all parameters, not some")
        return self._session.loaded.model.num_parameters

    def requires_grad_(self, requires_grad: bool = True) -> "OffplanForCausalLM":
        """Stay as it is; raises InputError if gradients are asked for."""
        self.train(requires_grad)
        return self

    def train(self, mode: bool = True) -> "OffplanForCausalLM":
        """Stay as it is; raises InputError if the model is to be trained."""
        if mode:
            raise InputError(f"{_UNTRAINED}: load it by transformers")
        return super().train(False)

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
        if not self._session.loaded.stage.way.is_own:
            return self._continue_together(texts)
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

    def _continue_together(self, texts: Sequence[list[int]]) -> torch.Tensor:
        """Do what ``_continue`` does by other passes than offplan's own, whose cache has no rows.

        Raises InputError for texts of unlike lengths.
        """
        if len({len(tokens) for tokens in texts}) > 1:
            raise InputError(
                "found sequences of unlike lengths, and "
                f"{self._session.loaded.stage.way.whose} passes generate those of one length "
                "together: generate one at a time"
            )
        before, self._read_together = self._read_together, []
        if before == [tokens[:-1] for tokens in texts] and before[0]:
            with self._session.stream():
                new = torch.tensor([tokens[-1:] for tokens in texts]).to(self._session.device)
            logits = self._session.decode(new)
        else:
            logits = self._session.prefill(torch.tensor(texts))
        with self._session.stream():
            made = logits.cpu()
        self._session.check()
        self._read_together = [*texts]
        return made

    def _forget(self) -> None:
        """Leave the rows: what reads all positions takes their cache."""
        self._rows, self._held, self._read_together = None, {}, []


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


def _refusal(name: str, why: str) -> Any:
    """Make the method ``name`` that raises InputError, saying ``why``."""

    def refuse(self: OffplanForCausalLM, *args: Any, **options: Any) -> Any:
        raise InputError(f"{name}: {why}")

    refuse.__name__ = name
    refuse.__doc__ = f"Raise InputError: {why}."
    return refuse


_HELD = "a plan's session holds the weights, and this model has none to read or change"
for _name in _WITHOUT_WEIGHTS:
    setattr(OffplanForCausalLM, _name, _refusal(_name, f"{_HELD}: load it by transformers"))
for _name in _TRAINING:
    setattr(OffplanForCausalLM, _name, _refusal(_name, f"{_UNTRAINED}: load it by transformers"))
AutoModelForCausalLM.register(OffplanConfig, OffplanForCausalLM)  # or pipelines print all they know
