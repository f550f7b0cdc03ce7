"""Replay a directory of faults and compare each with what is right.

    python tests/faults2.py DIR [NAME ...]

DIR has a folder for each fault, with its inputs and mostly a `run.sh`. Each runs in a copy, with the helpers of the
first round (`DIR/../faults`) where its scripts look for them. A fault without a script is replayed by tests that pin
its kind. Prints a line for each fault, and exits with 1 where one is not right.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Replay:
    """What a script printed, and the directory it ran in."""

    out: str
    folder: Path

    def steps(self, run: str, field: str = "loss") -> np.ndarray:
        """A field of all steps of a run."""
        lines = (self.folder / "runs" / run / "events.jsonl").read_text().splitlines()
        return np.array([json.loads(line)[field] for line in lines if '"kind": "step"' in line])

    def differs(self, run: str, other: str) -> float:
        """The largest relative difference of the losses of two runs."""
        return float(np.max(np.abs(self.steps(run) / self.steps(other) - 1)))

    def numbers(self, pattern: str) -> list[float]:
        """The numbers that a pattern finds in the output."""
        return [float(text) for text in re.findall(pattern, self.out)]


Problems = Iterator[str]


def check_dropout(replay: Replay) -> Problems:
    for run in ("replicate", "tensor", "context", "pipeline"):
        if (difference := replay.differs(run, "one")) > 1e-5:
            yield f"losses under {run} differ from one process by {difference:.1e}"
    shares = {name: re.findall(r"^\d+ \(.*\) ([\d.]+)$", part, re.M) for name, part in split_by_run(replay.out)}
    for name in ("tensor", "context", "lora"):
        agree = [float(share) for share in shares.get(name, [])]
        if not agree or not any(share < 0.9 for share in agree):
            yield f"masks of slices under {name} agree: {agree}"


def split_by_run(out: str) -> Iterator[tuple[str, str]]:
    """Parts of the output after a line that is the name of a run."""
    parts = re.split(r"^(replicate|tensor|context|lora)$", out, flags=re.M)
    yield from zip(parts[1::2], parts[2::2], strict=True)


def check_auxiliary_loss(replay: Replay) -> Problems:
    for model in ("mixtral", "qwen3moe"):
        if np.array_equal(replay.steps(f"{model}-0.0"), replay.steps(f"{model}-10.0")):
            yield f"{model} has the same losses with and without its balance term"


def check_bf16(replay: Replay) -> Problems:
    means = dict(re.findall(r"^(\S+) +step1 \S+ mean20 (\S+)", replay.out, re.M))
    if float(means["shard"]) > 3 * float(means["one-m8"]):
        yield f"shard differs by {means['shard']}, another micro-batch by {means['one-m8']}"


def check_muon(replay: Replay) -> Problems:
    if (difference := replay.differs("p2", "p1")) > 1e-5:
        yield f"two stages differ from one by {difference:.1e}"
    yield from re.findall(r"^.* is \S+ ; in one process .*$", replay.out, re.M)


def check_optimizer_state(replay: Replay) -> Problems:
    lines = re.findall(r"at step 10: (\d+) of (\d+) parameters", replay.out)
    if not lines or sum(int(count) for count, _ in lines) != 2 * int(lines[0][1]):  # of two runs, one on two stages
        yield f"parameters with state: {lines}"


def check_sources(replay: Replay) -> Problems:
    weights = {"seven-to-one": {"a": 7, "b": 1}, "four": dict.fromkeys("abcd", 1)}
    for run in ("average", "diloco", "seven-to-one", "four"):
        expected = weights.get(run, {"a": 1, "b": 1})
        for file in sorted((replay.folder / "runs" / run).glob("seen-*.json")):
            seen = json.loads(file.read_text())
            total = sum(seen.values())
            shares = {key: seen.get(key, 0) / total for key in expected}
            if any(abs(shares[key] - weight / sum(expected.values())) > 0.06 for key, weight in expected.items()):
                yield f"{run}, {file.stem}: {seen}"


def check_control_tokens(replay: Replay) -> Problems:
    if replay.out.count("text comes back: True") != 2:
        yield "a text with control tokens does not come back"
    yield from re.findall(r"^.*: [1-9]\d*[,}].*text comes back.*$", replay.out, re.M)


def check_begin_of_text(replay: Replay) -> Problems:
    found = re.search(r"<bos>: (\d+) <eos>: (\d+) ; first: \[\s*(\d+)", replay.out)
    if found is None or found[1] != found[2] or found[3] != "2":
        yield f"begin of text: {found and found[0]}"


def check_windows(replay: Replay) -> Problems:
    if "0 of 500 documents lie in no window as a whole; 0 windows begin inside" not in replay.out:
        yield replay.out.strip().splitlines()[-1]


def check_validation(replay: Replay) -> Problems:
    counts = [int(count) for count in re.findall(r'"num_samples": (\d+)', replay.out)]
    if min(counts) < 62:
        yield f"validation samples: {counts}"
    if not re.search(r"validation .*sample", replay.out):
        yield "the report does not say how many samples are validated"


def check_images(replay: Replay) -> Problems:
    for model in ("vit", "resnet"):
        lines = (replay.folder / "runs" / model / "given.txt").read_text().splitlines()
        given, right = ([float(number) for number in re.findall(r"-?\d+\.\d+", line)] for line in lines)
        if not np.allclose(given, right, atol=1e-5):
            yield f"{model} is given {given}"
    yield from re.findall(r"^.* pipeline: .*$", replay.out, re.M)
    if not re.search(r"accuracy (1\.0*|100)", replay.out):
        yield "a model that has accuracy 1 with its own preprocessing has less"


def check_export_dtype(replay: Replay) -> Problems:
    original = (replay.folder / "llama16" / "model.safetensors").stat().st_size
    exported = [file.stat().st_size for file in replay.folder.glob("out-*/model.safetensors")]
    if any(size > 1.1 * original for size in exported):
        yield f"exports of {exported} bytes, the original has {original}"
    if replay.out.count("bfloat16") < 3:
        yield "an export is not declared as bfloat16"


def check_adapter(replay: Replay) -> Problems:
    for run in ("own", "mixtral", "qwen3moe", "gptoss", "rank8", "named", "encoder"):
        if not (replay.folder / "runs" / run / "result.json").is_file():
            yield f"{run} was not trained"
    if len(re.findall("^adapter +adapters on", replay.out, re.M)) < 6:
        yield "a start does not say how many matrices have adapters"


def check_slurm_cores(replay: Replay) -> Problems:
    cores = [int(count) for count in re.findall(r"--cpus-per-task=(\d+)", replay.out)]
    if len(cores) < 2 or min(cores) < 4:
        yield f"cores of jobs on Slurm: {cores}"
    if not re.search(r"cpus_per_node\D+(?:[2-9]|\d\d)", replay.out):
        yield "a job on Ray asks for one core"
    if "cpu:" not in replay.out:
        yield "a job on Kubernetes requests no cores"


def check_variables(replay: Replay) -> Problems:
    seen = re.search(r"^SEEN .*$", replay.out, re.M)
    missing = re.findall(r"'(\w+)': None", seen[0] if seen else "")
    if seen is None or set(missing) - {"SSL_CERT_FILE"}:
        yield f"variables that the job lacks: {missing}"
    if "mlflow.db" in re.findall(r"^\S+\.db", replay.out, re.M):
        yield "the job has made a store of its own"


def check_ipv6(replay: Replay) -> Problems:
    yield from re.findall(r"^== .*exit code [1-9].*$", replay.out, re.M)


def check_deleted_experiment(replay: Replay) -> Problems:
    if "cannot be reached" in replay.out or "deleted" not in replay.out:
        yield "a deleted experiment is not named as such"


def check_charts(replay: Replay) -> Problems:
    points = re.findall(r"in MLflow: (\d+)", replay.out)
    if all(count == "0" for count in points) and "checkpoint" not in replay.out:
        yield "charts stay empty, and no line says until when"


def check_page(replay: Replay) -> Problems:
    for text in ("by the printed link", "with the cookie", "its script", "ssh -L", "keeps the name"):
        if (line := re.search(rf"^.*{re.escape(text)}.*: (\d+).*$", replay.out, re.M)) and line[1] not in (
            "200",
            "303",
        ):
            yield line[0]


def check_generation_end(replay: Replay) -> Problems:
    yield from (line for line in re.findall(r"^The .*$", replay.out, re.M) if line.count(".") > 1)


def check_model_args(replay: Replay) -> Problems:
    yield from re.findall(r"^.*exit code (?!0|78)\d+.*$", replay.out, re.M)
    yield from (line for line in re.findall(r"^.*lines of traceback.*$", replay.out, re.M) if ", 0 lines" not in line)


def check_threads(replay: Replay) -> Problems:
    if "num_threads: 1" not in replay.out:
        yield "OMP_NUM_THREADS=1 is not taken"


def check_read_only_home(replay: Replay) -> Problems:
    yield from (name for name in ("PHALANX_CACHE_DIR", "PHALANX_STATE_DIR") if name not in replay.out)


def check_rapl(replay: Replay) -> Problems:
    for found, right in re.findall(r": ([\d.]+) W \(right: ([\d.]+)\)", replay.out):
        if float(found) != float(right):
            yield f"{found} W instead of {right} W"
    if "intel-rapl:1" in replay.out:
        yield "psys may be capped"


def check_pipeline_evaluation(replay: Replay) -> Problems:
    if not (replay.folder / "runs" / "pp" / "result.json").is_file():
        yield "the run has not ended"


def check_queue_without_locks(replay: Replay) -> Problems:
    if "exit code 0" in replay.out or re.search(r"^1 +tiny", replay.out, re.M):
        yield "a job is queued after an error"


@dataclass(frozen=True)
class Fault:
    """How a fault is replayed: by its `run.sh`, or by other commands, or by tests that pin its kind."""

    check: Callable[[Replay], Problems] | None = None
    commands: str = "bash run.sh"
    tests: tuple[str, ...] = ()


RENAME_ADAPTER_KEY = (
    r"sed -i -E 's/^lora:/adapter:/; s/lora(\.(rank|target_modules)|=)/adapter\1/' *.yaml run.sh; bash run.sh"
)
"""Runs a script that was written when the key `adapter` was `lora`."""

FAULTS = {
    "01-dropout-masks-repeat": Fault(check_dropout, RENAME_ADAPTER_KEY),
    "02-auxiliary-loss-ignored": Fault(check_auxiliary_loss),
    "03-bf16-differs-by-shards": Fault(check_bf16),
    "05-muon-routing-by-stage": Fault(check_muon),
    "05b-resume-drops-optimizer-state": Fault(check_optimizer_state),
    "06-sources-alias-with-workers": Fault(check_sources),
    "07-text-becomes-control-token": Fault(check_control_tokens),
    "08-no-begin-of-text": Fault(check_begin_of_text),
    "09-windows-cut-examples": Fault(
        check_windows,
        "python make.py && phalanx train qa.yaml data.packing=whole steps=38 --run runs/qa && python count.py",
    ),
    "11-validation-of-three-samples": Fault(check_validation),
    "13-image-normalisation-ignored": Fault(check_images),
    "15-exports-are-fp32": Fault(check_export_dtype, RENAME_ADAPTER_KEY),
    "16-lora-skips-experts": Fault(check_adapter, RENAME_ADAPTER_KEY),
    "19-slurm-one-core": Fault(check_slurm_cores),
    "20-job-loses-variables": Fault(check_variables),
    "21-ipv6-only": Fault(check_ipv6),
    "23-deleted-experiment": Fault(check_deleted_experiment),
    "24-charts-empty-until-checkpoint": Fault(check_charts),
    # Links of the page are relative, so a browser asks for its script below the path.
    "25-page-behind-a-path": Fault(
        check_page,
        "sed -i -e 's#:8442/static/#:8442/user/x/proxy/8441/static/#' "
        "-e 's#serve runs#serve runs --proxy-name cluster.example.org#' run.sh; bash run.sh",
    ),
    "26-rapl-dies-counted-twice": Fault(check_rapl, "python rapl.py; python psys.py"),
    "30-generation-without-end": Fault(check_generation_end),
    "31-pipeline-shard-evaluation": Fault(
        check_pipeline_evaluation, "timeout 300 phalanx train pp.yaml --nproc-per-node 4 --run runs/pp"
    ),
    "32-start-on-an-ordinary-cpu": Fault(tests=("tests/unit/autoconfig",)),
    "fleet": Fault(tests=("fleet/tests/unit/test_power_faults.py", "fleet/tests/unit/thermal/test_response.py")),
    "security": Fault(tests=("tests/unit/run", "tests/unit/jobs/agent")),
    "x1-model-args-of-wrong-type": Fault(check_model_args),
    "x2-omp-num-threads-ignored": Fault(check_threads),
    "x3-read-only-home": Fault(check_read_only_home, "unset PHALANX_CACHE_DIR; bash run.sh"),
    "x4-mfu-above-100": Fault(tests=("tests/unit/observe/test_metrics.py",)),
    "x5-submit-says-error-and-queues": Fault(
        check_queue_without_locks,
        "gcc -shared -fPIC -o noflock.so ../../faults/noflock.c; cp ../x3*/tiny.yaml .; "
        "export XDG_STATE_HOME=$PWD/state; "
        "FLOCK_ERRNO=38 LD_PRELOAD=$PWD/noflock.so phalanx jobs submit tiny.yaml; echo exit code $?; phalanx jobs ls",
    ),
}


def replay(faults: Path, name: str) -> list[str]:
    """Replay a fault; return what is not right."""
    fault = FAULTS[name]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    if fault.check is None:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *fault.tests],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        return [] if done.returncode == 0 else re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.M) or [done.stdout]
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        shutil.copytree(faults, Path(scratch) / "faults2", ignore=shutil.ignore_patterns("runs"))
        if (faults.parent / "faults").is_dir():
            shutil.copytree(faults.parent / "faults", Path(scratch) / "faults")
        folder = Path(scratch) / "faults2" / name
        environment |= {"PHALANX_CACHE_DIR": f"{scratch}/cache", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(
            ["bash", "-c", fault.commands],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
        (Path(tempfile.gettempdir()) / f"faults2-{name}.log").write_text(done.stdout)
        return list(fault.check(Replay(done.stdout, folder)))


def main(arguments: list[str]) -> int:
    """Replay the faults that the arguments name, or all."""
    if not arguments or not Path(arguments[0]).is_dir():
        print(__doc__)
        return 64
    faults, names = Path(arguments[0]).absolute(), arguments[1:]
    present = [path.name for path in sorted(faults.iterdir()) if path.is_dir()]
    num_wrong = 0
    for name in names or present:
        started = time.monotonic()
        try:
            problems = replay(faults, name)
        except (KeyError, OSError, ValueError, TypeError, IndexError, subprocess.TimeoutExpired) as error:
            problems = [f"{type(error).__name__}: {error}"]
        num_wrong += bool(problems)
        verdict = "; ".join(problems) or "right"
        print(f"{name:40} {time.monotonic() - started:5.0f} s  {verdict}", flush=True)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
