"""Run a real Slurm on one machine: munged, slurmctld, and a slurmd in each of several network namespaces.

Requires root. Checked with Slurm 22.05 of Debian 12. A node is the first process of a process namespace.
When it ends, all processes of the node end at once, like a machine that loses power.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.processes import ROOT, wait_until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "scancel", "srun", "munged", "ip", "unshare")
NODE_TIMEOUT_S = 10  # after this time, slurmctld marks a silent node as down
CPUS = 4  # memory of a node, independent of the machine


def get_missing_requirement() -> str:
    """Return the reason why no Slurm can start here, or an empty text."""
    if os.geteuid() != 0:
        return "a Slurm of our own needs root (network namespaces)"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    absent = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    return f"missing: {', '.join(absent)}; run tests/slurm/install_tools.sh" if absent else ""


class Cluster:
    """Control a Slurm cluster that `cluster()` started. The machine is the login node, on the nodes' network."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder = folder
        tag, net = os.getpid() % 30_000, os.getpid() % 200
        self._prefix = f"ms{tag}"
        self._network = f"10.88.{net}"
        self.address = f"{self._network}.254"
        self.nodes = [f"node{i}" for i in range(num_nodes)]
        self.conf = folder / "slurm.conf"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment for commands that use this cluster."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        return {**kept, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", "SLURM_CONF": str(self.conf)}

    def get_address(self, node: str) -> str:
        return f"{self._network}.{self.nodes.index(node) + 1}"

    def command(self, *argv: str, check: bool = True) -> str:
        """Run a Slurm command, and return its output."""
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode == 0 or not check, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit_script(self, script: str, *options: str) -> str:
        """Submit a job that runs the script, and return its id."""
        argv = ["sbatch", "--parsable", f"--output={self.folder}/%j.out", *options]
        done = subprocess.run(argv, input=script, env=self.environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().partition(";")[0]

    def get_job_state(self, job: str) -> str:
        """Return the state of a job, or an empty text for an unknown job."""
        return self.command("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T", check=False).strip()

    def get_node_state(self, node: str) -> str:
        # sinfo does not work here: after a restart of slurmctld, it reports "mixed" until another query.
        output = self.command("scontrol", "--oneliner", "show", "node", node)
        return output.partition(" State=")[2].partition(" ")[0].lower()

    def start(self) -> None:
        self._make_network()
        self._configure()
        self._start_munge()
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        wait_until(self._all_idle, "the nodes are idle", 40)

    def start_controller(self) -> None:
        self._start("slurmctld", ["slurmctld", "-D", "-f", str(self.conf)])
        # Commands answer quickly or fail.
        wait_until(lambda: "UP" in self.command("scontrol", "ping", check=False), "slurmctld answers", 30)

    def with_settings(self, **settings: str) -> str:
        """Return slurm.conf with the given settings replaced."""
        kept = [line for line in self.conf.read_text().splitlines() if line.partition("=")[0] not in settings]
        return "\n".join([*(f"{name}={value}" for name, value in settings.items()), *kept]) + "\n"

    def configure(self, conf: str) -> None:
        """Restart slurmctld with another slurm.conf."""
        self.stop_controller()
        self.conf.write_text(conf)
        self.start_controller()

    def stop_controller(self, number: signal.Signals = signal.SIGKILL) -> None:
        self._end("slurmctld", number)

    def start_node(self, node: str) -> None:
        """Start the node in a process namespace under its own host name.

        The namespace's end ends all its processes.
        """
        inside = f"hostname {node}; exec slurmd -D -N {node} -f {self.conf}"
        apart = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", inside]
        self._start(node, ["ip", "netns", "exec", self._namespace(node), *apart])

    def lose_power(self, node: str) -> None:
        """Kill every process of the node at once."""
        self._end(node, signal.SIGKILL)

    def cut(self, node: str) -> None:
        """Disconnect the node's cable."""
        _ip("link", "set", self._port(node), "down")

    def reconnect(self, node: str) -> None:
        _ip("link", "set", self._port(node), "up")

    def settle(self) -> None:
        """Wait until no job exists and every node is idle."""
        self.command("scancel", "--quiet", "--user=root", check=False)
        left = ["squeue", "--noheader", "--states=pending,running,completing", "--format=%i"]
        # A restarted slurmctld learns about ended jobs only when slurmd reports them again.
        wait_until(lambda: not self.command(*left).split(), "no job is left", 120)
        wait_until(self._all_idle, "the nodes are idle", 60)

    def _all_idle(self) -> bool:
        return {self.get_node_state(node) for node in self.nodes} == {"idle"}

    def stop(self) -> None:
        for name in reversed(list(self._processes)):
            self._end(name, signal.SIGKILL)
        for node in self.nodes:
            subprocess.run(["ip", "netns", "delete", self._namespace(node)], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / self._namespace(node), ignore_errors=True)
        subprocess.run(["ip", "link", "delete", f"{self._prefix}b"], capture_output=True, check=False)

    def _namespace(self, node: str) -> str:
        return f"{self._prefix}{node}"

    def _port(self, node: str) -> str:
        return f"{self._prefix}p{self.nodes.index(node)}"

    def _make_network(self) -> None:
        bridge = f"{self._prefix}b"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{self.address}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for node in self.nodes:
            namespace, port = self._namespace(node), self._port(node)
            _ip("netns", "add", namespace)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("link", "set", port, "master", bridge, "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "addr", "add", f"{self.get_address(node)}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            # Node names resolve on nodes like on any cluster, because torchrun resolves its own name.
            names = "".join(f"{self.get_address(name)} {name}\n" for name in self.nodes)
            etc = Path("/etc/netns") / namespace
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}")

    def _configure(self) -> None:
        for name in ("state", "spool", "run", "log"):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        run, log = self.folder / "run", self.folder / "log"
        lines = [
            "ClusterName=tests",
            f"SlurmctldHost={os.uname().nodename}({self.address})",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={run}/munge.socket",
            f"StateSaveLocation={self.folder}/state",
            f"SlurmdSpoolDir={self.folder}/spool/%n",
            f"SlurmctldPidFile={run}/slurmctld.pid",
            f"SlurmdPidFile={run}/%n.pid",
            f"SlurmctldLogFile={log}/slurmctld.log",
            f"SlurmdLogFile={log}/%n.log",
            "DebugFlags=NO_CONF_HASH",  # slurmctld may restart with another configuration, and slurmd does not
            "SlurmctldPort=16817",
            "SlurmdPort=16818",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "MpiDefault=none",
            "SwitchType=switch/none",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "SchedulerType=sched/backfill",
            "SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0",
            "SlurmdParameters=config_overrides",
            f"SlurmdTimeout={NODE_TIMEOUT_S}",
            "MessageTimeout=5",
            "KillWait=30",
            "ReturnToService=2",
            "MinJobAge=300",
            *(
                f"NodeName={n} NodeAddr={self.get_address(n)} CPUs={CPUS} RealMemory=8000 State=UNKNOWN"
                for n in self.nodes
            ),
            # Jobs of the partition "urgent" preempt others a minute after a warning.
            "PreemptType=preempt/partition_prio",
            "PreemptMode=CANCEL",
            "SlurmctldParameters=preempt_send_user_signal",
            "PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=60",
            "PartitionName=other Nodes=ALL MaxTime=60 State=UP PriorityTier=1",
            "PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=10",
        ]
        self.conf.write_text("\n".join(lines) + "\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _start_munge(self) -> None:
        run = self.folder / "run"
        key = run / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        options = [f"--{option}={run / name}" for option, name in files.items()]
        self._start("munged", ["munged", "--foreground", "--force", f"--log-file={run}/munge.log", *options])
        wait_until(lambda: (run / "munge.socket").exists(), "munged listens", 10)

    def run(self, name: str, argv: list[str]) -> None:
        """Start another daemon that ends with the cluster or with `end`."""
        self._start(name, argv)

    def end(self, name: str) -> None:
        self._end(name, signal.SIGKILL)

    def _start(self, name: str, argv: list[str]) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as out:
            self._processes[name] = subprocess.Popen(
                argv, env=self.environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip

    def _end(self, name: str, number: signal.Signals) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        process.wait(20)


@contextlib.contextmanager
def cluster(folder: Path, num_nodes: int = 2) -> Iterator[Cluster]:
    """Run a cluster with idle nodes, and remove all of it at the end."""
    made = Cluster(folder, num_nodes)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
