"""The agents of one run on several nodes, here all processes of this machine."""

import contextlib
import secrets
import subprocess
from pathlib import Path

from phalanx.run import Run
from phalanx.run.authentication import reserve_port
from train_harness import HarnessRun, TrainHarness, Values


class Nodes:
    """The nodes of one run. `start(0)` is the leading one."""

    def __init__(self, lab: TrainHarness, run: Run, token: Path, changes: Values):
        self.count = 2
        self.num_nodes = ""  # MIN:MAX, where it is not the count
        self.lab, self.run, self.token, self.changes = lab, run, token, changes
        self.location: str | Path = run.path
        self.stack = contextlib.ExitStack()
        self.port = self.stack.enter_context(reserve_port()).getsockname()[1]

    def start(self, node: int, token: Path | None = None, **more: str) -> "subprocess.Popen[str]":
        variables = {"PHALANX_NUM_NODES": self.num_nodes or str(self.count), "PHALANX_NODE_RANK": str(node)}
        variables["PHALANX_LEADER_ADDR"] = f"127.0.0.1:{self.port}"
        variables["PHALANX_TOKEN_FILE"] = str(token or self.token)
        variables |= more
        recipe = self.lab.recipe_file(self.changes)
        words = ("train", recipe, "--run", self.location, "--nproc-per-node", "1")
        return self.stack.enter_context(self.lab.start(*words, variables=variables))

    def end(
        self, leader: "subprocess.Popen[str]", *members: "subprocess.Popen[str]", seconds: float = 150
    ) -> HarnessRun:
        """How the run ended; the members end with its code."""
        _, errors = leader.communicate(timeout=seconds)
        for member in members:
            out, said = member.communicate(timeout=90)
            print(out, said)  # pytest shows it when the test fails
            assert member.returncode == leader.returncode, (errors, out, said)
        print(errors)
        return HarnessRun(self.run, leader.returncode, errors)


def make_nodes(lab: TrainHarness, folder: Path) -> Nodes:
    """Nodes of a new run, with a token in `folder`."""
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    return Nodes(lab, lab.new_run(), token, {})
