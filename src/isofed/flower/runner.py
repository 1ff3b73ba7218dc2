"""Starts a site's app for each message: ``python -m isofed.flower.runner``.

Flower's own executor starts a new Python for each message, which spends seconds on importing PyTorch. This one imports
it once and makes each new process as a copy of itself. It trains nothing itself, so that no thread and no GPU is in use
when it is copied. Like Flower's, it proves to the node by a shared secret that it may take tasks.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import run_clientapp

import isofed.engine.serial
import isofed.flower.client_app  # noqa: F401  this and the line above are what an app will want

POLL = 0.1  # seconds between two looks for a task
_METHOD = "/flwr.proto.Runtime/AcquireTask"


def main() -> None:
    """Take tasks of the node at an address until it is gone."""
    address, secret, node = sys.argv[1], Path(sys.argv[2]).read_bytes(), int(sys.argv[3])
    with suppress(ImportError):
        import sklearn.datasets  # noqa: F401  where the digits are
    auth = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=frozenset({_METHOD}))
    client = RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,  # it never leaves this machine
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), auth],
    )
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what the copies return
    while _alive(node):
        token = ""
        with suppress(httpx.TransportError):  # the node may be starting, or going
            found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
            token = found.token if found.HasField("task") else ""
        if token:
            _launch(address, token)
        else:
            time.sleep(POLL)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


def _launch(address: str, token: str) -> None:
    """Let a copy of this process run the app, and end."""
    parent = os.getpid()
    if os.fork():
        return
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        run_clientapp(runtime_api_address=address, token=token, insecure=True, parent_pid=parent)
    except SystemExit:
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
