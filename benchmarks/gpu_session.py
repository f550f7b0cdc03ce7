"""Everything that one GPU can show about Phalanx, in one command of a few minutes, most important things first.

    python benchmarks/gpu_session.py --out DIR [--seconds 540]     # on a machine with a GPU
    python benchmarks/gpu_session.py --out DIR --emulate           # at toy size on an emulated GPU (tests/emulated)

Phases run in order; one that would not end in time is left out, not cut short. DIR/session.json is written again after
each phase, so what a kill leaves is whole; DIR/gpu.md has the tables. Runs that compare bits share the GPU with each
other; what is timed has the GPU to itself. All contenders of `speed` train the same module with 4 micro-batches a step,
the plain loop with blocks and loss compiled. FLOPs and MFU: benchmarks/gpu.py.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent / "src"))  # a machine with a GPU for some minutes has nothing installed

import gpu  # noqa: E402
import gpu_telemetry  # noqa: E402
from loop_overhead import PEER_PACKAGES, PLAIN, can_run, make_dataset  # noqa: E402
from phalanx.run import EventTail, read_events  # noqa: E402
from phalanx.run.event_types import StepDone, WorkerStarted  # noqa: E402

SESSION_MEMORY = 80 * 10**9
"""Layers of the 8B shape are as many as fit here, so that cards with more memory train the same model."""
AFTER_SPEED = 100.0
"""Seconds that are kept for what comes after the contenders."""
ORDER = ("8b-4k", "gpt2", "1b3", "8b-8k")
STEPS = 60
KILL_AT = 30
FP32_STEPS = 20
DEFAULT_STEPS = 180
BITS_PATIENCE = 170.0
"""Seconds that a run which is not timed may take."""
LIBRARIES = ("nvidia-ml-py", "triton", "flash-attn", "flash-attn-3", "liger-kernel", "quack-kernels", "torchao")
"""What could make a step faster where it is installed."""
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


@dataclass
class Session:
    """What all phases share."""

    out: Path
    folder: Path
    deadline: float
    environment: dict[str, str]
    emulated: bool
    groups: list[str]
    only: list[str]
    results: dict[str, Any] = field(default_factory=dict)
    dataset: Path = Path()

    def left(self) -> float:
        """Seconds until the session must have ended."""
        return self.deadline - time.monotonic()

    def save(self) -> None:
        """Write what is known so far; whole at every moment."""
        temporary = self.out / "session.json.new"
        text = json.dumps(self.results, indent=1, default=str).replace(str(HERE.parent), "REPOSITORY")
        temporary.write_text(text.replace(str(self.folder), "SESSION"))
        temporary.replace(self.out / "session.json")
        (self.out / "gpu.md").write_text("\n".join(page(self.results)) + "\n")

    def call(self, command: list[str], patience: float, **environment: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command; 124 where it took too long, or longer than the session has."""
        found = {**self.environment, **environment}
        patience = max(1.0, min(patience, self.left()))
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=patience, env=found, check=False)
        except subprocess.TimeoutExpired:
            return 124, "", f"took longer than {patience:.0f} s"
        except OSError as error:
            return 127, "", str(error)
        return done.returncode, done.stdout, done.stderr

    def cases(self) -> dict[str, gpu.Case]:
        """The models, at toy size on the emulator."""
        wanted = ("gpt2",) if self.emulated else self.only or ("gpt2", "1b3", "8b-4k")
        cases = {key: (gpu.TOYS if self.emulated else gpu.CASES)[key] for key in wanted}
        return {key: gpu.with_layers_that_fit(case, SESSION_MEMORY) for key, case in cases.items()}


@dataclass(frozen=True)
class Phase:
    """A part of a session: it begins only where so many seconds are left."""

    name: str
    needs: float
    run: Callable[[Session], Any]


# ---- what the machine is


