"""Files written whole."""

import errno
import os
import stat
from pathlib import Path

import pytest

from offplan.files import write_whole


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o755, 0o400])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "plan.yaml"
    path.touch()
    path.chmod(mode)
    write_whole(path, b"new")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", mode)
    assert [*tmp_path.iterdir()] == [path]


def test_a_new_file_gets_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "new", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "plan.yaml"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]
