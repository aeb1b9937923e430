"""Servers that are kept to this machine, as the kernel sees them and as another machine does."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

from axial.errors import InputError
from axial.io.loopback import host_and_port, keep_local
from tests.conftest import ROOT


def device_of(server):
    return server.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")


@pytest.fixture(params=["ipv4", "both"])
def servers(request):
    """Two servers at all addresses, as TensorFlow's."""
    address, options = {"ipv4": ("0.0.0.0", {}), "both": ("::", dict(family=socket.AF_INET6, dualstack_ipv6=True))}[
        request.param
    ]
    if options and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    made = [socket.create_server((address, 0), **options) for _ in range(2)]
    yield made
    for server in made:
        server.close()


def test_only_the_servers_of_the_port_are_kept_local(servers, tmp_path):
    with socket.socket(socket.AF_UNIX) as other:  # a listening socket without a port
        other.bind(str(tmp_path / "socket"))
        other.listen()
        keep_local(servers[0].getsockname()[1])
    assert [device_of(server) for server in servers] == [b"lo", b""]
    with socket.create_connection(("localhost", servers[0].getsockname()[1]), 5):
        pass


def test_the_address_of_a_dispatcher_has_a_host_and_a_port():
    for address, parts in {
        "grpc://here:1": ("here", 1),
        "grpc://10.0.0.2:65535": ("10.0.0.2", 65535),
        "grpc://[::1]:5050": ("::1", 5050),
    }.items():
        assert host_and_port("data_service", address) == parts
    for address in ("here:1", "grpc://here", "grpc://here:0", "grpc://here:65536", "grpc://:1", "grpc://a b:1"):
        with pytest.raises(InputError, match=f"^--data_service={address}: expected the address of a dispatcher"):
            host_and_port("data_service", address)


def test_no_file_is_left_open(servers, tmp_path):
    """A copy of a pipe that stays open keeps its reader waiting."""
    (tmp_path / "file").touch()
    reads, writes = os.pipe()
    with (tmp_path / "file").open(), open(reads, "rb"), open(writes, "wb"):
        before = os.listdir("/proc/self/fd")
        keep_local(servers[0].getsockname()[1])
        assert os.listdir("/proc/self/fd") == before


def test_a_port_where_nothing_listens_is_named():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port}: TensorFlow cannot listen"):
            keep_local(port)


def test_a_system_that_cannot_do_it_is_told(servers, monkeypatch):
    monkeypatch.setattr(socket, "SO_BINDTODEVICE", 2**15)  # an option that no kernel knows
    with pytest.raises(InputError, match="port .*: this system cannot keep it .*--listen=all opens it"):
        keep_local(servers[0].getsockname()[1])
    monkeypatch.delattr(socket, "SO_BINDTODEVICE")
    with pytest.raises(InputError, match="this system cannot keep it"):
        keep_local(servers[0].getsockname()[1])


# Runs as root of a user namespace and of a network of its own, whose cable leads to a second network: another machine.
TWO_MACHINES = """
import socket, subprocess, sys
from axial.io.loopback import keep_local

def run(*words):
    return subprocess.run(words, stderr=subprocess.DEVNULL).returncode == 0

servers = [socket.create_server(("0.0.0.0", 0)) for _ in range(2)]
ports = [str(server.getsockname()[1]) for server in servers]
keep_local(int(ports[0]))
other = subprocess.Popen(["unshare", "-n", "sh", "-c", "echo; exec sleep 60"], stdout=subprocess.PIPE)
try:
    other.stdout.readline()
    there = ["nsenter", "-t", str(other.pid), "-n"]
    assert run("ip", "link", "set", "lo", "up")
    assert run("ip", "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(other.pid))
    for place, device, address in (([], "near", "10.0.0.1"), (there, "far", "10.0.0.2")):
        assert run(*place, "ip", "address", "add", address + "/24", "dev", device)
        assert run(*place, "ip", "link", "set", device, "up")
    connect = [sys.executable, "-c", "import socket, sys; socket.create_connection((sys.argv[1], sys.argv[2]), 5)"]
    print(*(run(*there, *connect, "10.0.0.1", port) for port in ports))
    print(*(run(*connect, "127.0.0.1", port) for port in ports))
finally:
    other.kill()
    other.wait()
"""


def test_another_machine_does_not_reach_a_server_that_is_kept_local():
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("needs unshare, nsenter and ip (Debian: apt install util-linux iproute2)")
    if subprocess.run([*alone, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine makes no networks for a user")
    done = subprocess.run(
        [*alone, sys.executable, "-c", TWO_MACHINES], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False True", "True True"]
