"""One node of a job of any framework: `python -m phalanx.app.framework_node FRAMEWORK PROCESSES -- COMMAND`."""

import os
import sys
import time
from collections.abc import Sequence

from phalanx.app.site_limits import has_ramp, open_site_limits
from phalanx.deadline import print_status
from phalanx.errors import ExitCode, PhalanxError
from phalanx.fleet.power.start_slots import MAX_WAIT_S
from phalanx.jobs.agent.leader_state import StartTerms
from phalanx.jobs.frameworks import launcher
from phalanx.jobs.signal_queue import SignalQueue
from phalanx.run.node_env import NodeEnv, find_node_name


def main(arguments: Sequence[str]) -> int:
    """Wait for a slot on the first node, for which the others wait, then launch; returns the exit code."""
    leader_delay_s = 0.0
    try:
        node_env = NodeEnv.from_environment(os.environ)
        if node_env.node_rank != 0:
            leader_delay_s = MAX_WAIT_S if has_ramp() else 0.0
        else:
            with SignalQueue() as signals:
                # each node counts as this one, each process as one of its GPUs
                terms = open_site_limits(int(arguments[1]))([find_node_name()] * node_env.num_nodes)
                if not _wait_for_start(terms, signals):
                    print_status("asked to stop before its processes were started")
                    return int(ExitCode.UNFINISHED)
    except PhalanxError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.code)
    return launcher.main(arguments, leader_delay_s)


def _wait_for_start(terms: StartTerms, signals: SignalQueue) -> bool:
    """Wait until the processes may start. Returns whether they may: False when the job is to stop meanwhile."""
    if terms.reason:
        print_status(terms.reason)
    end = time.monotonic() + terms.seconds
    while not signals.received and (left_s := end - time.monotonic()) > 0:
        signals.wait(left_s)
    return not signals.received


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
