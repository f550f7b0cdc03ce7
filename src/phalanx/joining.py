"""`phalanx.join`: a training loop of the user's own as a run. Makes the run ready, gives the loop its gang, ends it.

A script with a loop is started in any of three ways, and need not know which:

    python train.py                               alone, in this process
    phalanx train train.py --nproc-per-node 4 --run DIR    under our agent, which starts it again after any failure
    torchrun --nproc-per-node 4 train.py          as workers of an outside launcher

Nothing is tried out before such a run: its model is not known until the loop builds it. So every `auto` of its recipe
follows a rule (`plan.choices_untried`).
"""

import contextlib
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TextIO

from phalanx.api import (
    Ready,
    changed,
    check_machine,
    check_on,
    check_whole,
    continuing,
    create,
    finished,
    last_attempt,
    lost,
    machine_of,
    previous,
    to_the_end,
    write_run,
)
from phalanx.errors import ExitCode, GaveUpError, PhalanxError, RecipeError, UsageError, storage_failed, words_of
from phalanx.jobs.agent import Agent, Outcome
from phalanx.jobs.attempt import NEVER_CAME
from phalanx.jobs.nursery_process import NurseryProcess
from phalanx.observe.live import Display, LiveFacts, display_for, facts_of
from phalanx.plan import choices_untried, go_on, resolve
from phalanx.recipe import Recipe, check, expanded, grown, load_recipe, refused, stays_told
from phalanx.recipe.checks import has_bf16
from phalanx.recipe.load import Loaded
from phalanx.recipe.schema import Parallelism
from phalanx.run import Event, Run
from phalanx.run.directory import check_place
from phalanx.run.event_types import AttemptStarted, RunEnded, RunWarning, WorkerFailure
from phalanx.run.lock import locked
from phalanx.run.messages import Command, WorkerFinishing
from phalanx.run.pulse import Pulse, Silent, pulse_of
from phalanx.streams import printable, word_of

RUN = "PHALANX_RUN_DIR"
"""Set by `phalanx train SCRIPT`: the run's directory."""
MEETING = "PHALANX_RENDEZVOUS_ID"
"""Tells worlds apart that meet in one store."""
FORCE = "PHALANX_FORCE"
"""Set by `phalanx train SCRIPT --force`."""
WITHOUT_EFFECT = (
    *("model.build", "model.args", "init_from", "lora", "task", "data", "evaluation"),
    *(
        "optimizer.name",
        "optimizer.lr",
        "optimizer.weight_decay",
        "optimizer.betas",
        "optimizer.momentum",
        "optimizer.state_dtype",
    ),
    *("memory.chunked_loss", "optimizer.offload"),
)
"""Keys that say what a loop of the user's own says itself."""
ONLY_TRAINER = ("pipeline", "context")
"""Layouts that must know the loss, or cut sequences: the trainer can, a loop of the user's own cannot."""
_finished: list[Path] = []
"""The runs that this process has joined and ended."""


