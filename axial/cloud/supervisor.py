"""The supervisor: the main process of each host of a slice, under every engine. A container or a VM's script runs it.

    python3 -m axial.cloud.supervisor        with the variables of `runs.from_environment`

The first host runs the trainer. With several hosts, every host also runs TensorFlow's server, and the other supervisors
hold a connection to the first one. The first supervisor sends the run's exit code before it closes the connections. If
a connection breaks without a code, a host is lost. The user's machine is not involved.

Exit codes: 0 after the last step; 2 for bad input and 70 for a fault of axial, like axial-train; 42 after a signal to
stop, or if a host or the folder's lease is lost (a restart then continues the run); 124 at the deadline, which is
checked before every start and while the trainer runs. If the trainer fails `TRIES` times without a new checkpoint, the
code is the trainer's own, or 128 + the number of the signal that ended it.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

from axial.cloud import runs
from axial.cloud.lease import Lease
from axial.errors import InputError
from axial.io.read import read_file
from axial.io.show import say
from axial.io.write import write_text

TRIES = 3
# Times in seconds, which `Run.pace` multiplies.
LEASE = 60.0  # time after which a holder that does not renew the lease of a folder loses the lease
PATIENCE = 300.0  # longest wait for another run in the folder to end
GATHER = 1800.0  # longest wait for all hosts
SAVE = 120.0  # longest wait for the trainer to save at the deadline
PAUSE = 10.0  # pause before a restart of the trainer
INTERVAL, STOP = 0.5, b"stop\n"  # time between two checks; what a host sends to the first host after SIGTERM
# Environment variables that tell a process which slice it belongs to. A stale variable in an image can hang the start
# on another slice (https://github.com/ray-project/ray/issues/62893). TensorFlow reads the first group
# (python/tpu/client/client.py), libtpu the variables with these prefixes. A server needs libtpu's variables, as does a
# trainer on a slice without servers. A trainer on a host with a server must not have libtpu's variables.
TENSORFLOW_VARIABLES = "TPU_NAME TPU_CONFIG KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS TPU_API_DISCOVERY_URL TF_CONFIG".split()
LIBTPU_PREFIXES = ("TPU_", "CLOUD_TPU_", "MEGASCALE_")


class End(Exception):
    """Ends the supervisor of this host. Its arguments are the exit code and the reason."""


class Supervisor:
    """The supervisor of a `Run` on host number `host`. `hosts` has the addresses of all hosts."""

    def __init__(self, run, host, hosts):
        self.run, self.host, self.hosts = run, host, hosts
        self.stopped = ""  # name of the signal that asked to stop
        self._server = self._trainer = self._lease = None
        self._others = []  # connections to other supervisors
        self._pause = INTERVAL * min(run.pace, 1.0)

    def main(self):
        """Supervises the run on this host until its end, and returns the exit code."""
        # The handlers come first: the kernel drops a signal for which process 1 of a container has no handler.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        try:
            with tempfile.TemporaryDirectory() as folder:
                self._check()
                self._run_first(folder) if self.host == 0 else self._run_other()
        except End as end:
            code, why = end.args
        except InputError as error:
            code, why = runs.BAD_INPUT, str(error)
        for process in (self._trainer, self._server):
            _kill(process)
        if self._lease:
            self._lease.release()
        self._log(f"{why}; ends with {code}")
        for other in self._others:
            with contextlib.suppress(OSError):
                if self.host == 0:
                    other.sendall(b"%d\n" % code)
                other.close()
        return code

    def _stop(self, number, _):
        self.stopped = signal.Signals(number).name
        if self._trainer:
            with contextlib.suppress(ProcessLookupError):
                self._trainer.send_signal(signal.SIGTERM)

    def _log(self, line):
        say(f"axial-tpu: host {self.host} of {self.run.hosts}: {line}")

    def _check(self, saving=False):
        """Raises End if this host must end.

        With `saving`, a signal does not end the host, and the deadline ends the host later: the trainer may need this
        host to save a checkpoint.
        """
        if time.time() >= self.run.deadline + (2 * SAVE * self.run.pace if saving else 0.0):
            raise End(runs.DEADLINE, "the deadline has passed")
        if self.stopped and not saving and not self._trainer:
            raise End(runs.PREEMPTED, self.stopped)
        if self._server and self._server.poll() is not None:
            raise End(runs.PREEMPTED, f"TensorFlow's server has ended with {_code(self._server)}")
        if self._lease and self._lease.lost.is_set():
            _kill(self._trainer)
            raise End(runs.PREEMPTED, "the lease of the folder is lost")

    def _start_server(self):
        """Starts this host's TensorFlow server, unless the image starts it, and waits until it listens."""
        if self.run.own_server:
            words = ["python3", "-m", "axial.cloud.server", "--listen=all", f"--port={self.run.port}"]
            self._server = _start(words, _without(TENSORFLOW_VARIABLES))
        self._wait_for(lambda: _listens(self.hosts[self.host], self.run.port), "TensorFlow's server does not listen")

    def _wait_for(self, condition, why):
        """Calls condition() until its value is true, and returns this value. Raises End after `GATHER` seconds."""
        end = time.monotonic() + GATHER * self.run.pace
        while not (value := condition()):
            self._check()
            if time.monotonic() > end:
                raise End(runs.PREEMPTED, why)
            time.sleep(self._pause)
        return value

    def _run_other(self):
        self._start_server()
        first = self._wait_for(lambda: _connected(self.hosts[0], self.run.port - 1), "the first host does not come")
        self._hold(first)
        first.sendall(f"{self.run.name} {self.host}\n".encode())
        self._log("waits for the end of the first host")
        stop_sent = False
        while True:
            self._check(saving=True)
            if self.stopped and not stop_sent:  # the first host's trainer also saves this host's state
                stop_sent = True
                with contextlib.suppress(OSError):
                    first.sendall(STOP)
            try:
                code = first.recv(16).strip()
            except TimeoutError:
                continue
            except OSError:
                code = b""
            if code.isdigit():
                raise End(int(code), "the first host has ended")
            raise End(runs.PREEMPTED, "the first host is lost")

    def _hold(self, other):
        """Keeps a connection to another host. If that host vanishes silently, the connection breaks within a minute."""
        for option, value in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 4)):
            other.setsockopt(socket.IPPROTO_TCP, option, value)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        other.settimeout(self._pause)
        self._others.append(other)

    def _gather(self):
        """Waits until all other supervisors connect, and keeps the connections."""
        missing = set(range(1, self.run.hosts))
        try:
            listener = socket.create_server(("", self.run.port - 1))
        except OSError as error:
            raise InputError(f"port {self.run.port - 1}: cannot be listened at ({error.strerror})") from None

        def all_here():
            with contextlib.suppress(OSError):
                other = listener.accept()[0]
                other.settimeout(5.0)
                name, _, number = other.recv(256).decode(errors="replace").strip().rpartition(" ")
                if name == self.run.name and number.isdigit() and int(number) in missing:  # a host of this run
                    missing.remove(int(number))
                    self._hold(other)
            return not missing

        with contextlib.closing(listener):
            listener.settimeout(INTERVAL)
            self._wait_for(all_here, "some hosts do not come")

    def _is_complete(self, with_servers=False):
        """Whether all other supervisors are connected, and, if `with_servers`, their servers listen.

        If one of them has sent `STOP`, this method signals the trainer to stop.
        """
        for other in self._others:
            other.setblocking(False)
            try:
                if other.recv(16) != STOP:
                    return False
                self._stop(signal.SIGTERM, None)
            except BlockingIOError:
                pass
            except OSError:
                return False
        return not with_servers or all(_listens(host, self.run.port) for host in self.hosts[1:])

    def _run_first(self, folder):
        lease, patience = Lease(self.run.model_dir, self.run.name, LEASE * self.run.pace), PATIENCE * self.run.pace
        if not lease.take(patience):
            self._log("waits for the lease of the folder")
            self._wait_for(lambda: lease.take(patience), "the lease of the folder is not released")
        self._lease = lease
        if self.run.hosts > 1:
            self._start_server()
            self._gather()
        tries, checkpoint = 0, _checkpoint(self.run)
        while True:
            code = self._train(folder)
            before, checkpoint = checkpoint, _checkpoint(self.run)
            tries = 1 if checkpoint != before else tries + 1
            if tries >= TRIES:
                raise End(code, f"the trainer has ended with {code}, {TRIES} times without a new checkpoint")
            self._log(f"the trainer has ended with {code}; it is started again")
            end = time.monotonic() + PAUSE * self.run.pace
            while time.monotonic() < end:
                self._check()
                time.sleep(self._pause)

    def _train(self, folder):
        """Runs a trainer, and returns its exit code if a retry may help. Raises End after any other code."""
        self._trainer = _start(_command(self.run, self.hosts, folder), _environment(self.run))
        if self.stopped:  # the signal came just before the start, so the trainer has not got it
            self._trainer.send_signal(signal.SIGTERM)
        while self._trainer.poll() is None:
            try:
                self._check()
                if not self._is_complete():
                    raise End(runs.PREEMPTED, "a host is lost")
                time.sleep(self._pause)
            except End as end:
                if end.args[0] == runs.DEADLINE:
                    self._log("the deadline has passed; the trainer saves")
                    self._trainer.send_signal(signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._trainer.wait(SAVE * self.run.pace)
                if self._trainer.poll() != 0:
                    raise
        code = _code(self._trainer)
        _kill(self._trainer)  # ends the remaining processes of its group
        self._trainer = None
        if code and not self._is_complete(with_servers=True):
            raise End(runs.PREEMPTED, f"a host is lost, the trainer has ended with {code}")
        if code in (0, runs.BAD_INPUT, runs.FAULT, runs.PREEMPTED):
            raise End(code, "the trainer has ended" if code else "the last step is reached")
        if self.stopped:
            raise End(runs.PREEMPTED, self.stopped)
        return code


def _command(run, hosts, folder):
    """The command of axial-train, as a list of words. Writes the gin text of the run, if any, to a file in `folder`."""
    tpu = ",".join(f"grpc://{host}:{run.port}" for host in hosts) if run.hosts > 1 else "local"
    words = ["axial-train", "--strategy=tpu", f"--tpu={tpu}", f"--model_dir={run.model_dir}"]
    if run.gin:
        path = os.path.join(folder, "config.gin")
        write_text(path, run.gin)
        words.append(f"--gin_file={path}")
    return [*words, *run.arguments]


def _environment(run):
    """The trainer's environment. With several hosts, servers hold the chips, so the trainer must not load libtpu."""
    beside = {"TPU_LOAD_LIBRARY": "0"} if run.hosts > 1 else {}
    variables = {"AXIAL_TPU": run.generation, "PYTHONUNBUFFERED": "1", **run.environment}
    return {**_without(TENSORFLOW_VARIABLES, LIBTPU_PREFIXES if beside else ()), **beside, **variables}


def _checkpoint(run):
    """Content of the run's file 'checkpoint', which names its latest checkpoint; None if it cannot be read."""
    with contextlib.suppress(InputError):
        return read_file(os.path.join(run.model_dir, "checkpoint"))
    return None


def _without(names, starts=()):
    """The environment for another process: a copy that omits variables in `names` or with a prefix in `starts`."""
    names = *names, "TPU_LOAD_LIBRARY", runs.VARIABLE
    return {name: value for name, value in os.environ.items() if name not in names and not name.startswith(starts)}


def _start(command, environment):
    """Starts a command in its own process group. With setpriv, the kernel kills the command when this process dies."""
    tied = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
    return subprocess.Popen([*tied, *command], env=environment, stdin=subprocess.DEVNULL, start_new_session=True)


def _code(process):
    """Exit code of a process that has ended; 128 + the number of the signal if a signal ended it, as in a shell."""
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _kill(process):
    """Kills a process and its process group."""
    if process:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _connected(address, port):
    """A TCP connection to a port of a host, or None if the host does not accept the connection."""
    with contextlib.suppress(OSError):
        return socket.create_connection((address, port), timeout=5.0)
    return None


def _listens(address, port):
    """Whether a host's TensorFlow server accepts connections."""
    if connection := _connected(address, port):
        connection.close()
    return bool(connection)


def main():
    os.environ["TPU_LOAD_LIBRARY"] = "0"  # TensorFlow, which reads buckets here, must leave the chips to the trainer
    try:
        return Supervisor(*runs.from_environment()).main()
    except InputError as error:
        say(f"axial-tpu: {error}", error=True)
        return runs.BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
