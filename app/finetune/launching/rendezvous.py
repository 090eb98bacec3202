"""The processes of several machines meet before any work: who is missing, who differs, who has failed already. Level 2.

It goes over the store that the process group will use (the launcher's own, or one that rank 0 opens at MASTER_ADDR:
MASTER_PORT), so it needs no further port. A process that fails before the group exists leaves its message there, and the
other machines end with it instead of waiting for a peer that will not come.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from finetune.errors import InputError
from finetune.launching import network

POLL_SECONDS = 0.1
LAST_WORDS_SECONDS = 10  # how long a process that fails keeps the store open for those who have not heard of it
MACHINE_NAMES = "FINETUNE_MACHINES"  # names in the order of ranks, set by our own launching scripts
SHOWN = 20

Judge = Callable[[list[dict[str, Any]]], list[str]]


class ElsewhereError(InputError):
    """Another process's failure, heard of at the meeting."""

    def __init__(self, where: str, problems: list[str], code: int):
        super().__init__(*problems[:-1], f"{problems[-1]} [{where}]")
        self.exit_code = code


@dataclass
class Meeting:
    """This process's place in the job, and the store; `done` once the process group stands."""

    rank: int
    world_size: int
    local_world_size: int
    address: str
    port: int
    store: Any = None
    done: bool = False
    names: tuple[str, ...] = ()

    def key(self, name: str) -> str:
        # A launcher that restarts its workers keeps its store.
        return f"finetune/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"


_meeting: Meeting | None = None


