"""Login node: an sshd on the cluster's network that can stop and start."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path

from tests.slurm.cluster import Cluster
from tests.support.processes import ROOT, wait_until
from webapp.runner import find_free_port


class Login:
    """Run an sshd. The board's settings name its `address` and `config`."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder / "login"
        self.address, self.config = "root@login", self._folder / "ssh_config"
        self._port = find_free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        self._folder.mkdir(mode=0o700)
        for name in ("host_key", "user_key"):
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / name)]
            subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
        known = (self._folder / "host_key.pub").read_text().split()[:2]
        (self._folder / "known").write_text(" ".join(["login", *known]) + "\n")
        (self._folder / "user_key.pub").rename(self._folder / "authorized")
        (self._folder / "sshd_config").write_text(
            f"ListenAddress {self._cluster.address}:{self._port}\nHostKey {self._folder}/host_key\n"
            f"AuthorizedKeysFile {self._folder}/authorized\nPermitRootLogin yes\nStrictModes no\nUsePAM no\n"
            f"PidFile none\nSetEnv SLURM_CONF={self._cluster.conf}\n"
        )
        self.config.write_text(
            f"Host login\n  HostName {self._cluster.address}\n  Port {self._port}\n  HostKeyAlias login\n"
            f"  IdentityFile {self._folder}/user_key\n  UserKnownHostsFile {self._folder}/known\n"
        )

    def start(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        with (self._folder / "sshd.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["/usr/sbin/sshd", "-D", "-e", "-f", str(self._folder / "sshd_config")],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        wait_until(self._listens, "sshd listens", 10)

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self._cluster.address, self._port), 1):
            return True
        return False

    def stop(self) -> None:
        """Stop the sshd and every connection through it."""
        if self._process is None:
            return
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for pid in [str(self._process.pid), *children]:
            os.kill(int(pid), signal.SIGKILL)
        self._process.wait(10)
        self._process = None
