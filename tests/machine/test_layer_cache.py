"""Layer times kept on disk."""

from pathlib import Path
from typing import Any

import pytest

from offplan.machine.layer_cache import LayerTimeCache
from offplan.machine.profile import LayerTime

KEY: dict[str, Any] = {"gpu": ["a", 1], "torch": "2", "layers": ["x", "y"], "batch": 1}
TIMES = (
    LayerTime(layer="x", phase="decode", batch=1, tokens=1, context=64, seconds=0.1 + 0.2),
    LayerTime(layer="y", phase="prefill", batch=1, tokens=8, context=8, seconds=1e-5),
)


def entries(home: Path) -> list[Path]:
    return sorted((home / "offplan" / "layer-times").iterdir())


def test_times_come_back_as_they_were(tmp_path: Path) -> None:
    assert LayerTimeCache(tmp_path, KEY).load() is None
    assert LayerTimeCache(tmp_path, KEY).store(TIMES)
    assert LayerTimeCache(tmp_path, dict(reversed(KEY.items()))).load() == TIMES


@pytest.mark.parametrize("name", KEY)
def test_any_change_is_another_entry(tmp_path: Path, name: str) -> None:
    LayerTimeCache(tmp_path, KEY).store(TIMES)
    changed = LayerTimeCache(tmp_path, KEY | {name: "other"})
    assert changed.load() is None
    assert LayerTimeCache(tmp_path, {k: v for k, v in KEY.items() if k != name}).load() is None
    changed.store(TIMES[:1])
    assert LayerTimeCache(tmp_path, KEY).load() == TIMES


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"[]",
        lambda whole: b"null",
        lambda whole: b"\xff\xfe",
        lambda whole: whole.replace(b'"seconds"', b'"minutes"'),
        lambda whole: whole.replace(b'"torch": "2"', b'"torch": "3"'),
        lambda whole: whole.replace(b"1e-05", b"-1"),
    ],
)
def test_a_damaged_file_is_absent_and_written_again(tmp_path: Path, damage: Any) -> None:
    cache = LayerTimeCache(tmp_path, KEY)
    cache.store(TIMES)
    (path,) = entries(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    assert cache.load() is None
    assert cache.store(TIMES)
    assert cache.load() == TIMES
    assert entries(tmp_path) == [path]


def test_a_disk_that_refuses_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "offplan").write_text("a file where the folder should be")
    cache = LayerTimeCache(tmp_path, KEY)
    assert not cache.store(TIMES)
    assert cache.load() is None
