"""The recipe that workers see: every `auto` that `autoconfig` resolves has a value."""

from typing import Annotated, Literal

from pydantic import Field

from phalanx.recipe.schema import (
    BatchConfig,
    GradSyncConfig,
    LocalSgdConfig,
    MemoryConfig,
    Parallelism,
    Recipe,
)


class ResolvedBatch(BatchConfig):
    """`micro_size` is known."""

    micro_size: Annotated[int, Field(gt=0)]


class ResolvedMemory(MemoryConfig):
    """What is traded for memory is chosen."""

    activation_checkpointing: Literal["none", "selective", "full"]
    chunked_loss: bool


class ResolvedGradSync(GradSyncConfig):
    """Bucket size and warm-up are known. `algorithm: auto` stays: it is measured while training."""

    bucket_mib: Annotated[float, Field(gt=0)]
    warmup_steps: Annotated[int, Field(ge=0)]


class ResolvedLocalSgd(LocalSgdConfig):
    """The warm-up is known."""

    warmup_steps: Annotated[int, Field(ge=0)]


class ResolvedRecipe(Recipe):
    """A recipe without `auto`, but for what workers measure while they train: `grad_sync.algorithm` and
    `checkpoint.every`."""

    batch: ResolvedBatch
    device: Literal["cpu", "cuda", "xpu", "mps"]
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
    parallelism: Parallelism
    memory: ResolvedMemory
    compile: bool | Literal["cuda-graphs"]
    determinism: Literal["fixed-world", "elastic", "off"]
    grad_sync: ResolvedGradSync
    local_sgd: ResolvedLocalSgd | None = None
    num_threads: Annotated[int, Field(gt=0)]
