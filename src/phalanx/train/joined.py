"""A training loop of the user's own under a gang: model, optimizer and batches come from here, all else stays theirs.

    with phalanx.join("recipe.yaml") as gang:
        model, optimizer = gang.prepare(build, lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4))
        for batch in gang.batches(dataset):
            loss_sum, terms = ...
            gang.backward(loss_sum, terms)
            gang.step()                  # both in one: gang.learn(loss_sum, terms)

The recipe's layout, precision, batch, steps, schedule, checkpoint and recovery hold as under the trainer. Model, data,
loss and optimizer with its learning rate are the loop's; so is evaluation. `phalanx.join` (joining.py) makes the run
ready and ends it.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from phalanx.errors import UsageError
from phalanx.recipe import Recipe, dump_recipe, load_recipe
from phalanx.recipe.exchanges import bucket_between_nodes, gradients_of_one, travels_beside
from phalanx.recipe.schema import Parallelism
from phalanx.run import Run
from phalanx.run.directory import write_json, write_whole
from phalanx.run.pulse import Pulse, Silent
from phalanx.train.callbacks import Callbacks, RunView, load_callbacks
from phalanx.train.checkpoint import clean
from phalanx.train.collated import Collate, Collated, check_dataset, describe, mapped, moved
from phalanx.train.ends import make_stepper, result_of, resume, tell_start
from phalanx.train.fp8_choice import chooser
from phalanx.train.gang import Gang
from phalanx.train.memory import explain_memory
from phalanx.train.model import Seeds, check_begins_alike, seed_everything, seed_for
from phalanx.train.nodes import nodes_of
from phalanx.train.optimizers.adopted import Adopted
from phalanx.train.parallel.divided import Divided
from phalanx.train.parallel.mesh import build_mesh
from phalanx.train.parallel.parallelize import Choices, divide
from phalanx.train.parallel.shard import let_go
from phalanx.train.parts import Parts
from phalanx.train.place import Place
from phalanx.train.precision import LossScale, computing
from phalanx.train.reporter import Reporter
from phalanx.train.savable import check_model, own_memory
from phalanx.train.stop import StopRequest

OTHER_DATA = (
    "give the data that it was trained on, or another run directory. Where a dataset gives other samples each time, "
    "name it by gang.batches(dataset, fingerprint=...)"
)


@dataclass(frozen=True)
class Prepared:
    """What `prepare` made. `facts` describe it for the run's plan."""

    model: nn.Module
    divided: Divided
    optimizer: Adopted
    scale: LossScale
    facts: dict[str, Any]


