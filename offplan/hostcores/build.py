"""The library is compiled once for each source and compiler, into a folder that is the user's own.

Its file's name has a digest of its content, which is checked before the file is loaded. Code is
loaded from that folder, so nobody else may be able to write there. The owners and modes of the
file, its folder and all folders above are checked each time.
"""

import ctypes
import errno
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from offplan.errors import InputError, OffplanError, OffplanWarning, Topic
from offplan.files import write_whole
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
_OBJECTS = {
    "library": ("library.cpp", "x86-64"),
    "coordinator": ("coordinator.cpp", "x86-64"),
    "products": ("products.cpp", "x86-64"),
    "avx2": ("kernels.cpp", "x86-64-v3"),
    "avx512": ("kernels.cpp", "x86-64-v4+avx512bf16+avx512vbmi+avx512vnni"),
}
"""Source and processor of each object file. Code for any processor is linked first: the linker
keeps the first copy of what several objects have in common."""
PREBUILT = Path(__file__).parent / "prebuilt"
"""Has the library in wheels for Linux on x86-64, and nothing in a checkout."""
_ZIG = (sys.executable, "-m", "ziglang", "c++", "-target", "x86_64-linux-gnu.2.17", "-s")
_TIMEOUT_S = 300


_OR_WITHOUT = "; or plan without the host's cores: `offplan replan PLAN --no-host-cores`"


def refuse(
    why: str, kind: type[OffplanError] = OffplanError, topic: Topic | None = None
) -> OffplanError:
    """Make the error for a host whose cores cannot compute ``decode: host``."""
    return kind(f"`decode: host` {why}{_OR_WITHOUT}", topic=topic)


def describe_refusal(error: OffplanError) -> str:
    """Return what an error says, for a plan that is without the host's cores already."""
    return f"{str(error).removesuffix(_OR_WITHOUT)}{error.more}"


def check_platform() -> None:
    """Raise OffplanError if the library does not run: it is for Linux on x86-64."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise refuse(
            f"needs Linux on an x86-64 processor with AVX2, found {sys.platform} on "
            f"{platform.machine()}: run the plan on such a host"
        )


def load_code() -> ctypes.CDLL:
    """Load the library for this source and compiler, compiling it first where it is not there yet.

    That takes some ten seconds, once. The library in offplan's wheel is taken as it is, unless CXX
    names a compiler. If nothing can be kept in the cache, or loaded from there, the library is
    compiled for this process alone, with an OffplanWarning. Raises InputError for a CXX that names
    no compiler, and OffplanError where there is none, it fails, or the cache is not the user's
    alone.
    """
    check_platform()
    prebuilt = _find_whole(PREBUILT, name_source())
    if prebuilt is not None and not os.environ.get("CXX"):
        return _load(prebuilt)  # who can write there can write offplan's own code, too
    compiler = find_compiler()
    source = name_source(compiler)
    folder = _cache_folder()
    try:
        _make_own(folder)
        if (kept := _find_whole(folder, source)) is not None:
            check_own(kept)
            return _load(kept)
        unusable = None
    except OSError as error:
        unusable = _say_why(error)
    with _room_to_compile() as made:
        built = made / "hostcores.so"
        _compile(compiler, made, built)
        if unusable is None:
            try:
                kept = _keep(built, folder, source)
                check_own(kept)
                return _load(kept)
            except OSError as error:
                unusable = _say_why(error)
        mend = "set XDG_CACHE_HOME to a folder of your own, with 2 MiB of room and without noexec"
        try:
            code = _load(built)
        except OSError as error:
            raise refuse(
                f"can load its kernels neither from {folder} ({unusable}) nor from {made.parent} "
                f"({_say_why(error)}): {mend}"
            ) from error
    warnings.warn(
        f"the kernels of the host's cores are compiled anew for each process, which takes ten "
        f"seconds: {folder} cannot be used ({unusable}); {mend}",
        OffplanWarning,
        stacklevel=2,
    )
    return code


def _load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def _say_why(error: OSError) -> str:
    """Say what the system has against a file; its linker's words begin with the file's name."""
    return error.strerror or str(error).rpartition(": ")[2]


def _cache_folder() -> Path:
    """Return the folder that libraries are kept in: a relative one where there is no home."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home if home.startswith("~") else os.path.realpath(home), "offplan", "hostcores")


def _make_own(folder: Path) -> None:
    """Make a folder for the user alone; raises OSError and what ``check_own`` raises."""
    if not folder.is_absolute():
        raise OSError(errno.ENOENT, "HOME is not set, and the user has no entry in passwd")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_own(folder)


