"""The KV cache's type: keys and values are kept as the model computes them, or in FP8."""

from collections.abc import Iterator
from dataclasses import replace

from pydantic import Field

from offplan.capabilities.goal import Asked, GoalBase
from offplan.capabilities.way import Way
from offplan.choices import KVCacheDtype
from offplan.row_cache import why_not_coded


class KVCacheGoal(GoalBase):
    """A question whose plans may keep keys and values in FP8."""

    # left out where it is usual: what is printed of other plans stays as it is
    kv_cache_dtype: KVCacheDtype = Field(default="auto", exclude_if=lambda dtype: dtype == "auto")
    """``fp8`` keeps keys, values and latents as E3M4, with a scale for each token and head;
    ``auto`` keeps them as the model computes them."""

    @property
    def way(self) -> Way:
        """The passes that run the model, which keep a cache of this type."""
        return replace(super().way, kv_cache_dtype=self.kv_cache_dtype)

    def list_refusals(self, asked: Asked) -> Iterator[str]:
        """Yield why the model's keys and values cannot be kept in FP8."""
        if self.kv_cache_dtype != "auto":
            yield from (f"`kv_cache_dtype={self.kv_cache_dtype}`: {w}" for w in self._list(asked))
        yield from super().list_refusals(asked)

    def _list(self, asked: Asked) -> Iterator[str]:
        model = asked.model
        caches = [layer.kv_cache for layer in model.layers]
        if not any(each.bytes_per_token for each in caches):
            yield f"no layer of {model.source} caches keys and values: leave it out"
        if model.architecture.attention.changes_cached:
            yield f"attention of {model.source} changes what is cached: leave it out"
        for index, each in enumerate(caches):
            if each.bytes_per_token and (why := why_not_coded(each.vectors)) is not None:
                yield f"layer {index} of {model.source} {why}: leave it out"
                break

    def describe(self) -> Iterator[str]:
        """Yield the cache's type, where it is asked for."""
        yield from super().describe()
        if self.kv_cache_dtype != "auto":
            yield f"the KV cache is kept in {self.kv_cache_dtype.upper()}"
