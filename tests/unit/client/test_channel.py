"""What can be connected to."""

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
