"""One node of a job of any framework: `python -m phalanx.app.framework_node FRAMEWORK PROCESSES -- COMMAND`."""

import os
import sys
import time
from collections.abc import Sequence

from phalanx.app.start_ramp import find_ramped_fleet, open_start_ramp
from phalanx.deadline import print_status
from phalanx.errors import ExitCode, PhalanxError
from phalanx.fleet.power.start_slots import MAX_WAIT_S
from phalanx.jobs.agent.leader_state import StartDelay
from phalanx.jobs.frameworks import launcher
from phalanx.jobs.signal_queue import SignalQueue
from phalanx.run.node_env import NodeEnv, find_node_name


def main(arguments: Sequence[str]) -> int:
    """Wait for a slot on the first node, for which the others wait, then launch; returns the exit code."""
    leader_delay_s = 0.0
    try:
        node_env = NodeEnv.from_environment(os.environ)
        if node_env.node_rank != 0:
            leader_delay_s = MAX_WAIT_S if find_ramped_fleet() is not None else 0.0
        else:
            with SignalQueue() as signals:
                # each node counts as this one, each process as one of its GPUs
                delay = open_start_ramp(int(arguments[1]))([find_node_name()] * node_env.num_nodes)
                if not _wait_for_start(delay, signals):
                    print_status("asked to stop before its processes were started")
                    return int(ExitCode.UNFINISHED)
    except PhalanxError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.code)
    return launcher.main(arguments, leader_delay_s)


def _wait_for_start(delay: StartDelay, signals: SignalQueue) -> bool:
    """Wait until the processes may start. Returns whether they may: False when the job is to stop meanwhile."""
    if delay.reason:
        print_status(delay.reason)
    end = time.monotonic() + delay.seconds
    while not signals.received and (left_s := end - time.monotonic()) > 0:
        signals.wait(left_s)
    return not signals.received


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