@contextmanager
def _room_to_compile() -> Iterator[Path]:
    """Make a folder for the user alone, which is removed in the end."""
    try:
        room = tempfile.TemporaryDirectory(prefix="offplan-", ignore_cleanup_errors=True)
    except OSError as error:
        raise refuse(
            f"has no room to compile its kernels in ({_say_why(error)}): set TMPDIR to a folder "
            "with 10 MiB of it"
        ) from error
    with room as made:
        folder = Path(made).resolve()
        check_own(folder)
        yield folder


def _find_whole(folder: Path, source: str) -> Path | None:
    """Find a library made of ``source`` whose content is what its name says; remove any other.

    A file that was cut short would end the process by SIGBUS once its kernels run.
    """
    for path in sorted(folder.glob(f"hostcores-{source}-*.so")):
        if path.stem.rpartition("-")[2] == _digest_of(path.read_bytes()):
            return path
        with suppress(OSError):
            path.unlink()
    return None


def _keep(built: Path, folder: Path, source: str) -> Path:
    """Put a library into a folder, under the name that ``_find_whole`` looks for."""
    content = built.read_bytes()
    path = folder / f"hostcores-{source}-{_digest_of(content)}.so"
    write_whole(path, content, mode=0o700)  # of two processes that compile, either's will do
    return path


def _digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def find_compiler() -> list[str]:
    """Find a C++ compiler, as the words of its command.

    Raises InputError for a CXX that names none, and OffplanError where there is none.
    """
    text = os.environ.get("CXX", "")
    try:
        named = shlex.split(text)
    except ValueError as error:
        raise refuse(
            f"needs a C++ compiler, and CXX is no command ({error}), found {text!r}: correct it, "
            "or unset CXX",
            InputError,
            Topic.COMPILER,
        ) from None
    if named:
        if shutil.which(named[0]) is None:
            raise refuse(
                f"needs a C++ compiler, and CXX names {named[0]}, which is not there",
                InputError,
                Topic.COMPILER,
            )
        return named
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        raise refuse(
            f"needs a C++ compiler to build its kernels, found none of {', '.join(COMPILERS)}: "
            "install one (Debian, Ubuntu: apt-get install g++), or name one in CXX",
            topic=Topic.COMPILER,
        )
    return [found]


def check_own(path: Path) -> None:
    """Raise OffplanError if somebody else could have written a file, or a folder above it."""
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
                "XDG_CACHE_HOME (or TMPDIR) to a folder of your own"
            )


def prebuild() -> Path:
    """Compile the library that a wheel has, by zig, for any Linux on x86-64 since glibc 2.17.

    Raises OffplanError if the package ``ziglang`` is not there, or it fails.
    """
    shutil.rmtree(PREBUILT, ignore_errors=True)
    PREBUILT.mkdir()
    with _room_to_compile() as made:
        built = made / "hostcores.so"
        _compile([*_ZIG], made, built)
        path = _keep(built, PREBUILT, name_source())
    path.chmod(0o755)
    return path


def name_source(compiler: Sequence[str] = ()) -> str:
    """Name what the library is made of: source, flags and the compiler, if it is said."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((_FLAGS, _DEFINES, _OBJECTS, compiler)).encode())
    if compiler:
        told = subprocess.run([*compiler, "--version"], capture_output=True, check=False)
        digest.update(told.stdout)
    return digest.hexdigest()[:32]


def _compile(compiler: Sequence[str], folder: Path, library: Path) -> None:
    """Compile the objects, each for its processor, in ``folder``, and link them to ``library``."""
    objects = [str(folder / f"{name}.o") for name in _OBJECTS]
    _run(
        [
            [*compiler, *_FLAGS, *_DEFINES, *_for_processor(compiler, processor), "-c",
             str(SOURCE / source), "-o", to]
            for (source, processor), to in zip(_OBJECTS.values(), objects, strict=True)
        ]
    )  # fmt: skip
    _run([[*compiler, "-shared", "-pthread", *objects, "-o", str(library)]])


def _for_processor(compiler: Sequence[str], processor: str) -> list[str]:
    """Name a processor and what it has beside; zig writes both in its own way."""
    if tuple(compiler) == _ZIG:
        return [f"-mcpu={processor.replace('-', '_')}"]
    return f"-march={processor}".replace("+", " -m").split()


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
            mend = (
                "Use a compiler that knows AVX-512 BF16 (GCC 10, Clang 11 or newer), and name it "
                "in CXX"
            )
            if os.strerror(errno.ENOSPC) in said:
                mend = "Make room there, or set TMPDIR to another folder"
            failed = refuse(
                f"could not build its kernels: {' '.join(command)} failed "
                f"({first.strip() or f'exit code {process.returncode}'}). {mend}",
                topic=Topic.COMPILER,
            )
    if failed is not None:
        raise failed


if __name__ == "__main__":  # in a release: see .github/workflows/release.yml
    print(prebuild())
