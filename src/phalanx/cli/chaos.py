"""`phalanx chaos`: parse, train undisturbed, train under faults, show each as it strikes, leave with the verdict."""

import shutil
import signal
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.errors import ExitCode, PhalanxError, UsageError
from phalanx.streams import word_of

if TYPE_CHECKING:
    from phalanx.cli.chaos_page import Bout, Screen
    from phalanx.jobs.chaos.inject import Struck
    from phalanx.jobs.chaos.plan import Course, Fault
    from phalanx.jobs.chaos.story import Usual
    from phalanx.recipe.load import Loaded
    from phalanx.run import Event, Run

FAILED = 1
"""Exit code when the run did not end as it should: a mistake in Phalanx, or in the recipe's own code."""
PINNED = ("recipe.yaml", "resolved.yaml", "plan.json", "cluster.json", "fp8.json")
"""Files of the undisturbed run with which the other begins, so that every `auto` means the same."""
LAG = 0.15
"""Seconds of progress for which a run may be ahead of what is heard of it."""


def chaos(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe (YAML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides, such as steps=500.")
    ] = None,
    faults: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Number of faults to inject.")] = 10,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, metavar="S", help="Seed of the fault plan.")] = 0,
    kinds: Annotated[
        str | None, typer.Option(metavar="KIND,...", help="Kinds of faults.", show_default="all applicable")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="New directory for both runs.", show_default="runs/<name>-chaos"),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc-per-node", min=1, max=100_000, metavar="N", help="Workers on each node."),
    ] = None,
    nodes: Annotated[
        int, typer.Option(min=1, max=1_000, metavar="N", help="Number of nodes, emulated by agents on this machine.")
    ] = 1,
    queue: Annotated[bool, typer.Option("--queue", help="Run as a job of a separate local queue.")] = False,
    against: Annotated[
        Path | None,
        typer.Option("--baseline", metavar="RUN", help="Finished run without faults, instead of training one."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the fault plan, without training.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print faults, costs and verdict as JSON.")] = False,
) -> int:
    """Train under injected faults, and check that the weights are bit-identical and nothing is left behind.

    Trains the recipe twice: without faults, and with a seeded plan of faults during steps, saves and restarts. Restarts
    the run when it was killed or exited with 75. Exit code 0: the digests are equal, and no process, shared memory,
    temporary file or queue entry is left; else 1. Ctrl-C stops and removes everything.

    Kinds: kill, crash, abort, fork-server, agent, preempt, interrupt, time-limit, corrupt-checkpoint, disk-full,
    storage-outage, freeze, hang; with --nodes also node-loss and partition; with --queue also job-runner and
    queue-daemon.
    """
    from phalanx.cli import chaos_page as page
    from phalanx.jobs.chaos.plan import draw, kinds_of
    from phalanx.recipe import load_recipe
    from phalanx.run.directory import check_place

    given = overrides or []
    if recipe.suffix == ".py":
        raise UsageError(
            f"{recipe}: chaos is for recipes; a script with a loop of its own cannot be compared with itself"
        )
    if queue and nodes > 1:
        raise UsageError("--queue has this machine only; leave out --nodes")
    loaded = load_recipe(recipe, given)
    loaded.check_named()
    if loaded.recipe.determinism == "auto":  # on a GPU it may promise no bits, and digests are compared here
        given = [*given, "determinism=fixed-world"]
        loaded = load_recipe(recipe, given)
    course = course_of(loaded, nproc, nodes, queue)
    plan = draw(seed, faults, kinds_of(kinds, course), course)
    where = run if run is not None else Path("runs") / f"{loaded.recipe.name}-chaos"
    if where.exists():
        raise UsageError(f"{where}: exists already; choose another --run, or remove it")
    check_place(where)
    screen = page.Screen(quiet=as_json, total=len(plan))
    screen.planned(plan, course, seed)
    if dry_run:
        if as_json:
            typer.echo(page.as_json(plan, seed))
        return int(ExitCode.DONE)
    calm = None if against is None else finished_run(against, loaded, course)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it cleans up like Ctrl-C
    where.mkdir(parents=True)
    try:
        bout = Contest(recipe, given, course, plan, where, screen).held(calm)
    except BaseException:
        shutil.rmtree(where, ignore_errors=True)
        raise
    summary = page.as_json(plan, seed, bout)
    (where / "chaos.json").write_text(summary + "\n", encoding="utf-8")
    screen.verdict(bout)
    if as_json:
        typer.echo(summary)
    return int(ExitCode.DONE) if bout.verdict.passed else FAILED


def course_of(loaded: "Loaded", nproc: int | None, nodes: int, queue: bool) -> "Course":
    """What the run will be, as far as the list of faults depends on it."""
    from phalanx.api import machine_of
    from phalanx.cli.training import workers_of
    from phalanx.cluster.discover import check_workers
    from phalanx.jobs.chaos.plan import Course
    from phalanx.recipe import check, workers_for

    recipe = loaded.recipe
    world = workers_of(loaded, nproc, nodes)
    machine = machine_of(loaded)
    world = world or workers_for(recipe, machine.gpus or 1)
    check_workers(machine, world)
    check(recipe, loaded.folder, world, loaded.at)
    saved = recipe.checkpoint
    if isinstance(saved.every, str):
        raise UsageError(
            f"checkpoint.every={saved.every}: the list of faults goes by the saves, so their number must be "
            "known; give it here, such as checkpoint.every='20 steps'"
        )
    return Course(recipe.steps, saved.every, saved.keep, recipe.fault_tolerance.max_restarts, world, nodes, queue)


def finished_run(path: Path, loaded: "Loaded", course: "Course") -> "Run":
    """The run to compare with. UsageError when it is not done, or was another recipe, or had other workers."""
    from phalanx.api import finished
    from phalanx.recipe import load_recipe
    from phalanx.run import Run

    run = Run.existing(path)
    if finished(run, loaded.recipe) is None or (run.read_json(run.result) or {})["steps"] != loaded.recipe.steps:
        raise UsageError(
            f"--baseline {path}: this is no run of this recipe that is done; see `phalanx report {word_of(path)}`"
        )
    layout = load_recipe(run.resolved).recipe.parallelism
    if isinstance(layout, str) or layout.world != course.world:
        raise UsageError(f"--baseline {path}: its workers were not {course.world}, and the digest goes by that")
    return run


@dataclass(frozen=True)
class Contest:
    """A recipe that is trained undisturbed and under faults, in a folder for both."""

    recipe: Path
    overrides: Sequence[str]
    course: "Course"
    plan: "Sequence[Fault]"
    where: Path
    screen: "Screen"

    def held(self, calm: "Run | None") -> "Bout":
        """Both runs, the first only where there is none yet; nothing of them runs on when this is over. UsageError
        when the undisturbed one shows that there is no time for so many faults."""
        from phalanx.jobs.chaos import ground, referee
        from phalanx.jobs.chaos.story import usual_of
        from phalanx.run import Run, read_events

        mark = str(uuid.uuid4())
        with referee.scratch_folder() as scratch:
            environment = ground.environment_for(mark, scratch)
            try:
                if calm is None:
                    calm = Run(self.where / "baseline")
                    train_calm(
                        calm, self._words(calm, self.course.world), environment, self.where / "baseline.log", mark
                    )
                usual = usual_of(read_events(calm.events))
                long_enough(self.plan, self.course, usual.step)
                self.screen.calm(calm, usual)
                return self._disturbed(calm, usual, mark, scratch, environment)
            finally:
                ground.end_all(mark)

    def _disturbed(self, calm: "Run", usual: "Usual", mark: str, scratch: Path, environment: dict[str, str]) -> "Bout":
        """The run under faults, and what is wrong with it. What it leaves is looked at before that is ended."""
        from phalanx.cli.chaos_page import Bout
        from phalanx.jobs.chaos import ground as grounds
        from phalanx.jobs.chaos import referee
        from phalanx.jobs.chaos.inject import Scene
        from phalanx.jobs.chaos.story import Story
        from phalanx.run import Run

        run = Run(self.where / "faulted")
        run.create()
        for name in PINNED:
            if (calm.path / name).is_file():
                shutil.copyfile(calm.path / name, run.path / name)
        story, log = Story(run), self.where / "faulted.log"
        words = self._words(run, self.course.each)
        ground: grounds.Ground
        if self.course.queue:
            ground = grounds.Queued(words, environment, scratch / "state", log)
        else:
            ground = grounds.Commands(["train", *words], environment, log, story, self.course.nodes)
        struck: list[Struck] = []
        events: list[Event] = []
        left: list[str] = []

        def told(one: "Struck") -> None:
            struck.append(one)
            self.screen.struck(one)

        before, begun = referee.look(), time.monotonic()
        ended = referee.disturb(
            ground,
            Scene(story, usual, mark, told, ground.supervisors),
            self.plan,
            events.append,
            self.screen.again,
            over=lambda: left.extend(referee.left_behind(run, mark, scratch, before, ground.left)),
        )
        seconds = time.monotonic() - begun
        digest = (calm.read_json(calm.result) or {})["digest"]
        verdict = referee.judge(run, digest, ended, len(self.plan), len(struck), left, newest_digest)
        return Bout(run, digest, struck, events, ended.starts, seconds, verdict)

    def _words(self, run: "Run", each: int) -> list[str]:
        return [str(self.recipe), *self.overrides, "--run", str(run.path), "--nproc-per-node", str(each)]


def train_calm(run: "Run", words: Sequence[str], environment: dict[str, str], log: Path, mark: str) -> None:
    """Train undisturbed. PhalanxError with the exit code of a run that fails by itself, and its last line."""
    from phalanx.jobs.chaos.ground import Commands
    from phalanx.jobs.chaos.inject import Scene
    from phalanx.jobs.chaos.referee import disturb
    from phalanx.jobs.chaos.story import Story, Usual

    story = Story(run)
    scene = Scene(story, Usual(0.0, 0.0, 0.0), mark, lambda struck: None)
    ground = Commands(["train", *words], environment, log, story)
    ended = disturb(ground, scene, (), lambda event: None, lambda starts: None)
    digest = (run.read_json(run.result) or {}).get("digest")
    if ended.code == ExitCode.DONE and digest is not None:
        return
    said = log.read_text(errors="replace").strip().splitlines()
    lines = [line for line in said if line.startswith("error: ")] or said or ["it said nothing"]
    error = PhalanxError(f"without any fault the run does not end: {ended.stuck or lines[-1].removeprefix('error: ')}")
    known = {int(code) for code in ExitCode} - {0}
    error.code = ExitCode(ended.code) if ended.code in known else ExitCode.GAVE_UP
    raise error


def long_enough(plan: "Sequence[Fault]", course: "Course", step: float) -> None:
    """UsageError when the run's steps are over before so many faults can strike."""
    rounds = 1 + sum(fault.moment.fresh for fault in plan)
    needed = rounds * (LAG + step * (course.every or 1))
    if needed <= course.steps * step:
        return
    from phalanx.observe.units import duration

    raise UsageError(
        f"{len(plan)} faults in {rounds} rounds take {duration(needed)} of progress at least, and the run's "
        f"{course.steps} steps are over in {duration(course.steps * step)}: give it steps={_round_up(needed / step)}, "
        f"or fewer faults"
    )


def _round_up(steps: float) -> int:
    """Half as many again, in hundreds."""
    return 100 * (int(1.5 * steps / 100) + 1)


def newest_digest(run: "Run") -> str:
    """Of the newest checkpoint, as it lies on the disk."""
    from phalanx.train.checkpoint import CorruptError, digest_checkpoint, list_checkpoints

    found = list_checkpoints(run.checkpoints)
    if not found:
        return "none: there is no checkpoint"
    try:
        return digest_checkpoint(found[0])
    except CorruptError as error:
        return f"none: {error}"
