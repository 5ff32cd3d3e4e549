"""Work that must not wait for vLLM's next step: an idle engine makes none."""

from __future__ import annotations

import os
import select
import threading
from typing import Protocol

PAUSE_S = 0.02


class Pollable(Protocol):
    """A data plane, as far as it is polled here."""

    @property
    def eventfd(self) -> int:
        """Readable while there is something to take in."""

    def poll_devices(self) -> None:
        """Take in what devices completed, and submit what follows from that."""


class IdlePoller:
    """A thread that polls a data plane whenever something completed.

    So the header of a chunk, and its backup, follow its payload although no step asks for results.
    The owner of the data plane holds `lock` in all calls of it.
    """

    def __init__(self, plane: Pollable, lock: threading.Lock) -> None:
        self._plane, self._lock = plane, lock
        self._stopped = threading.Event()
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvpool-idle", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._plane.eventfd, select.POLLIN)
        poller.register(self._stop_fd, select.POLLIN)
        while not self._stopped.is_set():
            poller.poll()
            with self._lock:
                if not self._stopped.is_set():
                    self._plane.poll_devices()
            self._stopped.wait(PAUSE_S)  # steps poll too: then there is little to do here

    def stop(self) -> None:
        """End the thread. Call it without the lock."""
        self._stopped.set()
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        os.close(self._stop_fd)
