import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from offplan.checkpoint.headers import LENGTH_BYTES, header_length, parse_header
from offplan.checkpoint.tensors import DTYPE_BITS, TensorInfo
from offplan.errors import CheckpointError
from tests.checkpoint.files import entries, header_bytes, safetensors_bytes


def parse(data: bytes, file_bytes: int | None = None) -> list[TensorInfo]:
    size = len(data) if file_bytes is None else file_bytes
    length = header_length(data[:LENGTH_BYTES], size, "x.safetensors")
    return parse_header(data[LENGTH_BYTES : LENGTH_BYTES + length], size, "x", "x.safetensors")


def entry(**changes: object) -> bytes:
    fields = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
    return header_bytes({"a": fields}) + bytes(8)


def test_reads_what_stands_in_a_header():
    data = safetensors_bytes({"b": ("BF16", (2, 3)), "a": ("F32", ()), "empty": ("U8", (0, 4))})
    start = len(data) - 16
    assert parse(data) == [
        TensorInfo("b", "BF16", (2, 3), "x", start),
        TensorInfo("a", "F32", (), "x", start + 12),
        TensorInfo("empty", "U8", (0, 4), "x", start + 16),
    ]


def test_order_of_the_json_is_not_the_order_of_the_data():
    header, size = entries({"a": ("U8", (3,)), "b": ("U8", (5,))})
    data = header_bytes(dict(reversed(header.items()))) + bytes(size)
    assert [tensor.name for tensor in parse(data)] == ["a", "b"]


def test_json_may_be_padded_on_either_side():
    header, size = entries({"a": ("U8", (3,))})
    padded = b"\t\n  " + json.dumps(header).encode() + b" \r\n"
    (tensor,) = parse(header_bytes(padded) + bytes(size))
    assert tensor.offset == 8 + len(padded)


def test_packed_type_takes_half_a_byte():
    assert parse(safetensors_bytes({"a": ("F4", (4, 3))}))[0].nbytes == 6


