"""Servers accept connections only from this machine, as the kernel reports."""

import socket

import pytest

from axial.errors import InputError
from axial.io.loopback import host_and_port, keep_local
from tests.conftest import reached_by


def device_of(server):
    return server.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")


@pytest.fixture(params=[("0.0.0.0", {}), ("::", dict(family=socket.AF_INET6, dualstack_ipv6=True))], ids=["4", "6"])
def servers(request):
    """Two servers that listen at all addresses, as TensorFlow's servers do."""
    address, options = request.param
    if options and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with socket.create_server((address, 0), **options) as first, socket.create_server((address, 0), **options) as other:
        yield first, other


def test_only_the_servers_of_the_port_are_kept_local(servers, tmp_path):
    with socket.socket(socket.AF_UNIX) as other:  # a listening socket without a port
        other.bind(str(tmp_path / "socket"))
        other.listen()
        keep_local(servers[0].getsockname()[1])
    assert [device_of(server) for server in servers] == [b"lo", b""]
    assert [reached_by(server.getsockname()[1]) for server in servers] == ["this machine", "all"]
    with socket.create_connection(("localhost", servers[0].getsockname()[1]), 5):
        pass


def test_the_address_of_a_dispatcher_has_a_host_and_a_port():
    addresses = "grpc://here:1", "grpc://10.0.0.2:65535", "grpc://[::1]:5050"
    parts = [host_and_port("data_service", address) for address in addresses]
    assert parts == [("here", 1), ("10.0.0.2", 65535), ("::1", 5050)]
    for address in ("here:1", "grpc://here", "grpc://here:0", "grpc://here:65536", "grpc://:1", "grpc://a b:1"):
        with pytest.raises(InputError, match=f"^--data_service={address}: expected the address of a dispatcher"):
            host_and_port("data_service", address)


def test_a_port_where_nothing_listens_is_named():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port}: TensorFlow cannot listen"):
            keep_local(port)


def test_a_system_without_support_is_named(servers, monkeypatch):
    monkeypatch.setattr(socket, "SO_BINDTODEVICE", 2**15)  # an option that does not exist
    with pytest.raises(InputError, match="port .*: this system cannot keep it .*--listen=all opens it"):
        keep_local(servers[0].getsockname()[1])
    monkeypatch.delattr(socket, "SO_BINDTODEVICE")
    with pytest.raises(InputError, match="this system cannot keep it"):
        keep_local(servers[0].getsockname()[1])
