"""Fingerprint of Phalanx's source files, to detect nodes that run different code of the same version, such as an
editable install that was updated on only one of them."""

import functools
import hashlib
from pathlib import Path

import phalanx


@functools.cache
def compute_build_fingerprint(package_dir: Path = Path(phalanx.__file__).parent) -> str:
    """64 bits in hex over relative names and contents of all modules below a package's folder. Computed once (some
    milliseconds), so it stays what it was when this process began to meet others. Files that cannot be imported, such
    as an editor's, do not count."""
    digest = hashlib.sha256()
    for path in sorted(package_dir.rglob("*.py")):
        name = path.relative_to(package_dir)
        if all(part.isidentifier() for part in name.with_suffix("").parts):
            content = path.read_bytes()
            digest.update(f"{name.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]