def facts(session: Session) -> dict[str, Any]:
    """The card, its clocks and limits, the software; CUDA in a fork of a process that has imported what the fork server
    imports."""
    query = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu,ecc.mode.current"
    _, card, _ = session.call(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], 20)
    code = (
        "import os, json, torch\n"
        "from phalanx.compat import import_torch\n"
        "import_torch()\n"
        "import phalanx.train.worker\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    ok = float(torch.ones(8, device='cuda').sum()) == 8.0 or bool(os.environ.get('NULLGPU'))\n"
        "    os._exit(0 if ok else 1)\n"
        "forked = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "p = torch.cuda.get_device_properties(0)\n"
        "print(json.dumps({'forked': forked, 'torch': torch.__version__, 'cuda': torch.version.cuda, 'name': p.name,"
        "'memory': p.total_memory, 'sms': p.multi_processor_count, 'cudnn': torch.backends.cudnn.version()}))\n"
    )
    status, out, errors = session.call([sys.executable, "-c", code], 90)
    found = json.loads(out.splitlines()[-1]) if status == 0 else {"failed": errors[-500:]}
    hidden = not Path("/proc/driver/nvidia/gpus").is_dir()
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "driver_folder_hidden": hidden}
    machine["libraries"] = {name: version for name in LIBRARIES if (version := version_of(name))}
    return {"card": card.strip(), **found, **machine}


