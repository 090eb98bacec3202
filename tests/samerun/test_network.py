import socket

import pytest

from samerun import machines
from samerun.errors import InputError


def test_addresses_of_this_machine():
    assert ("lo", "127.0.0.1") in machines.addresses()
    assert machines.own_address("127.0.0.1") == "127.0.0.1"
    assert machines.own_address("no-such-host.invalid") is None
    assert [machines.is_loopback(address) for address in ("127.0.1.1", "10.0.0.1", None)] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_variables_are_compared_with_the_interfaces(environment, variable):
    for accepted in ("", "lo", "l", "=lo", "nowhere,lo", "^docker"):  # NCCL's syntax
        environment[variable] = accepted
        machines.check_variables()
    environment[variable] = "nowhere7"
    with pytest.raises(
        InputError, match=rf"{variable}=nowhere7: {socket.gethostname()} has no such .*lo \(127.0.0.1\)"
    ):
        machines.check_variables()
