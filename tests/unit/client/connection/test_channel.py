"""What can be connected to."""

import socket
import threading

import pytest

import rheostat

BAD = {
    "localhost": "target needs a port, e.g. localhost:50051; 'localhost' has none",
    "::1": "target needs a port, e.g. localhost:50051; '::1' has none",
    "": "target needs a port, e.g. localhost:50051; '' has none",
    "http://localhost:50051/": "a target has no scheme: write 'localhost:50051', without http://",
    "grpc://a:1": "a target has no scheme: write 'a:1', without grpc://",
    "localhost:70000": "a target's port is 1 to 65535, not 70000",
    "localhost:0": "a target's port is 1 to 65535, not 0",
}


@pytest.mark.parametrize("connect", [rheostat.connect, rheostat.aio.connect])
@pytest.mark.parametrize(("target", "message"), BAD.items())
def test_what_is_no_target_is_refused_at_once(connect, target, message):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        connect(target)
    assert (raised.value.path, raised.value.message) == ("target", message)


@pytest.mark.parametrize(
    "target",
    ["localhost:1", "[::1]:65535", "a.b-c:50051", "unix:/a/socket", "dns:///a:1", "ipv4:1.2.3.4:5"],
)
def test_hosts_with_a_port_and_grpcs_resolvers_are_targets(target):
    assert repr(rheostat.aio.connect(target)) == f"aio.Engine({target!r})"


def test_a_host_that_is_called_as_a_resolver_is_a_host():
    assert repr(rheostat.aio.connect("dns:50051")) == "aio.Engine('dns:50051')"


@pytest.mark.parametrize("connect", [rheostat.connect, rheostat.aio.connect])
def test_a_target_that_is_no_text_is_refused_with_what_is_meant(connect):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        connect(50051)
    assert raised.value.message == 'a target is a text, not 50051: write "localhost:50051"'


@pytest.mark.parametrize(
    ("variable", "target"), [("gpu-host:1234", "gpu-host:1234"), (None, "localhost:50051")]
)
def test_no_target_is_the_one_of_the_command_line(monkeypatch, variable, target):
    monkeypatch.delenv("RHEOSTAT_TARGET", raising=False)
    if variable is not None:
        monkeypatch.setenv("RHEOSTAT_TARGET", variable)
    assert repr(rheostat.aio.connect()) == f"aio.Engine({target!r})"
    with rheostat.connect() as engine:
        assert repr(engine) == f"Engine({target!r})"
        assert repr(engine.vectors) == f"Vectors({target!r})"
        assert repr(engine.steering) == f"Steering({target!r})"


def test_what_speaks_no_grpc_is_named_as_such():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(64)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        with rheostat.connect(target) as engine, pytest.raises(rheostat.Unavailable) as raised:
            engine.generate("x")
    assert raised.value.message.startswith(
        f"no server answers at {target}: something else listens there, which does not speak gRPC; "
    )
