"""Random recipes x random faults x random resumes, for hours: each disturbed run must end in the digest of the same
recipe undisturbed. `make soak HOURS=2`; `--seed S --rounds 1` is one round again, with its recipe and its faults.

A round trains what its seed draws twice: undisturbed, and struck by what `phalanx chaos` knows, by signals at random
times after a start of the command, and started again, where the recipe promises the same bits, on other numbers of
workers. A recipe that is refused in a sentence counts as refused. Wrong is another digest, a run that hangs, an exit
code that nobody would start again, a traceback, and what is left behind.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from grammar import RecipeSample, Values, draw_finetuning_recipe, draw_matrix_recipe, draw_recipe, write_sources

from chat_inputs import save_chat_model, write_chat_inputs
from parity_inputs import write_parity_inputs
from phalanx.app.chaos import PINNED_FILES, read_newest_digest
from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.chaos import launcher, verify
from phalanx.jobs.chaos.fault_plan import Fault, RunShape, draw_faults, list_possible_kinds
from phalanx.jobs.chaos.faults import FaultContext, InjectedFault
from phalanx.jobs.chaos.launcher import RunMonitor, TypicalDurations, measure_durations
from phalanx.recipe.yaml_loader import to_yaml
from phalanx.run import Run, read_events
from phalanx.run.directory import write_json
from phalanx.run.event_types import StepDone
from train_harness import random_words

REFUSED = (ExitCode.USAGE, ExitCode.DATA, ExitCode.RECIPE)
PATIENCE, TIMES = 600.0, 10.0
"""Seconds, or times what the undisturbed run took, after which a run is taken for stuck, though it may say something
still; silence is noticed before."""
MOST_FAULTS, MOST_CUTS = 4, 2
LATEST_CUT = 8.0
"""Seconds after a start of the command until which a signal cuts it: data, trials, and the first steps."""
CUTS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
TESTS = Path(__file__).absolute().parents[1]
OWN_MODULES = ("soak/soak_models.py", "helpers/user_models.py", "helpers/chat_rewards.py")


@dataclass
class Round:
    """What came of one round. `outcome`: "equal", "refused" or "failed"; `reasons` says why it is not equal."""

    seed: int
    recipe: str
    outcome: str
    reasons: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    cuts: list[str] = field(default_factory=list)
    starts: int = 0
    workers: list[int] = field(default_factory=list)
    """Of each start of the command."""
    seconds: float = 0.0

    def __str__(self) -> str:
        said = f"seed {self.seed}  {self.outcome:<7}  {self.seconds:4.0f} s  {self.recipe}"
        if self.outcome != "refused":
            said += f"; {', '.join(self.faults + self.cuts) or 'no fault'}; {self.starts} starts on {self.workers}"
        return "\n".join([said, *(f"    {reason}" for reason in self.reasons)])


class TooLongError(Exception):
    """A run that goes on for so long must hang."""


@dataclass
class Deadline:
    """A `sleep` that does not last beyond a moment."""

    until: float

    def sleep(self, seconds: float) -> None:
        if time.monotonic() > self.until:
            raise TooLongError
        time.sleep(seconds)


class KilledLauncher(launcher.LocalLauncher):
    """The command for each node, with workers of each start as a seed draws them, and signals some time after it.
    `words` end with the number of workers. `cuts`: start of the command -> signal and seconds."""

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        story: RunMonitor,
        nodes: int,
        workers: Callable[[], int],
        cuts: Mapping[int, tuple[signal.Signals, float]],
    ):
        super().__init__(words, environment, output, story, nodes)
        self.begun: list[int] = []
        self.cut: list[str] = []
        self._workers, self._cuts, self._due = workers, cuts, 0.0
        self._log, self._log_bytes = output, 0

    def restart_if_needed(self) -> int | None:
        number, delay_s = self._cuts.get(len(self.begun), (None, 0.0))
        if not self._due and self._log_bytes >= 0 and self._log.stat().st_size > self._log_bytes:
            # before the command's first line Python itself ends by a signal, with a traceback
            self._due, self._log_bytes = time.monotonic() + delay_s, -1
        if number is not None and len(self.cut) < len(self.begun) and 0 < self._due <= time.monotonic():
            self._due = 0.0
            if self._processes[0].poll() is None:
                self._processes[0].send_signal(number)
                self.cut.append(f"{number.name} in start {len(self.begun)}")
        return super().restart_if_needed()

    def _start_node(self, node: int) -> "launcher.subprocess.Popen[bytes]":
        if node == 0:
            count = self._workers()
            self.command = (*self.command[:-1], str(count))
            self.begun.append(count)
            self._due, self._log_bytes = 0.0, self._log.stat().st_size if self._log.exists() else 0
        return super()._start_node(node)


@dataclass
class AnyWorldContext(FaultContext):
    """The scene of a run whose number of workers changes: a fault strikes whoever has the rank modulo that."""

    def find_worker(self, rank: int) -> psutil.Process:
        return super().find_worker(rank % max(1, len(self.monitor.worker_pids)))


def create_recipe_dir(folder: Path) -> None:
    """The folder of all recipes: data, and modules of a user's own."""
    folder.mkdir(parents=True)
    write_sources(folder, random_words)
    write_parity_inputs(folder, random_words(1, 700))
    write_chat_inputs(folder)
    save_chat_model(folder / "teacher", seed=1)
    for name in OWN_MODULES:
        shutil.copy(TESTS / name, folder)


