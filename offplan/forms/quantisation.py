"""How the modules of a quantised checkpoint are stored, by its config."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from offplan.errors import CheckpointError
from offplan.forms.scheme import Scheme

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
