"""The part of a recipe that says what to train and to evaluate on: sources, tokenizer, sequence length."""

import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from phalanx.recipe.field_types import (
    NUMBER_NOT_BOOL,
    ConfigModel,
    Count,
    Fraction,
    NonNegativeNumber,
    PositiveNumber,
    StepCount,
)

SOURCE_KINDS = ("text", "jsonl", "parquet", "arrow", "tokens", "webdataset", "idx", "images", "prepared")
PYTHON_STDLIB_GLOB = "${python.stdlib}/**/*.py"
INSTALLED_PACKAGES_GLOBS = ["**/site-packages/**", "**/dist-packages/**"]
"""Installed packages are below the standard library, but differ between machines."""
MAX_BPE_TOKENS = 10**7
"""The library that trains a tokenizer allocates for as many at its start, and aborts the process where that fails."""


class IdxFiles(ConfigModel):
    """An image set in IDX files (as MNIST and Fashion-MNIST are published), plain or .gz."""

    model_config = ConfigDict(title="IDX files")

    images: str
    """File of the images."""
    labels: str
    """File of the labels, one for each image."""


class DataSource(ConfigModel):
    """One source of samples: exactly one of `text`, `jsonl`, `parquet`, `arrow`, `tokens`, `webdataset`, `idx`,
    `images`, `prepared`."""

    model_config = ConfigDict(title="Source")

    text: str | list[str] | None = Field(
        None, description="Glob(s) or URLs of text files; .gz, .bz2, .xz and .zst are unpacked."
    )
    jsonl: str | list[str] | None = Field(None, description="Glob(s) or URLs of JSON lines; `text_field` has the text.")
    parquet: str | list[str] | None = Field(None, description="Glob(s) or URLs of Parquet; `text_field` is the column.")
    arrow: str | list[str] | None = Field(
        None, description="Directory of a data set that `datasets` saved, or glob(s) of Arrow files; see `text_field`."
    )
    tokens: str | list[str] | None = Field(
        None, description="Glob(s) or URLs of token files that other tools wrote with `data.tokenizer`: see `format`."
    )
    format: Literal["detect", "megatron", "nanogpt", "llm.c"] = "detect"
    """Format of token files. detect: megatron if there is an index (.idx), llm.c by its first bytes, else nanogpt."""
    webdataset: str | list[str] | None = Field(
        None, description="Glob(s) or URLs of tar archives: images with labels if there is an `image_size`, else texts."
    )
    idx: IdxFiles | None = None
    """Image set in IDX files."""
    images: str | None = Field(None, description="Directory or URL with one sub-directory of images for each class.")
    prepared: str | None = Field(None, description="What `phalanx data prepare` wrote: a directory or URL.")
    text_field: str = "text"
    """Name of the field with the text, or the way to a nested one, such as `choices[0].text`."""
    exclude: str | list[str] = Field(default_factory=list, description="Glob(s) or URLs of files to leave out.")
    image_size: tuple[Count, Count] | None = Field(None, description="Height and width that images are resized to.")
    weight: NonNegativeNumber = 1.0
    """Share of the samples that comes from this source, relative to the weights of the others. 0: none before a stage
    of `data.curriculum`."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [name for name in SOURCE_KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(SOURCE_KINDS)}; found {', '.join(given) or 'none'}")
        return self

    @property
    def kind(self) -> str:
        """Which of the kinds of sources this is."""
        return next(name for name in SOURCE_KINDS if getattr(self, name) is not None)

    @property
    def has_images(self) -> bool:
        """Whether its files hold images; of a prepared source only its manifest says so."""
        return self.kind in ("idx", "images") or (self.kind == "webdataset" and self.image_size is not None)


class BpeTokenizerConfig(ConfigModel):
    """A byte-pair tokenizer trained on the data itself, with this many tokens."""

    model_config = ConfigDict(title="BPE tokenizer")

    bpe: Annotated[int, Field(ge=257, le=MAX_BPE_TOKENS), NUMBER_NOT_BOOL]
    """Number of tokens of the vocabulary."""


class ChatConfig(ConfigModel):
    """How conversations become tokens, and which of them are in the loss: for `task: chat` and `task: preference`; of
    `reward`, `text-classification` and `embedding` what records hold.

    A record has `messages` (OpenAI's form, with `tools`), `conversations` (ShareGPT's), or `prompt` and `completion`;
    for preferences `chosen` and `rejected`, or a `label`.
    """

    model_config = ConfigDict(title="Chat")

    template: str | None = None
    """File of a chat template (Jinja). null: that of the tokenizer's directory."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens in the loss: those of all assistant messages, of the last one, or of the whole text."""
    reasoning: Literal["keep", "drop"] = "keep"
    """Whether `reasoning_content` of assistant messages is passed to the template."""
    too_long: Literal["drop", "truncate", "error"] = "drop"
    """What to do with conversations of more than `data.seq_len` tokens: leave them out, keep their beginning, or stop.
    They are counted in the log and the report."""
    date: datetime.date | None = None
    """The day, as YEAR-MONTH-DAY, for templates that write it (`strftime_now`), so that data do not depend on the day
    of their preparation."""
    allow_special_tokens: bool = False
    """Whether the name of a control token in a message becomes that token. false: it is text."""
    images: bool = False
    """Whether messages have images, which the processor in the tokenizer's directory prepares for the model. One
    conversation a sample; `docs/how-to/images.md`."""
    records: Literal["chat", "pairs", "labels", "rewards", "classes", "texts"] = "chat"
    """What a record holds: a conversation, a chosen and a rejected one (`rewards`: perhaps with a margin), or one with
    a label; a text with the name of its class, or texts to embed. The task sets it."""
    classes: list[str] | None = None
    """Names of the classes. The task sets it."""