def version_of(package: str) -> str | None:
    """What is installed of it."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def ceilings(session: Session) -> dict[str, Any]:
    """benchmarks/gpu_ceilings.py."""
    toy = ["--toy", "--seconds", "0.01"] if session.emulated else []
    status, out, errors = session.call([sys.executable, str(HERE / "gpu_ceilings.py"), *toy], 120)
    found: dict[str, Any] = json.loads(out.splitlines()[-1]) if status == 0 else {"failed": errors[-2000:]}
    return found


# ---- bits: the product's own command, killed and not


@dataclass(frozen=True)
class BitsCase:
    """A run of a small model: its overrides, and whether its worker is killed on the way. Runs of one `group` must end
    with the same digest."""

    group: str
    name: str
    overrides: tuple[str, ...] = ()
    kill: bool = False
    cpu: bool = False


COMPILED = ("compile=true",)
REPLICAS = ("determinism=elastic", "batch.micro_size=4", "compile=false")
WIDE = "model.args={layers: 4, hidden_size: 2048, num_heads: 16}"
"""A run takes fp8 only for products that are faster in it: a narrow model has none."""
FP8 = ("precision=fp8", *COMPILED, WIDE, "batch.global_size=32", "data.seq_len=512")
FP32 = ("precision=fp32", f"steps={FP32_STEPS}", "compile=false")
BITS = (
    BitsCase("eager", "eager", ("compile=false",)),
    BitsCase("eager", "eager, again", ("compile=false",)),
    BitsCase("eager", "eager, killed", ("compile=false",), kill=True),
    BitsCase("offload", "eager, optimizer offloaded", ("compile=false", "optimizer.offload=true")),
    BitsCase("compiled", "compiled", COMPILED),
    BitsCase("compiled", "compiled, killed", COMPILED, kill=True),
    BitsCase("replicas", "determinism: elastic", REPLICAS),
    BitsCase("replicas", "determinism: elastic, killed", REPLICAS, kill=True),
    BitsCase("fp8", "fp8", FP8),
    BitsCase("fp8", "fp8, killed", FP8, kill=True),
    BitsCase("chunked", "chunked loss", ("memory.chunked_loss=true", *COMPILED)),
    BitsCase("documents", "documents", ("data.document_masking=true", *COMPILED)),
    BitsCase("graphs", "CUDA graphs", ("compile=cuda-graphs",)),
    BitsCase("fp16", "fp16", ("precision=fp16",)),
    BitsCase("gpu fp32", "fp32 on the GPU", FP32),
    BitsCase("cpu fp32", "fp32 on the CPU", (*FP32, "num_threads=4"), cpu=True),
)
TINY = (
    "model.args={layers: 4, hidden_size: 256, num_heads: 4}",
    "batch.global_size=8",
    "data.seq_len=256",
    "checkpoint.every=10 steps",
    "evaluation.every=30 steps",
    "evaluation.max_samples=32",
    f"optimizer.schedule.warmup_steps={STEPS // 4}",
    "optimizer.lr=1e-3",
)


def bits(session: Session) -> dict[str, Any]:
    """Digests and last losses of all runs, side by side on the GPU."""
    (session.folder / "text").mkdir(exist_ok=True)
    source = session.folder / "text/corpus.txt"
    source.write_text("\n".join(path.read_text(errors="replace") for path in sorted(HERE.glob("*.py"))) * 8)
    recipe = session.folder / "recipe.yaml"
    recipe.write_text(f"name: bits\ndata: {{source: {{text: {source}}}}}\n")
    cases = [case for case in BITS if not session.groups or case.group in session.groups]
    if session.emulated:
        cases = [case for case in BITS if case.name in ("eager", "compiled")]
    with ThreadPoolExecutor(len(cases)) as pool:
        runs = list(pool.map(lambda case: train(session, recipe, case), cases))
    groups: dict[str, set[str]] = {}
    for case, run in zip(cases, runs, strict=True):
        groups.setdefault(case.group, set()).add(str(run.get("digest")))
    same = {group: len(found) == 1 and found != {"None"} for group, found in groups.items()}
    fp32 = [run["losses"] for case, run in zip(cases, runs, strict=True) if case.group.endswith("fp32")]
    off = None
    if len(fp32) == 2 and all(len(losses) == FP32_STEPS for losses in fp32):
        off = max(abs(a - b) / b for a, b in zip(*fp32, strict=True))
    named = {case.name: run for case, run in zip(cases, runs, strict=True)}
    return {"runs": named, "same_digest": same, "fp32_off_from_cpu": off}


def train(session: Session, recipe: Path, case: BitsCase) -> dict[str, Any]:
    """One run by `phalanx train`, to its end: a killed worker is started again by its agent."""
    where = session.folder / "bits" / case.name.replace(" ", "-").replace(",", "").replace(":", "")
    where.parent.mkdir(exist_ok=True)
    steps = () if any(each.startswith("steps=") for each in case.overrides) else (f"steps={STEPS}",)
    exact = () if case.group == "replicas" else ("determinism=fixed-world",)
    command = [sys.executable, "-m", "phalanx", "train", str(recipe), "--run", str(where), *TINY, *exact, *steps]
    environment = {**session.environment, **({"CUDA_VISIBLE_DEVICES": ""} if case.cpu else {}), COMPILE_THREADS: "2"}
    begun = time.monotonic()
    process = subprocess.Popen(
        [*command, *case.overrides], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    killer = threading.Thread(target=kill_at, args=(where / "events.jsonl", KILL_AT, process))
    if case.kill:
        killer.start()
    try:
        told, _ = process.communicate(timeout=min(BITS_PATIENCE, max(5.0, session.left())))
    except subprocess.TimeoutExpired:
        process.terminate()
        told, _ = process.communicate(timeout=20)
    if case.kill:
        killer.join()
    events = list(read_events(where / "events.jsonl"))
    digest = next((line.split()[1] for line in told.splitlines() if line.startswith("digest")), None)
    losses = [event.loss for event in events if isinstance(event, StepDone)]
    found = {"exit": process.returncode, "digest": digest, "losses": losses if case.group.endswith("fp32") else []}
    found |= {"last_loss": losses[-1] if losses else None, "seconds": time.monotonic() - begun}
    found["starts"] = sum(isinstance(event, WorkerStarted) for event in events)
    with contextlib.suppress(OSError, ValueError):
        found["fp8"] = json.loads((where / "fp8.json").read_text())["layers"]
    if process.returncode != 0:
        found["output"] = told[-1500:]
    return found


def kill_at(events: Path, step: int, process: subprocess.Popen[str]) -> None:
    """SIGKILL the worker of a run as soon as it has done a step."""
    tail, pid = EventTail(events), 0
    while process.poll() is None:
        for event in tail.read():
            if isinstance(event, WorkerStarted):
                pid = event.pid
            elif isinstance(event, StepDone) and event.step >= step:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                return
        time.sleep(0.02)


# ---- speed


def contenders(case: str) -> list[str]:
    """Who trains a case. Twice for gpt2, to see how much a card drifts."""
    if case == "gpt2":
        return [gpu.PHALANX, PLAIN, gpu.DETERMINISTIC, gpu.PHALANX]
    return [gpu.PHALANX, PLAIN] if case == "1b3" else [gpu.PHALANX, PLAIN, gpu.FP8]


def task_of(session: Session, key: str, case: gpu.Case, name: str, seconds: float, kernels: bool) -> dict[str, Any]:
    place = Path(tempfile.mkdtemp(dir=session.folder, prefix=f"{key}-"))
    task = {"case": asdict(case), "name": name, "folder": str(place), "dataset": str(session.dataset)}
    return {**task, "seconds": seconds, "compile": True, "whole": False, "kernels": kernels}


def speed(session: Session) -> dict[str, Any]:
    """Tokens a second, MFU, energy, memory and kernels of every contender, one after the other with the GPU to itself.
    They share a process, since importing torch and starting CUDA takes longer than measuring; where one ends it, the
    next begins in another."""
    cases, found = session.cases(), session.results.setdefault("speed", {})
    order = sorted(cases, key=lambda key: ORDER.index(key))
    for key in order:
        case = cases[key]
        entry = found.setdefault(key, {"case": asdict(case), "tokens": case.tokens, "contenders": {}})
        entry["flops_per_token"] = gpu.flops_per_token(case)
        entry["flops_per_token_half"] = gpu.flops_per_token(case, causal_half=True)
    work = [(key, name) for key in order for name in contenders(key)]
    seconds = 0.2 if session.emulated else 4.0
    tasks = [task_of(session, key, cases[key], name, seconds, kernels=name != PLAIN) for key, name in work]
    done = 0
    while done < len(work) and session.left() > AFTER_SPEED + 25:
        results = run_series(session, tasks[done:]) or [{"refused": "its process died"}]
        for (key, name), result in zip(work[done:], results, strict=False):
            found[key]["contenders"].setdefault(name, []).append(result)
        done += len(results)
        session.save()
    return found


def run_series(session: Session, tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of tasks in one process, as far as it came."""
    result = session.folder / "series.json"
    result.unlink(missing_ok=True)
    patience = max(10.0, session.left() - AFTER_SPEED)
    given = {"tasks": tasks, "result": str(result), "seconds": patience - 15}
    command = [sys.executable, str(HERE / "gpu.py"), "--series", json.dumps(given)]
    _, _, errors = session.call(command, patience)
    results: list[dict[str, Any]] = json.loads(result.read_text()) if result.is_file() else []
    if len(results) < len(tasks):
        session.results.setdefault("series_errors", []).append(errors[-1500:])
    return results


