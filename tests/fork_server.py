"""Runs the command line in fresh processes that start at once: a server that has imported everything forks them.

As a module it is the handle for tests; as a script (`python -m tests.fork_server`) the server, which speaks
one JSON line per request on its standard streams. On a CPU only: nothing here touches CUDA, and the server has no
threads.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from helixctl.plugins import DRAFTERS, load_plugin, plugin_names

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
TIMEOUT_S = 120.0


class Child:
    """A command in a process of its own."""

    def __init__(self, server: ForkServer, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        self._server = server
        self._handle = os.pidfd_open(pid)

    @property
    def output(self) -> str:
        """Both streams so far."""
        return self.log.read_text(errors="replace")

    def send(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._handle, number)

    def ended_within(self, timeout_s: float) -> bool:
        return bool(select.select([self._handle], [], [], timeout_s)[0])

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """The exit code, negative after a signal; a child that does not end is killed, and its output shown."""
        ended = self.ended_within(timeout_s)
        if not ended:
            self.send(signal.SIGKILL)
        code: int = self._server.ask({"wait": self.pid})
        os.close(self._handle)
        assert ended, f"process {self.pid} did not end in {timeout_s} s: {self.output}"
        return code


class ForkServer:
    """Starts children; use `fork_server`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._count = 0

    def start(
        self,
        arguments: Sequence[str],
        logs: Path,
        environment: Mapping[str, str] | None = None,
        program: str = "helixctl.cli.app",
    ) -> Child:
        """`helixctl ARGUMENTS...`, its output in a file of the folder `logs`; `program` is a module with a `main()`."""
        self._count += 1
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"output-{self._count}.txt"
        request = {"arguments": list(arguments), "log": str(log), "environment": dict(environment or {})}
        pid = self.ask({**request, "program": program})
        return Child(self, pid, log)

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def fork_server() -> Iterator[ForkServer]:
    """A server that ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fork_server"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    with process:
        yield ForkServer(process)
        assert process.stdin is not None
        process.stdin.close()


def serve() -> None:
    for module in ("transformers.models.llama.modeling_llama", "helixctl.cli.app", "helixctl.training.run"):
        import_module(module)  # what every child would import for itself
    for name in plugin_names(DRAFTERS):
        load_plugin(DRAFTERS, name, "plugin")
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork() or run_child(request)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def run_child(request: dict[str, Any]) -> int:
    """Never returns."""
    from tests.reliability.faults import FAULT, install_fault

    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(0)
    os.setsid()  # whoever is left of this session when the child has ended was forgotten by it
    os.environ.update(request["environment"])
    sys.argv = ["helixctl", *request["arguments"]]
    if FAULT in os.environ:
        install_fault(os.environ[FAULT])
    code: Any = 1
    try:
        import_module(request["program"]).main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except Exception:
        traceback.print_exc()  # as the interpreter would, before the exit code 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    serve()
