"""The program that Ray runs for a job: it reserves resources on machines, starts one node on each, monitors the nodes,
and restarts them depending on their exit code. It ends with the job's exit code.

`python -m phalanx.jobs.backends.ray.driver run TASK`, or `... signal JOB NODES NUMBER`, `... pause JOB REASON` and `...
resume JOB` to reach one that runs. The driver of a paused job waits without machines.
"""

import json
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.deadline import Deadline
from phalanx.errors import ExitCode
from phalanx.jobs.backends.base import PAUSED_PREFIX
from phalanx.jobs.backends.ray.driver_spec import (
    DRIVER_LINE_PREFIX,
    JOB_ID_VARIABLE,
    LOST_NODE_EXIT_CODE,
    NO_NODE,
    DriverSpec,
    actor_name,
    count_fitting_nodes,
    decide_exit_code,
    describe_shortage,
    killed,
    list_unfit_nodes,
    secrets_path,
)
from phalanx.jobs.backends.ray.node_actor import RAY_NAMESPACE, NodeActor, open_pause_switch, set_pause
from phalanx.jobs.spec import MAX_KILLS_IN_A_ROW, MIN_PROGRESS_S
from phalanx.logging_config import configure_logging
from phalanx.run.node_env import EXPECTED_VARIABLE

POLL_INTERVAL_S = 0.5
"""Seconds between two looks at clocks and signals."""
NODE_ID_LABEL = "ray.io/node-id"
"""The label by which Ray knows a machine."""


class PlacementError(Exception):
    """The job could not be placed; the text gives the reason."""


@dataclass
class RayAttempt:
    """One attempt: a start of all nodes."""

    actors: list[Any]
    node_ids: list[str]
    ended: list[tuple[int, int]] = field(default_factory=list)
    kill_at: float | None = None
    is_paused: bool = False
    """Whether it was asked to end for a pause."""

    def call_all(self, method: str, *arguments: Any) -> None:
        """Call a method of all nodes that have not ended, without waiting for them."""
        ended_nodes = {node for node, _ in self.ended}
        for number, actor in enumerate(self.actors):
            if number not in ended_nodes:
                getattr(actor, method).remote(*arguments)


