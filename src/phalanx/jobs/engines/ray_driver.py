"""The program that Ray runs for a job: it gets a place on each of its machines, starts one node on each, follows them,
and starts them again when their exit code says so. It ends with the job's exit code.

`python -m phalanx.jobs.engines.ray_driver run TASK`, or `... signal JOB NODES NUMBER` to reach one that runs.
"""

import json
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import ExitCode
from phalanx.jobs.engines.ray_node import Node
from phalanx.jobs.engines.ray_task import (
    JOB,
    LOST,
    NO_NODE,
    SPEAKS,
    Task,
    actor_name,
    killed,
    room,
    secrets_file,
    unfit,
    verdict,
)
from phalanx.jobs.spec import DEATHS, PROGRESS
from phalanx.waits import Wait

NAMESPACE = "phalanx"
LOOK = 0.5
"""Seconds between two looks at clocks and signals."""
MACHINE = "ray.io/node-id"
"""The label by which Ray knows a machine."""


class Unplaced(Exception):
    """There was no place for the job; says why."""


@dataclass
class Attempt:
    """One start of all nodes."""

    actors: list[Any]
    machines: list[str]
    ended: list[tuple[int, int]] = field(default_factory=list)
    kill_at: float | None = None

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of all nodes that have not ended, without waiting for them."""
        gone = {node for node, _ in self.ended}
        for number, actor in enumerate(self.actors):
            if number not in gone:
                getattr(actor, method).remote(*arguments)


class Driver:
    """Keeps one job going."""

    def __init__(self, ray: Any, task: Task, job: str, hidden: Mapping[str, str]):
        self._ray, self._task, self._job, self._hidden = ray, task, job, hidden
        self._stopping = False
        self._excluded: set[str] = set()
        self._end: float | None = None

    def stop(self, *_: object) -> None:
        """A signal's handler: Ray wants the job to end."""
        self._stopping = True

    def run(self) -> int:
        """All attempts; returns the job's exit code."""
        deaths = 0
        for number in range(1, self._task.max_restarts + 2):
            try:
                group = self._place()
            except Unplaced as reason:
                say(f"there is no place for the job: {reason}")
                return int(ExitCode.UNFIT_NODE if self._excluded else ExitCode.UNFINISHED)
            try:
                attempt, begun = self._start(group, number), time.monotonic()
                code = self._follow(attempt)
            except Unplaced as reason:
                say(f"the job cannot start: {reason}")
                return int(ExitCode.UNFINISHED)
            finally:
                self._ray.util.remove_placement_group(group)
            if self._stopping or self._late():
                say("ended because it was asked to" if self._stopping else "ended at its time limit")
                return _shown(code)
            self._excluded |= {attempt.machines[node] for node in unfit(attempt.ended)}
            if code not in (ExitCode.UNFINISHED, ExitCode.UNFIT_NODE):
                if code != 0:
                    say(f"attempt {number} ended with exit code {code}")
                return _shown(code)
            death, short = killed(attempt.ended), time.monotonic() - begun < PROGRESS
            deaths = 0 if death is None else deaths + 1 if short else 1
            if death is not None and deaths >= DEATHS:
                why = "not started again; it may need more memory"
                say(f"killed {deaths} times in a row (exit code {_shown(death)}): {why}")
                return _shown(death)
            say(f"attempt {number} ended with exit code {code}, to be started again")
        say(f"started {self._task.max_restarts + 1} times, as often as allowed")
        return code

    def _place(self) -> Any:
        """A placement group with a place for each node. Raises Unplaced."""
        task = self._task
        others = {MACHINE: f"!in({','.join(sorted(self._excluded))})"} if self._excluded else None
        group = self._ray.util.placement_group(
            [task.bundle()] * task.nodes,
            strategy=task.strategy,
            bundle_label_selector=None if others is None else [others] * task.nodes,
        )
        waiting, deadline, last = group.ready(), time.monotonic() + task.patience, ""
        while not self._ray.wait([waiting], timeout=LOOK)[0]:
            alive = [one for one in self._ray.nodes() if one["Alive"] and one["NodeID"] not in self._excluded]
            short = room(task, [one["Resources"] for one in alive])
            why = short or "other jobs hold what it needs"
            hopeless = bool(self._excluded) and short is not None
            if self._stopping or hopeless or time.monotonic() > deadline:
                self._ray.util.remove_placement_group(group)
                raise Unplaced("it was asked to end" if self._stopping else why)
            if why != last:
                say(f"waits for its machines: {why}")
            last = why
        return group

    def _get(self, asked: list[Any]) -> list[Any]:
        """What nodes answer. Raises Unplaced when they do not, or the job is to end."""
        wait = Wait("Ray to start this job's nodes", self._task.patience, lambda text: say(f"waits: {text}"))
        while len(self._ray.wait(asked, num_returns=len(asked), timeout=LOOK)[0]) < len(asked):
            if self._stopping or wait.over():
                silent = f"Ray did not start its nodes within {self._task.patience:.0f} s"
                raise Unplaced("it was asked to end" if self._stopping else silent)
        found: list[Any] = self._ray.get(asked)
        return found

    def _start(self, group: Any, number: int) -> Attempt:
        """Start the command on each node of a group."""
        ray, task = self._ray, self._task
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        actors = [
            ray.remote(Node)
            .options(
                name=actor_name(self._job, node),
                num_cpus=task.cores,
                num_gpus=task.devices,
                max_concurrency=8,
                scheduling_strategy=strategy(group, placement_group_bundle_index=node),
            )
            .remote()
            for node in range(task.nodes)
        ]
        (port,) = self._get([actors[0].port.remote()])
        table = {one["NodeID"]: one["NodeManagerAddress"] for one in ray.nodes()}
        where = ray.util.placement_group_table(group)["bundles_to_node_id"]
        machines = [where[node] for node in range(task.nodes)]
        say(f"attempt {number} on {', '.join(table[machine] for machine in machines)}")
        token = secrets.token_hex(32)
        common = {**task.environment, **self._hidden, "PHALANX_NUM_NODES": str(task.nodes)}
        common["PHALANX_LEADER_ADDR"] = f"{table[machines[0]]}:{port}"
        self._get(
            [
                actor.start.remote(task.command, task.folder, {**common, "PHALANX_NODE_RANK": str(node)}, token)
                for node, actor in enumerate(actors)
            ]
        )
        if self._end is None and task.limit is not None:  # it counts no time in which nothing could run
            self._end = time.monotonic() + task.limit
        return Attempt(actors, machines)

    def _follow(self, attempt: Attempt) -> int:
        """Print the lines of all nodes until the last has ended. One bad end asks the others to end, too."""
        ray, several = self._ray, len(attempt.actors) > 1
        reads = {actor.read.remote(): node for node, actor in enumerate(attempt.actors)}
        while reads:
            for ready in ray.wait(list(reads), timeout=LOOK)[0]:
                node = reads.pop(ready)
                try:
                    lines, code = ray.get(ready)
                except ray.exceptions.RayActorError as error:
                    lines, code = [f"{SPEAKS}this node is lost: {str(error).splitlines()[0]}"], LOST
                for line in lines:
                    print(f"[node {node}] {line}" if several else line)
                sys.stdout.flush()
                if code is None:
                    reads[attempt.actors[node].read.remote()] = node
                else:
                    attempt.ended.append((node, code))
            self._end_in_time(attempt)
        for actor in attempt.actors:
            ray.kill(actor)
        return verdict(attempt.ended)

    def _end_in_time(self, attempt: Attempt) -> None:
        """Ask nodes to save and end when there is a reason, and kill those that did not within the warning."""
        now = time.monotonic()
        bad = any(code != 0 for _, code in attempt.ended)
        if attempt.kill_at is None and (bad or self._stopping or self._late()):
            attempt.kill_at = now + self._task.warning
            attempt.tell("signal", int(signal.SIGTERM))
        elif attempt.kill_at is not None and now > attempt.kill_at:
            attempt.tell("kill")

    def _late(self) -> bool:
        """Whether the time has come to save."""
        return self._end is not None and time.monotonic() > self._end - self._task.warning