class CurriculumStage(ConfigModel):
    """Weights of the sources from a step on."""

    model_config = ConfigDict(title="Curriculum stage")

    from_step: Count
    """First step with these weights. Steps count from 1."""
    weights: list[NonNegativeNumber]
    """Weight of each source, in the order of `data.source`."""


class DataConfig(ConfigModel):
    """Where samples come from. `document_masking` keeps attention and targets within a document."""

    model_config = ConfigDict(title="Data")

    source: DataSource | Annotated[list[DataSource], Field(min_length=1)] = Field(
        default_factory=lambda: DataSource(text=PYTHON_STDLIB_GLOB, exclude=INSTALLED_PACKAGES_GLOBS)
    )
    """One source, or a list that is mixed by weight. The default is the source of Python's standard library."""
    temperature: PositiveNumber | None = None
    """Weights from the sizes of the sources: one of n samples has the weight n^(1/T). 1: by size; the larger, the more
    equal. null: each source has its `weight`."""
    curriculum: list[CurriculumStage] | None = None
    """Weights that change with the step: a list of {from_step, weights}, the first step of a stage (steps count from
    1) and the weight of each source from there on. null: the same weights in all steps."""
    tokenizer: str | BpeTokenizerConfig = Field(
        "bytes", description="`bytes`, {bpe: SIZE}, or a tokenizer.json: its path, directory or URL."
    )
    seq_len: Count = 256
    """Tokens of one training sample."""
    document_masking: bool = False
    """Whether attention and targets stay within a document; false: they continue past its end."""
    packing: Literal["whole", "single"] | None = None
    """How documents are put into samples. null: they follow one another, and are cut where a sample ends. `whole`: a
    document is cut only if it is longer than `seq_len`, and the rest of a sample is padded; validation shares no
    document with training. `single`: the same with one document in a sample."""
    chat: ChatConfig | None = None
    """How conversations become tokens. null: the sources hold plain text."""

    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with a row that cannot be read, such as a broken line of JSON, a text that is null or an image that
    cannot be decoded. `skip`: leave it out, and count it in the log, the report and `skipped.json`."""
    prepare: Literal["first", "stream"] = "first"
    """When data are prepared: before the first step, or while training runs. A stream starts once its first window is
    prepared, and shuffles within windows."""
    stream_window: Count = 8
    """Pieces of a stream (4 to 256 MiB of source files each) that are shuffled together."""

    @property
    def sources(self) -> list[DataSource]:
        """The sources to train on, also where there is one."""
        return self.source if isinstance(self.source, list) else [self.source]

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.prepare == "stream" and self.packing is not None:
            raise ValueError("packing needs all documents at once; expected prepare: first")
        return self

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.chat is not None and self.packing is None:
            raise ValueError("chat: conversations are kept whole; expected packing: whole or single")
        if self.chat is not None and self.chat.images:
            if self.packing != "single":
                raise ValueError("chat: conversations with images are not packed; expected packing: single")
            if self.chat.records != "chat" or self.chat.too_long == "truncate":
                raise ValueError("chat: images go with records: chat, and with too_long: drop or error")
        if self.chat is not None and self.chat.records in ("rewards", "texts") and self.chat.too_long == "truncate":
            raise ValueError("chat.too_long: truncate would cut the last text of a record; expected drop or error")
        is_alone = self.packing == "single" and self.chat is not None and self.chat.records not in ("pairs", "labels")
        if self.chat is not None and not is_alone and not self.document_masking:
            raise ValueError("chat: the conversations of a sample are kept separate; expected document_masking: true")
        return self

    @model_validator(mode="before")
    @classmethod
    def _drop_retired_key(cls, values: Any) -> Any:
        """Read recipes of earlier runs, which hold the version of the order in which sources are mixed. Data in another
        order than today's have another fingerprint."""
        if isinstance(values, dict) and values.get("order") in (1, 2):
            return {name: value for name, value in values.items() if name != "order"}
        return values


class EarlyStopConfig(ConfigModel):
    """End the run early. The checkpoint with the lowest validation loss is kept as the best."""

    model_config = ConfigDict(title="Early stop")

    metric: str = "loss"
    """`loss`, which is to fall, or a metric of the task, such as `accuracy`, which is to rise."""
    patience: Count = 3
    """Evaluations in a row without a better value after which the run ends."""


class EvaluationConfig(ConfigModel):
    """Evaluation on a validation set: a `holdout_fraction` of the samples, which are never trained on, or a separate
    `source`."""

    model_config = ConfigDict(title="Evaluation")

    every: StepCount | None = 100
    """Steps between two evaluations; null: never."""
    holdout_fraction: Fraction = 0.01
    """Fraction of the samples that is never trained on."""
    max_samples: Count = Field(
        512, description="At most this many samples of the validation set, and of each of `tasks`, are scored."
    )
    source: DataSource | None = None
    """Separate validation data, instead of a fraction of the training data."""
    weights: Literal["model", "ema"] = "model"
    """Weights that are evaluated, exported and talked with: the model's, or their moving average
    (`optimizer.ema_decay`)."""
    early_stop: EarlyStopConfig | None = Field(
        None, description="End the run when the model no longer improves on the validation set. null: never."
    )
    tasks: list[str] = Field(
        default_factory=list,
        description="Tasks of lm-eval, or their YAML files, on which checkpoints are scored by another process while "
        "training continues; with `model.build: hf:PATH`.",
    )
    tasks_every: StepCount | None = None
    """Score the first checkpoint of every N steps on `tasks`; null: each, unless one is still being scored. The last
    one is always scored."""


def list_sources(data: DataConfig, evaluation: EvaluationConfig) -> list[DataSource]:
    """Return all sources of a recipe, that of the validation set last."""
    return [*data.sources, *filter(None, [evaluation.source])]