def of_environment() -> Meeting | None:
    """This process's place as the launcher says it; None for a job of one machine, whose launcher sees to everything."""
    env = os.environ
    world = int(env.get("WORLD_SIZE", 1))
    local = int(env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", 1)))
    if world == local or not env.get("MASTER_ADDR") or not env.get("MASTER_PORT", "").isdecimal():
        return None
    names = tuple(filter(None, env.get(MACHINE_NAMES, "").split(",")))
    return Meeting(int(env.get("RANK", 0)), world, local, env["MASTER_ADDR"], int(env["MASTER_PORT"]), names=names)


def call_the_roll(compared: dict[str, Any], timeout: int) -> None:
    """Waits until every process of the job is there and compares what they are about to do.

    `compared`: what must be equal on every machine, by name; a process may leave names out. Does nothing on one machine.
    Raises `InputError` naming the machines that did not come within `timeout` seconds, or every difference.
    """
    global _meeting
    _meeting = of_environment()
    if _meeting is None:
        return
    problems = network.wrong_hints()
    if problems:
        raise InputError(*problems)
    _open(_meeting, timeout)
    _gather(_meeting, "roll", _card(_meeting, compared), timeout, _differences, "--start_timeout")


def wait_until_ready(timeout: int) -> None:
    """Waits until every process has read its data, so that the process group's own wait is short; hears of failures."""
    if _meeting is None:
        return
    cards = _gather(_meeting, "ready", _card(_meeting, {}), timeout, lambda cards: [], "--ddp_timeout")
    _choose_card([card["address"] for card in cards])


def closed() -> None:
    """The process group stands: from now on failures are the group's."""
    if _meeting is not None:
        _meeting.done = True


def leave_word(problems: list[str], code: int, patience: float = LAST_WORDS_SECONDS) -> None:
    """Tells the processes that still wait why this one will not come. Never raises; `patience` bounds each of its two waits."""
    global _meeting
    with contextlib.suppress(Exception):
        _meeting = _meeting or of_environment()
        if _meeting is None or _meeting.done:
            return
        if _meeting.store is None:
            _open(_meeting, patience)
        word = json.dumps({"where": _where(_meeting), "problems": problems, "code": code})
        _meeting.store.compare_set(_meeting.key("failed"), "", word)
        _meeting.store.add(_meeting.key("heard"), 1)
        if _meeting.rank >= _meeting.local_world_size:
            return  # the store lives on rank 0's machine
        until = time.monotonic() + patience
        while time.monotonic() < until and _meeting.store.add(_meeting.key("heard"), 0) < _meeting.world_size:
            time.sleep(POLL_SECONDS)


def _open(meeting: Meeting, timeout: float) -> None:
    import torch.distributed as dist

    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = meeting.rank == 0 and not agents
    at = f"{meeting.address}:{meeting.port}"
    if not hosts:
        _wait_for_port(meeting, timeout)
    try:
        # Shared with the process group, which opens the same port in this process later on.
        meeting.store = dist.TCPStore(
            meeting.address,
            meeting.port,
            meeting.world_size,
            is_master=hosts,
            timeout=timedelta(seconds=max(1, timeout)),
            wait_for_workers=False,
            multi_tenant=hosts,
        )
    except (RuntimeError, OSError) as error:
        if hosts:
            raise InputError(
                f"port {meeting.port} of {socket.gethostname()} is in use, so the machines cannot meet at {at}; choose another "
                "on every machine (--master_port of deepspeed and torchrun, --main_process_port of accelerate, MASTER_PORT)"
            ) from error
        raise InputError(f"{_where(meeting)}: cannot talk to rank 0 at {at} ({_first_line(error)})") from error


def _wait_for_port(meeting: Meeting, timeout: float) -> None:
    """Until something listens at rank 0's address. Raises `InputError` after `timeout` seconds."""
    at, until, reason = f"{meeting.address}:{meeting.port}", time.monotonic() + timeout, None
    while True:
        try:
            socket.create_connection((meeting.address, meeting.port), timeout=max(1, min(5, timeout))).close()
            return
        except OSError as error:
            reason = error
        if time.monotonic() > until:
            raise InputError(
                f"{_where(meeting)}: machine {_machine(meeting, 0)} did not answer at {at} within {timeout:.0f} s "
                f"({reason.strerror or reason}); start the same command there, check the address and that no firewall closes "
                "the port, or wait longer with --start_timeout"
            ) from None
        time.sleep(POLL_SECONDS)


def _card(meeting: Meeting, compared: dict[str, Any]) -> dict[str, Any]:
    hint = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    address = network.cards().get(hint) if hint else network.own_address(meeting.address)
    return {"rank": meeting.rank, "host": socket.gethostname(), "address": address, "hinted": bool(hint), "compared": compared}


def _gather(meeting: Meeting, phase: str, card: dict, timeout: float, judge: Judge, argument: str) -> list[dict[str, Any]]:
    """Every process's card, in the order of ranks, once all are there and rank 0 has found nothing wrong with them."""
    store = meeting.store
    store.set(meeting.key(f"{phase}/{meeting.rank}"), json.dumps(card, default=str))
    started, verdict = time.monotonic(), meeting.key(f"{phase}/verdict")
    missing = list(range(meeting.world_size)) if meeting.rank == 0 else []
    # The others outwait rank 0, who can say more.
    patience = timeout if meeting.rank == 0 else timeout + LAST_WORDS_SECONDS
    while True:
        missing = [rank for rank in missing if not _ask(meeting, store.check, [meeting.key(f"{phase}/{rank}")])]
        if meeting.rank == 0 and not missing:
            cards = [json.loads(store.get(meeting.key(f"{phase}/{rank}"))) for rank in range(meeting.world_size)]
            problems = judge(cards)
            if problems:
                raise InputError(*problems)
            store.set(verdict, json.dumps(cards if phase == "ready" else []))
            return cards
        if meeting.rank != 0 and _ask(meeting, store.check, [verdict]):
            return json.loads(store.get(verdict))
        _hear(meeting)
        if time.monotonic() - started > patience:
            raise InputError(_who_is_missing(meeting, missing, timeout, argument))
        time.sleep(POLL_SECONDS)


def _ask(meeting: Meeting, question: Callable, *what: Any) -> Any:
    try:
        return question(*what)
    except RuntimeError as error:
        raise InputError(
            f"{_where(meeting)}: rank 0's machine ended before the job began; its own message says why ({_first_line(error)})"
        ) from None


def _hear(meeting: Meeting) -> None:
    """Raises what another process has failed of."""
    if _ask(meeting, meeting.store.check, [meeting.key("failed")]):
        word = json.loads(meeting.store.get(meeting.key("failed")))
        raise ElsewhereError(word["where"], word["problems"], word["code"])


def _differences(cards: list[dict[str, Any]]) -> list[str]:
    first, found = cards[0], []
    for card in cards[1:]:
        mine = f"rank {card['rank']} ({card['host']}):"
        for name in card["compared"].keys() & first["compared"].keys():
            here, there = card["compared"][name], first["compared"][name]
            if here == there:
                continue
            if isinstance(here, dict) and isinstance(there, dict):
                parts = sorted(part for part in here.keys() | there.keys() if here.get(part) != there.get(part))
                shown = [f"{part} is {_brief(here.get(part))}, but {_brief(there.get(part))}" for part in parts]
            else:
                shown = [f"{name} is {_brief(here)}, but {_brief(there)}"]
            found += [(card["host"], line, f"{mine} {line} on rank 0 ({first['host']})") for line in shown]
    once = {(host, line): message for host, line, message in reversed(found)}
    lines = sorted(once.values())
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    advice = ["every machine needs the same code, libraries, files and arguments"]
    return [*lines[:SHOWN], *more, *advice, *_lonely(cards)] if lines else _lonely(cards)


def _lonely(cards: list[dict[str, Any]]) -> list[str]:
    """Processes whose named network card only their own machine can reach, though others come from elsewhere."""
    if all(network.is_loopback(card["address"]) for card in cards):
        return []
    return [
        f"rank {card['rank']} ({card['host']}) would be reached at {card['address']}, which leads nowhere from other machines; "
        "set GLOO_SOCKET_IFNAME to the network card that they share, or leave it unset"
        for card in cards
        if card["hinted"] and network.is_loopback(card["address"])
    ]


def _choose_card(addresses: list[str | None]) -> None:
    """Names the network card for gloo, which would otherwise take the one that the host name stands for: often loopback."""
    if "GLOO_SOCKET_IFNAME" in os.environ or _meeting is None:
        return
    mine = addresses[_meeting.rank]
    others = [address for address in addresses if address and not network.is_loopback(address)]
    if network.is_loopback(mine) and others:
        mine = network.own_address(others[0])
    card = network.card_of(mine)
    if card is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = card


def _who_is_missing(meeting: Meeting, missing: list[int], timeout: float, argument: str) -> str:
    if meeting.rank != 0:
        return f"{_where(meeting)}: rank 0 said nothing for {timeout + LAST_WORDS_SECONDS:.0f} s ({argument})"
    machines: dict[int, list[int]] = {}
    for rank in missing:
        machines.setdefault(rank // meeting.local_world_size, []).append(rank)
    named = "; ".join(f"machine {_machine(meeting, number)}: rank {_span(ranks)}" for number, ranks in machines.items())
    return (
        f"{len(missing)} of {meeting.world_size} processes did not come to {meeting.address}:{meeting.port} within "
        f"{timeout:.0f} s: {named}. Start the same command on every machine, with its own rank; {argument} waits longer"
    )


def _machine(meeting: Meeting, number: int) -> str:
    return f"{number} ({meeting.names[number]})" if number < len(meeting.names) else str(number)


def _where(meeting: Meeting) -> str:
    return f"rank {meeting.rank} on {socket.gethostname()}"


def _span(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


def _brief(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