def _shown(code: int) -> int:
    """A code as a shell shows it: a signal's is negative here."""
    return code if code >= 0 else 128 - code


def say(text: str) -> None:
    """One line of the driver's own."""
    print(SPEAKS + text, flush=True)


def pass_on(ray: Any, job: str, nodes: int, number: int) -> int:
    """Send a signal to each node of a job; 0 when it reached one, NO_NODE when none runs, 1 where one that may run does
    not answer just now, as on a busy machine."""
    code = NO_NODE
    for node in range(nodes):
        try:
            actor = ray.get_actor(actor_name(job, node), namespace=NAMESPACE)
            if ray.get(actor.signal.remote(number)):
                code = 0
        except ray.exceptions.ActorUnavailableError:
            code = code and 1
        except (ValueError, ray.exceptions.RayActorError):  # there is no such actor, or it has just ended
            continue
    return code


def hidden(task: Task, job: str) -> dict[str, str]:
    """A job's secrets, which from now on stand nowhere but in memory."""
    if not task.secrets:
        return {}
    file = secrets_file(task.folder, job)
    found: dict[str, str] = json.loads(file.read_text())
    file.unlink()
    return found


def main(words: Sequence[str]) -> int:
    """Run what the words say."""
    import ray
    import ray.util.scheduling_strategies

    order, *rest = words
    ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    if order == "signal":
        return pass_on(ray, rest[0], int(rest[1]), int(rest[2]))
    task, job = Task.read(rest[0]), os.environ[JOB]
    try:
        driver = Driver(ray, task, job, hidden(task, job))
    except OSError as error:
        say(f"its secrets could not be read: {error}; its folder has to be shared with this cluster, and its owner")
        return int(ExitCode.USAGE)
    signal.signal(signal.SIGTERM, driver.stop)  # after init, which has a handler of its own
    return driver.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
