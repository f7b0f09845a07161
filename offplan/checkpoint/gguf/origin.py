"""A GGUF file in words: offplan plans the shape that it states, and never runs it."""

from dataclasses import dataclass

from offplan.units import format_bytes


@dataclass(frozen=True)
class GGUF:
    """A GGUF file, or the shards of one, as its header describes it."""

    architecture: str
    """llama.cpp's name of the architecture: ``llama``."""
    name: str | None
    """The model's name as the file has it; None where it has none."""
    file_type: str
    """The quantisation: ``Q4_K_M``; the type of most bytes where the file names none."""
    num_parameters: int
    total_bytes: int
    """Bytes of all tensors as stored."""
    num_layers: int | None
    runs_with: tuple[str, ...]
    """Commands that run the file, each by itself."""
    bases: tuple[str, ...] = ()
    """Hub ids that the file names: its source, or the model that this one was trained from."""
    planned_in: str = "bfloat16"
    """How the weights of the safetensors checkpoint of this shape are stored."""

    @property
    def bits(self) -> float:
        """Bits a weight, over all tensors."""
        return 8 * self.total_bytes / max(1, self.num_parameters)

    @property
    def facts(self) -> str:
        """The file's own statements, in a phrase."""
        count = self.num_parameters
        told = f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count:,}"
        layers = "" if (n := self.num_layers) is None else f"{n} layer{'s' * (n != 1)}, "
        return (
            f"GGUF, {self.architecture}, {layers}{told} parameters, "
            f"{format_bytes(self.total_bytes)} in {self.file_type} ({self.bits:.1f} bits a weight)"
        )

    @property
    def remedy(self) -> str:
        """The programs that run the file, and what offplan can run in its place."""
        commands = " or ".join(f"`{command}`" for command in self.runs_with)
        told = f"offplan runs safetensors, not GGUF. {commands} runs this file"
        if self.bases:
            return (
                f"{told}; it names {' and '.join(self.bases)} as what it was made or trained from, "
                "and the Hub's page of that model leads to safetensors"
            )
        named = f" of {self.name}" if self.name else ""
        return f"{told}; for offplan, name a safetensors checkpoint{named}"
