"""A sandbox for Python programs that a model writes: no network, no other processes, no files but its own folder.

A program runs in a separate process, which restricts itself first and cannot undo that (sandbox_process.py):

- Landlock: it reads the Python installation and system libraries, and writes only below its temporary folder.
- seccomp: no sockets, no new processes (threads are allowed), no signals, no changes of owners, modes or limits.
- limits of memory, CPU time, size and number of files; this process kills it after `timeout` seconds.
- no capabilities; started by root, it runs as another user, if that user can read the Python installation.

Programs have the standard library. A machine without Landlock (Linux 5.13) or seccomp is rejected when the tool is
loaded: nothing runs with less protection.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = Path(__file__).with_name("sandbox_process.py")
UNPRIVILEGED_USER = 65534
# Bytes of a program's output that are read.
MAX_OUTPUT = 1 << 16
# Imports modules that no process has loaded at its start.
PROBE = "import fractions, statistics; print('ready')"


class SandboxError(RuntimeError):
    """This machine cannot isolate programs; the message names the missing feature."""


class Sandbox:
    """Runs Python programs. The constructor tests that this machine can isolate them; SandboxError if not."""

    def __init__(self, *, timeout: float, memory_limit_gib: float | None):
        self._timeout = timeout
        self._memory = int((memory_limit_gib or 0) * 2**30)
        self._user = UNPRIVILEGED_USER if os.geteuid() == 0 else 0
        if self._user and self.run(PROBE) != "ready\n":
            self._user = 0
        if (output := self.run(PROBE)) != "ready\n":
            raise SandboxError(f"cannot isolate Python programs on this machine: {output.strip()[-300:]}")

    def run(self, program: str) -> str:
        """Output of a program on stdout and stderr, with the reason if it was killed."""
        with (
            tempfile.TemporaryDirectory(prefix="sandbox-") as folder,
            tempfile.TemporaryFile() as source,
            tempfile.TemporaryFile() as output,
        ):
            if self._user:
                os.chown(folder, self._user, self._user)
            source.write(program.encode(errors="replace"))
            source.seek(0)
            limits = [str(self._user), str(self._memory), str(int(self._timeout) + 1)]
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(PROGRAM), folder, *limits],
                stdin=source,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={"HOME": folder, "TMPDIR": folder, "PATH": os.defpath},
                start_new_session=True,
            )
            reason = self._wait(process)
            output.seek(0)
            text = output.read(MAX_OUTPUT).decode(errors="replace")
        return f"{text}\n{reason}" if text and reason else text or reason

    def _wait(self, process: subprocess.Popen[bytes]) -> str:
        """Wait until the process ends, or kill it; the reason, if it did not exit."""
        descriptor = os.pidfd_open(process.pid)
        try:
            is_done = bool(select.select([descriptor], [], [], self._timeout)[0])
        finally:
            os.close(descriptor)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not is_done:
            return f"error: the program took more than {self._timeout:g} seconds"
        return f"error: ended by signal {-process.returncode}" if process.returncode < 0 else ""
