"""Network switch with namespaces. Each cable can be cut, cut in one direction, or slowed."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

CLONE_NEWNET = 0x40000000
_count = itertools.count()


class Cable:
    """Connect the switch to one namespace."""

    def __init__(self, switch: str, namespace: str, number: int) -> None:
        self.switch, self.namespace = switch, namespace
        self.port, self.interface = f"p{number}", f"eth{number}"
        self.address = f"10.77.0.{number + 1}"

    def cut(self) -> None:
        """Cut both directions. Both ends still see a link."""
        _ip("-n", self.switch, "link", "set", self.port, "nomaster")

    def cut_inbound(self) -> None:
        """Drop all frames to the namespace. Frames from the namespace still arrive at the switch."""
        # Turn learning off, because the next frame from the namespace would restore the route.
        _run("bridge", "-n", self.switch, "link", "set", "dev", self.port, "learning", "off")
        _run("bridge", "-n", self.switch, "fdb", "flush", "dev", "br0", "dynamic")
        _run("bridge", "-n", self.switch, "fdb", "replace", self._mac(), "dev", "nowhere", "master", "static")

    def restore(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            _run("bridge", "-n", self.switch, "fdb", "del", self._mac(), "dev", "nowhere", "master", "static")
        _ip("-n", self.switch, "link", "set", self.port, "master", "br0", "up")
        _run("bridge", "-n", self.switch, "link", "set", "dev", self.port, "learning", "on")

    def slow(self, rate: str) -> None:
        """Limit both directions to `rate` in tc's notation."""
        for namespace, device in ((self.switch, self.port), (self.namespace, self.interface)):
            shape = ["tbf", "rate", rate, "burst", "64kb", "latency", "200ms"]
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape)

    def sent_bytes(self) -> int:
        """Return the bytes that the interface of the namespace has sent, from the kernel's counter."""
        links = json.loads(_run("ip", "-n", self.namespace, "-j", "-s", "link", "show", self.interface))
        return int(links[0]["stats64"]["tx"]["bytes"])

    def _mac(self) -> str:
        links = json.loads(_run("ip", "-n", self.namespace, "-j", "link", "show", self.interface))
        return str(links[0]["address"])


@contextlib.contextmanager
def switched(names: list[str]) -> Iterator[list[Cable]]:
    """Create a namespace for each name on one switch without a route to other networks. Requires root."""
    prefix = f"mc{os.getpid()}-{next(_count)}"
    switch = f"{prefix}-switch"
    cables = [Cable(switch, f"{prefix}-{name}", number) for number, name in enumerate(names)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        _ip("-n", switch, "link", "add", "nowhere", "type", "veth", "peer", "name", "void")
        _ip("-n", switch, "link", "set", "nowhere", "master", "br0", "up")
        for cable in cables:
            _ip("netns", "add", cable.namespace)
            _ip("-n", cable.namespace, "link", "set", "lo", "up")
            peer = ["peer", "name", cable.interface, "netns", cable.namespace]
            _ip("-n", switch, "link", "add", cable.port, "type", "veth", *peer)
            _ip("-n", switch, "link", "set", cable.port, "master", "br0", "up")
            _ip("-n", cable.namespace, "addr", "add", f"{cable.address}/24", "dev", cable.interface)
            _ip("-n", cable.namespace, "link", "set", cable.interface, "up")
        yield cables
    finally:
        for name in (*(cable.namespace for cable in cables), switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Run this thread, and all that it starts, in the network of the namespace."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        _enter(there)
        yield
    finally:
        _enter(before)
        os.close(before)
        os.close(there)


def _enter(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout
