"""This machine's network cards: which one leads to the other machines, and whether the one that was named is there. Level 1.

Linux only where it looks at cards; elsewhere it knows none and leaves the choice to the libraries.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct

SIOCGIFADDR = 0x8915  # netdevice(7)


def cards() -> dict[str, str]:
    """IPv4 address by name of network card; cards without one are left out."""
    found = {}
    try:
        import fcntl
    except ImportError:
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def own_address(host: str) -> str | None:
    """The address from which this machine would talk to `host`; nothing is sent. None if no road leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return probe.getsockname()[0]


def is_loopback(address: str | None) -> bool:
    return address is not None and ipaddress.ip_address(address).is_loopback


def card_of(address: str | None) -> str | None:
    """The name of the network card that has an address."""
    return next((name for name, its in cards().items() if its == address), None)


def wrong_hints() -> list[str]:
    """What is wrong with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, if they are set; one message each."""
    have = {name for _, name in socket.if_nameindex()}
    there = ", ".join(f"{name} ({address})" for name, address in cards().items())
    found = []
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in have:
            found.append(f"GLOO_SOCKET_IFNAME={name}: {socket.gethostname()} has no such network card; it has {there}")
        elif name not in cards():
            found.append(f"GLOO_SOCKET_IFNAME={name}: this card of {socket.gethostname()} has no address; others: {there}")
    # NCCL's syntax: a list of prefixes, "=" before exact names, "^" before those to leave out.
    stated = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if stated and not stated.startswith("^"):
        names = stated.removeprefix("=").split(",")
        exact = stated.startswith("=")
        if not any(name in have if exact else any(card.startswith(name) for card in have) for name in names):
            found.append(f"NCCL_SOCKET_IFNAME={stated}: {socket.gethostname()} has no such network card; it has {there}")
    return found