def run_round(seed: int, where: Path, folder: Path, cache: Path, callbacks: Sequence[str] = ()) -> Round:
    """One round, in a folder that is removed when its digests are equal. `callbacks`: of the recipe besides."""
    rng = random.Random(seed)
    what = (draw_finetuning_recipe, draw_matrix_recipe, draw_recipe)[seed % 3](rng)
    what.recipe["callbacks"] = list(callbacks)
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    recipe = folder / f"{where.name}.yaml"
    recipe.write_text(to_yaml(what.recipe, flow=False))
    found, begun, mark = Round(seed, str(what), "equal"), time.monotonic(), str(uuid.uuid4())
    with tempfile.TemporaryDirectory(prefix="phalanx-chaos-", ignore_cleanup_errors=True) as directory:
        scratch = Path(directory)
        environment = {**launcher.make_environment(mark, scratch), "PHALANX_CACHE_DIR": str(cache)}
        try:
            calm = _undisturbed(what, recipe, where, environment, mark, found)
            until = time.monotonic() + max(PATIENCE, TIMES * (time.monotonic() - begun))
            if calm is not None:
                _disturbed(what, recipe, where, environment, mark, scratch, calm, rng, found, Deadline(until))
        except TooLongError:
            found.reasons.append(f"it goes on for {time.monotonic() - begun:.0f} s")
        finally:
            launcher.kill_tagged_processes(mark)
    found.seconds = round(time.monotonic() - begun, 1)
    found.reasons += [f"a traceback in {log.name}" for log in where.glob("*.log") if "Traceback (" in log.read_text()]
    if found.outcome != "refused" or "a traceback" in " ".join(found.reasons):
        found.outcome = "failed" if found.reasons else "equal"
    if found.outcome != "failed":
        shutil.rmtree(where)
        recipe.unlink()
    return found


def _undisturbed(
    what: RecipeSample, recipe: Path, where: Path, environment: Mapping[str, str], mark: str, found: Round
) -> Run | None:
    """The run without faults; None where it is refused, or fails by itself, which `found` then says."""
    run, log = Run(where / "calm"), where / "calm.log"
    story = RunMonitor(run)
    train = ["train", str(recipe), "--run", str(run.path), "--nproc-per-node", str(what.world)]
    commands = launcher.LocalLauncher(train, environment, log, story)
    scene = FaultContext(story, TypicalDurations(0.0, 0.0, 0.0), mark, lambda struck: None)
    sleep = Deadline(time.monotonic() + PATIENCE).sleep
    ended = verify.run_with_faults(commands, scene, (), sleep=sleep)
    said = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("error: ")]
    if ended.exit_code == ExitCode.DONE:
        return run
    if (
        ended.exit_code in REFUSED
        and said
        and not any(isinstance(event, StepDone) for event in read_events(run.events))
    ):
        found.outcome, found.reasons = "refused", said[-1:]
    else:
        found.reasons.append(
            f"undisturbed, exit code {ended.exit_code}: {ended.hang or (said or ['it said nothing'])[-1]}"
        )
    return None


