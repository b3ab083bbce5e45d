"""How the host fares while an attempt runs: its network, its processors, the GPUs of the attempt's ranks."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from contracts.telemetry.health import GaugeItem
from workers.host.facts.gpus import Gpus

log = logging.getLogger(__name__)

EVERY_S = 5.0


def _lowest(names: Iterable[str], interfaces: Path = Path("/sys/class/net")) -> list[str]:
    """Of network interfaces those that others lie on, hardware where there is any: bonds, bridges and VLANs count the
    same bytes again."""
    found = [name for name in names if name != "lo" and not any((interfaces / name).glob("lower_*"))]
    return [name for name in found if (interfaces / name / "device").exists()] or found


class HostGauge:
    """Rates are since the look before. `slots` by rank: on a host with GPUs, which of them it has."""

    def __init__(self, slots: dict[int, int], *, with_gpus: bool) -> None:
        self._slots, self._with_gpus = slots, with_gpus
        self._gpus: Gpus | None = None
        self._before: tuple[float, int, int] | None = None

    def start(self, tell: Callable[[list[GaugeItem]], None]) -> None:
        """In a thread of its own that nobody waits for: a driver may hang. `tell` runs in the loop that runs now."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop, tell), name="host-gauge", daemon=True).start()

    def _run(self, loop: asyncio.AbstractEventLoop, tell: Callable[[list[GaugeItem]], None]) -> None:
        while True:
            try:
                loop.call_soon_threadsafe(tell, self.look())
            except RuntimeError:  # the loop is closed
                return
            except Exception:
                log.exception("cannot measure the machine")
            time.sleep(EVERY_S)

    def look(self) -> list[GaugeItem]:
        """One look."""
        return [self._of_host(), *self._of_gpus()]

    def _of_host(self) -> GaugeItem:
        item = GaugeItem(kind="gauge", rank=-1, time=time.time())
        busy = psutil.cpu_percent(None) / 100 * (psutil.cpu_count() or 1)  # since the call before, of this thread
        counted = psutil.net_io_counters(pernic=True)
        cards = [counted[name] for name in _lowest(counted)]
        now, sent, received = time.monotonic(), sum(c.bytes_sent for c in cards), sum(c.bytes_recv for c in cards)
        if self._before is not None:
            before, sent_before, received_before = self._before
            passed_s = max(now - before, 1e-3)
            item["cpu"] = busy
            item["sent_bytes_s"] = max(0, sent - sent_before) / passed_s  # an interface may be gone
            item["received_bytes_s"] = max(0, received - received_before) / passed_s
        self._before = (now, sent, received)
        return item

    def _of_gpus(self) -> list[GaugeItem]:
        """One for each rank: a host may have several."""
        if not self._with_gpus:
            return []
        if self._gpus is None:
            self._gpus = Gpus()
        used, clocks = self._gpus.use(), self._gpus.clocks()
        items = []
        for rank, slot in self._slots.items():
            if slot >= len(used):
                continue
            item, use = GaugeItem(kind="gauge", rank=rank, time=time.time()), used[slot]
            if "busy_percent" in use:
                item["gpu_percent"] = use["busy_percent"]
            if "watts" in use:
                item["gpu_power_w"] = use["watts"]
            if "celsius" in use:
                item["gpu_celsius"] = use["celsius"]
            if (clock := clocks[slot]) is not None:
                item["gpu_clock_mhz"] = clock
            items.append(item)
        return items


def slots_of(ranks: Sequence[int], slots: Sequence[int]) -> dict[int, int]:
    """Which slot each rank has: they are dealt out in order."""
    return dict(zip(ranks, slots, strict=False))
