"""The process of a worker: jobs come as lines of JSON on standard input, events go back the same way.

``python -m thalweg.sweeps.worker MODULE:FUNCTION``; what libraries print goes to standard error, a log.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from typing import Any, TextIO

from thalweg.sweeps.work import find_work, perform


def main(name: str) -> None:
    """Do jobs until standard input ends, and with it, at once, everything that this process has begun."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin, inbox), daemon=True).start()

    def tell(event: dict[str, Any]) -> bool:
        _send(out, event)
        return bool(inbox.get()["go"])

    work = find_work(name)
    while True:
        _send(out, perform(work, inbox.get()["job"], tell))


def _listen(lines: TextIO, inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in lines:
        inbox.put(json.loads(line))
    # The sweep is gone, perhaps by a kill: another one may go on with this run, so nothing here may outlive it.
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _send(out: TextIO, event: dict[str, Any]) -> None:
    out.write(json.dumps(event) + "\n")
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1])
