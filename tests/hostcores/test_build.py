"""The library is built once, by whatever compiler there is, where nobody else can write."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from offplan.errors import InputError, OffplanError, OffplanWarning
from offplan.hostcores import build


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the user's alone; pytest's own lies below one that all may write to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(build, "_load", lambda path: path)
    return tmp_path / "offplan" / "hostcores"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes its arguments down and makes empty files."""
    script = tmp_path / "compiler"
    script.write_text(
        '#!/bin/sh\nfor last; do :; done\nif [ "$last" = --version ]; then echo one; exit; fi\n'
        f'echo "$@" >> {tmp_path}/calls\necho made > "$last"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return tmp_path / "calls"


def load() -> Path:
    """Return the file that would be loaded."""
    path = build.load_code()
    assert isinstance(path, Path)
    return path


def test_it_is_built_once(cache: Path, fake: Path) -> None:
    first = load()
    num_calls = len(fake.read_text().splitlines())
    assert num_calls == 6  # five objects and the link
    assert load() == first
    assert len(fake.read_text().splitlines()) == num_calls
    assert [each.name for each in cache.iterdir()] == [first.name]
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_another_source_or_compiler_is_another_library(
    cache: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = load()
    monkeypatch.setenv("CXX", f"{tmp_path}/compiler -O1")
    assert load() != first


def test_what_comes_with_a_wheel_needs_no_compiler(
    cache: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = os.environ["CXX"]
    monkeypatch.setattr(build, "_ZIG", (compiler, "-target"))
    made = build.prebuild()
    assert list((tmp_path / "prebuilt").iterdir()) == [made]
    calls = fake.read_text()
    assert "-mcpu=x86_64_v4+avx512bf16+avx512vbmi+avx512vnni" in calls
    assert "-march" not in calls
    assert load() != made  # whoever names a compiler has it compile
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert load() == made
    # of other flags, it is another library
    monkeypatch.setattr(build, "_FLAGS", ("-O1",))
    with pytest.raises(OffplanError, match="found none of"):
        load()


def test_what_others_can_write_is_not_loaded(cache: Path, fake: Path) -> None:
    path = load()
    cache.chmod(0o770)
    with pytest.raises(OffplanError, match=r"could be written by others .*mode 770\): chmod go-w"):
        load()
    cache.chmod(0o700)
    path.chmod(0o702)
    with pytest.raises(OffplanError, match="could be written by others"):
        load()
    path.symlink_to(path.rename(cache / "elsewhere"))
    with pytest.raises(OffplanError, match="loads no code through a link"):
        load()


def test_a_folder_above_counts(tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "own"))
    with pytest.raises(OffplanError, match="to a folder of your own"):
        load()


def cannot_be_made(cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    cache.parents[1].joinpath("file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parents[1] / "file"))
    return "Not a directory"


def has_no_room(cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    def write(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(build, "write_whole", write)
    return "No space left on device"


def is_not_to_be_executed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    def refuse(path: Path) -> Path:
        if path.is_relative_to(cache):
            raise OSError(f"{path}: failed to map segment from shared object")
        return path

    monkeypatch.setattr(build, "_load", refuse)
    return "failed to map segment from shared object"


def has_no_home(cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    return "HOME is not set"


@pytest.mark.parametrize(
    "unusable", [cannot_be_made, has_no_room, is_not_to_be_executed, has_no_home]
)
def test_a_cache_that_cannot_be_used_costs_time_alone(
    cache: Path,
    fake: Path,
    monkeypatch: pytest.MonkeyPatch,
    unusable: Callable[[Path, pytest.MonkeyPatch], str],
) -> None:
    why = unusable(cache, monkeypatch)
    with pytest.warns(OffplanWarning, match=rf"compiled anew .* \({why}.*\); set XDG_CACHE_HOME"):
        path = load()
    assert not path.exists()  # it is loaded, and needs no file any more


def test_no_folder_to_load_from(cache: Path, fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> Path:
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(build, "_load", refuse)
    with pytest.raises(OffplanError, match=r"neither from .* nor from .* and without noexec"):
        load()


def test_what_was_cut_short_is_built_again(cache: Path, fake: Path) -> None:
    path = load()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert load() == path
    assert path.read_bytes() == whole
    assert [*cache.iterdir()] == [path]


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OffplanError, match=r"found none of c\+\+, g\+\+, clang\+\+: install one"):
        load()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match="CXX names no-such-compiler, which is not there"):
        load()
    monkeypatch.setenv("CXX", 'g++ "')
    with pytest.raises(InputError, match=r"CXX is no command .*: correct it, or unset CXX"):
        load()


def test_a_compiler_that_fails(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "compiler"
    script.write_text("#!/bin/sh\necho 'error: what is AVX-512' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(OffplanError, match=r"failed \(error: what is AVX-512\). Use a compiler"):
        load()
    assert not list(cache.iterdir())
    script.write_text("#!/bin/sh\necho 'error: No space left on device' >&2\nexit 1\n")
    with pytest.raises(OffplanError, match="Make room there, or set TMPDIR"):
        load()


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "aarch64")])
def test_other_platforms(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(build.sys, "platform", system)
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    with pytest.raises(OffplanError, match=f"needs Linux .* found {system} on {machine}"):
        load()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_what_is_anothers_is_not_loaded(cache: Path, fake: Path) -> None:
    path = load()
    os.chown(path, 12345, -1)
    with pytest.raises(OffplanError, match="owner 12345"):
        load()
