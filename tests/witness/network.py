"""Create hosts on one machine: network namespaces joined by a bridge."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from typing import NamedTuple


class NetHost(NamedTuple):
    """A network namespace and its address."""

    namespace: str
    address: str
    interface: str

    def inside(self, argv: list[str]) -> list[str]:
        """Return the command that runs `argv` in this namespace."""
        return ["ip", "netns", "exec", self.namespace, *argv]


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[NetHost]]:
    """Create hosts that reach only each other. Needs root."""
    prefix = f"mb{os.getpid() % 100_000}"
    switch = f"{prefix}s"
    made = [NetHost(f"{prefix}h{i}", f"10.77.0.{i + 1}", f"{prefix[-6:]}e{i}") for i in range(count)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for i, host in enumerate(made):
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            port = f"p{i}"
            _ip(
                "-n",
                switch,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                host.interface,
                "netns",
                host.namespace,
            )
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.namespace, "link", "set", host.interface, "up")
        yield made
    finally:
        for name in (*(host.namespace for host in made), switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
