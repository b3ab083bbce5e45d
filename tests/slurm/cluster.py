"""A real Slurm on one machine: munged, slurmctld, and a slurmd in each of several network namespaces. Needs root.

Checked on Debian 12's Slurm 22.05. A node is the first process of a process namespace: ended, all that runs on it is
gone at once, as when a machine loses its power.
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
NODE_TIMEOUT_S = 10  # after which slurmctld takes a silent node for dead
CPUS = 4  # of a node, whatever the machine has


def missing() -> str:
    """Why no Slurm can be started here; empty where one can."""
    if os.geteuid() != 0:
        return "a Slurm of our own needs root (network namespaces)"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    absent = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    return f"missing: {', '.join(absent)}; run tests/slurm/install_tools.sh" if absent else ""


class Cluster:
    """Started by `cluster()`. The machine itself is the login node, on the nodes' network."""

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

    def address_of(self, node: str) -> str:
        return f"{self._network}.{self.nodes.index(node) + 1}"

    def command(self, *argv: str, check: bool = True) -> str:
        """The output of one of Slurm's commands."""
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode == 0 or not check, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def batch(self, script: str, *options: str) -> str:
        """The id of a job that runs the script."""
        argv = ["sbatch", "--parsable", f"--output={self.folder}/%j.out", *options]
        done = subprocess.run(argv, input=script, env=self.environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().partition(";")[0]

    def state_of(self, job: str) -> str:
        """Return the state of a job, or an empty text for an unknown job."""
        return self.command("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T", check=False).strip()

    def node_state(self, node: str) -> str:
        # Not by sinfo: after a restart of slurmctld it goes on to say "mixed" until somebody asks otherwise.
        told = self.command("scontrol", "--oneliner", "show", "node", node)
        return told.partition(" State=")[2].partition(" ")[0].lower()

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
        # Each answer is quick, or there is none.
        wait_until(lambda: "UP" in self.command("scontrol", "ping", check=False), "slurmctld answers", 30)

    def with_settings(self, **settings: str) -> str:
        """slurm.conf with these in place of those it has."""
        kept = [line for line in self.conf.read_text().splitlines() if line.partition("=")[0] not in settings]
        return "\n".join([*(f"{name}={value}" for name, value in settings.items()), *kept]) + "\n"

    def configure(self, conf: str) -> None:
        """A slurmctld that starts again with another slurm.conf."""
        self.stop_controller()
        self.conf.write_text(conf)
        self.start_controller()

    def stop_controller(self, number: signal.Signals = signal.SIGKILL) -> None:
        self._end("slurmctld", number)

    def start_node(self, node: str) -> None:
        """In a process namespace, whose end is the end of everything on the node; under the node's own name."""
        inside = f"hostname {node}; exec slurmd -D -N {node} -f {self.conf}"
        apart = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", inside]
        self._start(node, ["ip", "netns", "exec", self._namespace(node), *apart])

    def lose_power(self, node: str) -> None:
        """Every process of the node ends at once."""
        self._end(node, signal.SIGKILL)

    def cut(self, node: str) -> None:
        """Its cable is pulled."""
        _ip("link", "set", self._port(node), "down")

    def mend(self, node: str) -> None:
        _ip("link", "set", self._port(node), "up")

    def settle(self) -> None:
        """No job, and every node idle: ready for the next test."""
        self.command("scancel", "--quiet", "--user=root", check=False)
        left = ["squeue", "--noheader", "--states=pending,running,completing", "--format=%i"]
        # A slurmctld that was restarted hears of what has ended only when slurmd says it again.
        wait_until(lambda: not self.command(*left).split(), "no job is left", 120)
        wait_until(self._all_idle, "the nodes are idle", 60)

    def _all_idle(self) -> bool:
        return {self.node_state(node) for node in self.nodes} == {"idle"}

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
            _ip("-n", namespace, "addr", "add", f"{self.address_of(node)}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            # Names of nodes resolve on nodes, as on any cluster: torchrun asks for its own.
            names = "".join(f"{self.address_of(name)} {name}\n" for name in self.nodes)
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
            "DebugFlags=NO_CONF_HASH",  # slurmctld may start again with another, and slurmd does not
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
                f"NodeName={n} NodeAddr={self.address_of(n)} CPUs={CPUS} RealMemory=8000 State=UNKNOWN"
                for n in self.nodes
            ),
            # Jobs of "urgent" take nodes from the others, whose jobs are warned a minute before.
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
        """Start another daemon that ends with the cluster, or by `end`."""
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
    """Up, every node idle; nothing is left of it whatever happens."""
    made = Cluster(folder, num_nodes)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
