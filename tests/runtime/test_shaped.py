"""Tensors without values: operators make of them what they make of real ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from offplan.runtime.stock import shaped
from offplan.runtime.stock.shaped import ShapedTensor, drop_values, list_tensors, storage_of
from tests.tiers import first_quick

Make = Callable[..., Any]

MADE: dict[str, Make] = {
    "sum of types": lambda x, i: x + i[:1],
    "whole numbers divided": lambda x, i: (i / 2, i // 2, i * 2, i * 2.0, i * True),
    "transposed": lambda x, i: x.mT.contiguous(),
    "parts": lambda x, i: (*x.split([1, 3], 1), *x.chunk(2, 1), *x.unbind()),
    "slices": lambda x, i: (x[:, 1:3], x[-1], x[..., None], x[:, -2:], x[:, ::2], x[:, 4:]),
    "looked up": lambda x, i: x[i],
    "looked up in real": lambda x, i: torch.ones(4, 5)[i],
    "written": lambda x, i: x.index_put_((i,), x[:2] + 1),
    "largest": lambda x, i: tuple(x.topk(2)),
    "product": lambda x, i: torch.nn.functional.linear(x, torch.ones(2, 4)),
    "norm": lambda x, i: torch.nn.functional.layer_norm(x.bfloat16(), [4]),
    "expanded": lambda x, i: x[:, None].expand(3, 2, 4),
    "reshaped": lambda x, i: (x.view(2, 6), x.mT.reshape(12), x.flatten()),
    "complex": lambda x, i: torch.view_as_real(torch.view_as_complex(x.view(3, 2, 2)) * 1j),
    "attention": lambda x, i: torch.nn.functional.scaled_dot_product_attention(
        *[x.view(1, 1, 3, 4)] * 3
    ),
}


@pytest.mark.parametrize("name", first_quick([*MADE]))
def test_operators_make_what_they_make_of_values(name: str) -> None:
    values, numbers = torch.ones(3, 4), torch.zeros(2, dtype=torch.int64)
    expected = list_tensors([MADE[name](values, numbers)])
    for _ in range(2):  # torch is asked, and what it answered is read again
        given = drop_values(values)
        made = list_tensors([MADE[name](given, drop_values(numbers))])
        for got, wanted in zip(made, expected, strict=True):
            assert isinstance(got, ShapedTensor)
            assert (got.shape, got.stride(), got.dtype) == (
                wanted.shape,
                wanted.stride(),
                wanted.dtype,
            )
            is_view = wanted.untyped_storage()._cdata == values.untyped_storage()._cdata
            assert (storage_of(got) is storage_of(given)) == is_view
            assert is_view or storage_of(got).nbytes() == wanted.untyped_storage().nbytes()


def test_what_is_written_in_place_stays_the_tensor() -> None:
    for _ in range(2):
        given, real = drop_values(torch.empty(3, 4)), torch.zeros(3, 4)
        assert given.mul_(2) is given
        assert given.copy_(torch.ones(4)) is given
        assert storage_of(real.copy_(given)) is real.untyped_storage()


RAISING: dict[str, Make] = {
    "a number": lambda x, i: int(i[0]),
    "a condition": lambda x, i: bool((x > 0).all()),
    "a list": lambda x, i: i.tolist(),
    "as many as are not zero": lambda x, i: x[x > 0],
    "as often as numbers say": lambda x, i: torch.repeat_interleave(x[:2], i, 0),
    "a tensor that lies otherwise": lambda x, i: x.unsqueeze_(0),
    "a tensor resized": lambda x, i: x.resize_(2),
    "signs left for later": lambda x, i: torch.view_as_complex(x.view(3, 2, 2)).conj(),
}


@pytest.mark.parametrize("name", first_quick([*RAISING]))
def test_what_shapes_do_not_tell_raises(name: str) -> None:
    for _ in range(2):
        given = drop_values(torch.empty(3, 4)), drop_values(torch.empty(2, dtype=torch.int64))
        with pytest.raises((RuntimeError, NotImplementedError)):
            RAISING[name](*given)


def test_steps_of_a_loop_ask_once() -> None:
    given = drop_values(torch.empty(5, 7, 11))
    given[0, :2].add(given[1, 2:4])
    before = len(shaped._ANSWERS)
    for step in range(1, 4):
        given[step, :2].add(given[step + 1, step : step + 2])
    assert len(shaped._ANSWERS) == before
