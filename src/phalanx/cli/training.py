"""What `phalanx train` prints around a run, on this machine or as one worker of an outside launcher."""

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from phalanx.api import Ready, check_start, finished, machine_of, starting, supervise
from phalanx.cli.data import preparing
from phalanx.cluster import this_machine
from phalanx.cluster.discover import check_workers
from phalanx.errors import ExitCode, PhalanxError, UsageError
from phalanx.jobs.member import Member, farewell
from phalanx.jobs.nodes import Crew, Here
from phalanx.jobs.nursery_process import NurseryProcess, answering
from phalanx.joining import Shown, train_script
from phalanx.observe.live import display_for, facts_of
from phalanx.observe.units import duration
from phalanx.recipe import dump_recipe, load_recipe, workers_for
from phalanx.recipe.load import Loaded
from phalanx.run import Run
from phalanx.run.directory import check_place
from phalanx.run.membership import Membership
from phalanx.run.wire import Door, token_from
from phalanx.streams import printable, word_of

ALONE = Membership()
TAKING_OVER = 300.0
"""Seconds for which a run on several nodes waits for its former leader: on a node that was cut off, it goes on until it
has noticed, and on a network disk its lock goes with its lease."""


def train_here(
    path: Path,
    overrides: Sequence[str],
    run_path: Path | None,
    nproc: int | None,
    force: bool,
    dry: bool,
    out: TextIO,
    membership: Membership = ALONE,
) -> int:
    """Start a run under our own agent and follow it; returns its exit code. With several nodes this is the leading
    one, and `nproc` workers are started on each."""
    loaded = load_recipe(path, overrides)
    loaded.check_named()
    run = Run(run_path if run_path is not None else Path("runs") / loaded.recipe.name)
    check_place(run.path)
    if not dry and (done := finished(run, loaded.recipe)):
        print(done, file=out)
        return int(ExitCode.DONE)
    if membership.nodes == 1:  # of several the others hear of it, below
        check_start(loaded, nproc, begins=not run.has_checkpoint())
    with (
        NurseryProcess(answer=answering(loaded.recipe.fault_tolerance.hang_timeout_s)) as nursery,
        contextlib.ExitStack() as stack,
    ):
        crew = stack.enter_context(crew_of(nursery, membership))
        workers = workers_of(loaded, nproc, membership.nodes)
        with preparing() as progress:
            ready = stack.enter_context(
                starting(
                    loaded,
                    run,
                    workers,
                    nursery.call,
                    force,
                    progress,
                    write=not dry,
                    preload=nursery.preload,
                    patience=TAKING_OVER if membership.nodes > 1 else 0.0,
                    nodes=membership.nodes,
                )
            )
        print(printable(introduction(ready)), file=out)
        if dry:
            print(dump_recipe(ready.recipe), end="")
            crew.code = ExitCode.DONE
            return int(ExitCode.DONE)
        display = display_for(out, ready.recipe.steps, facts_of(run))
        stack.callback(display.close)
        outcome = supervise(ready, nursery, display.show, force, crew)
        crew.code = outcome.code
    if outcome.message:
        print(f"error: {printable(outcome.message)}", file=out)
    print(printable(conclusion(run, outcome.code, path, overrides, nproc)), file=out)
    return int(outcome.code)


@contextlib.contextmanager
def crew_of(nursery: NurseryProcess, membership: Membership) -> Iterator[Crew]:
    """All nodes of a run, of which this is the leading one. When this ends with an error, the others end with its
    code."""
    token = token_from() if membership.leader is not None else b""
    here = Here(nursery.control, nursery.events, nursery.pulses, token)
    with contextlib.ExitStack() as stack:
        door = None
        if membership.leader is not None:
            door = stack.enter_context(Door(membership.leader, token))
        crew = stack.enter_context(Crew(here, membership.nodes, door))
        try:
            yield crew
        except PhalanxError as error:
            crew.code = error.code
            raise


def workers_of(loaded: Loaded, nproc: int | None, nodes: int) -> int | None:
    """Workers of all nodes together; None leaves it to the recipe and this machine alone. UsageError when they cannot
    be shared evenly."""
    if nodes == 1:
        return nproc
    each = nproc or machine_of(loaded).gpus or 1
    total = each * nodes if nproc is not None else workers_for(loaded.recipe, each * nodes)
    if total % nodes:
        raise UsageError(
            f"{total} workers, as the recipe's parallelism requires, cannot be divided among {nodes} nodes"
        )
    return total


def follow_leader(
    path: Path,
    overrides: Sequence[str],
    membership: Membership,
    out: TextIO,
    run_path: Path | None = None,
    nproc: int | None = None,
    dry: bool = False,
) -> int:
    """Be the agent of a node that does not lead; returns the run's exit code. RecipeError at once for a recipe that is
    wrong: the leading node ends of it before anybody can ask, and so it does of a run with nothing left to do."""
    try:
        loaded = load_recipe(path, overrides)
        run = Run(run_path if run_path is not None else Path("runs") / loaded.recipe.name)
        if not dry and (done := finished(run, loaded.recipe)):
            print(done, file=out)
            return int(ExitCode.DONE)
        with Member(membership, token_from(), out, nproc=nproc) as member:
            return int(member.work())
    except PhalanxError as error:
        with contextlib.suppress(UsageError):  # without a token no connection can be made
            farewell(membership, token_from(), error)
        raise