class RayDriver:
    """Keeps one job going. `find_pause`: returns why the job is paused, None if it is not."""

    def __init__(
        self,
        ray: Any,
        spec: DriverSpec,
        job_id: str,
        secret_values: Mapping[str, str],
        find_pause: Callable[[], str | None],
    ):
        self._ray, self._spec, self._job_id, self._secret_values = ray, spec, job_id, secret_values
        self._find_pause = find_pause
        self._is_stopping = False
        self._excluded_nodes: set[str] = set()
        self._time_limit_at: float | None = None

    def request_stop(self, *_: object) -> None:
        """A signal's handler: Ray wants the job to end."""
        self._is_stopping = True

    def run(self) -> int:
        """Run all attempts and return the job's exit code."""
        deaths = number = num_pauses = 0
        code, is_paused = int(ExitCode.UNFINISHED), False
        while True:
            # a job may be resumed while it still saves
            num_pauses += self._wait_while_paused() or is_paused
            if number > self._spec.max_restarts + num_pauses:
                print_driver_line(f"started {number} times, as often as allowed")
                return code
            try:
                group = self._reserve_nodes()
            except PlacementError as reason:
                print_driver_line(f"there is no place for the job: {reason}")
                return int(ExitCode.UNFIT_NODE if self._excluded_nodes else ExitCode.UNFINISHED)
            if group is None:
                is_paused = False  # it has been counted
                continue
            number += 1
            try:
                attempt, begun = self._start_attempt(group, number), time.monotonic()
                code = self._run_attempt(attempt)
                is_paused = attempt.is_paused
            except PlacementError as reason:
                print_driver_line(f"the job cannot start: {reason}")
                return int(ExitCode.UNFINISHED)
            finally:
                self._ray.util.remove_placement_group(group)
            if self._is_stopping or self._is_time_to_save():
                print_driver_line("ended because it was asked to" if self._is_stopping else "ended at its time limit")
                return _shell_exit_code(code)
            self._excluded_nodes |= {attempt.node_ids[node] for node in list_unfit_nodes(attempt.ended)}
            if code not in (ExitCode.UNFINISHED, ExitCode.UNFIT_NODE):
                if code != 0:
                    print_driver_line(f"attempt {number} ended with exit code {code}")
                return _shell_exit_code(code)
            death, short = killed(attempt.ended), time.monotonic() - begun < MIN_PROGRESS_S
            deaths = 0 if death is None else deaths + 1 if short else 1
            if death is not None and deaths >= MAX_KILLS_IN_A_ROW:
                why = "not started again; it may need more memory"
                print_driver_line(f"killed {deaths} times in a row (exit code {_shell_exit_code(death)}): {why}")
                return _shell_exit_code(death)
            print_driver_line(f"attempt {number} ended with exit code {code}, to be started again")

    def _wait_while_paused(self) -> bool:
        """Wait until the job is resumed, or is to end. Returns whether it was paused."""
        if (reason := self._find_pause()) is None:
            return False
        print_driver_line(f"{PAUSED_PREFIX}{reason}")
        begun = time.monotonic()
        while not self._is_stopping and self._find_pause() is not None:
            time.sleep(POLL_INTERVAL_S)
        if self._time_limit_at is not None:
            self._time_limit_at += time.monotonic() - begun
        print_driver_line("waits: it was resumed")
        return True

    def _reserve_nodes(self) -> Any:
        """Create a placement group with a bundle a node; None if the job is paused. Raises PlacementError."""
        task = self._spec
        excluded = f"!in({','.join(sorted(self._excluded_nodes))})"
        num_nodes = task.num_nodes
        if task.min_nodes is not None:
            fitting = count_fitting_nodes(task, self._list_resources())
            num_nodes = max(task.min_nodes, min(fitting, num_nodes))
        group = self._ray.util.placement_group(
            [task.make_bundle()] * num_nodes,
            strategy=task.strategy,
            bundle_label_selector=[{NODE_ID_LABEL: excluded}] * num_nodes if self._excluded_nodes else None,
        )
        waiting, deadline, last = group.ready(), time.monotonic() + task.placement_timeout_s, ""
        while not self._ray.wait([waiting], timeout=POLL_INTERVAL_S)[0]:
            shortage = describe_shortage(task, self._list_resources())
            reason = shortage or "other jobs hold what it needs"
            hopeless = bool(self._excluded_nodes) and shortage is not None
            if not self._is_stopping and self._find_pause() is not None:
                self._ray.util.remove_placement_group(group)
                return None
            if self._is_stopping or hopeless or time.monotonic() > deadline:
                self._ray.util.remove_placement_group(group)
                raise PlacementError("it was asked to end" if self._is_stopping else reason)
            if reason != last:
                print_driver_line(f"waits for its machines: {reason}")
            last = reason
        return group

    def _list_resources(self) -> list[Mapping[str, float]]:
        """Return the resources of each machine that can be used."""
        machines = (one for one in self._ray.nodes() if one["Alive"] and one["NodeID"] not in self._excluded_nodes)
        return [one["Resources"] for one in machines]

    def _get_results(self, asked: list[Any]) -> list[Any]:
        """Return the answers of the nodes. Raises PlacementError on timeout, or when the job is to end."""
        deadline = Deadline(
            "Ray to start this job's nodes",
            self._spec.placement_timeout_s,
            lambda text: print_driver_line(f"waits: {text}"),
        )
        while len(self._ray.wait(asked, num_returns=len(asked), timeout=POLL_INTERVAL_S)[0]) < len(asked):
            if self._is_stopping or deadline.check_expired():
                timeout_text = f"Ray did not start its nodes within {self._spec.placement_timeout_s:.0f} s"
                raise PlacementError("it was asked to end" if self._is_stopping else timeout_text)
        found: list[Any] = self._ray.get(asked)
        return found

    def _start_attempt(self, group: Any, number: int) -> RayAttempt:
        """Start the command on each node of a group."""
        ray, task = self._ray, self._spec
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        where = ray.util.placement_group_table(group)["bundles_to_node_id"]
        actors = [
            ray.remote(NodeActor)
            .options(
                name=actor_name(self._job_id, node),
                num_cpus=task.cpus_per_node,
                num_gpus=task.gpus_per_node,
                max_concurrency=8,
                scheduling_strategy=strategy(group, placement_group_bundle_index=node),
            )
            .remote()
            for node in range(len(where))
        ]
        (port,) = self._get_results([actors[0].find_free_port.remote()])
        table = {one["NodeID"]: one["NodeManagerAddress"] for one in ray.nodes()}
        machines = [where[node] for node in range(len(where))]
        print_driver_line(f"attempt {number} on {', '.join(table[machine] for machine in machines)}")
        token = secrets.token_hex(32)
        common = {**task.environment, **self._secret_values, "PHALANX_NUM_NODES": task.nodes_variable}
        common[EXPECTED_VARIABLE] = str(len(machines))
        common["PHALANX_LEADER_ADDR"] = f"{table[machines[0]]}:{port}"
        self._get_results(
            [
                actor.start.remote(task.command, task.working_dir, {**common, "PHALANX_NODE_RANK": str(node)}, token)
                for node, actor in enumerate(actors)
            ]
        )
        # it counts no time in which nothing could run
        if self._time_limit_at is None and task.time_limit_s is not None:
            self._time_limit_at = time.monotonic() + task.time_limit_s
        return RayAttempt(actors, machines)

    def _run_attempt(self, attempt: RayAttempt) -> int:
        """Print the lines of all nodes until the last has ended. The failure of one ends the others."""
        ray, several = self._ray, len(attempt.actors) > 1
        reads = {actor.read.remote(): node for node, actor in enumerate(attempt.actors)}
        while reads:
            for ready in ray.wait(list(reads), timeout=POLL_INTERVAL_S)[0]:
                node = reads.pop(ready)
                try:
                    lines, code = ray.get(ready)
                except ray.exceptions.RayActorError as error:
                    lines = [f"{DRIVER_LINE_PREFIX}this node is lost: {str(error).splitlines()[0]}"]
                    code = LOST_NODE_EXIT_CODE
                for line in lines:
                    print(f"[node {node}] {line}" if several else line)
                sys.stdout.flush()
                if code is None:
                    reads[attempt.actors[node].read.remote()] = node
                else:
                    attempt.ended.append((node, code))
            self._enforce_deadlines(attempt)
        for actor in attempt.actors:
            ray.kill(actor)
        return decide_exit_code(attempt.ended, self._spec.min_nodes)

    def _enforce_deadlines(self, attempt: RayAttempt) -> None:
        """Ask nodes to save and end when there is a reason, and kill those that did not within the warning."""
        now = time.monotonic()
        num_failed = sum(code != 0 for _, code in attempt.ended)
        any_failed = num_failed > len(attempt.actors) - (self._spec.min_nodes or len(attempt.actors))
        is_paused = self._find_pause() is not None
        if attempt.kill_at is None and (any_failed or is_paused or self._is_stopping or self._is_time_to_save()):
            attempt.is_paused = is_paused
            attempt.kill_at = now + self._spec.warning_s
            attempt.call_all("signal", int(signal.SIGTERM))
        elif attempt.kill_at is not None and now > attempt.kill_at:
            attempt.call_all("kill")

    def _is_time_to_save(self) -> bool:
        return self._time_limit_at is not None and time.monotonic() > self._time_limit_at - self._spec.warning_s


