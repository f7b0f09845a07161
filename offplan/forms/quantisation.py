"""How the modules of a quantised checkpoint are stored, by its config."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offplan.errors import CheckpointError
from offplan.files import load_facts
from offplan.forms.form import BITS, NESTED_BLOCK, Component, Form, Kind, WordOrder
from offplan.forms.recognise import WORD_BITS

Tensor = tuple[str, str, tuple[int, ...]]
"""The end of a stored tensor's name after the module's, its type (safetensors' name) and shape."""
BNB4_STATE_BYTES = 96
"""Bytes taken for the JSON of bitsandbytes' parameters, which has some more or less."""
_BNB4_BLOCK = 64
"""Weights of bitsandbytes that share a scale."""
_CHOICES = (Component.ZERO, Component.GROUP_INDEX, Component.INPUT_SCALE, Component.NESTED_SCALE)
"""Parts that a config may choose to store."""
_LAYOUTS = load_facts(Path(__file__).with_name("layouts.yaml"))


@dataclass(frozen=True)
class Scheme:
    """The form in which each linear layer that one part of a config takes is stored."""

    form: Form
    """As headers would be recognised; the block of channel-wise whole numbers is None."""
    layout: str
    """The name in ``layouts.yaml`` of the tensors that are stored."""
    scale: str = "BF16"
    """Type of the scales, as safetensors names it."""
    choices: Mapping[Component, bool] = field(default_factory=dict)
    """For each part that is a choice, True if it is stored. GROUP_INDEX is stored if columns lie in
    another order than their groups."""
    few_bits: int | None = None
    """Bits of whole numbers in words that have no form of their own: 2 or 3."""

    @property
    def needed(self) -> set[Component]:
        """Parts that codes and scales alone would stand for other values without."""
        return {part for part in (Component.ZERO, Component.GROUP_INDEX) if self.choices.get(part)}

    @property
    def word_bits(self) -> int:
        """Bits of whole numbers in words."""
        return self.few_bits or BITS.get(self.form.kind, 8)

    def fits(self, rows: int, columns: int) -> bool:
        """Return True if the layout can store such a matrix: whole groups, packed in whole words.

        Quantisers leave others as they are, or pad them, each in a way of its own.
        """
        block, order = self.form.block, self.form.word_order
        # GPTQ's last group may be of fewer columns. Source: GPTQModel, BaseQuantLinear.
        takes_any = self.form.kind is Kind.FP8_BLOCK or order in (WordOrder.GPTQ, WordOrder.GPTQ_V2)
        if block is not None and columns % block[1] and not takes_any:
            return False
        if order is None or order is WordOrder.NONE:
            return True
        by_columns = self.form.is_by_columns
        rows = rows if by_columns else 0
        return all(size * self.word_bits % WORD_BITS == 0 for size in (rows, columns))

    def store(self, rows: int, columns: int) -> list[Tensor]:
        """List what is stored for a matrix [out, in]."""
        layout = dict(_LAYOUTS[self.layout])
        for part in _CHOICES:
            chosen = layout.pop(f"if {part.value}", {})
            layout |= chosen if self.choices.get(part) else {}
        sizes = self._sizes(rows, columns)
        stored = []
        for end, described in layout.items():
            dtype, *shape = described.split()
            name = end.format(kind=self.form.kind.value)
            found = tuple(int(size) if size.isdecimal() else sizes[size] for size in shape)
            stored.append((name, self.scale if dtype == "SCALE" else dtype, found))
        return stored

    def _sizes(self, rows: int, columns: int) -> dict[str, int]:
        """Return the sizes that ``layouts.yaml`` names."""
        scales = -(-rows * columns // _BNB4_BLOCK)
        return {
            "out": rows,
            "in": columns,
            "out/word": -(-rows * self.word_bits // WORD_BITS),
            "in/word": columns * self.word_bits // WORD_BITS,
            "blocks": rows if self.form.block is None else -(-rows // self.form.block[0]),
            "groups": 1 if self.form.block is None else -(-columns // self.form.block[1]),
            "half": columns // 2,
            "packed": -(-rows * columns // 2),
            "scales": scales,
            "nested": -(-scales // NESTED_BLOCK),
            "state": BNB4_STATE_BYTES,
        }


MAX_NAME = 500
"""Characters of the longest name that patterns are matched with."""


@dataclass(frozen=True)
class Quantisation:
    """How the modules of a quantised checkpoint are stored, as far as its config says."""

    method: str
    """The config's ``quant_method``; ``mlx`` for mlx-lm's, which has none."""
    find: Callable[[str], Scheme | None] | None = None
    """Gives the scheme of a linear layer by its name, None if the layer is left as it is. Itself
    None if offplan does not read what the config says."""
    unread: Mapping[str, Any] = field(default_factory=dict)
    """The keys that offplan does not read as they are stated, None for one that is missing. Empty
    where the whole method is not read."""
    takes_experts_alone: bool = False
    """True if fused experts are all that is quantised (MXFP4 of gpt-oss)."""
    skips_head: bool = False
    """True if the head, and what is tied to it, is left as it is without being named."""
    takes_embeddings: bool = False
    """True if embeddings are quantised as linear layers are."""
    takes_text_alone: bool = False
    """True if the config says it of the text part: what reads images is left as it is."""
    takes_linear_alone: bool = False
    """True if its tool takes modules of the class Linear alone, and so no fused experts."""
    divides_experts: bool = False
    """True if each matrix of a fused expert is a linear layer of its own: Unsloth's gpt-oss."""
    is_known: bool = True
    """True if the meaning of what is stored is known: headers tell the rest."""
    leaves_misfits: bool = False
    """True if a matrix that its layout cannot store is left as it is."""
    has_cache_scales: bool = False
    """True if scales of an FP8 KV cache are stored beside the projections of keys and values."""
    activations: tuple[str, ...] = ()
    """Types that products' inputs are rounded to as well, such as FP8, by the config."""
    note: str | None = None
    """The values that were taken because the config leaves a choice."""

    @property
    def dropped(self) -> tuple[str, ...]:
        """A sentence on what the config says and ``run`` leaves out, if there is anything."""
        if not self.activations:
            return ()
        types = " and ".join(self.activations)
        said = f"the config quantises activations, too ({types}): `run` does not"
        return (f"{said}, so that its logits differ from those of an engine that does",)

    def stated(self, module: str) -> Scheme | None:
        """Return how the config says that this module is stored; None if it is unsure.

        A pattern that is not taken leaves it unsure: what headers alone do not tell is OTHER then.
        """
        if self.find is None or len(module) > MAX_NAME:
            return None
        try:
            return self.find(module)
        except CheckpointError:
            return None


def note_scales(dtype: str) -> str:
    """Say which type was taken for scales whose type the config leaves open."""
    return f"the config does not say the type of the scales: scales taken as {dtype}"


def leave_unread(method: str, stated: Mapping[str, Any], **reads: bool) -> Quantisation | None:
    """Return what stands for a config that says something that offplan does not read, else None.

    ``reads`` tells of each key whether offplan reads it as ``stated``.
    """
    unread = {key: stated.get(key) for key, is_read in reads.items() if not is_read}
    return Quantisation(method, unread=unread) if unread else None
