"""The right to train in a folder, on a disk or in a bucket: one holder at a time, whatever machine it is on."""

import contextlib
import os
import socket
import threading
import time
import uuid

from axial.errors import InputError
from axial.io import gfile
from axial.io.read import first_line, read_json
from axial.io.schemas import Struct
from axial.io.write import write_json

FILE = "lease.json"


class Held(Struct):
    """lease.json: who trains in a folder. `beat` is another one after each renewal."""

    token: str
    beat: int
    run: str = ""
    host: str = ""


def _now():
    """Seconds of a clock that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """A file that its holder writes anew three times in `seconds`.

    Another process takes it when it has not changed for `seconds` of that process's own clock, so clocks are not
    compared. File systems of buckets have no lock, so who writes looks again after a while whether another has written
    meanwhile; and a holder that finds another's token, or cannot renew its own for `seconds`, has lost it.

    Attributes:
        lost: `threading.Event`: another process may hold it.
    """

    def __init__(self, folder, run, seconds):
        """
        Args:
            folder: of the training.
            run: its name, for the messages of others.
            seconds: after which a silent holder has lost it.
        """
        self.lost, self._over = threading.Event(), threading.Event()
        self._folder, self._path, self._seconds = folder, os.path.join(folder, FILE), seconds
        self._mine = {"token": uuid.uuid4().hex, "run": run, "host": socket.gethostname()}
        self._beat, self._seen, self._since, self._first = 0, None, 0.0, None
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def take(self, patience):
        """Whether this process holds it now. If not, call it again after a while.

        Args:
            patience: seconds for which another holder may be alive before that is an error.

        Raises:
            InputError: another run trains there, or the folder cannot be written.
        """
        now = _now()
        try:
            found = self._read()
            if found and (found.token, found.beat) != self._seen:
                self._seen, self._since = (found.token, found.beat), now
                self._first = self._first or now
                if now - self._first > patience:
                    raise InputError(
                        f"--model_dir={self._folder}: {found.run} trains there, on {found.host}; one trainer a folder"
                    )
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
        """What the file says, or None if there is none. A damaged file is one of a holder that is silent."""
        try:
            return read_json(self._path, Held)[1] if gfile.exists(self._path) else None
        except InputError:
            damaged = Held("", 0, "a run", f"a host that the damaged {FILE} does not name")
            return damaged if gfile.exists(self._path) else None  # its holder has just given it back

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
                if _now() - last <= self._seconds:  # or this process was suspended, and another may have taken it
                    self._write()
                    last = _now()
            if _now() - last > self._seconds:
                break
        if not self._over.is_set():
            self.lost.set()

    def release(self):
        """Gives it back, so that the next one need not wait. One that another holds meanwhile is left to it."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(*gfile.file_errors()):
            if (found := self._read()) and found.token == self._mine["token"]:
                gfile.remove(self._path)
