"""Checkpoints as folders: named by their step when they are whole, verified when they are read.

Only what has a number for a name is a checkpoint. What is being written or deleted is called `*.partial`.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FORMAT = 2
_MANIFEST = "nf_jax.json"
_PARTIAL = ".partial"


def steps_in(root: Path) -> list[int]:
    """The steps of the checkpoints in a folder, ascending; whether they are whole is not looked at."""
    children = root.iterdir() if root.is_dir() else ()
    names = [child.name for child in children if child.name.isdecimal() and child.is_dir()]
    return sorted(int(name) for name in names if name == str(int(name)))


def partial_of(target: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return target.with_name(target.name + _PARTIAL)


def clear_partials(root: Path) -> None:
    """Deletes what saves left that were killed."""
    for child in root.iterdir() if root.is_dir() else ():
        if child.name.partition(".")[0].isdecimal() and _PARTIAL in child.suffixes:
            shutil.rmtree(child, ignore_errors=True)


def publish(target: Path, content: dict[str, Any]) -> None:
    """Gives a checkpoint written at `partial_of(target)` its name, once all of it lies on the disk.

    Args:
      target: its path; a damaged checkpoint there is replaced.
      content: what `verified` is to return.
    """
    partial = partial_of(target)
    manifest = {"format": FORMAT, **content, "files": _checksums(partial)}
    own = zlib.crc32(json.dumps(manifest).encode())
    (partial / _MANIFEST).write_text(json.dumps({**manifest, "crc32": own}))
    with ThreadPoolExecutor() as pool:  # a disk takes many at once in the time of one
        list(pool.map(_flush, [*partial.rglob("*"), partial]))
    if target.exists():
        _delete(target)
    os.replace(partial, target)
    _flush(target.parent)


def prune(root: Path, keep: int, newest: int) -> None:
    """Deletes all but the `keep` latest checkpoints up to step `newest`."""
    for step in [step for step in steps_in(root) if step <= newest][:-keep]:
        _delete(root / str(step))


def verified(path: Path) -> dict[str, Any]:
    """A checkpoint's manifest, once every file has proved to be as written: orbax keeps no sums of data.

    Raises:
      ValueError: there is none, it is damaged, or another version wrote it.
    """
    if not path.is_dir():
        raise ValueError(f"expected a checkpoint at {path}, found none")
    damaged = f"the checkpoint {path} is torn or corrupted"
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        own = manifest.pop("crc32")
        intact = zlib.crc32(json.dumps(manifest).encode()) == own
        files, found = manifest["files"], _checksums(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{damaged}, or was not written by nf_jax: {_MANIFEST}: {error!r}") from error
    wrong = sorted(name for name in {**files, **found} if files.get(name) != found.get(name))
    if wrong or not intact:
        shown = ", ".join(wrong[:5]) if intact else _MANIFEST
        raise ValueError(f"{damaged} ({shown}: missing, added or changed since then)")
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"the checkpoint {path} has format {manifest['format']}, expected {FORMAT}: it was written by "
            "another version of nf_jax; read it with that one"
        )
    return manifest


def _delete(path: Path) -> None:
    """Renamed first: one that is half deleted must not look like a checkpoint."""
    doomed = path.with_name(f"{path.name}.old{_PARTIAL}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _checksums(path: Path) -> dict[str, list[int]]:
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != _MANIFEST)
    name = lambda file: file.relative_to(path).as_posix()  # noqa: E731
    return {name(file): [file.stat().st_size, _crc32(file)] for file in files}


def _crc32(file: Path) -> int:
    crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return crc


def _flush(path: Path) -> None:
    """To the disk: a name that outlives what it names would be a torn checkpoint."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
