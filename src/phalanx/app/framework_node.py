"""One node of a job of any framework: `python -m phalanx.app.framework_node FRAMEWORK PROCESSES -- COMMAND`."""

import os
import sys
import time
from collections.abc import Sequence

from phalanx.app.start_ramp import open_start_ramp
from phalanx.deadline import print_status
from phalanx.errors import PhalanxError
from phalanx.jobs.frameworks import launcher
from phalanx.run.node_env import NodeEnv, find_node_name


def main(arguments: Sequence[str]) -> int:
    """Wait for a slot on the first node, for which the others wait, then launch; returns the exit code."""
    try:
        node_env = NodeEnv.from_environment(os.environ)
        if node_env.node_rank == 0:
            # each node counts as this one, each process as one of its GPUs
            delay = open_start_ramp(int(arguments[1]))([find_node_name()] * node_env.num_nodes)
            if delay.reason:
                print_status(delay.reason)
            time.sleep(delay.seconds)
    except PhalanxError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.code)
    return launcher.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
