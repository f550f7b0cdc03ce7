"""The trainer: a recipe's model and task, trained by a gang."""

from phalanx.train.distributed.pipeline.build import PipelineRunner
from phalanx.train.loss import LossModule
from phalanx.train.trainer import Trainer


def fit(trainer: Trainer, loss_module: LossModule | PipelineRunner) -> str:
    """Train to the end; returns `done` or `interrupted`. The last state is saved either way."""
    if isinstance(loss_module, PipelineRunner):
        for batches in trainer.steps():
            trainer.record_pipeline_losses(
                loss_module.step([trainer.context.prepare_batch(batch) for batch in batches])
            )
            trainer.step()
        return trainer.finish()
    for batch in trainer.micro_batches():
        ((_, loss, num_terms),) = loss_module(batch)
        trainer.backward(loss, num_terms)
        trainer.step()
    return trainer.finish()
