"""Units: parsed as people write them, printed in one way."""

import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offplan import units
from offplan.errors import InputError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("16GiB", 16 * 2**30),
        ("16 gib", 16 * 2**30),
        ("24GB", 24 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("8G", 8 * 2**30),
        ("8g", 8 * 2**30),
        ("4096B", 4096),
        (4096, 4096),
        ("0", 0),
    ],
)
def test_parse_bytes(text: str | int, num_bytes: int) -> None:
    assert units.parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1GiB",
        "16 Gi B",
        "sixteen",
        "16GiB/s",
        "1e400",
        "nan",
        "1e999999GiB",
        f"1e{9**30}B",
    ],
)
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(InputError):
        units.parse_bytes(text)


@pytest.mark.parametrize(
    ("parse", "text", "meant"),
    [
        (units.parse_bytes, "8", "8GiB"),
        (units.parse_bytes, " 16384 ", "16384MiB"),
        (units.parse_bytes, "17179869184", "17179869184B"),
        (units.parse_seconds, "50", "50ms"),
        (units.parse_seconds, "1.5", "1.5s"),
        (units.parse_rate, "25", "25GB/s"),
        (units.parse_flops, "165", "165TFLOP/s"),
    ],
)
def test_a_text_without_unit_is_refused_with_the_one_that_is_probably_meant(
    parse: Callable[[str], float], text: str, meant: str
) -> None:
    with pytest.raises(InputError, match=f"has no unit: is {meant} meant"):
        parse(text)


@pytest.mark.parametrize("text", ["16GiB", "24 GB", "1.5 MiB", "8g", "1e9 B", "139.8 GiB", "3 TiB"])
def test_a_budget_is_printed_as_it_was_typed(text: str) -> None:
    typed = text.replace("8g", "8 GiB").replace("16GiB", "16 GiB").replace("1e9 B", "1 GB")
    assert units.format_budget(units.parse_bytes(text)) == typed


def test_a_budget_that_nobody_typed_has_four_digits() -> None:
    assert units.format_budget(17179869183) == "16 GiB"
    assert units.format_bytes_exact(17179869183) == "17179869183 B"


@given(st.text("0123456789.GgiIbBkK /s", max_size=12))
def test_the_pattern_takes_the_texts_that_are_read(text: str) -> None:
    is_read = nullcontext() if re.match(units.SIZE.pattern, text) else pytest.raises(InputError)
    with is_read:
        units.parse_bytes(text)


@pytest.mark.parametrize(
    ("sizes", "unit", "figures"),
    [
        ([9_597_317_120, 419_430_400, 0], "GiB", ["8.938", "0.391", "0.000"]),
        ([700 * 2**30, 2**30], "GiB", ["700.0", "1.0"]),
        ([3 * 2**40], "TiB", ["3.000"]),
        ([1023, 5], "B", ["1,023", "5"]),
        ([], "B", []),
    ],
)
def test_sizes_of_a_column_share_a_unit(sizes: list[int], unit: str, figures: list[str]) -> None:
    assert units.format_bytes_alike(sizes) == (unit, figures)


@pytest.mark.parametrize(
    ("seconds", "text"), [(1e-3, "1 ms"), (1.0, "1 s"), (9.999e-4, "999.9 us")]
)
def test_a_whole_unit_is_one_of_it(seconds: float, text: str) -> None:
    assert units.format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_rate, "55.4 GB/s", 55.4e9),
        (units.parse_rate, "4.17TB/s", 4.17e12),
        (units.parse_rate, "1 GiB/s", 2**30),
        (units.parse_flops, "680 TFLOP/s", 680e12),
        (units.parse_seconds, "5.4 us", 5.4e-6),
        (units.parse_seconds, "31 ms", 0.031),
        (units.parse_seconds, "2s", 2.0),
        (units.parse_seconds, 2, 2.0),
        (units.parse_seconds, "0", 0.0),
    ],
)
def test_parse_other_units(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (units.format_bytes, 31_412_968_448, "29.26 GiB"),
        (units.format_bytes, 17_301_504, "16.5 MiB"),
        (units.format_bytes, 480, "480 B"),
        (units.format_bytes, 0, "0 B"),
        (units.format_rate, 55.4e9, "55.4 GB/s"),
        (units.format_rate, 4.17e12, "4.17 TB/s"),
        (units.format_flops, 680e12, "680 TFLOP/s"),
        (units.format_seconds, 0.12569, "125.7 ms"),
        (units.format_seconds, 5.4e-6, "5.4 us"),
        (units.format_seconds, 5.69, "5.69 s"),
    ],
)
def test_format(show: Callable[[float], str], value: float, text: str) -> None:
    assert show(value) == text


@given(st.integers(0, 2**53))
def test_exact_bytes_read_back(num_bytes: int) -> None:
    assert units.parse_bytes(units.format_bytes_exact(num_bytes)) == num_bytes


@given(st.integers(0, 2**60) | st.integers(1023 * 2**20, 1025 * 2**20))
def test_what_is_printed_reads_back_to_what_prints_the_same(num_bytes: int) -> None:
    text = units.format_bytes(num_bytes)
    assert units.format_bytes(units.parse_bytes(text)) == text


@given(st.integers(0, 2**50))
def test_what_is_needed_is_never_rounded_down(num_bytes: int) -> None:
    enough = units.parse_bytes(units.format_bytes_enough(num_bytes))
    assert num_bytes <= enough <= num_bytes * 1.002 + 1


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (0.005612, 0.00784, "5.6 to 7.8 ms"),
        (0.0009, 0.0012, "900 us to 1.2 ms"),
        (0.99951, 0.99952, "1 s"),
    ],
)
def test_ranges_have_two_digits_and_one_unit(low: float, high: float, told: str) -> None:
    assert units.format_range(low, high, units.format_seconds) == told
    assert units.format_range(107.3, 191.2, units.format_frequency) == "110 to 190"
