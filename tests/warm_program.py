"""A program that stands for `python` where others start it: srun, mpirun, a shell.

It asks the process that runs the tests for a process of tests/warm.py with its arguments,
environment, folder and streams, passes signals on to that, and ends as it ends.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from threading import Thread

from tests.warm import REGISTER, WarmPython

PROGRAM = """#!{python} -SE
import json, os, signal, socket, sys
asked = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
tests = socket.socket(socket.AF_UNIX)
tests.connect({address!r})
socket.send_fds(tests, [len(asked).to_bytes(8, "big")], [1, 2])
tests.sendall(asked)
pid = int.from_bytes(tests.recv(8, socket.MSG_WAITALL), "big")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int.from_bytes(tests.recv(8, socket.MSG_WAITALL), "big", signed=True)
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@cache
def warm_program() -> str:
    """Its path. It works while this process lives."""
    folder = Path(mkdtemp(prefix="dmt-warm-"))
    atexit.register(rmtree, folder)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen()
    program = folder / "python"
    program.write_text(PROGRAM.format(python=sys.executable, address=str(folder / "socket")))
    program.chmod(0o755)
    Thread(target=_serve, args=(listener,), daemon=True).start()
    return str(program)


def _serve(listener: socket.socket) -> None:
    while True:
        asking, _ = listener.accept()
        Thread(target=_answer, args=(asking,), daemon=True).start()


def _answer(asking: socket.socket) -> None:
    length, streams, *_ = socket.recv_fds(asking, 8, 2)
    asked = asking.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
    argv, env, folder = json.loads(asked)
    if not Path(env.get(REGISTER, "")).is_dir():
        env.pop(REGISTER, None)
    out, err = streams
    process = WarmPython(
        [sys.executable, *(word for word in argv if word != "-P")],
        env=env, cwd=Path(folder), stdin=subprocess.DEVNULL, stdout=out, stderr=err,
    )  # fmt: skip
    for stream in streams:
        os.close(stream)
    asking.sendall(process.pid.to_bytes(8, "big"))
    asking.sendall(process.wait().to_bytes(8, "big", signed=True))
    asking.close()
