import socket

import pytest

from finetune.launching import network


def test_every_machine_has_a_loopback_interface():
    assert network.addresses()["lo"][0] == "127.0.0.1"
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("203.0.113.9") is None


def test_an_interface_without_an_address_is_refused(environment, monkeypatch):
    monkeypatch.setattr(network, "addresses", lambda: {"lo": ["127.0.0.1"], "eth0": []})
    environment["GLOO_SOCKET_IFNAME"] = "eth0"
    environment.pop("NCCL_SOCKET_IFNAME", None)
    (problem,) = network.problems()
    assert problem.endswith("has no IPv4 address; others: lo (127.0.0.1)")


def test_the_address_towards_this_machine_is_its_own():
    assert network.own_address("127.0.0.1") == "127.0.0.1"
    assert network.own_address("no-such-host.invalid") is None
    assert [network.is_loopback(address) for address in ("127.0.1.1", "10.0.0.1", None)] == [True, False, False]


@pytest.mark.parametrize(
    ("name", "value", "count"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", 0),
        ("GLOO_SOCKET_IFNAME", "nowhere7", 1),
        ("GLOO_SOCKET_IFNAME", "lo,nowhere7", 1),
        ("NCCL_SOCKET_IFNAME", "l", 0),  # a prefix
        ("NCCL_SOCKET_IFNAME", "=l", 1),
        ("NCCL_SOCKET_IFNAME", "=lo", 0),
        ("NCCL_SOCKET_IFNAME", "nowhere,lo", 0),
        ("NCCL_SOCKET_IFNAME", "^docker", 0),
        ("NCCL_SOCKET_IFNAME", "nowhere", 1),
    ],
)
def test_variables_are_compared_with_the_interfaces(environment, name, value, count):
    for other in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environment.pop(other, None)
    environment[name] = value
    problems = network.problems()
    assert len(problems) == count
    assert all(
        f"{name}=" in problem and socket.gethostname() in problem and "lo (127.0.0.1)" in problem for problem in problems
    )