ODD = {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}
TWO = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
PAST = b'{"dtype": "U8", "shape": [4], "data_offsets": [0, 4], "x": 1e999}'
MALFORMED = {
    "empty file": (b"", "8 bytes of header length"),
    "short length": (b"\x01\x02", "found 2 bytes"),
    "length past the end": (struct.pack("<Q", 1000) + b"{}", "found a file of 10 bytes"),
    "length past the limit": (struct.pack("<Q", 2**63) + b"{}", "100000000 at most"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "not an object": (header_bytes(b"[1, 2]"), "expected a JSON object"),
    "space before no object": (header_bytes(b" []"), "expected a JSON object"),
    "more values than any model": (header_bytes(b'{"a":[' + b"[]," * 5_000_000), "JSON values"),
    "no json": (header_bytes(b"{nonsense"), "not valid JSON"),
    "bad utf-8": (header_bytes(b'{"\xff": 1}'), "not valid JSON"),
    "deep nesting": (header_bytes(b'{"a":' + b"[" * 100_000), "not valid JSON"),
    "huge number": (header_bytes(b'{"a":' + b"9" * 5000 + b"}"), "not valid JSON"),
    "duplicate tensor": (header_bytes(b'{"a": 1, "a": 2}'), "'a' stands twice"),
    "duplicate field": (header_bytes(b'{"a": {"dtype": "U8", "dtype": "I8"}}'), "stands twice"),
    "lone surrogate": (header_bytes({"\ud800": TWO}) + bytes(4), "expected printable text"),
    "name that steers a terminal": (
        header_bytes({"\x1b[2J": TWO}) + bytes(4),
        "expected printable",
    ),
    "name of two lines": (header_bytes({"a\nb": TWO}) + bytes(4), "expected printable"),
    "name that turns the text": (header_bytes({"a\u202eb": TWO}) + bytes(4), "expected printable"),
    "endless name": (header_bytes({"1." * 9999: TWO}) + bytes(4), "1024 at most"),
    "metadata of numbers": (header_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata of half a character": (header_bytes({"__metadata__": {"a": "\ud800"}}), "__metadata"),
    "nested past safetensors' limit": (entry(x=json.loads("[" * 200 + "]" * 200)), "alone"),
    "number past a float": (header_bytes(b'{"a": %s}' % PAST) + bytes(4), "alone"),
    "no number": (entry(x=float("nan")), "alone"),
    "half a character in a further key": (entry(x="\ud800"), "alone"),
    "a further key": (entry(x=1), "alone"),
    "negative zero": (
        header_bytes(b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [-0, 4]}}') + bytes(4),
        "data_offsets",
    ),
    "entry is a list": (header_bytes({"a": []}), "expected dtype, shape"),
    "no offsets": (header_bytes({"a": {"dtype": "U8", "shape": [1]}}), "expected dtype, shape"),
    "unknown dtype": (entry(dtype="F33"), "found dtype 'F33'"),
    "dtype is a list": (entry(dtype=["F32"]), "found dtype"),
    "negative size": (entry(shape=[-2]), "expected whole numbers"),
    "boolean size": (entry(shape=[True]), "expected whole numbers"),
    "fractional size": (entry(shape=[2.0]), "expected whole numbers"),
    "shape is text": (entry(shape="2"), "expected whole numbers"),
    "span of another shape": (entry(shape=[3]), "found 8 bytes"),
    "overflowing shape": (entry(shape=[2**63] * 1000), "found 8 bytes"),
    "part of a byte": (header_bytes({"a": ODD}) + bytes(1), "found 1 bytes"),
    "offsets backwards": (entry(data_offsets=[8, 0]), "first <= last"),
    "three offsets": (entry(data_offsets=[0, 8, 8]), "first <= last"),
    "negative offset": (entry(data_offsets=[-8, 0]), "data_offsets"),
    "hole at the start": (entry(data_offsets=[8, 16]) + bytes(8), "leaves a hole"),
    "overlap": (header_bytes({"a": TWO, "b": TWO}) + bytes(4), "overlaps"),
    "data cut short": (entry()[:-1], "expected"),
    "bytes after the data": (entry() + b"\0", "expected"),
}


@pytest.mark.parametrize(("data", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_header_is_refused_in_one_line(data, message):
    with pytest.raises(CheckpointError) as raised:
        parse(data)
    text = str(raised.value)
    assert message in text
    assert text.startswith("x.safetensors: ")
    assert text.isprintable()
    assert len(text) < 700


STRICTER = {
    "a further key",
    "duplicate tensor",
    "endless name",
    "name that steers a terminal",
    "name of two lines",
    "name that turns the text",
}
"""What offplan refuses though safetensors takes the last of the two, any name or any key."""


@pytest.mark.parametrize("name", MALFORMED)
def test_safetensors_refuses_it_too(name):
    data, _ = MALFORMED[name]
    if name in STRICTER:
        return
    with pytest.raises(SafetensorError):
        deserialize(data)


def described(changes: str, num_bytes: int = 16) -> bytes:
    """One I32 tensor [2, 2] as safetensors' own tests write it, with changes."""
    old, _, new = changes.partition(" -> ")
    text = '{"test":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}}'
    assert old in text
    return header_bytes(text.replace(old, new).encode()) + bytes(num_bytes)


ATTACK = {
    f"weight_{i}": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} for i in range(9)
}
LIBRARY_CASES = {
    "json attack: every tensor on the same bytes": header_bytes(ATTACK) + bytes(16),
    "metadata incomplete buffer: a polyglot's other half": described(" -> ") + b"extra_bogus_data",
    "metadata incomplete buffer: two bytes short": described(" -> ", 14),
    "header too large": b"<\0\0\0\0\xff\xff\xff" + described(" -> ")[8:],
    "header too small": b"",
    "invalid header length": b"<" + bytes(7),
    "invalid header, no utf-8": b"\x01" + bytes(7) + b"\xff",
    "invalid header, no json": b"\x01" + bytes(7) + b"{",
    "invalid info": described("16 -> 4", 4),
    "validation overflow in the shape": described("[2,2] -> [2,18446744073709551614]"),
    "validation overflow in the bytes": described("[2,2] -> [2,9223372036854775807]"),
    "misaligned fp4": described('"I32","shape":[2,2] -> "F4","shape":[1,3]', 16),
}
"""Source: the cases of the tests in ``safetensors/src/tensor.rs`` of safetensors 0.8."""


@pytest.mark.parametrize("data", LIBRARY_CASES.values(), ids=LIBRARY_CASES)
def test_malformed_files_of_safetensors_own_tests(data):
    with pytest.raises(SafetensorError):
        deserialize(data)
    with pytest.raises(CheckpointError, match=r"^x\.safetensors: "):
        parse(data)


@pytest.mark.parametrize(
    "data",
    [
        described(" -> "),
        safetensors_bytes({"test": ("I32", ())}),
        safetensors_bytes({"test": ("I32", (2, 0))}),
        header_bytes(b"\t\n{}\r "),
        header_bytes(b"{}\r \t\n"),
    ],
    ids=["plain", "scalar", "no elements", "padded before", "padded after"],
)
def test_unusual_files_of_safetensors_own_tests_are_read(data):
    assert len(parse(data)) == len(deserialize(data))


def test_unknown_file_size_leaves_missing_data_unnoticed():
    data = entry()
    assert parse_header(data[LENGTH_BYTES:-8], None, "x", "x")[0].nbytes == 8


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_file_never_raises_anything_else(data):
    whole = bytearray(safetensors_bytes({"a": ("F32", (2, 3)), "b.c": ("BF16", (5,))}))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(whole) - 1))
        whole[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    try:
        tensors = parse(bytes(whole[:cut]))
    except CheckpointError:
        return
    assert sum(tensor.nbytes for tensor in tensors) == 34


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BITS, "X"]) | JSON,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 40), max_size=3) | JSON,
    }
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(header=st.dictionaries(st.text(max_size=6), ENTRY | JSON, max_size=3) | JSON)
def test_any_json_is_read_or_refused(header):
    data = header_bytes(json.dumps(header).encode("utf-8", "surrogatepass")) + bytes(8)
    try:
        tensors = parse(data)
    except CheckpointError:
        return
    assert len(tensors) == len(deserialize(data))
    assert sum(tensor.nbytes for tensor in tensors) == 8


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
            lambda name: name.isprintable() and name != "__metadata__"
        ),
        st.tuples(st.sampled_from(["BF16", "F32", "U8"]), st.tuples(st.integers(0, 4))),
        max_size=6,
    )
)
def test_round_trip(shapes):
    tensors = parse(safetensors_bytes(shapes))
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors} == shapes