def gpt2(session: Session) -> gpu.Case:
    """The model of the phases that try one only, whichever cases are asked for."""
    return (gpu.TOYS if session.emulated else gpu.CASES)["gpt2"]


def peers(session: Session) -> dict[str, Any]:
    """The same of Fabric, Accelerate and the Trainer, with GPT-2."""
    found = session.results["speed"]["gpt2"]["contenders"] if "gpt2" in session.results.get("speed", {}) else {}
    for name in filter(can_run, PEER_PACKAGES):
        if session.left() < 30:
            break
        task = task_of(session, "gpt2", gpt2(session), name, 0.2 if session.emulated else 4.0, kernels=False)
        result = gpu.run_child(task, Path(task["folder"]), session.left(), session.environment)
        found.setdefault(name, []).append(result)
        session.save()
    return {"done": [name for name in PEER_PACKAGES if name in found]}


def segments(session: Session) -> dict[str, Any]:
    """GPT-2 with expandable_segments:False and with :True, which is Phalanx's default, each in a process of its own:
    speed, and bytes that torch allocated and reserved at most."""
    found = {}
    for name, value in (("fixed segments", "False"), ("expandable segments", "True")):
        task = task_of(session, "gpt2", gpt2(session), gpu.PHALANX, 0.2 if session.emulated else 2.0, kernels=False)
        environment = {**session.environment, "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{value}"}
        found[name] = gpu.run_child(task, Path(task["folder"]), min(40.0, session.left()), environment)
    return {"tokens": gpt2(session).tokens, "runs": found}


