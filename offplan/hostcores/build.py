"""The library is compiled once for each source and compiler, into a folder that is the user's own.

Code is loaded from that folder, so nobody else may be able to write there: the owners and modes of
the file, its folder and all folders above are checked each time.
"""

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from offplan.errors import OffplanError
from offplan.forms.form import BASE_BYTES, PATCH_ROWS
from offplan.forms.host_kernels import CHUNK_COLUMNS, MOST_COLUMNS

SOURCE = Path(__file__).parent / "source"
COMPILERS = ("c++", "g++", "clang++")
"""Compilers that are looked for, in order, where the environment variable CXX names none."""
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-trapping-math",
)
_DEFINES = (
    f"-DPATCH_ROWS={PATCH_ROWS}",
    f"-DBASE_BYTES={BASE_BYTES}",
    f"-DCHUNK_COLUMNS={CHUNK_COLUMNS}",
    f"-DMOST_COLUMNS_OF_A_ROW={MOST_COLUMNS}",
)
_FILES = {
    "library.cpp": ("-march=x86-64",),
    "coordinator.cpp": ("-march=x86-64",),
    "products.cpp": ("-march=x86-64",),
    "avx2.cpp": ("-march=x86-64-v3",),
    "avx512.cpp": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi"),
}
"""Flags of each file. What any processor runs is linked first: of what several files have in
common, the linker keeps the first."""
PREBUILT = Path(__file__).parent / "prebuilt"
"""Has the library in wheels for Linux on x86-64, and nothing in a checkout."""
_ZIG = (sys.executable, "-m", "ziglang", "c++", "-target", "x86_64-linux-gnu.2.17", "-s")
_ZIG_PROCESSORS = {
    "library.cpp": ("-mcpu=x86_64",),
    "coordinator.cpp": ("-mcpu=x86_64",),
    "products.cpp": ("-mcpu=x86_64",),
    "avx2.cpp": ("-mcpu=x86_64_v3",),
    "avx512.cpp": ("-mcpu=x86_64_v4+avx512bf16+avx512vbmi",),
}
"""What ``_FILES`` has, as zig names processors."""
_TIMEOUT_S = 300


def refuse(why: str) -> OffplanError:
    """Make the error for a host whose cores cannot compute ``decode: host``."""
    return OffplanError(f"`decode: host` {why}; or plan without the host's cores: `decode: uva`")


def check_platform() -> None:
    """Raise OffplanError where the library does not run: it is for Linux on x86-64."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise refuse(
            f"needs Linux on an x86-64 processor with AVX2, found {sys.platform} on "
            f"{platform.machine()}: run the plan on such a host"
        )


def find_library() -> Path:
    """Find the library for this source and compiler, compiling it first where it is not there yet.

    That takes some ten seconds, once. What came with offplan's wheel is taken as it is, unless CXX
    names a compiler. Raises OffplanError where there is no compiler, it fails, or the folder is not
    the user's alone.
    """
    check_platform()
    prebuilt = PREBUILT / f"hostcores-{_digest()}.so"
    if prebuilt.exists() and not os.environ.get("CXX"):
        return prebuilt  # who can write there can write offplan's own code, too
    folder = _make_folder()
    compiler = find_compiler()
    path = folder / f"hostcores-{_digest(compiler)}.so"
    if not path.exists():
        _compile(compiler, folder, path)
    check_own(path)
    return path


def find_compiler() -> list[str]:
    """Find a C++ compiler, as the words of its command; raises OffplanError where there is none."""
    if named := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(named[0]) is None:
            raise refuse(f"needs a C++ compiler, and CXX names {named[0]}, which is not there")
        return named
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        raise refuse(
            f"needs a C++ compiler to build its kernels, found none of {', '.join(COMPILERS)}: "
            "install one (Debian, Ubuntu: apt-get install g++), or name one in CXX"
        )
    return [found]


def check_own(path: Path) -> None:
    """Raise OffplanError where somebody else could have written a file, or a folder above it."""
    user = os.getuid()
    for each in (path, *path.parents):
        found = each.lstat()
        if stat.S_ISLNK(found.st_mode) and each == path:
            raise refuse(f"loads no code through a link, found one at {each}: remove it")
        if stat.S_ISLNK(found.st_mode):
            found = each.stat()
        # in a sticky folder nobody can exchange what is another's
        is_open = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (user, 0) or is_open:
            raise refuse(
                f"loads code from {path}, and {each} could be written by others (owner "
                f"{found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}): chmod go-w {each}, or set "
                "XDG_CACHE_HOME to a folder of your own"
            )


def _make_folder() -> Path:
    """Make the folder that libraries are kept in, for the user alone."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(home).expanduser().resolve() / "offplan" / "hostcores"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise refuse(
            f"keeps its kernels in {folder}, which cannot be made ({error.strerror}): set "
            "XDG_CACHE_HOME to a folder of your own"
        ) from error
    check_own(folder)
    return folder


def prebuild() -> Path:
    """Compile the library that a wheel has, by zig, for any Linux on x86-64 since glibc 2.17.

    Raises OffplanError where the package ``ziglang`` is not there, or it fails.
    """
    shutil.rmtree(PREBUILT, ignore_errors=True)
    PREBUILT.mkdir()
    path = PREBUILT / f"hostcores-{_digest()}.so"
    _compile([*_ZIG], PREBUILT, path, _ZIG_PROCESSORS)
    path.chmod(0o755)
    return path


def _digest(compiler: Sequence[str] = ()) -> str:
    """Name what the library is made of: source, flags and the compiler, if it is said."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((_FLAGS, _DEFINES, _FILES, compiler)).encode())
    if compiler:
        told = subprocess.run([*compiler, "--version"], capture_output=True, check=False)
        digest.update(told.stdout)
    return digest.hexdigest()[:32]


def _compile(
    compiler: list[str],
    folder: Path,
    path: Path,
    processors: Mapping[str, Sequence[str]] = _FILES,
) -> None:
    """Compile the files, each for its processor, in a folder of the user's."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        objects = [Path(made, name).with_suffix(".o") for name in _FILES]
        commands = [
            [*compiler, *_FLAGS, *_DEFINES, *flags, "-c", str(SOURCE / name), "-o", str(to)]
            for (name, flags), to in zip(processors.items(), objects, strict=True)
        ]
        whole = Path(made, path.name)
        link = [*compiler, "-shared", "-pthread", *map(str, objects), "-o", str(whole)]
        _run(commands)
        _run([link])
        whole.chmod(0o700)
        whole.replace(path)  # there whole, or not at all; of two that compile, either will do


def _run(commands: list[list[str]]) -> None:
    """Run commands beside one another; raises OffplanError with what the first that fails says."""
    started = [
        (each, subprocess.Popen(each, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        for each in commands
    ]
    failed = None
    for command, process in started:
        try:
            _, said = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            _, said = process.communicate()
        if process.returncode and failed is None:
            first = next((line for line in said.splitlines() if "error" in line), said[:200])
            failed = refuse(
                f"could not build its kernels: {' '.join(command)} failed ({first.strip()}). Use a "
                "compiler that knows AVX-512 BF16 (GCC 10, Clang 11 or newer), and name it in CXX"
            )
    if failed is not None:
        raise failed


if __name__ == "__main__":  # in a release: see .github/workflows/release.yml
    print(prebuild())
