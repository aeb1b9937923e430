"""Prepares training photos on machines of their own, with tf.data's service.

%s dispatcher --listen=all --port=5050 --work_dir=WORK    one, which hands out the work
%s worker --listen=all --dispatcher=grpc://HOST:5050      as many as axial-analyze input says
%s arrivals --model_dir=RUN                               which examples of a training arrived

Then axial-train --data_service=grpc://HOST:5050. Workers read the data under the path that the trainer has for it.
Without --listen=all a server answers its own machine alone. It has no authentication; see SECURITY.md.
A dispatcher that is started again with the same port and --work_dir goes on. SIGTERM ends both.
"""

import ipaddress
import os
import signal
import socket
import sys
import threading
import time

from absl import flags

from axial.cli import app
from axial.cli.checks import check_folder
from axial.errors import InputError
from axial.io.loopback import LISTEN, NAMES, check_answer, host_and_port, keep_local
from axial.io.show import say

FLAGS = flags.FLAGS

flags.DEFINE_integer("port", 0, "port to listen at; 0 for any free one.", lower_bound=0, upper_bound=2**16 - 1)
flags.DEFINE_enum(**LISTEN)
flags.DEFINE_string("host", None, "this machine's name or address for others; by default found on its own.")
flags.DEFINE_string("work_dir", None, "folder of the dispatcher's journal; without one it cannot be started again.")
flags.DEFINE_string("dispatcher", None, "grpc://HOST:PORT of the dispatcher.")
flags.DEFINE_float("wait", 60.0, "seconds that a worker waits for the dispatcher to answer.", lower_bound=0)
flags.DEFINE_string("model_dir", None, "folder of a run of axial-train.")


def _dispatcher(_):
    host = FLAGS.host or (socket.gethostname() if FLAGS.listen == "all" else NAMES[0])
    import tensorflow as tf

    from axial.io.lock import locked
    from axial.io.write import refuse_links

    service = tf.data.experimental.service
    if not FLAGS.work_dir:
        _serve(service.DispatchServer, service.DispatcherConfig(port=FLAGS.port), "dispatcher", host)
        return
    config = service.DispatcherConfig(port=FLAGS.port, work_dir=FLAGS.work_dir, fault_tolerant_mode=True)
    with locked(FLAGS.work_dir, "work_dir"):
        refuse_links(FLAGS.work_dir)
        _serve(service.DispatchServer, config, "dispatcher", host)


def _worker(_):
    address = app.flag("dispatcher")
    host_and_port("dispatcher", address)
    until = time.monotonic() + FLAGS.wait
    while True:
        try:
            own = check_answer("dispatcher", address)
            break
        except InputError:
            if time.monotonic() >= until:
                raise
            time.sleep(min(1, FLAGS.wait))
    if FLAGS.listen == "loopback" and not ipaddress.ip_address(own).is_loopback:
        raise InputError(
            f"--dispatcher={address}: serves other machines, which cannot reach this worker without --listen=all"
        )
    import tensorflow as tf

    host = FLAGS.host or (f"[{own}]" if ":" in own else own)
    # The default heartbeats of 30 s would keep a new worker waiting.
    config = tf.data.experimental.service.WorkerConfig(
        dispatcher_address=address.removeprefix("grpc://"),
        worker_address=f"{host}:%port%",
        port=FLAGS.port,
        heartbeat_interval_ms=2000,
    )
    _serve(tf.data.experimental.service.WorkerServer, config, "worker", host)


def _check():
    """Raises InputError unless --port is free and --host fits --listen."""
    if FLAGS.listen == "loopback" and FLAGS.host and FLAGS.host not in NAMES:
        raise InputError(f"--host={FLAGS.host}: others cannot reach the server at that name without --listen=all")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", FLAGS.port))
        except OSError as error:
            raise InputError(f"--port={FLAGS.port}: cannot be listened at ({error.strerror})") from None


def _serve(kind, config, name, host):
    """Runs a server until SIGTERM or SIGINT. Prints its address when it answers."""
    import tensorflow as tf

    from axial.io.read import first_line

    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        server = kind(config)
    except tf.errors.OpError as error:
        where = f"--work_dir={FLAGS.work_dir}: " if FLAGS.work_dir else ""
        raise InputError(f"{where}the {name} cannot start ({first_line(error)})") from None
    port = server._address.rsplit(":", 1)[1]  # the only way to the port of a worker
    if FLAGS.listen == "loopback":
        keep_local(int(port))
    say(f"{name} at grpc://{host}:{port}")
    ended.wait()
    server.stop()
    say(f"{name} ended")


def _arrivals(_):
    check_folder("model_dir", app.flag("model_dir"))
    from axial.data.service import arrival_lines

    say(*arrival_lines(os.path.join(app.flag("model_dir"), "arrivals")))


VERBS = {
    "dispatcher": app.Verb(_dispatcher, ("port", "listen", "host", "work_dir"), writes=("work_dir",), check=_check),
    "worker": app.Verb(_worker, ("dispatcher", "port", "listen", "host", "wait"), check=_check),
    "arrivals": app.Verb(_arrivals, ("model_dir",)),
}


def main():
    app.run_verbs(VERBS, sys.modules[__name__])