@contextlib.contextmanager
def join(
    recipe: "str | os.PathLike[str] | Recipe | None" = None,
    overrides: Sequence[str] = (),
    *,
    run: "str | os.PathLike[str] | None" = None,
    force: bool = False,
) -> Iterator[Any]:
    """This process as a worker of a run: `with phalanx.join("recipe.yaml") as gang:`; see `train.joined.Joined`.

    The run is kept in `run`, or in runs/<name of the recipe>; under `phalanx train SCRIPT` in what that says. It goes
    on from its last good checkpoint. When the block ends, the last state is saved; if the run was asked to stop, the
    process then exits with 75. An error that the user can mend is told in a line, and exits with its code. In a
    notebook, or at a prompt, nothing exits: such an error is a PhalanxError, an interrupt KeyboardInterrupt.
    """
    from phalanx.train.causes import naming_causes
    from phalanx.train.place import leave
    from phalanx.train.stop import StopRequest
    from phalanx.train.worker import left_early

    supervised, stop = "PHALANX_EVENTS_FD" in os.environ, StopRequest()
    force = force or FORCE in os.environ
    try:
        with contextlib.ExitStack() as stack:
            if not supervised:
                stack.enter_context(_signals_restored())
            stop.install()
            gang, report, where = _join(stack, recipe, overrides, run, force, stop)
            try:
                with naming_causes(), gang.explaining_memory():
                    yield gang
                    status = gang.end()
            except SystemExit as leaving:
                if leaving.code:  # the script's own word that something went wrong
                    raise
                early = f"{left_early(leaving, f'worker {gang.rank}')}; to end a run early, `break` out of the loop"
                if supervised:  # to the agent it is an exception like others
                    raise RuntimeError(early) from leaving
                _tell(report, GaveUpError(early), supervised)
                raise GaveUpError(early) from leaving
            except PhalanxError as error:
                _tell(report, error, supervised)
                raise
            except OSError as error:
                if storage_failed(error):
                    report.error(words_of(error), int(ExitCode.UNFINISHED))
                    report.flush()
                raise
            if gang.rank == 0 and not supervised:
                stack.callback(print, _conclusion(where, status), file=sys.stderr)
            gang.release()
            leave()
            _finished.append(where.path.resolve())
            code = ExitCode.UNFINISHED if status == "interrupted" else ExitCode.DONE
            report.say(WorkerFinishing(rank=gang.rank, exit_code=int(code)))
    except PhalanxError as error:
        if interactive():
            raise
        raise SystemExit(int(error.code)) from None
    if code is not ExitCode.DONE:
        if not interactive():
            raise SystemExit(int(code))
        if stop.asked:
            raise KeyboardInterrupt


def interactive() -> bool:
    """Whether this process is a notebook or a prompt, which must not end because a run does."""
    return hasattr(sys, "ps1")


def _join(
    stack: contextlib.ExitStack,
    recipe: "str | os.PathLike[str] | Recipe | None",
    overrides: Sequence[str],
    run: "str | os.PathLike[str] | None",
    force: bool,
    stop: Any,
) -> tuple[Any, Any, Run]:
    """Meet the other workers in a run that the leading one has made ready: the gang, the reporter and the run. A
    PhalanxError is told before it is raised."""
    from phalanx.train.causes import naming_causes
    from phalanx.train.joined import Joined
    from phalanx.train.meeting import RunAnnouncement, announce, await_announcement, come_together, telling_others
    from phalanx.train.place import agree, device_of, from_environment
    from phalanx.train.place import join as meet
    from phalanx.train.reporter import reporter
    from phalanx.train.worker import prepare_torch, worker_started

    events = os.environ.get("PHALANX_EVENTS_FD")
    notes, show = list[str](), None
    try:
        place = from_environment(device="cpu")  # until the recipe is known
        if events is not None and _finished:
            raise UsageError(
                "phalanx.join: this script joins a second run, and `phalanx train SCRIPT` is one run; start it once "
                "for each, such as `phalanx train SCRIPT 0 --run runs/fold-0`, or by `python SCRIPT` with "
                "phalanx.join(..., run=...) for each"
            )
        if _finished:  # what is in the launcher's store belongs to the runs before
            gc.collect()  # their models: a GPU may have room for one
            os.environ[MEETING] = f"{len(_finished)} runs later"
        with telling_others(place), naming_causes():
            if place.leads:
                given = _given(recipe, overrides)
                where, attempt = _run_of(given, run), place.attempt
                ready = stack.enter_context(_ready(given, run, place.world, events is not None, force))
                notes = ready.notes
                attempt = ready.first_attempt if events is None else attempt
                announce(place, RunAnnouncement(os.path.realpath(where.path), attempt))
                if events is None:
                    show = stack.enter_context(Shown(ready.run, sys.stderr)).show
            else:
                given = _given(recipe, overrides)
                device_of(place.local_rank, os.environ, given.recipe.device)  # what is wrong with it is said at once
                where = _run_of(given, run)
                attempt = await_announcement(place, where.path).attempt
    except PhalanxError as error:
        _tell(None if events is None else reporter(Run(Path()), False, events), error, events is not None)
        raise
    place = replace(place, attempt=attempt)
    where = Run(where.path.absolute())
    report = reporter(where, place.leads, events, show)
    stack.callback(report.close)
    try:
        report.event(worker_started(place))
        for note in notes:
            report.event(RunWarning(text=note))
        with telling_others(place), naming_causes():
            resolved = load_recipe(where.resolved).recipe
            place = replace(place, device=device_of(place.local_rank, os.environ, resolved.device))
            pulse = _pulse(place.local_rank)
            prepare_torch(resolved, place)
            meet(place, before=come_together)
        with naming_causes():
            # others would take the leading worker's for what they were told
            sync = given.recipe.model_dump_json(include={"determinism", "grad_sync", "local_sgd"})
            agree(
                place,
                sync,
                "gradient synchronization in the recipe",
                "join all workers with the same recipe",
                everywhere=True,
            )
            return Joined(where, resolved, given.folder, place, report, stop, force, pulse), report, where
    except PhalanxError as error:
        _tell(report, error, events is not None)
        raise


