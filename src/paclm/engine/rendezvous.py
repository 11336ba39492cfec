"""Where workers meet rank 0, and whether that is private enough. Without torch, so that checks are quick.

Prompts and votes cross this wire unencrypted: it stays on this machine, or inside a network that the operator vouches
for.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import NamedTuple

from paclm.errors import InvalidInput


class Rendezvous(NamedTuple):
    """An address of rank 0's machine, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def check_workers(count: int, num_worlds: int) -> None:
    """Refuse workers without a world."""
    if not 1 <= count <= num_worlds:
        raise InvalidInput(f"--workers must be between 1 and the {num_worlds} worlds, not {count}.")


def find_rendezvous(address: str, private_networks: Sequence[str] = (), *, is_insecure: bool = False) -> Rendezvous:
    """The address of HOST:PORT or [HOST]:PORT, if prompts may cross the wire to it unencrypted."""
    name, _, port = address.rpartition(":")
    if not name or not port.isdecimal() or int(port) > 65535:
        raise InvalidInput(f"--rendezvous must be HOST:PORT, such as 10.8.0.1:29500, not {address!r}.")
    try:
        found = socket.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidInput(f"The host of --rendezvous {address} cannot be found ({error.strerror}).") from None
    host = ipaddress.ip_address(str(found[0][4][0]))  # resolved once: what is checked is what is used
    if host.is_unspecified:
        raise InvalidInput(f"--rendezvous {address} is every address of this machine. Name the one that workers reach.")
    networks = [ipaddress.ip_network(network) for network in private_networks]
    if not (is_insecure or host.is_loopback or any(host in network for network in networks)):
        raise InvalidInput(
            f"Prompts and votes would cross the network to {host} unencrypted. Connect the hosts by a VPN such as "
            'WireGuard and name its network in paclm.toml, [workers] private_networks = ["10.8.0.0/24"]; or pass '
            "--insecure-network where the cables are yours."
        )
    return Rendezvous(str(host), int(port))
