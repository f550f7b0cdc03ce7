"""What an exception means for a worker without an agent of ours, which would know it by the worker's exit status: a
sentence and an exit code where its cause is known."""

import contextlib
import os
from collections.abc import Iterator

from phalanx.errors import ExitCode, PhalanxError, RecipeError, UnfitNodeError, describe_os_error, is_storage_error
from phalanx.recipe import describe_exception
from phalanx.train.distributed.environment import is_gpu_failure, is_peer_failure
from phalanx.train.oom import is_out_of_memory


class PassingError(PhalanxError):
    """What may be gone when the run is started again."""

    code = ExitCode.UNFINISHED


def cause_of(error: BaseException) -> PhalanxError | None:
    """None where it is a mistake in somebody's code."""
    if isinstance(error, PhalanxError):
        return error
    where = os.uname().nodename
    if is_gpu_failure(error):  # NCCL tells of it as it does of lost peers
        return UnfitNodeError(
            f"a GPU of {where} failed: {describe_exception(error)}; train on another machine, or reset the GPU"
        )
    if is_peer_failure(error):
        return PassingError(f"the connection to another worker was lost ({describe_exception(error)}); start again")
    if isinstance(error, OSError) and is_storage_error(error):
        return PassingError(f"storage fails: {describe_os_error(error)}; start again when it is back")
    if is_out_of_memory(error):
        return RecipeError(
            f"out of memory on {where}, not in a micro-batch: {describe_exception(error)}; use a smaller model, a "
            f"layout that cuts "
            "it, or devices with more memory"
        )
    return None


@contextlib.contextmanager
def naming_causes() -> Iterator[None]:
    """Turn an exception whose cause is known into a PhalanxError, unless an agent knows it by the worker's status."""
    try:
        yield
    except Exception as error:
        by_status = "PHALANX_EVENTS_FD" in os.environ and not is_out_of_memory(error)
        known = None if by_status else cause_of(error)
        if known is None or known is error:
            raise
        raise known from error
