"""Check a recipe before its run, and measure what needs little code: calls in a process of their own.

Each function may fail or fill memory without harm, and returns plain values. The larger trials are in
`profile_trial.py` and `timing_trial.py`; from what they return, `plan` chooses.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import xxhash
from pydantic import TypeAdapter

from phalanx.autoconfig.trial_model import open_trial
from phalanx.autoconfig.trial_names import OTHER_LOAD_KEY
from phalanx.cluster import measure_matmul
from phalanx.cluster.system_files import OtherLoad
from phalanx.data import open_data
from phalanx.recipe import Recipe, ResolvedRecipe, import_object
from phalanx.recipe.imports import HF_CONFIG_FILE, check_known_arguments
from phalanx.recipe.locations import huggingface_directory
from phalanx.recipe.schema import AdapterConfig, Parallelism, TaskConfig
from phalanx.run import Run
from phalanx.train.adapters.lora import add_adapters
from phalanx.train.builder import build_context
from phalanx.train.callbacks import load_callbacks
from phalanx.train.checkpoint import load_plan as init_weights
from phalanx.train.checkpoint.peft_files import open_peft_adapter
from phalanx.train.distributed.environment import dist_env_from_environment
from phalanx.train.distributed.parallelize import ParallelConfig, plan_model
from phalanx.train.distributed.pipeline.build import partition_model
from phalanx.train.hf import model as hf_model
from phalanx.train.hf.inputs import check_auxiliary_loss
from phalanx.train.loss import LossFn
from phalanx.train.profiler import profile_steps
from phalanx.train.reporter import RunReporter
from phalanx.train.tasks import load_task
from phalanx.train.train_context import WorkerProcess
from phalanx.train.train_step import to_device
from phalanx.train.worker import configure_torch


def measure_matmul_rate(payload: dict[str, Any]) -> dict[str, float]:
    """Measure the machine's matmul rate in TFLOP/s by precision, with the threads of one worker. On a CPU add the load
    of others (OTHER_LOAD_KEY)."""
    load = OtherLoad()
    rates = measure_matmul(payload["device"], payload["threads"])
    return rates | ({OTHER_LOAD_KEY: load.count_cores()} if payload["device"] == "cpu" else {})


def check_parallelism(payload: dict[str, Any]) -> None:
    """RecipeError unless the recipe's model can be divided as its layout says."""
    recipe, parallelism = Recipe.model_validate(payload["recipe"]), Parallelism(**payload["recipe"]["parallelism"])
    model, task, data = open_trial(payload, load=False)
    check_auxiliary_loss(model, parallelism)
    config = ParallelConfig(tp_plan=recipe.model.tp_plan, seq_len=data.info.seq_len)
    model_plan = plan_model(model, parallelism, config)
    if parallelism.pipeline > 1:
        batch = to_device(data.read_training(0, 1), torch.device("cpu"))
        partition_model(model, LossFn(task, "fp32", torch.device("cpu")), batch, parallelism, model_plan)


def begins(payload: dict[str, Any]) -> None:
    """DataError unless the weights that `init_from` and `adapter.init_from` name fit the recipe's model."""
    recipe, folder = Recipe.model_validate(payload["recipe"]), Path(payload["folder"])
    model, _, _ = open_trial(payload, load=False)
    if recipe.init_from:
        init_weights.open_initial_weights(recipe.init_from, folder, model)
    if recipe.adapter is not None and recipe.adapter.init_from:
        open_peft_adapter(recipe.adapter.init_from, folder, model, recipe.adapter)


def profile_recipe_steps(payload: dict[str, Any]) -> dict[str, Any]:
    """A profile of a few steps of a resolved recipe, as plain values."""
    recipe, folder = ResolvedRecipe.model_validate(payload["recipe"]), Path(payload["folder"])
    dist_env = dist_env_from_environment({}, recipe.device)
    configure_torch(recipe, dist_env)
    data = open_data(recipe.data, recipe.evaluation, recipe.seed, recipe.batch.global_size)
    scratch_run = Run(Path(payload["out"]).parent)
    process = WorkerProcess(scratch_run, folder, dist_env, RunReporter(scratch_run, is_rank_zero=False))
    context = build_context(process, recipe, data)
    return asdict(profile_steps(context, payload["steps"], 3, Path(payload["out"])))


def check_imports(payload: dict[str, Any]) -> str:
    """Check what needs no data. Return a hash of the source files of model and task, of what they imported from the
    recipe's folder, and of config.json: trials with the same hash still hold.

    RecipeError unless everything that a recipe names by import path exists, the builder takes `model.args`, and a
    Hugging Face directory has what its model and adapters need. DataError when `init_from` does not fit that, or has
    adapters that the recipe has not, and when `adapter.init_from` does not fit."""
    folder = Path(payload["folder"])
    directory = huggingface_directory(payload["build"], folder)
    if directory is not None:
        model = hf_model.build_on_meta(directory, payload.get("args") or {})
        adapter = AdapterConfig(**payload["adapter"]) if payload.get("adapter") else None
        if payload.get("init") is not None:
            init_weights.open_initial_weights(payload["init"], folder, model, adapter is not None)
        if adapter is not None:
            add_adapters(model, adapter)
            if payload["begins"] and adapter.init_from:
                open_peft_adapter(adapter.init_from, folder, model, adapter)
        init_weights.open_hf_weights(directory, model)
        owner, config = "", (directory / HF_CONFIG_FILE).read_bytes()
    else:
        builder = import_object(payload["build"], folder, key="model.build")
        check_known_arguments(builder, payload.get("args") or {})
        owner, config = builder.__module__, b""
    task = load_task(TypeAdapter(str | TaskConfig).validate_python(payload["task"]), folder)
    load_callbacks(payload["callbacks"], folder)
    named = {owner, type(task).__module__}
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    sources = {file for name, file in files.items() if name in named or Path(file).is_relative_to(folder)}
    code = b"".join(Path(it).read_bytes() for it in sorted(sources) if it.endswith(".py"))
    return xxhash.xxh3_64_hexdigest(code + config)
