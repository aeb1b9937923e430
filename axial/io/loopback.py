"""Limits TensorFlow's servers to connections from this machine, and checks the address of a server.

The servers of tf.data's service, tf.distribute and the profiler have no authentication. Anyone who can connect to one
of the first two can run graphs on it that read and write files. TensorFlow 2.20 always listens at every address of the
machine: core/data/service/server_lib.cc and core/distributed_runtime/rpc/grpc_server_lib.cc have "0.0.0.0:", the
profiler's profiler_server.cc has "[::]:".
"""

import contextlib
import os
import re
import socket
import stat

from axial.errors import InputError


def keep_local(port):
    """Binds this process's sockets that listen at a port to the loopback device (Linux's SO_BINDTODEVICE).

    The sockets then accept connections from this machine only. In the few milliseconds between the start of the server
    and this call, they also accept connections from other machines.

    Raises:
        InputError: the system does not support this, or nothing listens at the port.
    """
    bound = False
    try:
        for listener in _listening(port):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
            bound = True
    except (OSError, AttributeError) as error:
        what = f"port {port}: this system cannot keep it to this machine ({error}); Linux 5.7 and later can"
        raise InputError(f"{what}. --listen=all opens it to others") from None
    if not bound:
        raise InputError(f"port {port}: TensorFlow cannot listen at it")


def _listening(port):
    """Yields this process's sockets that listen at a TCP port."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # another thread has closed it
            if not stat.S_ISSOCK(os.fstat(number).st_mode):  # `fromfd` would leave a copy open
                continue
            with socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM) as listener:
                has_port = listener.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) in (socket.AF_INET, socket.AF_INET6)
                listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if has_port and listens and listener.getsockname()[1] == port:
                    yield listener


def host_and_port(flag, address):
    """(host, port) of a flag's value. Raises InputError unless the value is grpc://HOST:PORT."""
    match = re.fullmatch(r"grpc://([^\s/:]+|\[[0-9a-fA-F:]+\]):([0-9]{1,5})", address)
    if not match or not 0 < int(match[2]) < 2**16:
        raise InputError(f"--{flag}={address}: expected the address of a dispatcher, grpc://HOST:PORT")
    return match[1].strip("[]"), int(match[2])


def check_answer(flag, address, timeout=5.0):
    """The local address of a connection to a dispatcher. Raises InputError if no dispatcher answers."""
    try:
        with socket.create_connection(host_and_port(flag, address), timeout) as connection:
            return connection.getsockname()[0]
    except OSError as error:
        raise InputError(f"--{flag}={address}: no dispatcher answers there ({error.strerror or error})") from None
