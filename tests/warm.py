"""Processes that begin with modules imported: forks of one process that has imported them.

Torch and transformers take seconds to import. A test that starts several processes, and claims
nothing about what they import, starts them here. Each has its own arguments, environment and
streams, and ends as any other: at the end of the interpreter, or by a signal.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import IO

COMMAND = "from offplan.cli.main import main; main()"
"""The program ``offplan``."""
TORCH = "import offplan.cli.app, offplan.runtime.session, transformers.models.auto.modeling_auto"
"""What takes the longest of a command that runs a model."""

_SERVER = """
import gc, json, os, socket, sys
exec(sys.argv[2])
gc.collect()
gc.freeze()
asked = socket.socket(fileno=int(sys.argv[1]))
while True:
    message, streams, _, _ = socket.recv_fds(asked, 2**20, 4)
    if not message:
        break
    if os.fork():
        os.waitpid(-1, 0)
        [*map(os.close, streams)]
        continue
    # One process more, which waits for the program: nobody waits for that one.
    if os.fork():
        os._exit(0)
    asked.close()
    *own, report = streams
    pid = os.fork()
    if pid:
        [*map(os.close, own)]
        os.write(report, b"%d\\n" % pid)
        _, status = os.waitpid(pid, 0)
        os.write(report, b"%d\\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    os.close(report)
    for number, stream in enumerate(own):
        os.dup2(stream, number)
        os.close(stream)
    program, arguments, environment, folder = json.loads(message)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["-c", *arguments]
    exec(program, {"__name__": "__main__"})
    sys.exit()
"""


class Process:
    """A program that runs, as ``subprocess.Popen`` has it."""

    def __init__(self, report: int, streams: list[IO[str] | None]) -> None:
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = streams
        self._report = os.fdopen(report)
        self.pid = int(self._report.readline())

    def wait(self, timeout: float) -> int:
        """Wait for its end; TimeoutExpired after ``timeout`` seconds."""
        if self.returncode is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a warm process", timeout)
            self.returncode = int(self._report.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def close(self) -> None:
        """Kill it, if it runs, and close what leads to it."""
        if not select.select([self._report], [], [], 0)[0]:
            self.send_signal(signal.SIGKILL)
        self.wait(60)
        for stream in (self._report, self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()


class Warm:
    """A process that has run ``imported``, and begins others; ``environment`` is of all of them.

    It begins itself with the first of them.
    """

    def __init__(self, imported: str, environment: Mapping[str, str]) -> None:
        self._imported, self._environment = imported, dict(environment)
        self._environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._asking: socket.socket | None = None

    def _start(self) -> socket.socket:
        asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", _SERVER, str(asked.fileno()), self._imported]
        with asked:
            self._server = subprocess.Popen(
                command,
                env=self._environment,
                # pipes, as a program's streams may be: Python seeks in what could be sought in here
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[asked.fileno()],
            )
        atexit.register(self.close)
        return asking

    def begin(
        self,
        program: str,
        *arguments: object,
        streams: tuple[int, int, int],
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Begin a program with these files as its streams; return where its end is reported."""
        self._asking = self._asking or self._start()
        report, reported = os.pipe()
        asked = {**self._environment, **(environment or {})}
        message = json.dumps([program, [*map(str, arguments)], asked, os.getcwd()]).encode()
        socket.send_fds(self._asking, [message], [*streams, reported])
        os.close(reported)
        return report

    @contextmanager
    def open(
        self, program: str, *arguments: object, environment: Mapping[str, str] | None = None
    ) -> Iterator[Process]:
        """Begin a program whose streams are pipes, and kill it in the end if it still runs."""
        pipes = [os.pipe() for _ in range(3)]
        (stdin, told), (out, stdout), (err, stderr) = pipes
        report = self.begin(
            program, *arguments, streams=(stdin, stdout, stderr), environment=environment
        )
        for theirs in (stdin, stdout, stderr):
            os.close(theirs)
        ours = [os.fdopen(told, "w"), os.fdopen(out), os.fdopen(err)]
        process = Process(report, [*ours])
        try:
            yield process
        finally:
            process.close()

    def run(
        self,
        program: str,
        *arguments: object,
        given: bytes = b"",
        timeout: float = 120,
        environment: Mapping[str, str] | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program to its end, with ``given`` as what it reads."""
        with (
            tempfile.TemporaryFile() as stdin,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            stdin.write(given)
            stdin.seek(0)
            streams = stdin.fileno(), out.fileno(), err.fileno()
            report = self.begin(program, *arguments, streams=streams, environment=environment)
            process = Process(report, [None, None, None])
            try:
                process.wait(timeout)
            finally:
                process.close()
            said = [_read(file) for file in (out, err)]
        assert process.returncode is not None
        return subprocess.CompletedProcess([*map(str, arguments)], process.returncode, *said)

    def as_subprocess(self) -> SimpleNamespace:
        """Stand in for the module ``subprocess`` where another runs programs of Python with it."""

        def run(command: list[str], input: bytes, **_: object) -> SimpleNamespace:
            done = self.run(command[-1], given=input, environment=os.environ)
            return SimpleNamespace(stdout=done.stdout)

        return SimpleNamespace(run=run, SubprocessError=subprocess.SubprocessError)

    def close(self) -> None:
        """End it; programs that run go on."""
        if self._asking is None:
            return
        self._asking.close()
        with self._server:
            self._server.wait(timeout=60)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()
