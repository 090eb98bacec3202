"""This machine's network interfaces: which one leads to the other machines, and whether the one that the user named exists."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil


def addresses() -> dict[str, list[str]]:
    """The IPv4 addresses of each network interface, by its name."""
    return {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }


def own_address(host: str) -> str | None:
    """The address from which this machine would talk to `host`; nothing is sent. None if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return probe.getsockname()[0]


def is_loopback(address: str | None) -> bool:
    return address is not None and ipaddress.ip_address(address).is_loopback


def interface_of(address: str | None) -> str | None:
    """The name of the network interface that has an address."""
    return next((name for name, own in addresses().items() if address in own), None)


def problems() -> list[str]:
    """What is wrong with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, if they are set; one message each."""
    known, host = addresses(), socket.gethostname()
    usable = ", ".join(f"{name} ({own[0]})" for name, own in known.items() if own)
    messages = []
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in known:
            messages.append(f"GLOO_SOCKET_IFNAME={name}: {host} has no such network interface; it has {usable}")
        elif not known[name]:
            messages.append(f"GLOO_SOCKET_IFNAME={name}: this interface of {host} has no IPv4 address; others: {usable}")
    # NCCL's syntax: a list of prefixes, "=" before exact names, "^" before those to leave out.
    setting = os.environ.get("NCCL_SOCKET_IFNAME", "")
    names, exact = setting.removeprefix("=").split(","), setting.startswith("=")
    if (
        setting
        and not setting.startswith("^")
        and not any(own == name if exact else own.startswith(name) for own in known for name in names)
    ):
        messages.append(f"NCCL_SOCKET_IFNAME={setting}: {host} has no such network interface; it has {usable}")
    return messages