def _given(recipe: "str | os.PathLike[str] | Recipe | None", overrides: Sequence[str]) -> Loaded:
    """The recipe that a loop was given."""
    if isinstance(recipe, Recipe):
        given_keys = recipe.model_dump(exclude_defaults=True)
        return Loaded(expanded(recipe, Path.cwd()), None, Path.cwd(), given_keys)
    return load_recipe(None if recipe is None else Path(recipe), overrides)


def _run_of(loaded: Loaded, run: "str | os.PathLike[str] | None") -> Run:
    return Run(Path(os.environ.get(RUN) or run or Path("runs") / loaded.recipe.name))


def _pulse(local_rank: int) -> Pulse | Silent:
    """What gives this worker's signs of life. Its agent, where there is one, may ask where it is from now on."""
    pulse = pulse_of(local_rank)
    if isinstance(pulse, Pulse):
        faulthandler.register(signal.SIGUSR2)  # the answer goes to the worker's log
    pulse.beat("starting")
    return pulse


def _tell(report: Any, error: PhalanxError, supervised: bool) -> None:
    """Say why a worker ends: to its agent and into its log, or on the terminal."""
    from phalanx.train.memory import OutOfMemory

    if report is not None:
        report.error(str(error), int(error.code), out_of_memory=isinstance(error, OutOfMemory))
        report.flush()
        report.say(WorkerFinishing(rank=int(os.environ.get("RANK") or 0), exit_code=int(error.code)))
    if supervised or report is None:
        print(f"error: {printable(str(error))}", file=sys.stderr)


