"""Ways in which offplan's own runtime runs a model: by its own passes, or by others."""

from dataclasses import dataclass, field

from offplan.choices import KVCacheDtype


@dataclass(frozen=True)
class Way:
    """Passes that run a model; whatever else depends on them asks it."""

    name: str
    """The name in JSON; of other passes than offplan's own the key of a goal that asks for them."""
    whose: str
    """Whose passes they are, in words that ``passes`` follows."""
    num_scratch: int = 1
    """Weights of dense layers, stored as codes, whose values live in a pass at the same time."""
    kv_cache_dtype: KVCacheDtype = field(default="auto", compare=False)
    """The type of what they cache of each token, which makes them no other passes."""

    @property
    def is_own(self) -> bool:
        """True if they are offplan's own: priced by formulas, captured, with a row for each text.

        What other passes take is counted by running them, and timed in whole passes.
        """
        return self == OWN


OWN = Way("own", "offplan's own")
