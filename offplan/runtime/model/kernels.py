"""Kernels are chosen for a model: our own where they know it, else transformers' and torch's."""

import sys

import torch
from transformers import PreTrainedModel

from offplan.checkpoint.model import Model
from offplan.forms.form import Kind
from offplan.kernel_sizes import KERNEL_TYPES, MAX_PAIRS, are_grouped, is_power
from offplan.placement import Phase
from offplan.runtime.forms.experts import (
    GROUPS_NAME,
    KNOWN_GATE,
    MULTIPLIED_BY,
    PLAIN_WAY,
    STORED_EXPERTS_NAME,
    are_plain,
    holds_codes,
)
from offplan.runtime.forms.gates import find_gates
from offplan.runtime.forms.runnable import is_transposed
from offplan.runtime.model.cache_mask import FindFilled, filled_blocks, filled_mask, filled_up_to
from offplan.transformers_private import ExpertsInterface, list_experts

RAW = Kind.RAW.value


class ExpertKernels:
    """Has transformers multiply a model's routed experts by what is best for a pass."""

    def __init__(
        self, model: Model, module: PreTrainedModel, device: torch.device, *, with_own: bool
    ) -> None:
        """Find whether our own kernels serve this model; ``with_own`` allows them (CUDA only)."""
        self._decoder = module.get_decoder()
        self._num_chosen = model.experts.num_experts_per_token if model.experts else 0
        self._own, self._few_pairs = find_own_experts(model, module, with_kernels=with_own)
        experts = list_experts(module)
        for part, gate in zip(experts, find_gates(experts), strict=True):
            vars(part)[KNOWN_GATE] = gate
        plain = [part for part in experts if not holds_codes(part)]
        shared = STORED_EXPERTS_NAME if len(plain) < len(experts) else ""
        asked = (vars(part).get(MULTIPLIED_BY) for part in experts)
        self._shared_name: str = next(filter(None, asked), shared)
        """The name under which all layers are multiplied where they differ; empty elsewhere."""
        self._plain = plain if self._shared_name else []
        """Experts held by their values, in a model of which others need ``_shared_name``."""
        self._groups_freely = groups_freely(model.dtype, device)
        self._num_grouped = 0
        """Experts of a layer whose values prompts may multiply group by group; 0 for none.

        Values that lie as inputs by outputs took six times as long so as by torch's product.
        """
        turned = any(map(is_transposed, plain))
        if plain and with_own and model.dtype in KERNEL_TYPES and not turned:
            self._num_grouped = max(part.num_experts for part in plain)
        self._current = ""
        """The way that was chosen; empty if that is not known."""
        self.choose(Phase.DECODE, 1)  # what transformers would take need not know what is stored

    def choose(self, phase: Phase, num_tokens: int) -> None:
        """Set the module up for passes of so many tokens, over all sequences."""
        if not self._num_chosen:
            return
        # a decode step is captured
        must_not_wait = phase is Phase.DECODE and not self._groups_freely
        if num_tokens * self._num_chosen <= self._few_pairs or (self._own and must_not_wait):
            name = self._own
        elif phase is Phase.PREFILL and self._are_grouped(num_tokens):
            name = GROUPS_NAME
        else:
            name = "batched_mm" if num_tokens == 1 or must_not_wait else "grouped_mm"
        if name == self._current:
            return
        for experts in self._plain:
            vars(experts)[PLAIN_WAY] = ExpertsInterface()[name]
        if not (self._shared_name and self._current):
            self._decoder.set_experts_implementation(self._shared_name or name)
        self._current = name

    def invalidate(self) -> None:
        """Know of no way that was chosen."""
        self._current = ""

    def can_capture(self, num_tokens: int) -> bool:
        """Return True if a prompt of so many tokens, of all sequences, never waits for the host."""
        is_few = num_tokens * self._num_chosen <= self._few_pairs
        return self._groups_freely or is_few or self._are_grouped(num_tokens)

    def _are_grouped(self, num_tokens: int) -> bool:
        num_pairs = num_tokens * self._num_chosen
        return self._num_grouped > 0 and are_grouped(num_pairs, self._num_grouped, (RAW,))


def groups_freely(dtype: str, device: torch.device) -> bool:
    """Return True if grouped products never wait for the host, as a capture needs.

    Source: torch's ``_grouped_mm``, whose kernels are for bf16 on compute capability 9.x and 10.x;
    elsewhere it reads the groups' ends on the host.
    """
    if dtype != "bfloat16":
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def find_own_experts(
    model: Model, module: PreTrainedModel, *, with_kernels: bool
) -> tuple[str, int]:
    """Return the name of our own kernels for experts, and the most pairs they are best for.

    The name is empty if they do not know this model's experts. For more pairs of a token and an
    expert than this they would read experts several times. Our kernels alone know experts that are
    stored as codes, ``with_kernels`` or without. If others are held by their values, the answer is
    about these.
    """
    # only those that transformers lets choose how they are multiplied say what they are made of
    experts = list_experts(module)
    coded = [part for part in experts if holds_codes(part)]
    experts = [part for part in experts if not holds_codes(part)]
    if coded and not experts:
        return STORED_EXPERTS_NAME, sys.maxsize
    if with_kernels and experts and model.dtype in KERNEL_TYPES:
        from offplan.runtime.model.experts import EXPERTS_NAME, ROWS

        if all(map(are_plain, experts)):
            return EXPERTS_NAME, min(MAX_PAIRS, ROWS * min(each.num_experts for each in experts))
    return "", 0


def find_filled(
    model: Model, module: PreTrainedModel, context: int, *, codes: bool = False
) -> FindFilled:
    """Find how a captured decode step of this model tells attention where its cache ends.

    Compiled block attention needs heads of a power of two from 16 on, and layers that ask for
    nothing. What layers ask for, and ``codes``, our kernel knows, but for latents. It needs
    KERNEL_TYPES, and the kernel for latents latents of a power of two besides.
    """
    if codes:
        return filled_up_to
    asked = [vars(part)["asked"] for part in module.modules() if "asked" in vars(part)]
    config = module.config.get_text_config()
    latent_dim = getattr(config, "kv_lora_rank", None)
    if not all(each.is_plain_within(context) for each in asked):
        return filled_up_to if model.dtype in KERNEL_TYPES and not latent_dim else filled_mask
    if latent_dim:
        powers = is_power(latent_dim) and is_power(config.qk_rope_head_dim)
        return filled_up_to if powers and model.dtype in KERNEL_TYPES else filled_mask
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return filled_blocks if is_power(dim) else filled_mask