def kernels(session: Session) -> dict[str, Any]:
    """benchmarks/gpu_kernels.py."""
    toy = ["--toy", "--seconds", "0.01"] if session.emulated else []
    command = [sys.executable, str(HERE / "gpu_kernels.py"), *toy]
    status, out, errors = session.call(command, 120)
    found: dict[str, Any] = json.loads(out.splitlines()[-1]) if status == 0 else {"failed": errors[-2000:]}
    return found


def default(session: Session) -> dict[str, Any]:
    """What a user gets who says nothing: GPT-2 by `phalanx train`, every key `auto`."""
    case = gpt2(session)
    names = ("layers", "hidden_size", "num_heads", "activation", "vocab_size", "tie_embeddings")
    args = {name: size for name, size in gpu.sizes_of(case).items() if name in names}
    recipe = session.folder / "default.yaml"
    samples = case.samples * case.micro_batches
    data = f"data: {{source: {{prepared: {session.dataset}}}, seq_len: {case.sequence}}}"
    steps = 8 if session.emulated else DEFAULT_STEPS
    recipe.write_text(
        f"name: default\nmodel: {{args: {json.dumps(args)}}}\n{data}\nbatch: {{global_size: {samples}}}\n"
        f"steps: {steps}\nevaluation: {{every: null, holdout_fraction: 0}}\ncheckpoint: {{every: null}}\n"
        "optimizer: {schedule: {warmup_steps: 10}}\n"
    )
    where = session.folder / "default"
    begun = time.monotonic()
    command = [sys.executable, "-m", "phalanx", "train", str(recipe), "--run", str(where)]
    port = {"PHALANX_METRICS_PORT": str(gpu_telemetry.METRICS_PORT)}
    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(session.call, command, session.left(), **port)
        watched = gpu_telemetry.watch(where, steps // 4, session.environment, lambda: not trained.done())
        status, out, errors = trained.result()
    times = [event.duration_s for event in read_events(where / "events.jsonl") if isinstance(event, StepDone)]
    found: dict[str, Any] = {"exit": status, "wall_s": time.monotonic() - begun, "output": out[-3000:] + errors[-800:]}
    found["watched"] = watched
    if len(times) > 4:
        found["step_s"] = statistics.median(times[len(times) // 2 :])
        found["tokens_per_s"] = case.tokens / found["step_s"]
    with contextlib.suppress(OSError, ValueError):
        plan = json.loads((where / "plan.json").read_text())
        found["predicted_step_s"] = plan.get("predicted_step_s")
        found["chosen"] = {each["key"]: [each["value"], each["reason"]] for each in plan.get("auto_choices", [])}
    with contextlib.suppress(OSError, ValueError):
        found["joules"] = json.loads((where / "result.json").read_text()).get("energy_j")
    status, out, errors = session.call([sys.executable, "-m", "phalanx", "report", str(where)], session.left())
    found["report"] = {"exit": status, "output": (out + errors)[-4000:]}
    return found


def telemetry(session: Session) -> dict[str, Any]:
    """benchmarks/gpu_telemetry.py: GPT-2 with and without the node's sampler."""
    seconds = 2.0 if session.emulated else 40.0
    task = task_of(session, "gpt2", gpt2(session), gpu.PHALANX, seconds, kernels=False)
    return gpu_telemetry.effect(task, Path(task["folder"]), session.left(), session.environment)


def planner(session: Session) -> dict[str, Any]:
    """`phalanx calibrate --quick`, and `phalanx plan` of the cases by it and by the catalogue's H100."""
    found: dict[str, Any] = {}
    begun = time.monotonic()
    out = session.folder / "here.yaml"
    probe = [sys.executable, "-m", "phalanx", "calibrate", "--quick", "--out", str(out)]
    status, told, errors = session.call(probe, min(90.0, session.left()))
    found["probe"] = {"exit": status, "seconds": time.monotonic() - begun, "output": (told + errors)[-1500:]}
    found["plans"] = {}
    for key, case in session.cases().items():
        recipe = gpu.recipe_of(case, "bf16", session.dataset, True)
        path = session.folder / f"{key}.yaml"
        path.write_text(json.dumps(recipe.model_dump(mode="json", exclude_unset=True)))
        for cluster in [*([str(out)] if status == 0 else []), "h100:1"]:
            if session.left() < 20:
                break
            command = [sys.executable, "-m", "phalanx", "plan", str(path), "--cluster", cluster, "--json"]
            code, text, errors = session.call(command, session.left())
            name = "probe" if cluster == str(out) else cluster
            found["plans"][f"{key} {name}"] = planned(text) if code == 0 else f"exit {code}: {errors[-400:]}"
    return found


def planned(text: str) -> dict[str, Any]:
    """What is compared with the measurement: seconds of a step with their range, and bytes."""
    plan = json.loads(text)
    names = ("step_s", "peak_bytes", "micro_size", "activation_checkpointing", "breakdown_s")
    return {name: plan["candidates"][0][name] for name in names} | {
        name: plan[name] for name in ("low_s", "high_s", "mfu", "memory_bytes", "cost_source")
    }


def tests(session: Session) -> dict[str, Any]:
    """The tests that need a GPU, and `phalanx doctor --quick`."""
    if session.emulated:  # there numbers are garbage
        return {"left_out": "the emulated GPU computes nothing"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "-rfE"]
    files = [
        str(path) for path in sorted((HERE.parent / "tests/unit").rglob("test_*.py")) if "mark.gpu" in path.read_text()
    ]
    command += [*files, f"--basetemp={session.folder / 'pytest'}"]
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(session.call, [sys.executable, "-m", "phalanx", "doctor", "--quick"], 60)
        status, out, errors = session.call(command, min(120.0, session.left()))
        doctor = asked.result()
    found: dict[str, Any] = {"exit": status, "output": (out + errors)[-3500:]}
    return {**found, "doctor": {"exit": doctor[0], "output": (doctor[1] + doctor[2])[-2500:]}}


PHASES = (
    Phase("facts", 20, facts),
    Phase("tests", 25, tests),
    Phase("speed", 60, speed),
    Phase("default", 50, default),
    Phase("bits", 60, bits),
    Phase("telemetry", 75, telemetry),
    Phase("ceilings", 40, ceilings),
    Phase("planner", 60, planner),
    Phase("peers", 60, peers),
    Phase("kernels", 95, kernels),
    Phase("segments", 45, segments),
)


# ---- the page


def page(results: Mapping[str, Any]) -> list[str]:
    """docs/benchmarks/gpu.md, as far as it can be written."""
    about = results.get("facts", {})
    lines = [
        "# One GPU",
        "",
        f"`python benchmarks/gpu_session.py`, {results.get('date', '')}, {about.get('card') or about.get('name')}, "
        f"torch {about.get('torch')}, {about.get('cores')} cores." + (" EMULATED." if results.get("emulated") else ""),
        "",
    ]
    ceiling = results.get("ceilings", {}).get("measured_matmul_tflops", {}).get("bf16")
    for key, entry in results.get("speed", {}).items():
        lines += speed_table(key, entry, ceiling)
    if default_run := results.get("default"):
        lines += ["## What a recipe without settings gets (GPT-2)", "", "```", *default_text(default_run), "```", ""]
    if found := results.get("bits"):
        lines += ["## Bits", "", "| runs | same digest |", "|---|---|"]
        lines += [f"| {group} | {'yes' if same else 'NO'} |" for group, same in found["same_digest"].items()]
        lines += ["", "| run | exit | worker starts | last loss | digest |", "|---|---:|---:|---:|---|"]
        for name, run in found["runs"].items():
            lines.append(f"| {name} | {run['exit']} | {run['starts']} | {run['last_loss']} | {run['digest']} |")
        lines += ["", f"fp32 losses of {FP32_STEPS} steps, GPU against CPU: {found['fp32_off_from_cpu']}", ""]
    if found := results.get("ceilings"):
        lines += ["## Ceilings", "", "```", json.dumps(found, indent=1), "```", ""]
    lines += kernels_table(results.get("kernels", {})) + segments_table(results.get("segments", {}))
    took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in results.get("seconds", {}).items())
    return [*lines, f"Phases: {took}. Left out: {', '.join(results.get('left_out', [])) or 'none'}."]


def speed_table(key: str, entry: Mapping[str, Any], ceiling: float | None) -> list[str]:
    """Rows of a case's contenders."""
    case = entry["case"]
    lines = [
        f"## {case['title']} at {case['sequence']:,}: {case['layers']} layers, {entry['tokens']:,} tokens a step",
        "",
        "| | tokens/s | of the plain loop | MFU, full (989 TFLOP/s) | MFU, causal-half | of this card's matmul "
        "| J/token | memory, GB | kernels, ms | step, ms |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    of_plain = [t for run in entry["contenders"].get(PLAIN, []) for t in run.get("seconds", [])]
    plain = entry["tokens"] / statistics.median(of_plain) if of_plain else None
    for name, runs in entry["contenders"].items():
        times = [t for run in runs for t in run.get("seconds", [])]
        if not times:
            lines.append(f"| {name} | {runs[0].get('refused', '?')[:120]} | | | | | | | | |")
            continue
        rate = entry["tokens"] / statistics.median(times)
        full, half = rate * entry["flops_per_token"] / 1e12, rate * entry["flops_per_token_half"] / 1e12
        joules = [run["joules_per_token"] for run in runs if run.get("joules_per_token")]
        memory = max(run.get("memory_bytes") or 0 for run in runs) / 1e9
        kernels = next((run["kernels_ms"] for run in runs if "kernels_ms" in run), 0.0)
        cells = [f"{rate:,.0f}", f"{rate / plain:.3f}" if plain else "", f"{full / 989:.1%}"]
        cells += [f"{half / 989:.1%}", f"{full / ceiling:.1%}" if ceiling else ""]
        cells += [f"{statistics.median(joules):.2e}" if joules else "", f"{memory:.1f}", f"{kernels:.1f}"]
        lines.append(f"| {name} | {' | '.join(cells)} | {1e3 * entry['tokens'] / rate:.1f} |")
    return [*lines, ""]


def kernels_table(found: Mapping[str, Any]) -> list[str]:
    """Rows of each way to compute each part, at each shape."""
    if "shapes" not in found:
        return ["## Kernels", "", str(found["failed"])[-300:], ""] if found else []
    lines = ["## Kernels, forward and backward together", ""]
    lines += ["| shape | part | by | ms | TFLOP/s | GB/s | memory, GB |", "|---|---|---|---:|---:|---:|---:|"]
    for shape, parts in found["shapes"].items():
        for part, ways in parts.items():
            for way, each in ways.items():
                cells = [f"{each[key]:.{digits}f}" if key in each else "" for key, digits in KERNEL_COLUMNS]
                cells[0] = cells[0] or ("missing" if "missing" in each else each.get("failed", "?")[:60])
                lines.append(f"| {shape} | {part} | {way} | {' | '.join(cells)} |")
    missing, left_out = (", ".join(found[key]) or "none" for key in ("missing", "left_out"))
    return [*lines, "", f"Not installed: {missing}. Left out for lack of time: {left_out}.", ""]


KERNEL_COLUMNS = (("ms", 3), ("tflops", 1), ("gb_per_s", 0), ("peak_gb", 2))


def segments_table(found: Mapping[str, Any]) -> list[str]:
    """Rows of GPT-2 with segments of fixed size and with expandable ones."""
    if not found:
        return []
    lines = [
        "## expandable_segments (GPT-2)",
        "",
        "| | tokens/s | allocated, GB | reserved, GB |",
        "|---|---:|---:|---:|",
    ]
    for name, run in found["runs"].items():
        if "seconds" not in run:
            lines.append(f"| {name} | {run.get('refused', '?')[:120]} | | |")
            continue
        rate = found["tokens"] / statistics.median(run["seconds"])
        memory = [f"{(run.get(key) or 0) / 1e9:.2f}" for key in ("memory_bytes", "reserved_bytes")]
        lines.append(f"| {name} | {rate:,.0f} | {' | '.join(memory)} |")
    return [*lines, ""]


def default_text(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{key} = {value}: {why}" for key, (value, why) in found.get("chosen", {}).items()]
    if "tokens_per_s" in found:
        lines.append(f"{found['tokens_per_s']:,.0f} tokens/s, {1e3 * found['step_s']:.1f} ms a step")
        predicted = found.get("predicted_step_s")
        lines.append(f"predicted {1e3 * predicted:.1f} ms" if predicted else "nothing predicted")
    return lines or [f"exit {found['exit']}", *found["output"].splitlines()[-5:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for session.json and gpu.md")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all phases together")
    parser.add_argument("--emulate", action="store_true", help="on the emulated GPU, at toy size")
    parser.add_argument("--bits", nargs="+", default=[], help="only runs of these groups in the phase of that name")
    parser.add_argument("--cases", nargs="+", default=[], choices=ORDER, help="only these models")
    parser.add_argument("--phases", nargs="+", choices=[phase.name for phase in PHASES], help="only these")
    options = parser.parse_args()
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="gpu-session-"))
    paths = [str(HERE.parent / "src"), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "XDG_CACHE_HOME": "cache"}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    environment |= {name: os.environ.get(name, str(folder / place)) for name, place in caches.items()}
    if options.emulate:
        sys.path.insert(1, str(HERE.parent / "tests/emulated"))
        import emulator

        environment |= emulator.environment(emulator.build())
        environment["PYTHONPATH"] = os.pathsep.join([*paths, str(HERE.parent / "tests/emulated/site")])
    deadline = began + options.seconds
    session = Session(options.out, folder, deadline, environment, options.emulate, options.bits, options.cases)
    session.results |= {"date": time.strftime("%Y-%m-%d"), "emulated": options.emulate, "seconds": {}, "left_out": []}
    try:
        session.dataset = make_dataset(folder, megabytes=1 if options.emulate else 16)
        for phase in PHASES:
            if options.phases and phase.name not in options.phases:
                continue
            if session.left() < phase.needs:
                session.results["left_out"].append(phase.name)
                continue
            begun = time.monotonic()
            try:
                session.results[phase.name] = phase.run(session)
            except Exception:  # noqa: BLE001 the other phases must not be lost with it
                session.results.setdefault("failed", {})[phase.name] = traceback.format_exc()[-1500:]
            session.results["seconds"][phase.name] = time.monotonic() - begun
            session.save()
            print(f"{phase.name}: {time.monotonic() - begun:.0f} s, {session.left():.0f} s left", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(page(session.results)))


if __name__ == "__main__":
    main()
