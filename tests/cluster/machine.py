"""Host as a separate machine with its own network, name, processes and boot id. Its disk survives power loss."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.network import Cable
from tests.support.processes import ROOT, base_environment, wait_until

# PID 1 sets the name, lets the kernel reap orphans, and stays until the power goes.
INIT = """
import signal, socket, sys
socket.sethostname(sys.argv[1])
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
open(sys.argv[2], "w").close()
while True:
    signal.pause()
"""
BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Machine:
    """Switch a host on and off."""

    def __init__(self, name: str, cable: Cable, folder: Path, settings: dict[str, str]) -> None:
        self.name, self.cable, self.folder = name, cable, folder
        self.run_dir, self.checkpoint_root = folder / "runs", Path(settings["MESHBOARD_CHECKPOINT_ROOT"])
        self.environment = {
            **base_environment(),
            "MESHBOARD_HOST_NAME": name,
            "MESHBOARD_RUN_DIR": str(self.run_dir),
            "MESHBOARD_STATE_DIR": str(folder / "state"),
            "MESHBOARD_SCRIPT_ROOT": str(folder / "scripts"),
            "MESHBOARD_MIN_FREE_BYTES": "0",
            **settings,
        }
        folder.mkdir(parents=True)
        self._etc = Path("/etc/netns") / cable.namespace
        self._before_init = f'mount --bind "$0" {BOOT_ID}'
        self._power: subprocess.Popen[bytes] | None = None
        self.pid = 0

    def set_known_hosts(self, hosts: str) -> None:
        """Set the content of /etc/hosts from the next start. No name server answers."""
        self._etc.mkdir(parents=True, exist_ok=True)
        (self._etc / "hosts").write_text(hosts + "\n")
        (self._etc / "resolv.conf").write_text("nameserver 127.0.0.1\n")

    def limit_disk(self, megabytes: int) -> None:
        """Limit the disk of the runs from the next start. Its old content is lost."""
        self.run_dir.mkdir(mode=0o711)
        self._before_init += f' && mount -t tmpfs -o size={megabytes}m,mode=711 tmpfs "{self.run_dir}"'

    def skew_clock(self, seconds: int) -> None:
        """Shift the time of day from the next start."""
        etc, source = self.folder / "etc", Path(__file__).with_name("skew.c")
        shutil.copytree("/etc", etc, symlinks=True, ignore_dangling_symlinks=True)
        for name in ("hosts", "resolv.conf"):
            (etc / name).unlink(missing_ok=True)
            shutil.copy(self._etc / name, etc / name)
        # The files are in /etc, which a job also sees in its sandbox. A job does not see this folder.
        flags = ["-shared", "-fPIC", "-O1", f"-DSKEW_S=({seconds})"]
        subprocess.run(["cc", *flags, "-o", str(etc / "skew.so"), str(source), "-ldl"], check=True)
        (etc / "ld.so.preload").write_text("/etc/skew.so\n")
        self._before_init += f' && mount --bind "{etc}" /etc'

    def power_on(self) -> None:
        """Boot the machine without starting any service."""
        boot, up = self.folder / "boot_id", self.folder / f"up-{secrets.token_hex(4)}"
        boot.write_text(f"{uuid.uuid4()}\n")
        own = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = f'{self._before_init} && exec "$@"'
        init = ["sh", "-c", script, str(boot), sys.executable, "-c", INIT, self.name, str(up)]
        self._power = subprocess.Popen(
            ["ip", "netns", "exec", self.cable.namespace, *own, *init], stdin=subprocess.DEVNULL, start_new_session=True
        )
        wait_until(up.exists, f"{self.name} is booted", 20)
        children = Path(f"/proc/{self._power.pid}/task/{self._power.pid}/children").read_text().split()
        self.pid = int(children[0])

    def power_off(self) -> None:
        """Kill every process at once without notice, like a power cut."""
        if self._power is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._power.wait(20)
        self._power = None

    def build_command(self, argv: list[str]) -> list[str]:
        """Return the command that runs `argv` on this machine."""
        return [
            "nsenter",
            "--target",
            str(self.pid),
            "--net",
            "--uts",
            "--pid",
            "--mount",
            f"--wd={ROOT}",
            "--",
            *argv,
        ]

    def run(self, *argv: str) -> str:
        """Run a command, and return its output."""
        done = subprocess.run(self.build_command(list(argv)), capture_output=True, text=True, check=True, timeout=60)
        return done.stdout

    def start_worker(self) -> subprocess.Popen[bytes]:
        """Start the host worker, which joins first. A power cut ends it."""
        argv = [sys.executable, "-m", "workers.host.join"]
        with self.worker_log.open("ab") as out:
            return subprocess.Popen(
                self.build_command(argv),
                env=self.environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def worker_log(self) -> Path:
        return self.folder / "worker.log"


@contextlib.contextmanager
def powered(machine: Machine) -> Iterator[Machine]:
    machine.power_on()
    try:
        yield machine
    finally:
        machine.power_off()