def _disturbed(
    what: RecipeSample,
    recipe: Path,
    where: Path,
    environment: dict[str, str],
    mark: str,
    scratch: Path,
    calm: Run,
    rng: random.Random,
    found: Round,
    deadline: Deadline,
) -> None:
    """The run under faults; `found` says what struck, and what is wrong with it."""
    run, log = Run(where / "disturbed"), where / "disturbed.log"
    run.create()
    for name in PINNED_FILES:
        if (calm.path / name).is_file():
            shutil.copyfile(calm.path / name, run.path / name)
    story, struck, left = RunMonitor(run), list[InjectedFault](), list[str]()
    given = [str(recipe), "--run", str(run.path), "--nproc-per-node", str(what.world // what.nodes)]
    place: launcher.Launcher
    if what.queue:
        place = launcher.QueueLauncher(given, environment, scratch / "state", log)
    else:
        cuts, order = cuts_for(rng), random.Random(rng.random())

        def workers() -> int:
            return order.choice(what.others) // what.nodes

        place = KilledLauncher(["train", *given], environment, log, story, what.nodes, workers, cuts)
    scene = AnyWorldContext(story, measure_durations(read_events(calm.events)), mark, struck.append, place.find_daemons)
    before = verify.list_shared_memory()

    def over() -> None:
        left.extend(verify.find_leftovers(run, mark, scratch, before, place.list_leftovers))

    try:
        ended = verify.run_with_faults(
            place,
            scene,
            faults_for(what, rng),
            on_finish=over,
            sleep=deadline.sleep,
        )
    finally:
        found.faults = [one.fault.kind for one in struck]
        found.starts = place.num_starts
        found.workers = place.begun if isinstance(place, KilledLauncher) else [what.world]
        found.cuts = place.cut if isinstance(place, KilledLauncher) else []
    digest = (calm.read_json(calm.result) or {})["digest"]
    left = [each for each in left if not each.startswith("shared memory: ")]  # others' tests leave some, too
    found.reasons += verify.verify_run(run, digest, ended, 0, 0, left, read_newest_digest)


def cuts_for(rng: random.Random) -> dict[int, tuple[signal.Signals, float]]:
    """Signals to the first starts of the command, and how many seconds after each."""
    return {at + 1: (rng.choice(CUTS), rng.uniform(0.0, LATEST_CUT)) for at in range(rng.randint(0, MOST_CUTS))}


def faults_for(what: RecipeSample, rng: random.Random) -> tuple[Fault, ...]:
    """A list of faults that the run can go through."""
    recipe = what.recipe
    course = RunShape(
        recipe["steps"],
        recipe["checkpoint"]["every"],
        recipe["checkpoint"]["keep"],
        recipe["fault_tolerance"]["max_restarts"],
        min(what.others),
        what.nodes,
        what.queue,
    )
    kinds = [*list_possible_kinds(course), "interrupt"]
    if not course.num_saves:  # a save that fails would be the last
        kinds = [kind for kind in kinds if kind not in ("disk-full", "storage-outage")]
    count = rng.randint(1, MOST_FAULTS)
    while True:
        try:
            return draw_faults(rng.randrange(1 << 30), count, kinds, course)
        except UsageError:  # too many for so few saves
            count -= 1


@dataclass
class Counts:
    """What came of all rounds."""

    seed: int
    seconds: float = 0.0
    rounds: int = 0
    equal: int = 0
    refused: int = 0
    failed: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    cuts: int = 0
    resumes: int = 0
    other_workers: int = 0
    """Starts again on another number of workers."""
    failures: list[Round] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)

    def take(self, one: Round) -> None:
        """Count a round."""
        self.rounds += 1
        setattr(self, one.outcome, getattr(self, one.outcome) + 1)
        self.faults.update(one.faults)
        self.cuts += len(one.cuts)
        self.resumes += max(0, one.starts - 1)
        self.other_workers += sum(a != b for a, b in zip(one.workers, one.workers[1:], strict=False))
        if one.outcome == "failed":
            self.failures.append(one)
        if one.outcome == "refused":
            self.refusals.update(one.reasons)

    def values(self) -> Values:
        """For JSON."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()} | {
            "failures": [{**asdict(one), "again": reproduce_command(one.seed)} for one in self.failures]
        }

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        lines = [
            f"{self.rounds} rounds in {self.seconds / 3600:.2f} h: {self.equal} digests equal, {self.failed} failed, "
            f"{self.refused} recipes refused",
            f"{sum(self.faults.values())} faults ({kinds}), {self.cuts} signals to the command; "
            f"{self.resumes} resumes, {self.other_workers} of them on another number of workers",
        ]
        return "\n".join(lines + [f"failed: {reproduce_command(one.seed)}" for one in self.failures])


def reproduce_command(seed: int) -> str:
    """The command that makes the same round."""
    return f"PYTHONPATH={TESTS / 'helpers'} {sys.executable} {Path(__file__).absolute()} --seed {seed} --rounds 1"


def main(argv: Sequence[str] | None = None) -> int:
    """Soak until the time or the rounds are over, or Ctrl-C; 1 if a round failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first round; the next has the next")
    parser.add_argument("--rounds", type=int, help="at most so many")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--out", type=Path, default=Path("build/soak"), help="for counts, and the rounds that failed")
    given = parser.parse_args(argv)
    if not given.hours > 0 or (given.rounds is not None and given.rounds < 1):
        parser.error(f"--hours {given.hours:g} --rounds {given.rounds}: expected more than 0; nothing would be tried")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell's `&` leaves it, and commands inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = given.out.absolute()
    folder = out / "recipes"
    shutil.rmtree(folder, ignore_errors=True)
    create_recipe_dir(folder)
    counts, begun = Counts(given.seed), time.monotonic()
    try:
        while counts.rounds != given.rounds and time.monotonic() - begun < 3600 * given.hours:
            one = run_round(
                given.seed + counts.rounds, out / f"round-{given.seed + counts.rounds}", folder, out / "cache"
            )
            counts.take(one)
            print(f"{time.strftime('%H:%M:%S')}  {one}", flush=True)
            if one.outcome == "failed":
                print(f"    again: {reproduce_command(one.seed)}", flush=True)
            counts.seconds = round(time.monotonic() - begun, 1)
            write_json(out / "soak.json", counts.values())
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    counts.seconds = round(time.monotonic() - begun, 1)
    write_json(out / "soak.json", counts.values())
    print(f"{counts}\nwritten to {out / 'soak.json'}")
    return 1 if counts.failed else 0


if __name__ == "__main__":
    sys.exit(main())
