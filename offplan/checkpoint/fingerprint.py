"""The fingerprint of a checkpoint: what it holds, wherever it lies."""

import hashlib
from collections.abc import Iterable

from offplan.checkpoint.tensors import TensorInfo


def headers_sha256(tensors: Iterable[TensorInfo]) -> str:
    """SHA-256, in hex, over one sorted line a tensor: name, dtype, ``d0,d1,...``, tabs between.

    Shards, offsets and metadata are left out, so that the Hub, a folder sharded otherwise and a
    config alone agree.
    """
    lines = sorted(
        f"{tensor.name}\t{tensor.dtype}\t{','.join(map(str, tensor.shape))}\n" for tensor in tensors
    )
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()
