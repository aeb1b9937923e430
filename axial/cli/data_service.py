"""Prepares training photos on machines of their own, with tf.data's service.

%s dispatcher --listen=all --port=5050 --work_dir=WORK    one, which hands out the work
%s worker --listen=all --dispatcher=grpc://HOST:5050      as many as axial-analyze input says
%s arrivals --model_dir=RUN                               which examples of a training arrived

Then axial-train --data_service=grpc://HOST:5050. Workers read the data under the path that the trainer has for it.
Without --listen=all a server answers its own machine alone. It has no authentication; see SECURITY.md.
A dispatcher that is started again with the same port and --work_dir goes on. SIGTERM ends both.
"""

import contextlib
import ipaddress
import os
import signal
import socket
import sys
import threading
import time

from axial.cli import app, flags
from axial.cli.flags import Flag, Flags
from axial.errors import InputError
from axial.io.lock import locked
from axial.io.loopback import NAMES, check_answer, host_and_port, keep_local
from axial.io.read import first_line
from axial.io.show import say
from axial.io.write import refuse_links


class Server(Flags):
    work_dir = None
    port = Flag(int, "port to listen at; 0 for any free one.", 0, least=0, most=2**16 - 1)
    listen = flags.LISTEN
    host = Flag(str, "this machine's name or address for others; by default found on its own.")

    def check(self):
        if self.listen == "loopback" and self.host and self.host not in NAMES:
            raise InputError(f"--host={self.host}: others cannot reach the server at that name without --listen=all")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", self.port))
            except OSError as error:
                raise InputError(f"--port={self.port}: cannot be listened at ({error.strerror})") from None


class Dispatcher(Server):
    work_dir = Flag(
        str, "folder of the dispatcher's journal; without one it cannot be started again.", path=flags.OUT_FOLDER
    )


class Worker(Server):
    dispatcher = Flag(str, "grpc://HOST:PORT of the dispatcher.", needed=True)
    wait = Flag(float, "seconds that a worker waits for the dispatcher to answer.", 60.0, least=0)


class Arrivals(Flags):
    model_dir = flags.MODEL_DIR.but(path=flags.IN_FOLDER, needed=True)


def _dispatcher(given: Dispatcher):
    host = given.host or (socket.gethostname() if given.listen == "all" else NAMES[0])
    import tensorflow as tf

    service = tf.data.experimental.service
    kept = dict(work_dir=given.work_dir, fault_tolerant_mode=True) if given.work_dir else {}
    with locked(given.work_dir, "work_dir") if kept else contextlib.nullcontext():
        if kept:
            refuse_links(given.work_dir)
        _serve(service.DispatchServer, service.DispatcherConfig(port=given.port, **kept), given, host)


def _worker(given: Worker):
    address = given.dispatcher
    host_and_port("dispatcher", address)
    until = time.monotonic() + given.wait
    while True:
        try:
            own = check_answer("dispatcher", address)
            break
        except InputError:
            if time.monotonic() >= until:
                raise
            time.sleep(min(1, given.wait))
    if given.listen == "loopback" and not ipaddress.ip_address(own).is_loopback:
        raise InputError(
            f"--dispatcher={address}: serves other machines, which cannot reach this worker without --listen=all"
        )
    import tensorflow as tf

    host = given.host or (f"[{own}]" if ":" in own else own)
    # The default heartbeats of 30 s would keep a new worker waiting.
    config = tf.data.experimental.service.WorkerConfig(
        dispatcher_address=address.removeprefix("grpc://"),
        worker_address=f"{host}:%port%",
        port=given.port,
        heartbeat_interval_ms=2000,
    )
    _serve(tf.data.experimental.service.WorkerServer, config, given, host)


def _serve(kind, config, given, host):
    """Runs a server until SIGTERM or SIGINT. Prints its address when it answers."""
    import tensorflow as tf

    name = type(given).__name__.lower()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        server = kind(config)
    except tf.errors.OpError as error:
        where = f"--work_dir={given.work_dir}: " if given.work_dir else ""
        raise InputError(f"{where}the {name} cannot start ({first_line(error)})") from None
    port = server._address.rsplit(":", 1)[1]  # the only way to the port of a worker
    if given.listen == "loopback":
        keep_local(int(port))
    say(f"{name} at grpc://{host}:{port}")
    ended.wait()
    server.stop()
    say(f"{name} ended")


def _arrivals(given: Arrivals):
    from axial.data.service import arrival_lines

    say(*arrival_lines(os.path.join(given.model_dir, "arrivals")))


VERBS = {"dispatcher": _dispatcher, "worker": _worker, "arrivals": _arrivals}


def main():
    app.run(VERBS, sys.modules[__name__])