def train_own_loop(
    script: Path, arguments: Sequence[str], run_path: Path | None, nproc: int | None, force: bool, out: TextIO
) -> int:
    """Run a script that calls `phalanx.join` under our own agent and follow it; returns its exit code."""
    if not script.is_file():
        raise UsageError(f"{script}: no such file; expected a recipe or a script that calls phalanx.join")
    run = Run(run_path if run_path is not None else Path("runs") / script.stem)
    machine = this_machine()
    world = nproc or machine.gpus or 1
    check_workers(machine, world)
    with NurseryProcess() as nursery, Shown(run, out) as shown:
        outcome = train_script(script, arguments, run, world, nursery, shown.show, {}, force)
    if outcome.message:
        print(f"error: {printable(outcome.message)}", file=out)
    print(printable(conclusion(run, outcome.code, script, arguments, nproc)), file=out)
    return int(outcome.code)


def introduction(ready: Ready) -> str:
    """What will be trained and what was chosen for it, in a few lines."""
    plan, cluster, recipe = ready.plan, ready.cluster, ready.recipe
    rates = cluster.get("measured_matmul_tflops") or {}
    measured = ", ".join(f"{name} {rate:.2f}" for name, rate in rates.items())
    workers = recipe.parallelism.world if not isinstance(recipe.parallelism, str) else 1
    lines = [
        f"run      {ready.run.path}",
        f"model    {recipe.model.build}, {plan.get('trainable_parameters', 0) / 1e6:.2f} M parameters",
        f"machine  {cluster.get('device_name')}, {cluster.get('physical_cores')} cores; "
        f"measured matmul TFLOP/s: {measured}",
        f"workers  {workers} x {recipe.num_threads} {'thread' if recipe.num_threads == 1 else 'threads'}",
    ]
    for choice in plan.get("auto_choices", []):
        if choice["why"] != "given" and choice["key"] != "num_threads":
            value = choice["value"]
            shown = str(value).lower() if isinstance(value, bool) else value
            lines.append(f"auto     {choice['key']} = {shown}: {choice['why']}")
    if predicted := plan.get("predicted_step_s"):
        lines.append(f"predicted {predicted:.3g} s/step, {duration(predicted * recipe.steps)} for {recipe.steps} steps")
    return "\n".join(lines)


def conclusion(run: Run, code: ExitCode, path: Path, overrides: Sequence[str], nproc: int | None) -> str:
    """How it ended, and what to type next."""
    result = run.read_lossy(run.result)
    workers = [] if nproc is None else ["--nproc-per-node", str(nproc)]
    again = f"phalanx train {word_of(path)} {shlex.join([*overrides, '--run', str(run.path), *workers])}"
    if code is ExitCode.DONE:
        return f"digest   {result.get('digest')}\nreport   phalanx report {word_of(run.path)}"
    if code is ExitCode.UNFINISHED:
        # Only a state that was saved has a digest: a second Ctrl-C or a full disk leaves the checkpoint before.
        saved = f"saved at step {result.get('steps')}" if result.get("digest") else "the last steps were not saved"
        return f"{saved}; resume with: {again}"
    return f"details  {run.logs}"


def train_outside(path: Path, overrides: Sequence[str], run_path: Path | None, force: bool, out: TextIO) -> int:
    """Be one worker of a world that torchrun, srun or mpirun started; returns its exit code. The leading one makes the
    run ready, follows it and keeps its events; the others wait for its word."""
    from phalanx.train.meeting import RunAnnouncement, announce, await_announcement, telling_others
    from phalanx.train.nodes import nodes_told
    from phalanx.train.place import device_of, end_at_once, from_environment, store_of
    from phalanx.train.worker import take_part

    place = from_environment(device="cpu")  # until the recipe is read
    if not place.leads:
        with telling_others(place):
            loaded = load_recipe(path, overrides)
            device_of(place.local_rank, os.environ, loaded.recipe.device)  # what is wrong with it is said at once
            run = Run(run_path if run_path is not None else Path("runs") / loaded.recipe.name)
            told = await_announcement(place, run.path)
        if told.is_finished:
            return int(ExitCode.DONE)
        payload = {"run": str(run.path.absolute()), "folder": str(loaded.folder), "force": force}
        return end_at_once(int(take_part(payload, replace(place, attempt=told.attempt))))
    with contextlib.ExitStack() as stack:
        with telling_others(place):
            if place.world > 1:
                store_of(place)  # where this one hosts it, the others find it from the beginning
            loaded = load_recipe(path, overrides)
            run = Run(run_path if run_path is not None else Path("runs") / loaded.recipe.name)
            if done := finished(run, loaded.recipe):
                announce(place, RunAnnouncement(is_finished=True))
                print(done, file=out)
                return int(ExitCode.DONE)
            with (
                NurseryProcess(answer=answering(loaded.recipe.fault_tolerance.hang_timeout_s)) as nursery,
                preparing() as progress,
            ):
                ready = stack.enter_context(
                    starting(
                        loaded,
                        run,
                        place.world,
                        nursery.call,
                        force,
                        progress,
                        preload=nursery.preload,
                        nodes=nodes_told(place),
                    )
                )
            payload = {"run": str(run.path.absolute()), "folder": str(ready.folder), "force": force}
            announce(place, RunAnnouncement(os.path.realpath(run.path), ready.first_attempt))
        print(printable(introduction(ready)), file=out)
        display = display_for(out, ready.recipe.steps, facts_of(run))
        stack.callback(display.close)
        code = take_part(payload, replace(place, attempt=ready.first_attempt), display.show)
    if code is ExitCode.UNFINISHED:
        print("not finished; resume with the same command", file=out)
    else:
        print(printable(conclusion(run, code, path, overrides, None)), file=out)
    return end_at_once(int(code))
