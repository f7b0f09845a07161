"""What the runtime's cache is made of."""

import torch

from offplan.checkpoint.model import KVCache
from offplan.placement import ALIGNMENT_BYTES
from offplan.row_cache import RowCache
from offplan.runtime.model.caches import LayerCaches, Position

CONTEXT = 7


def make_caches(token_bytes: list[int], position: Position) -> LayerCaches:
    return LayerCaches(RowCache([KVCache(each) for each in token_bytes], CONTEXT), position)


def test_layers_know_the_position_and_the_model_does_not() -> None:
    position = Position(torch.device("cpu"))
    cache = make_caches([1, 1], position)
    position.new = torch.arange(3, 6)
    assert [layer.get_seq_length(0) for layer in cache.layers] == [3, 3]
    assert cache.get_seq_length() == 0


def test_layers_of_any_shape_share_allocations_and_no_memory() -> None:
    position = Position(torch.device("cpu"))
    heads = [3, 3, 1, 3, 1, 3]
    cache = make_caches(heads, position)
    states = [torch.randn(2, count, 1, 5, dtype=torch.bfloat16) for count in heads]
    for index, new in enumerate(states):
        cache.layers[index].update(new, new[..., :3])
    storages = set()
    for layer, new in zip(cache.layers, states, strict=True):
        for kept, of_new in ((layer.keys, new), (layer.values, new[..., :3])):
            assert kept.shape == (*new.shape[:2], CONTEXT, of_new.shape[-1])
            assert kept.is_contiguous()
            assert kept.data_ptr() % 16 == kept.untyped_storage().data_ptr() % 16
            assert kept.storage_offset() * kept.itemsize % ALIGNMENT_BYTES == 0
            torch.testing.assert_close(kept[:, :, :1], of_new)
            assert not kept[:, :, 1:].any()
            storages.add(kept.untyped_storage().data_ptr())
            kept.fill_(1)
    assert len(storages) == 4  # keys and values of two shapes
    cache.clear_from(2)
    for layer in cache.layers:
        for kept in (layer.keys, layer.values):
            assert kept[:, :, :2].all()
            assert not kept[:, :, 2:].any()


def test_layers_of_unlike_shapes_take_what_they_need() -> None:
    heads = [8, 8, 2, 8]
    cache = make_caches([*heads, 0], Position(torch.device("cpu")))
    for layer, count in zip(cache.layers, heads, strict=False):
        layer.update(*[torch.ones(1, count, 1, 64)] * 2)
    blocks = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in cache.layers[:4]
        for tensor in (layer.keys, layer.values)
    }
    assert sum(blocks.values()) == 2 * sum(heads) * CONTEXT * 64 * 4