def _shell_exit_code(code: int) -> int:
    """A code as a shell shows it: a signal's is negative here."""
    return code if code >= 0 else 128 - code


def print_driver_line(text: str) -> None:
    print(DRIVER_LINE_PREFIX + text, flush=True)


def send_signal(ray: Any, job_id: str, nodes: int, number: int) -> int:
    """Send a signal to each node of a job; 0 when it reached one, NO_NODE when none runs, 1 where one that may run does
    not answer just now, as on a busy machine."""
    code = NO_NODE
    for node in range(nodes):
        try:
            actor = ray.get_actor(actor_name(job_id, node), namespace=RAY_NAMESPACE)
            if ray.get(actor.signal.remote(number)):
                code = 0
        except ray.exceptions.ActorUnavailableError:
            code = code and 1
        except (ValueError, ray.exceptions.RayActorError):  # there is no such actor, or it has just ended
            continue
    return code


def read_secrets(spec: DriverSpec, job_id: str) -> dict[str, str]:
    """A job's secrets, which from now on stand nowhere but in memory."""
    if not spec.secrets:
        return {}
    file = secrets_path(spec.working_dir, job_id)
    found: dict[str, str] = json.loads(file.read_text())
    file.unlink()
    return found


def main(arguments: Sequence[str]) -> int:
    """Run what the words say."""
    import ray
    import ray.util.scheduling_strategies

    configure_logging()
    verb, *rest = arguments
    ray.init(address="auto", namespace=RAY_NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    if verb == "signal":
        return send_signal(ray, rest[0], int(rest[1]), int(rest[2]))
    if verb in ("pause", "resume"):
        return set_pause(ray, rest[0], rest[1] if verb == "pause" else None)
    spec, job_id = DriverSpec.from_json(rest[0]), os.environ[JOB_ID_VARIABLE]
    try:
        driver = RayDriver(ray, spec, job_id, read_secrets(spec, job_id), open_pause_switch(ray, job_id))
    except OSError as error:
        print_driver_line(
            f"its secrets could not be read: {error}; its folder has to be shared with this cluster, and its owner"
        )
        return int(ExitCode.USAGE)
    signal.signal(signal.SIGTERM, driver.request_stop)  # after init, which has a handler of its own
    return driver.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
