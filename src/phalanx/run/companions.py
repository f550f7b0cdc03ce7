"""Files of a Hugging Face directory that belong to a model's weights: a run keeps them, and an export has them again.

They are copied when a run starts, because its recipe names the directory. Nothing is read from there because of a run
directory or a checkpoint, which may come from anywhere.
"""

import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from phalanx.run.directory import Run, write_atomic

NoteFn = Callable[[str], object]
"""Receives a message about a file that was copied or skipped."""
TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
GENERATION_CONFIG_FILE, CHAT_TEMPLATE_FILE = "generation_config.json", "chat_template.jinja"
IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
LICENSE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE")
MODEL_CARD_FILE = "README.md"  # for the license that it names: an export has a card of its own
COMPANION_FILES = (
    GENERATION_CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    CHAT_TEMPLATE_FILE,
    "chat_template.json",
    *IMAGE_PROCESSOR_FILES,
    *LICENSE_FILES,
    MODEL_CARD_FILE,
)
"""Files that a run keeps of the directory from which its tokenizer comes."""
MAX_COMPANION_BYTES = 2**28


def keep_companions(
    run: Run, directory: Path, notes: NoteFn = lambda note: None, names: Iterable[str] = COMPANION_FILES
) -> None:
    """Copy these files of a directory into a run that has none yet."""
    if os.path.lexists(run.companions):
        return
    for name in names:
        content = read_contained(directory / name, directory, notes)
        if content is not None:
            run.companions.mkdir(exist_ok=True)
            write_atomic(run.companions / name, content)


def read_contained(file: Path, root: Path, notes: NoteFn = lambda note: None) -> bytes | None:
    """A regular file below `root`, if it is there; links may lead to where `root` leads, and within the cache that a
    snapshot of Hugging Face's hub is part of, nowhere else."""
    if not os.path.lexists(file):
        return None
    within = root.parent.parent if root.parent.name == "snapshots" else root
    real = file.resolve()
    if not real.is_relative_to(within.resolve()):
        notes(f"{file} not copied: it is a link that leads out of {within}")
        return None
    try:
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        notes(f"{file} not copied: {error.strerror}")
        return None
    with open(descriptor, "rb") as opened:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_COMPANION_BYTES:
            notes(f"{file} not copied: not a regular file of at most {MAX_COMPANION_BYTES >> 20} MiB")
            return None
        return opened.read()
