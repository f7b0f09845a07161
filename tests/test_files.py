"""Files written whole, and caches read back."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from offplan import files
from offplan.files import answer_path, keep, read_kept, write_whole


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


def test_what_is_kept_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    assert read_kept(path, 9) is None
    assert keep(path, b"123456789")
    assert read_kept(path, 9) == b"123456789"
    assert read_kept(path, 8) is None


def test_what_has_changed_is_not_read_back(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    keep(path, b"abc")
    whole = path.read_bytes()
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1
        path.write_bytes(flipped)
        assert read_kept(path, 9) is None
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert read_kept(path, 9) is None


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_folder(path: Path) -> None:
    path.mkdir()


def put_endless_link(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("put", [put_pipe, put_link_to_device, put_folder, put_endless_link])
def test_what_is_no_file_is_not_opened(tmp_path: Path, put: Callable[[Path], None]) -> None:
    put(tmp_path / "kept")
    assert read_kept(tmp_path / "kept", 9) is None


def test_an_answer_depends_on_what_was_asked_and_what_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = {answer_path("sizes", *asked) for asked in ((), ("a", "b"), ("ab",), ("b", "a"))}
    assert answer_path("sizes", "ab") in paths
    installed = files.distribution

    def without_files(name: str) -> object:  # as another build of one version lists other ones
        package = installed(name)
        monkeypatch.setattr(package, "read_text", lambda _: "")
        return package

    monkeypatch.setattr(files, "distribution", without_files)
    assert len({*paths, answer_path("sizes", "ab")}) == 5
