"""A real Slurm of one controller and four nodes on this machine, for tests and for play: `make cluster-up`.

    with SlurmCluster() as rig:                            # about 3 s; needs root and Debian's slurm-wlm
        code, out, err = rig.run(["sinfo"])                # as a user would on a login node
        rig.run(["sbatch", "--wrap", "hostname"])
        rig.administer("n2", "mount", "...")               # as root on the node; its mounts are its own
        rig.cut("n2")                                      # off the network, all its processes live on
        rig.kill_node("n3")                                # dead, as when its power fails
        rig.revive("n2")                                   # back, whichever of the two it was

The nodes are those of `network_namespaces.py`, 10.77.0.1 (n1) to 10.77.0.4 on a bridge where the controller is
10.77.0.100, and nothing of the host is touched or left. Files are the host's: temporary folders, the repository and its
virtual environment are what they are outside, and shared by all nodes. What Slurm itself writes lies in memory, over
/etc/slurm. Not for measuring: four nodes share the cores of this machine.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import network_namespaces
from network_namespaces import Namespaces, children

NODES = ("n1", "n2", "n3", "n4")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
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


def find_obstacle() -> str | None:
    """Why there can be no rig on this machine, in words; None if nothing is in the way."""
    return network_namespaces.find_obstacle("a Slurm to test on", PROGRAMS, "slurm-wlm munge iproute2")


def login_files() -> list[Path]:
    """What a login shell of this user reads here. slurmd starts one on a job's first node to learn the environment, and
    waits for it, for up to 120 s, while the controller takes the job for lost after some 50. pyenv's part of such a
    file takes a lock, waits for it for 60 s, and leaves it behind when it is killed with its node."""
    home = Path("~root").expanduser()
    files = [home / name for name in (".profile", ".bash_profile", ".bash_login", ".bashrc")]
    return [file for file in files if file.is_file()]


class SlurmCluster:
    """The cluster, as a context. `environment`: what commands see; this process's by default. `more`: lines of
    slurm.conf besides."""

    def __init__(self, environment: Mapping[str, str] | None = None, more: str = "") -> None:
        self._environment = dict(os.environ if environment is None else environment)
        self._more = more
        self._spaces = Namespaces()
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
        return Path(f"/proc/{self._spaces.pid}/root{HOME}")

    def inside(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on the login node."""
        return self._spaces.inside(argv)

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
        self._spaces.kill(node)

    def cut(self, node: str) -> None:
        """Take a node off the network."""
        self._spaces.administer("ip", "link", "set", node, "down")

    def revive(self, node: str) -> None:
        """Bring back a node that was killed or cut, and wait until Slurm has it again."""
        if node in self._spaces.nodes:
            self._spaces.administer("ip", "link", "set", node, "up")
        else:
            self._start_node(node)
        self.wait_for(lambda: self._in_service(node), f"{node} back in service")

    def administer(self, node: str, *argv: str) -> None:
        """Run a command on a node, as its administrator."""
        self._spaces.administer(*argv, node=node)

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
        if self._spaces.is_open:
            self._spaces.close()
            for daemon in self._daemons:
                daemon.wait()
            self._daemons.clear()

    def _start(self) -> None:
        self._spaces.open("controller")
        for argv in (
            ("mount", "-t", "tmpfs", "-o", "mode=755", "slurm", HOME),
            ("mkdir", *(f"{HOME}/{name}" for name in ("munge", "state", "log", *(f"spool-{node}" for node in NODES)))),
            *(("mknod", f"{HOME}/gpu{index}", "c", "1", "3") for index in range(2)),  # as good as /dev/null
        ):
            self._spaces.administer(*argv)
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
        self._spaces.administer("mount", "--bind", f"{HOME}/hosts", "/etc/hosts")
        (self.files / "empty").touch()
        for file in login_files():
            self._spaces.administer("mount", "--bind", f"{HOME}/empty", str(file))
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
        self._spaces.add(node, NODES.index(node) + 1)
        self._daemon(["slurmd", "-D", "-N", node], node)

    def _in_service(self, node: str) -> bool:
        state = self.states()[node]
        if state.startswith("down"):  # or Slurm would take half a minute to look
            self.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"])
        return state in ("idle", "mixed", "allocated")

    def _daemon(self, argv: Sequence[str], node: str | None = None) -> subprocess.Popen[bytes]:
        self._daemons.append(self._spaces.daemon(argv, node))
        return self._daemons[-1]

    def _last_words(self) -> str:
        log = self.files / "log" / "slurmctld.log"
        return "\n".join(log.read_text().splitlines()[-30:]) if log.exists() else "slurmctld wrote nothing"


def main() -> None:
    """`make cluster-up`: a shell on the login node, and no cluster any more when it ends."""
    why = find_obstacle()
    if why is not None:
        raise SystemExit(f"no cluster: {why}")
    with SlurmCluster() as rig:
        print("A Slurm of four nodes, n1 to n4, with two make-believe GPUs each; files are this machine's own.")
        print("Try: sinfo; srun --nodes=4 hostname; phalanx jobs ls --on slurm. `exit` ends it and leaves nothing.")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        subprocess.run(rig.inside(["bash"]), env={**os.environ, "PATH": path})


if __name__ == "__main__":
    main()
