"""A real Slurm of one controller and four nodes on this machine, for tests and for play: `make cluster-up`.

    with Rig() as rig:                                     # about 3 s; needs root and Debian's slurm-wlm
        code, out, err = rig.run(["sinfo"])                # as a user would on a login node
        rig.run(["sbatch", "--wrap", "hostname"])
        rig.limit("n2", "100mbit")                         # its link, both ways; rig.limit("n2", None) lifts it
        rig.administer("n2", "mount", "...")               # as root on the node; its mounts are its own
        rig.cut("n2")                                      # off the network, all its processes live on
        rig.kill_node("n3")                                # dead, as when its power fails
        rig.revive("n2")                                   # back, whichever of the two it was

Each node has network, process, mount and host name of its own: 10.77.0.1 (n1) to 10.77.0.4 on a bridge where the
controller is 10.77.0.100. Files are the host's: temporary folders, the repository and its virtual environment are what
they are outside, and shared by all nodes. What Slurm itself writes lies in memory, over /etc/slurm.

Nothing of the host is touched, and nothing is left: all processes are in one process namespace that dies with its
first process, which dies when whoever holds the rig closes it or is killed; interfaces and mounts go with them.
Not for measuring: four nodes share the cores of this machine.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

NODES = ("n1", "n2", "n3", "n4")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "tc", "unshare", "nsenter", "setpriv")
HOME = "/etc/slurm"
"""Where the memory file system is mounted: Slurm looks for its configuration there, and its package has made it."""

CONFIGURATION = f"""\
ClusterName=rig
SlurmctldHost=controller(10.77.0.100)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={HOME}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={HOME}/state
SlurmdSpoolDir={HOME}/spool-%n
SlurmctldPidFile={HOME}/slurmctld.pid
SlurmdPidFile={HOME}/slurmd-%n.pid
SlurmctldLogFile={HOME}/log/slurmctld.log
SlurmdLogFile={HOME}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=0,nohold_on_prolog_fail
SlurmdParameters=config_overrides
SlurmdTimeout=10
MessageTimeout=5
TCPTimeout=2
SlurmctldTimeout=10
KillWait=5
MinJobAge=3600
ReturnToService=2
GresTypes=gpu
{{nodes}}
PartitionName=main Nodes=n[1-4] Default=YES PriorityTier=1 GraceTime=10 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=n[1-4] PriorityTier=10 MaxTime=INFINITE State=UP
"""
GPUS = "".join(f"NodeName={node} Name=gpu File={HOME}/gpu[0-1]\n" for node in NODES)
HOSTS = "127.0.0.1 localhost\n10.77.0.100 controller\n" + "".join(
    f"10.77.0.{number} {node}\n" for number, node in enumerate(NODES, 1)
)


def obstacle() -> str | None:
    """Why there can be no rig on this machine, in words; None if nothing is in the way."""
    if os.geteuid() != 0:
        return "a Slurm to test on needs root, for its namespaces"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: apt-get install slurm-wlm munge iproute2)"
    tried = subprocess.run(
        ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "ip", "link", "add", "name", "a", "type", "bridge"],
        capture_output=True,
        text=True,
    )
    return f"namespaces are forbidden here: {tried.stderr.strip()}" if tried.returncode else None


class Rig:
    """The cluster, as a context. `environment`: what commands see; this process's by default. `more`: lines of
    slurm.conf besides."""

    def __init__(self, environment: Mapping[str, str] | None = None, more: str = "") -> None:
        self._environment = dict(os.environ if environment is None else environment)
        self._more = more
        self._first: subprocess.Popen[str] | None = None
        self._nodes: dict[str, tuple[subprocess.Popen[str], int]] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._controller: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def files(self) -> Path:
        """Slurm's own files, seen from outside: `slurm.conf`, `log/`."""
        return Path(f"/proc/{self._pid}/root{HOME}")

    def inside(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on the login node."""
        here = f"--wd={os.getcwd()}"
        return ["nsenter", f"--target={self._pid}", "--mount", "--net", "--uts", "--pid", here, "--", *argv]

    def run(self, argv: Sequence[str], timeout: float = 60.0) -> tuple[int, str, str]:
        """Run a command on the login node: its exit code, what it printed, and its errors."""
        done = subprocess.run(
            self.inside(argv),
            capture_output=True,
            text=True,
            timeout=timeout,
            env=self._environment,
            stdin=subprocess.DEVNULL,
        )
        return done.returncode, done.stdout, done.stderr

    def kill_node(self, node: str) -> None:
        """Kill everything that runs on a node, at once; its interface is gone, too."""
        process, pid = self._nodes.pop(node)
        os.kill(pid, signal.SIGKILL)
        ended(process)

    def cut(self, node: str) -> None:
        """Take a node off the network."""
        self._administer("ip", "link", "set", node, "down")

    def revive(self, node: str) -> None:
        """Bring back a node that was killed or cut, and wait until Slurm has it again."""
        if node in self._nodes:
            self._administer("ip", "link", "set", node, "up")
        else:
            self._start_node(node)
        self.wait_for(lambda: self._in_service(node), f"{node} back in service")

    def administer(self, node: str, *argv: str) -> None:
        """Run a command on a node, as its administrator."""
        self._administer(*argv, target=self._nodes[node][1])

    def stop_controller(self) -> None:
        """Stop the controller, which writes down what it knows; the nodes and their jobs run on. (Killed outright, it
        forgets the jobs of its last 5 s.)"""
        assert self._controller is not None
        for pid in children(self._controller.pid):
            os.kill(pid, signal.SIGTERM)
        self._controller.wait()

    def start_controller(self) -> None:
        """Start the controller, which goes on where it was."""
        self._controller = self._daemon(["slurmctld", "-D"])

    def limit(self, node: str, rate: str | None) -> None:
        """Slow a node's link down, in both directions: a rate as tc writes it, such as `1gbit`; None for no limit."""
        for where, interface in ((self._pid, node), (self._nodes[node][1], "eth0")):
            if rate is None:
                self._administer("tc", "qdisc", "del", "dev", interface, "root", target=where)
            else:
                shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
                self._administer("tc", "qdisc", "replace", "dev", interface, *shape, target=where)

    def states(self) -> dict[str, str]:
        """What Slurm thinks of each node, such as `idle` or `down`; a `*` at the end stands for no answer."""
        code, out, err = self.run(["sinfo", "--noheader", "--Node", "--format=%N %T"])
        if code:
            return dict.fromkeys(NODES, err.strip() or "unknown")
        return {node: state for node, _, state in (line.partition(" ") for line in out.splitlines())}

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        """Look until a condition holds; AssertionError with the controller's last words when it does not in time."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"not in {seconds:g} s: {what}\n{self._last_words()}")
            time.sleep(0.1)

    def close(self) -> None:
        """End everything."""
        if self._first is not None:
            ended(self._first)  # with it go all others
            for process, _ in self._nodes.values():
                ended(process)
            for daemon in self._daemons:
                daemon.wait()
            self._first = None
            self._nodes.clear()
            self._daemons.clear()

    def _start(self) -> None:
        spaces = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._first, self._pid = waiting(["setpriv", "--pdeathsig", "KILL", *spaces])
        for argv in (
            ("mount", "-t", "tmpfs", "-o", "mode=755", "slurm", HOME),
            ("hostname", "controller"),
            ("mkdir", *(f"{HOME}/{name}" for name in ("munge", "state", "log", *(f"spool-{node}" for node in NODES)))),
            *(("mknod", f"{HOME}/gpu{index}", "c", "1", "3") for index in range(2)),  # as good as /dev/null
            ("ip", "link", "set", "lo", "up"),
            ("ip", "link", "add", "name", "bridge", "type", "bridge"),
            ("ip", "address", "add", "10.77.0.100/24", "dev", "bridge"),
            ("ip", "link", "set", "bridge", "up"),
        ):
            self._administer(*argv)
        key = self.files / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        cores = max(2, os.cpu_count() or 1)
        nodes = "\n".join(
            f"NodeName={node} NodeAddr=10.77.0.{number} CPUs={cores} RealMemory=4000 Gres=gpu:2 State=UNKNOWN"
            for number, node in enumerate(NODES, 1)
        )
        (self.files / "slurm.conf").write_text(f"{CONFIGURATION.format(nodes=nodes)}{self._more}\n")
        (self.files / "gres.conf").write_text(GPUS)
        (self.files / "hosts").write_text(HOSTS)
        self._administer("mount", "--bind", f"{HOME}/hosts", "/etc/hosts")
        munge = [f"--{name}={HOME}/munge/{name.partition('-')[0]}" for name in ("key-file", "pid-file", "seed-file")]
        self._daemon(
            ["munged", "--foreground", f"--socket={HOME}/munge/socket", f"--log-file={HOME}/log/munged", *munge]
        )
        self.wait_for((self.files / "munge" / "socket").exists, "munged")
        self.start_controller()
        for node in NODES:
            self._start_node(node)
        self.wait_for(lambda: set(self.states().values()) == {"idle"}, "all nodes idle")

    def _start_node(self, node: str) -> None:
        number = NODES.index(node) + 1
        spaces = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--mount-proc"]
        enter = ["nsenter", f"--target={self._pid}", "--mount", "--net", "--uts", "--pid", "--"]
        process, pid = waiting([*enter, *spaces])
        self._nodes[node] = process, pid
        # the process id is the host's, so this must not enter the process namespace
        self._administer("ip", "link", "add", "name", node, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self._administer("ip", "link", "set", node, "master", "bridge", "up")
        for argv in (
            ("hostname", node),
            ("ip", "link", "set", "lo", "up"),
            ("ip", "address", "add", f"10.77.0.{number}/24", "dev", "eth0"),
            ("ip", "link", "set", "eth0", "up"),
        ):
            self._administer(*argv, target=pid)
        self._daemon(["slurmd", "-D", "-N", node], target=pid)

    def _in_service(self, node: str) -> bool:
        state = self.states()[node]
        if state.startswith("down"):  # or Slurm would take half a minute to look
            self.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"])
        return state in ("idle", "mixed", "allocated")

    def _administer(self, *argv: str, target: int | None = None) -> None:
        enter = ["nsenter", f"--target={target or self._pid}", "--mount", "--net", "--uts", "--"]
        done = subprocess.run([*enter, *argv], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")

    def _daemon(self, argv: Sequence[str], target: int | None = None) -> subprocess.Popen[bytes]:
        enter = ["nsenter", f"--target={target or self._pid}", "--mount", "--net", "--uts", "--pid", "--"]
        nowhere = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._daemons.append(subprocess.Popen([*enter, *argv], start_new_session=True, cwd="/", **nowhere))
        return self._daemons[-1]

    def _last_words(self) -> str:
        log = self.files / "log" / "slurmctld.log"
        return "\n".join(log.read_text().splitlines()[-30:]) if log.exists() else "slurmctld wrote nothing"


def waiting(spaces: Sequence[str]) -> tuple[subprocess.Popen[str], int]:
    """Start the first process of new namespaces, which does nothing but reap orphans and wait for the end of its input;
    the process that leads to it, and its id as seen from here."""
    process = subprocess.Popen(
        [*spaces, "bash", "-c", "echo ready; read -r _"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is not for the cluster
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{' '.join(spaces)}: {process.stderr.read().strip()}")
    pid = process.pid
    while below := children(pid):
        (pid,) = below
    return process, pid


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ended(process: subprocess.Popen[str]) -> None:
    """End what `waiting` started, by the end of its input, if it has not ended, and wait for it."""
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def main() -> None:
    """`make cluster-up`: a shell on the login node, and no cluster any more when it ends."""
    why = obstacle()
    if why is not None:
        raise SystemExit(f"no cluster: {why}")
    with Rig() as rig:
        print("A Slurm of four nodes, n1 to n4, with two make-believe GPUs each; files are this machine's own.")
        print("Try: sinfo; srun --nodes=4 hostname; phalanx jobs ls --on slurm. `exit` ends it and leaves nothing.")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        subprocess.run(rig.inside(["bash"]), env={**os.environ, "PATH": path})


if __name__ == "__main__":
    main()