def _conclusion(run: Run, status: str) -> str:
    if status == "interrupted":
        return "not finished; start it again in the same way to go on"
    return f"digest   {(run.read_json(run.result) or {}).get('digest')}\nreport   phalanx report {word_of(run.path)}"


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """A script goes on after its run with the signals as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Shown:
    """A run's display, made when training begins or something went wrong: what it must know is not written before."""

    def __init__(self, run: Run, stream: TextIO):
        self._run, self._stream = run, stream
        self._early: list[Event] = []
        self._display: Display | None = None

    def show(self, event: Event) -> None:
        """Take one event, in the order of events.jsonl."""
        if self._display is None:
            self._early.append(event)
            if not isinstance(event, AttemptStarted | WorkerFailure | RunEnded):
                return
            facts = facts_of(self._run) if self._run.resolved.is_file() else LiveFacts(self._run.path.name)
            self._display = display_for(self._stream, 0, facts)
            for each in self._early:
                self._display.show(each)
            return
        self._display.show(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._display.close()


@contextlib.contextmanager
def _ready(
    loaded: Loaded,
    run: "str | os.PathLike[str] | None",
    world: int,
    supervised: bool,
    force: bool,
) -> Iterator[Ready]:
    """A run whose files are written, locked unless its agent has it. PhalanxError before anything is written."""
    _check_loop(loaded)
    where = _run_of(loaded, run)
    if not supervised:
        check_place(where.path)
    machine = machine_of(loaded)
    given = loaded.recipe.model_copy(update={"device": machine.device})
    if where.path.resolve() in _finished and finished(where, given):
        raise UsageError(
            f"{where.path}: this script has joined this run before, and it is done; give each phalanx.join a run of "
            "its own: run=..."
        )
    old, notes = previous(where, given), []
    if old is not None and (differing := refused(*old, given)):
        if not force:
            raise RecipeError(changed(where, differing))
        notes += [f"forced: {difference}" for difference in differing]
        old = None
    if old is not None:
        check_whole(where, old[1])
        resolved = go_on(old[1], given, world)
        check_on(resolved, machine)
        notes += [*lost(where), *where.damaged(), *continuing(old[1], resolved), *stays_told(given, resolved, world)]
        plan: dict[str, Any] = where.read_lossy(where.plan)
    else:
        whole = grown(given, world)
        choices = choices_untried(whole, machine.cores, world, machine.device, has_bf16(machine.capability))
        resolved = resolve(whole, choices, world)
        plan = {"auto_choices": [vars(choice) for choice in choices]}
        if loop := where.read_lossy(where.plan).get("session"):  # forced: it went on with this optimizer's state
            plan["session"] = loop
    check(resolved, loaded.folder, world, loaded.at)
    check_machine(loaded, machine)
    create(where)
    cluster = {
        "host": machine.host,
        "device": machine.device,
        "device_name": machine.name,
        "physical_cores": machine.cores,
    }
    ready = Ready(where, resolved, loaded.folder, plan, cluster, notes, last_attempt(where) + 1)
    with contextlib.nullcontext() if supervised else locked(where) as note:
        ready.notes.extend([] if note is None else [note])
        write_run(ready, loaded)
        yield ready


def _check_loop(loaded: Loaded) -> None:
    """RecipeError when the recipe says what only the trainer can do, or what the loop itself says."""
    for key in WITHOUT_EFFECT:
        part: Any = loaded.given
        for name in key.split("."):
            part = part.get(name) if isinstance(part, Mapping) else None
        if part is not None:
            raise RecipeError(
                f"{loaded.at(key)}: has no effect in a training loop of your own, which has its own model, data, loss "
                "and optimizer; leave it out, and say it in the script"
            )
    if isinstance(loaded.recipe.parallelism, Parallelism):
        for name in ONLY_TRAINER:
            if getattr(loaded.recipe.parallelism, name) > 1:
                raise RecipeError(
                    f"{loaded.at(f'parallelism.{name}')}: a training loop of your own cannot be divided so, only a "
                    "recipe's task can; use replicate, shard or tensor"
                )


def train_script(
    script: Path,
    arguments: Sequence[str],
    run: Run,
    nproc: int,
    nursery: NurseryProcess,
    show: Callable[[Event], None],
    environment: Mapping[str, str],
    force: bool = False,
) -> Outcome:
    """Run a script with a loop of its own as `nproc` workers under our agent, and write the run's result."""
    check_place(run.path)
    create(run)
    with locked(run) as note:
        payload = {"script": str(script.absolute()), "arguments": list(arguments), "force": force}
        payload["run"] = str(run.path.absolute())
        command = Command(function="phalanx.train.script:work", payload=payload)

        def showing(event: Event) -> None:
            if isinstance(event, AttemptStarted):  # now the recipe is known
                recovery = load_recipe(run.resolved).recipe.fault_tolerance
                agent.attempts, agent.silence = recovery.max_restarts, recovery.hang_timeout_s
            show(event)

        def judge(outcome: Outcome) -> Outcome:
            return replace(outcome, message=f"{script}: {NEVER_CAME}") if outcome.message == NEVER_CAME else outcome

        agent = Agent(run, nursery, showing, attempts=3)
        notes = [] if note is None else [note]
        return to_the_end(agent, nproc, command, environment, last_attempt(run) + 1, notes, judge)
