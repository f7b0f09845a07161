"""The library is built once, by whatever compiler there is, where nobody else can write."""

import os
import stat
from pathlib import Path

import pytest

from offplan.errors import OffplanError
from offplan.hostcores import build


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the user's alone; pytest's own lies below one that all may write to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
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


def test_it_is_built_once(cache: Path, fake: Path) -> None:
    first = build.find_library()
    num_calls = len(fake.read_text().splitlines())
    assert num_calls == 6  # five files and the link
    assert build.find_library() == first
    assert len(fake.read_text().splitlines()) == num_calls
    assert [each.name for each in cache.iterdir()] == [first.name]
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_another_source_or_compiler_is_another_library(
    cache: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = build.find_library()
    monkeypatch.setenv("CXX", f"{tmp_path}/compiler -O1")
    assert build.find_library() != first


def test_what_comes_with_a_wheel_needs_no_compiler(
    cache: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = os.environ["CXX"]
    monkeypatch.setattr(build, "_ZIG", (compiler, "-target"))
    made = build.prebuild()
    assert list((tmp_path / "prebuilt").iterdir()) == [made]
    calls = fake.read_text()
    assert "-mcpu=x86_64_v4+avx512bf16+avx512vbmi" in calls
    assert "-march" not in calls
    assert build.find_library() != made  # whoever names a compiler has it compile
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert build.find_library() == made
    # of other flags, it is another library
    monkeypatch.setattr(build, "_FLAGS", ("-O1",))
    with pytest.raises(OffplanError, match="found none of"):
        build.find_library()


def test_zig_compiles_the_same_files() -> None:
    assert build._ZIG_PROCESSORS.keys() == build._FILES.keys()


def test_what_others_can_write_is_not_loaded(cache: Path, fake: Path) -> None:
    path = build.find_library()
    cache.chmod(0o770)
    with pytest.raises(OffplanError, match=r"could be written by others .*mode 770\): chmod go-w"):
        build.find_library()
    cache.chmod(0o700)
    path.chmod(0o702)
    with pytest.raises(OffplanError, match="could be written by others"):
        build.find_library()
    path.unlink()
    path.symlink_to("/bin/true")
    with pytest.raises(OffplanError, match="loads no code through a link"):
        build.find_library()


def test_a_folder_above_counts(tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "own"))
    with pytest.raises(OffplanError, match="set XDG_CACHE_HOME to a folder of your own"):
        build.find_library()


def test_a_folder_that_cannot_be_made(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OffplanError, match="cannot be made"):
        build.find_library()


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OffplanError, match=r"found none of c\+\+, g\+\+, clang\+\+: install one"):
        build.find_library()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(OffplanError, match="CXX names no-such-compiler, which is not there"):
        build.find_library()


def test_a_compiler_that_fails(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "compiler"
    script.write_text("#!/bin/sh\necho 'error: what is AVX-512' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(OffplanError, match=r"failed \(error: what is AVX-512\). Use a compiler"):
        build.find_library()
    assert not list(cache.iterdir())


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "aarch64")])
def test_other_platforms(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(build.sys, "platform", system)
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    with pytest.raises(OffplanError, match=f"needs Linux .* found {system} on {machine}"):
        build.find_library()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_what_is_anothers_is_not_loaded(cache: Path, fake: Path) -> None:
    path = build.find_library()
    os.chown(path, 12345, -1)
    with pytest.raises(OffplanError, match="owner 12345"):
        build.find_library()
