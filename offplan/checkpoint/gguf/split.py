"""How llama.cpp divides a GGUF file between GPU and host: its options ``-ngl`` and ``-ncmoe``.

Source: llama.cpp of October 2026, ``src/llama-model.cpp`` (layers from the last one on lie on the
GPU, the output before them all, the embedding on the host) and ``common/common.h`` (experts).
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from offplan.checkpoint.gguf.read import Header, is_counted, num_layers, of_architecture

_BLOCK = re.compile(r"blk\.(\d+)\.")
_EXPERTS = re.compile(r"blk\.\d+\.ffn_(up|down|gate|gate_up)_(ch|)exps")


class Split(NamedTuple):
    """Which weights of a file lie on the GPU."""

    num_gpu_layers: int
    """``-ngl``: the output, and one layer fewer from the last one on. Layers that predict further
    tokens are counted, and lie nowhere."""
    num_host_experts: int
    """``-ncmoe``: layers, from the first on, whose routed experts stay on the host."""
    gpu_bytes: int
    """Bytes of weights and of the cache on the GPU."""
    cache_bytes: int
    """Bytes of the cache among them."""

    @property
    def options(self) -> tuple[str, ...]:
        """The options of llama.cpp's programs."""
        experts = ("-ncmoe", str(self.num_host_experts)) if self.num_host_experts else ()
        return ("-ngl", str(self.num_gpu_layers), *experts)


NOTHING = Split(0, 0, 0, 0)
"""All on the host."""


def choose_split(header: Header, cache_bytes: Sequence[int], room_bytes: int) -> Split:
    """Return the division with the most on the GPU that takes at most ``room_bytes`` of it.

    Routed experts leave the GPU first, of the first layer first; then whole layers do.
    ``cache_bytes`` are those of each layer's keys and values. Where nothing fits, nothing lies on
    the GPU.
    """
    splits = _list_splits(header, cache_bytes)
    return next((each for each in splits if each.gpu_bytes <= room_bytes), NOTHING)


def _list_splits(header: Header, cache_bytes: Sequence[int]) -> Iterator[Split]:
    """List divisions, that with the most on the GPU first; the last one has nothing there."""
    whole, experts, output = _sum_bytes(header)
    num, more = len(cache_bytes), of_architecture(header.metadata).get("nextn_predict_layers", 0)
    layers = [whole[index] + cache_bytes[index] for index in range(num)]
    on_gpu, cached = output + sum(layers), sum(cache_bytes)
    for count in range(num + 1):
        on_gpu -= experts[count - 1] if count else 0
        if count == 0 or experts[count - 1]:
            yield Split(num + more + 1, count, on_gpu, cached)
    num_host = num if any(experts.values()) else 0
    for index in range(num):
        on_gpu -= layers[index] - experts[index]
        cached -= cache_bytes[index]
        yield Split(num + more - index, num_host, on_gpu, cached)


def _sum_bytes(header: Header) -> tuple[Counter[int], Counter[int], int]:
    """Return the bytes of each layer, of the experts among them, and of the output."""
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    whole, experts, output = Counter[int](), Counter[int](), 0
    # a tied output is a copy of the embedding, which itself lies on the host
    head = "output.weight" if "output.weight" in shapes else "token_embd.weight"
    for tensor in header.tensors:
        block = _BLOCK.match(tensor.name)
        if block is None:
            is_output = tensor.name == head or tensor.name.startswith("output_norm")
            output += tensor.nbytes if is_output else 0
        elif is_counted(tensor.name, num_layers(header.metadata), shapes):
            whole[int(block[1])] += tensor.nbytes
            if _EXPERTS.match(tensor.name):
                experts[int(block[1])] += tensor.nbytes
    return whole, experts, output
