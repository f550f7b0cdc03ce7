"""GGUF, the format of llama.cpp, Ollama and LM Studio: written by llama.cpp's own converter, a script of Python."""

import os
import subprocess
import sys
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.run.directory import fsync_if_supported
from phalanx.train.checkpoint import run_gguf_converter

GGUF_FORM, GGUF_FILE = "gguf", "model.gguf"
CONVERTER_VARIABLE, CONVERTER_NAME = "PHALANX_GGUF_CONVERTER", "convert_hf_to_gguf.py"
INSTALL_COMMANDS = (
    "git clone --depth 1 https://github.com/ggml-org/llama.cpp && pip install gguf sentencepiece && "
    f"export {CONVERTER_VARIABLE}=$PWD/llama.cpp/{CONVERTER_NAME}"
)
OUT_TYPES = {"float64": "f32", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""The converter's name of the dtype of matrices; vectors are always fp32."""


def find_converter() -> Path:
    """Return the absolute path that PHALANX_GGUF_CONVERTER names. Raises UsageError if there is no such file."""
    named = os.environ.get(CONVERTER_VARIABLE)
    path = Path(named or CONVERTER_NAME).absolute()
    if not named or not path.is_file():
        problem = f"{path}: no such file" if named else f"{CONVERTER_VARIABLE} is not set"
        raise UsageError(f"--form gguf: {problem}; it names the converter of llama.cpp: {INSTALL_COMMANDS}")
    return path


def convert_to_gguf(converter: Path, directory: Path, dtype: str) -> None:
    """Write GGUF_FILE into a directory in Hugging Face's format, with matrices in `dtype`. Raises UsageError with the
    last line of what the converter says if it fails, as for an architecture or a tokenizer that it does not know."""
    out = directory / GGUF_FILE
    arguments = [str(converter), str(directory), "--outfile", str(out), "--outtype", OUT_TYPES[dtype]]
    command = [sys.executable, "-P", run_gguf_converter.__file__, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode or not out.is_file():
        said = (result.stderr.strip() or "nothing").splitlines()[-1]
        raise UsageError(f"--form gguf: {converter} ended with exit code {result.returncode}; it says: {said}")
    with open(out, "rb") as written:
        fsync_if_supported(written.fileno())