class Joined:
    """What `phalanx.join` gives: this worker's place in the run. `rank`, `world` and `device` say where it is."""

    def __init__(
        self,
        run: Run,
        recipe: Recipe,
        folder: Path,
        place: Place,
        report: Reporter,
        stop: StopRequest,
        force: bool,
        pulse: Pulse | Silent,
    ):
        assert isinstance(recipe.parallelism, Parallelism)
        self.rank, self.world, self.device = place.rank, place.world, place.device
        self._run, self._recipe, self._folder, self._place = run, recipe, folder, place
        self._report, self._stop, self._force, self._pulse = report, stop, force, pulse
        if place.leads:
            clean(run.checkpoints)
        self._mesh = build_mesh(recipe.parallelism, place, recipe)
        self._prepared: Prepared | None = None
        self._gang: Gang | None = None
        self._over = False
        self._stepped = False

    def prepare(
        self,
        build: Callable[[], nn.Module],
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        rules: dict[str, str] | None = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model that `build()` returns, divided and in the recipe's precision, and the optimizer that
        `make_optimizer(model)` makes of it afterwards. Initial weights depend on the recipe's seed. `rules` tell how
        tensor ranks cut it, as model.tp_plan in the recipe does. RecipeError when it does not fit the layout,
        UsageError when the optimizer does not train just this model."""
        recipe, place = self._recipe, self._place
        seed_everything(seed_for(recipe.seed, "init"), torch.device("cpu"))
        model = build()
        if not isinstance(model, nn.Module):
            raise UsageError(f"gang.prepare: build() returned {type(model).__name__}, expected an nn.Module")
        own_memory(model)
        check_model(model)
        check_begins_alike(place, model)
        model.to(place.device).train()
        size = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self._recipe = recipe = with_buckets(self._run, recipe, place, size)
        assert recipe.memory.activation_checkpointing != "auto"
        choices = Choices(
            recipe.precision,
            recompute=recipe.memory.activation_checkpointing,
            compile="cuda-graphs" if recipe.compile == "cuda-graphs" else recipe.compile is True,
            rules=rules or recipe.model.tp_plan,
            fp8=chooser(self._run, place, {}, bool(recipe.compile)) if recipe.precision == "fp8" else None,
        )
        divided, _ = divide(model, model, self._mesh, choices)
        compute_in(model, recipe.precision, place.device)
        optimizer = make_optimizer(model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"gang.prepare: make_optimizer(model) returned {type(optimizer).__name__}, expected an optimizer"
            )
        adopted = Adopted(model, optimizer, divided=not self._mesh.only_replicates)
        scale = LossScale.for_precision(recipe.precision, recipe.batch.global_size)
        kind = type(optimizer).__name__
        facts = {"model": type(model).__name__, "parameters": size, "optimizer": f"{kind}, lr {adopted.rate:g}"}
        self._prepared = Prepared(model, divided, adopted, scale, facts)
        return model, optimizer

    def batches(
        self, dataset: Any, fingerprint: str | None = None, tokens: int = 1, collate: Collate = default_collate
    ) -> Iterator[Any]:
        """This worker's micro-batches of a map-style dataset (`len` and `[i]`), collated, on the device, in the run's
        order, from where the run stands to its last step, over as many epochs as that takes.

        `fingerprint` names the data, so that a run does not go on with other data; by default it follows from the
        dataset's class, length and a few of its samples. `tokens` is what a sample counts in rates. What a sample is
        must depend on its index only, or a run that resumes is another run. DataError when the run was trained on
        other data.
        """
        if self._prepared is None:
            raise UsageError("gang.batches: call gang.prepare(build, make_optimizer) first")
        if self._gang is not None:
            if not self._over:
                raise UsageError("gang.batches: take the batches of a run once, in one loop up to its last step")
            return iter(())  # a loop over epochs comes back for more: the first one had them all
        check_dataset(dataset)
        fingerprint = fingerprint or describe(dataset)
        prepared, place = self._prepared, self._place
        parts = self._parts(prepared, Collated(dataset, fingerprint, self._recipe.seed, collate), tokens)
        self._write_plan(prepared, dataset, tokens)
        progress = resume(parts, fingerprint, self._force, OTHER_DATA)
        self._pulse.beat("restoring")
        if place.leads:
            tell_start(parts, len(dataset), progress)
        meta = {"fingerprint": fingerprint, "recipe": parts.recipe.model_dump(mode="json")}
        self._gang = Gang(parts, progress, meta)
        return self._each(self._gang)

    def _each(self, gang: Gang) -> Iterator[Any]:
        for batch in gang.batches():
            yield batch
            if self._stepped:
                self._let_go()
        self._over = True
        self._pulse.beat("ending")  # what the loop does now may take as long as it likes

    def _let_go(self) -> None:
        """Take back what an evaluation in the loop has gathered of a sharded model: no backward did."""
        assert self._prepared is not None
        let_go(self._prepared.model.modules())
        self._stepped = False

    def _parts(self, prepared: Prepared, data: Collated, tokens: int) -> Parts:
        place, divided, optimizer, scale = self._place, prepared.divided, prepared.optimizer, prepared.scale
        # The schedule's factor is applied to the rate that the loop gave its optimizer, and events tell that.
        optim = self._recipe.optimizer.model_copy(update={"lr": optimizer.rate})
        recipe = self._recipe.model_copy(update={"optimizer": optim})
        view = RunView(self._run.path, place.rank, place.world, prepared.model)
        return Parts(
            run=self._run,
            recipe=recipe,
            place=place,
            data=data,
            model=prepared.model,
            divided=divided,
            optimizer=optimizer,
            scale=scale,
            stepper=make_stepper(recipe, place, divided, optimizer, scale, Seeds(recipe.seed, place.device)),
            callbacks=Callbacks(load_callbacks(recipe.callbacks, self._folder), view),
            reporter=self._report,
            stop=self._stop,
            units_per_sample=tokens,
            score=lambda: None,
            convert=lambda batch: moved(batch, place.device),
            pulse=self._pulse,
        )

    def _write_plan(self, prepared: Prepared, dataset: Any, tokens: int) -> None:
        """Complete plan.json by what only the loop knew. UsageError when the run was begun with another optimizer."""
        plan = self._run.read_lossy(self._run.plan)
        now = prepared.facts["optimizer"].partition(",")[0]
        if "session" in plan and (before := plan["session"]["optimizer"].partition(",")[0]) != now:
            raise UsageError(
                f"{self._run.path}: was trained with {before}, and the loop now makes {now}, which cannot go on with "
                "that state; make the same, or give another run directory"
            )
        if self._place.leads:
            data = f"{type(dataset).__name__}, {len(dataset)} samples"
            plan |= {"session": {**prepared.facts, "data": data}, "trainable_parameters": prepared.facts["parameters"]}
            plan |= {"unit": "tokens" if tokens > 1 else "samples", "units_per_sample": tokens}
            write_json(self._run.plan, plan)

    def backward(self, loss_sum: Tensor, terms: Tensor | int) -> None:
        """Backward of a micro-batch: the sum (0-d) of its losses over `terms` terms, not their mean. UsageError when
        there is no such sum, or no batch that waits for it."""
        gang = self._started()
        if not isinstance(loss_sum, Tensor) or loss_sum.dim() or not loss_sum.requires_grad:
            found = f"shape {list(loss_sum.shape)}" if isinstance(loss_sum, Tensor) else type(loss_sum).__name__
            found = "one without a gradient" if isinstance(loss_sum, Tensor) and not loss_sum.dim() else found
            raise UsageError(
                "gang.backward: expected the sum of the losses as a 0-d tensor that depends on the model, "
                f"found {found}"
            )
        gang.backward(loss_sum, terms)

    def learn(self, loss_sum: Tensor, terms: Tensor | int) -> bool:
        """`backward` and `step` in one."""
        self.backward(loss_sum, terms)
        return self.step()

    def step(self) -> bool:
        """After each backward; acts when a step's micro-batches are done, and says whether it did."""
        self._stepped = self._started().step()
        return self._stepped

    def alive(self) -> None:
        """A sign of life in long work of the loop's own between two steps, such as after each batch of an evaluation:
        a worker that gives none for `fault_tolerance.hang_timeout_s` seconds is taken for stuck. Costs a
        microsecond."""
        self._pulse.beat("evaluation")

    def explaining_memory(self) -> contextlib.AbstractContextManager[None]:
        """Around the loop: turns an allocation failure into an error that names a micro-batch that would fit."""
        micro = self._recipe.batch.micro_size
        assert isinstance(micro, int)
        return explain_memory(micro, None)

    def _started(self) -> Gang:
        if self._gang is None:
            raise UsageError("a training loop must take its batches from gang.batches(dataset)")
        return self._gang

    def release(self) -> None:
        """Let go of everything that holds the process group, which is left next. The model stays the loop's."""
        if self._gang is not None:
            self._gang.parts.stepper.summed.close()
        self._gang = self._prepared = None
        del self._mesh

    def end(self) -> str:
        """Save the last state and report the result; `done` or `interrupted`."""
        gang = self._started()
        self._let_go()
        status = gang.finish()
        if self._place.leads:
            self._report.result(result_of(gang.parts, gang.progress, status))
        return status


def with_buckets(run: Run, recipe: Recipe, place: Place, trained: int) -> Recipe:
    """The recipe of a new run with the size of buckets that suits a model of so many trained parameters, where that was
    left open and workers are on several nodes: nobody knew the model when the recipe was resolved. Bits may depend on
    it, so resolved.yaml says it from then on. All workers call it."""
    layout, begun = recipe.parallelism, "session" in run.read_lossy(run.plan)
    left_open = load_recipe(run.recipe).recipe.grad_sync.bucket_mib == "auto"
    assert isinstance(layout, Parallelism)
    beside = travels_beside(recipe, layout, place.device.type)
    if begun or not left_open or not beside or nodes_of(place).count == 1:
        return recipe
    bucket = bucket_between_nodes(gradients_of_one(trained, layout), recipe.grad_sync)
    grad_sync = recipe.grad_sync.model_copy(update={"bucket_mib": bucket})
    if place.leads:
        resolved = load_recipe(run.resolved).recipe
        write_whole(run.resolved, dump_recipe(resolved.model_copy(update={"grad_sync": grad_sync})))
    return recipe.model_copy(update={"grad_sync": grad_sync})


def compute_in(model: nn.Module, precision: str, device: torch.device) -> None:
    """Have the model's forward run in autocast if `precision` asks for it, and give its floating-point results in
    fp32, so that the loss is computed in that."""
    if precision in ("fp32", "tf32"):
        return
    forward = model.forward

    def cast(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with computing(precision, device):
            return mapped(forward(*args, **kwargs), lambda part: part.float() if part.is_floating_point() else part)

    vars(model)["forward"] = MethodType(cast, model)
