import socket

import pytest

from finetune.launching import network


def test_every_machine_has_a_loopback_card():
    assert network.cards()["lo"] == "127.0.0.1"
    assert network.card_of("127.0.0.1") == "lo"
    assert network.card_of("203.0.113.9") is None


def test_the_address_towards_this_machine_is_its_own():
    assert network.own_address("127.0.0.1") == "127.0.0.1"
    assert network.own_address("no-such-host.invalid") is None
    assert [network.is_loopback(address) for address in ("127.0.1.1", "10.0.0.1", None)] == [True, False, False]


@pytest.mark.parametrize(
    ("name", "value", "found"),
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
def test_hints_are_held_against_the_cards(environment, name, value, found):
    for other in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environment.pop(other, None)
    environment[name] = value
    problems = network.wrong_hints()
    assert len(problems) == found
    assert all(
        f"{name}=" in problem and socket.gethostname() in problem and "lo (127.0.0.1)" in problem for problem in problems
    )
