"""A lease on a folder of a disk or bucket: on all machines, only the process that holds it trains in the folder."""

import contextlib
import os
import socket
import threading
import time
import uuid

from axial.errors import InputError
from axial.io import gfile
from axial.io.read import first_line, read_existing
from axial.io.schemas import Struct
from axial.io.write import write_json

FILE = "lease.json"


class Held(Struct):
    """lease.json: the holder of a folder's lease. Each renewal increments `beat`."""

    token: str
    beat: int
    run: str = ""
    host: str = ""


def _now():
    """Seconds of a clock that also runs while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """The lease of a folder: a file that its holder rewrites every `seconds` / 3 seconds.

    Another process takes the lease if the file does not change for `seconds`, which it measures with its own clock.
    Buckets have no locks, so the new holder reads the file again after a short wait: the process that wrote it last has
    the lease. A holder loses the lease if it reads another process's token, or cannot renew the lease for `seconds`.

    Attributes:
        lost: `threading.Event` that is set when another process may hold the lease.
    """

    def __init__(self, folder, run, seconds):
        """
        Args:
            folder: folder of the training.
            run: name of the run, for the messages of other processes.
            seconds: time after which a holder that does not renew the lease loses the lease.
        """
        self.lost, self._over = threading.Event(), threading.Event()
        self._folder, self._path, self._seconds = folder, os.path.join(folder, FILE), seconds
        self._mine = {"token": uuid.uuid4().hex, "run": run, "host": socket.gethostname()}
        self._beat, self._seen, self._since, self._first = 0, None, 0.0, None
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def take(self, patience):
        """Tries to take the lease, and returns whether this process holds it now. If not, call `take` again later.

        Args:
            patience: seconds during which another holder may renew the lease before `take` raises.

        Raises:
            InputError: another run trains in the folder, or the folder cannot be written.
        """
        now = _now()
        try:
            found = self._read()
            if found and (found.token, found.beat) != self._seen:
                self._seen, self._since = (found.token, found.beat), now
                self._first = self._first or now
                if now - self._first > patience:
                    raise InputError(f"--model_dir={self._folder}: {found.run} trains there, on {found.host}")
            if found and now - self._since < self._seconds:
                return False
            self._write()
            time.sleep(self._seconds / 20)
            found = self._read()
        except gfile.file_errors() as error:
            raise InputError(f"--model_dir={self._folder}: no lease can be written ({first_line(error)})") from None
        if not found or found.token != self._mine["token"]:
            return False
        self._thread.start()
        return True

    def _read(self):
        """Returns the file as a `Held`; None if there is none. A damaged file gives a `Held` that is never renewed."""
        try:
            return read_existing(self._path, Held)
        except InputError:
            damaged = Held("", 0, "a run", f"a host that the damaged {FILE} does not name")
            return damaged if gfile.exists(self._path) else None  # no file: the holder has just released the lease

    def _write(self):
        self._beat += 1
        write_json(self._path, {**self._mine, "beat": self._beat})

    def _renew(self):
        last = _now()
        while not self._over.wait(self._seconds / 3):
            with contextlib.suppress(InputError, *gfile.file_errors()):
                found = self._read()
                if found and found.token not in ("", self._mine["token"]):
                    break
                if _now() - last <= self._seconds:  # after this time, another process may hold the lease
                    self._write()
                    last = _now()
            if _now() - last > self._seconds:
                break
        if not self._over.is_set():
            self.lost.set()

    def release(self):
        """Removes the file, so that the next process need not wait. Keeps a file that another process has written."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(*gfile.file_errors()):
            if (found := self._read()) and found.token == self._mine["token"]:
                gfile.remove(self._path)
