"""Runs the input pipeline of a training on other machines, with tf.data's service.

%s dispatcher --listen=all --port=5050 --work_dir=WORK    one server, which distributes the work
%s worker --listen=all --dispatcher=grpc://HOST:5050      as many as axial-analyze input recommends

Then run axial-train --data_service=grpc://HOST:5050. Workers read the data from the trainer's --data_dir.
Without --listen=all a server answers only its own machine. It has no authentication; see SECURITY.md.
A dispatcher resumes if it restarts with the same port and --work_dir. SIGTERM ends dispatchers and workers.
"""

import contextlib
import ipaddress
import signal
import socket
import threading
import time

from axial.cli import app, flags
from axial.cli.flags import Flag, Flags
from axial.errors import InputError
from axial.io.lock import locked
from axial.io.loopback import check_answer, host_and_port, keep_local
from axial.io.read import first_line
from axial.io.show import say
from axial.io.write import refuse_links


class Server(Flags):
    port = Flag(int, "port to listen at; 0 for any free port.", 0, least=0, most=2**16 - 1)
    listen = flags.LISTEN

    def check(self):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", self.port))
            except OSError as error:
                raise InputError(f"--port={self.port}: cannot be listened at ({error.strerror})") from None


class Dispatcher(Server):
    work_dir = Flag(str, "folder of the journal, without which it cannot resume.", path=flags.OUT_FOLDER)


class Worker(Server):
    dispatcher = Flag(str, "grpc://HOST:PORT of the dispatcher.", needed=True)
    wait = Flag(float, "seconds to wait for the dispatcher to answer.", 60.0, least=0)


def _dispatcher(given):
    import tensorflow as tf

    service = tf.data.experimental.service
    folder = given.work_dir or None
    with locked(folder, "work_dir") if folder else contextlib.nullcontext():
        if folder:
            refuse_links(folder)
        config = service.DispatcherConfig(port=given.port, work_dir=folder, fault_tolerant_mode=bool(folder))
        host = socket.gethostname() if given.listen == "all" else "localhost"
        _serve(service.DispatchServer, config, given, host, where=f"--work_dir={folder}: " if folder else "")


def _worker(given):
    host_and_port("dispatcher", given.dispatcher)
    until = time.monotonic() + given.wait
    while True:
        try:
            address = check_answer("dispatcher", given.dispatcher)
            break
        except InputError:
            if time.monotonic() >= until:
                raise
            time.sleep(min(1, given.wait))
    if given.listen == "loopback" and not ipaddress.ip_address(address).is_loopback:
        where = f"--dispatcher={given.dispatcher}: serves other machines"
        raise InputError(f"{where}, which cannot reach this worker without --listen=all")
    import tensorflow as tf

    host = f"[{address}]" if ":" in address else address
    # A new worker waits for a heartbeat, which is every 30 s by default.
    config = tf.data.experimental.service.WorkerConfig(
        dispatcher_address=given.dispatcher.removeprefix("grpc://"),
        worker_address=f"{host}:%port%",
        port=given.port,
        heartbeat_interval_ms=2000,
    )
    _serve(tf.data.experimental.service.WorkerServer, config, given, host)


def _serve(kind, config, given, host, *, where=""):
    """Runs a server until SIGTERM or SIGINT, and prints its address. Its error messages begin with `where`."""
    import tensorflow as tf

    name, ended = given.verb, threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        server = kind(config)
    except tf.errors.OpError as error:
        raise InputError(f"{where}the {name} cannot start ({first_line(error)})") from None
    port = server._address.rsplit(":", 1)[1]  # no public attribute has the port of a worker
    if given.listen == "loopback":
        keep_local(int(port))
    say(f"{name} at grpc://{host}:{port}")
    ended.wait()
    server.stop()
    say(f"{name} ended")


VERBS = {"dispatcher": (Dispatcher, _dispatcher), "worker": (Worker, _worker)}


def main():
    app.run(VERBS)
