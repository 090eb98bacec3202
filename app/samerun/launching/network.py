"""This machine's network interfaces and addresses."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from samerun.errors import InputError


def addresses() -> list[tuple[str, str]]:
    """(network interface, IPv4 address) of every address of this machine."""
    interfaces = psutil.net_if_addrs().items()
    return [
        (name, entry.address)
        for name, entries in interfaces
        for entry in entries
        if entry.family == socket.AF_INET
    ]


def own_address(host: str) -> str | None:
    """This machine's address on the route to `host`; None without a route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return probe.getsockname()[0]


def is_loopback(address: str | None) -> bool:
    return address is not None and ipaddress.ip_address(address).is_loopback


def check_variables() -> None:
    """Raises `InputError` if GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names no interface of this machine."""
    known, host = addresses(), socket.gethostname()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # NCCL's syntax: prefixes, "=" before exact names, "^" before excluded names.
        setting = os.environ.get(variable, "")
        names = tuple(setting.removeprefix("=").split(","))
        if not setting.startswith("^") and not any(name.startswith(names) for name, _ in known):
            usable = ", ".join(f"{name} ({address})" for name, address in known)
            raise InputError(f"{variable}={setting}: {host} has no such network interface; it has {usable}")
