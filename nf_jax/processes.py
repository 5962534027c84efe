"""What the processes of one run must agree on, compared before they train.

A worker with another profile would take other branches and wait for ever, or worse, not; so would one with
other code. One collective at the start tells (arXiv 2606.25759 leaves it to the operator).
"""

from __future__ import annotations

import collections
import json
import platform
import secrets
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jaxlib.version
import numpy as np
from jax.experimental import multihost_utils

from nf_jax import checks
from nf_jax.plan import Plan
from nf_jax.profile import Profile
from nf_jax.stages import Substrate

_MISSING = "<nothing>"


def check_agreement(profile: Profile, plan: Plan, *, substrate: Substrate | None = None, **more: str) -> None:
    """Raises, on every process, unless all processes run the same training.

    Call it on all of them, at the same point: after `jax.distributed.initialize()` and before the first
    step, whenever profile or model change. In one process it does nothing. It costs two small collectives.

    Compared are Python, JAX, jaxlib and this library (its version and a checksum of its files), the number
    of workers, the profile, the model (paths, shapes, dtypes) and the plan made of them.

    Args:
      profile: what `aggregate_gradients` was given.
      plan: `nf_jax.plan(profile, params, num_workers)`.
      substrate: what the plan and `aggregate_gradients` were given, if anything.
      **more: name -> text of whatever else must be the same, such as a learning rate.

    Raises:
      ValueError: naming what differs, on which processes, with both values; of long texts the first
        line that differs. Or the processes have different numbers of devices.

    Example:
      >>> import jax, nf_jax
      >>> profile = nf_jax.Profile.static("SIGN")
      >>> plan = nf_jax.plan(profile, {"kernel": jax.ShapeDtypeStruct((64, 64), "float32")}, num_workers=8)
      >>> check_agreement(profile, plan, learning_rate="1e-3")
    """
    if jax.process_count() == 1:
        return
    facts = _versions() | {
        "num_workers": str(plan.num_workers),
        "profile": profile.dumps(),
        "model": "\n".join(map(str, zip(plan.paths, plan.shapes, plan.dtypes, strict=True))),
        "plan": f"fingerprint {plan.fingerprint}\n" + "\n".join(plan.lanes.names),
        **({} if substrate is None else {"substrate": substrate.dumps()}),
        **more,
    }
    check_same(**facts)


def check_same(**facts: str) -> None:
    """Raises, on every process, unless all processes call it with the same; alone, a process agrees.

    Args:
      **facts: name -> text.

    Raises:
      ValueError: as `check_agreement`.
    """
    if jax.process_count() == 1:
        return
    _check_devices()
    if lines := differences(_gather(facts)):
        raise ValueError(
            checks.join_lines("processes: expected all of them to run the same training, but", lines)
            + "\nStart all of them with the same code, packages, profile and arguments."
        )


def is_shared(folder: Path) -> bool:
    """Whether all processes see the same files in a folder, which the first makes; call it on all of them."""
    if jax.process_count() == 1:
        return True
    # A name of its own: a network file system may remember that there was no such file.
    number = int(multihost_utils.broadcast_one_to_all(np.int32(secrets.randbits(31))))
    path = folder / f".shared-{number}"
    is_first = jax.process_index() == 0
    if is_first:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    multihost_utils.sync_global_devices(f"nf_jax.is_shared {number}")
    is_seen = multihost_utils.process_allgather(np.array(path.exists()))
    if is_first:
        path.unlink()
    return bool(is_seen.all())


def differences(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """A line per fact that differs between processes, with the values and who has them.

    Args:
      facts: name -> text, one mapping per process, in process order.
    """
    lines = []
    for name in dict.fromkeys(name for own in facts for name in own):
        owners: dict[str, list[int]] = {}
        for index, own in enumerate(facts):
            owners.setdefault(own.get(name, _MISSING), []).append(index)
        if len(owners) > 1:
            shown = zip(_first_difference(list(owners)), owners.values(), strict=True)
            lines.append(f"{name}: " + "; ".join(f"{text} on {_processes(own)}" for text, own in shown))
    return lines


def _versions() -> dict[str, str]:
    package = Path(__file__).parent
    code = 0
    for path in sorted(package.glob("*.py")):
        code = zlib.crc32(path.read_bytes(), code)
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        # The public names lie a layer above this file, but Python has loaded them before it.
        "nf_jax": f"{sys.modules['nf_jax'].__version__}, files {code:08x}",
    }


def _check_devices() -> None:
    """From what every process knows of all: a collective between unequal processes would not start."""
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{counts[i]} on process {i}" for i in sorted(counts))
        raise ValueError(f"processes: expected the same number of devices on all of them, got {listed}")


def _gather(facts: Mapping[str, str]) -> list[dict[str, str]]:
    own = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.int32(len(own))))
    padded = np.pad(own, (0, int(sizes.max()) - len(own)))
    texts = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(text[:size])) for text, size in zip(texts, sizes, strict=True)]


def _first_difference(texts: Sequence[str], most: int = 80) -> list[str]:
    """Of several texts, what differs first, short enough for a message."""
    split = [text.split("\n") for text in texts]
    length = max(map(len, split))
    padded = [lines + [_MISSING] * (length - len(lines)) for lines in split]
    row = next(row for row in zip(*padded, strict=True) if len(set(row)) > 1)
    columns = enumerate(zip(*row, strict=False))
    same = next((i for i, column in columns if len(set(column)) > 1), min(map(len, row)))
    return [_shorten(line, max(0, same - most // 2), most) for line in row]


def _shorten(line: str, start: int, most: int) -> str:
    before, after = "..." if start else "", "..." if len(line) > start + most else ""
    return repr(before + line[start : start + most] + after)


def _processes(indices: Sequence[int], most: int = 8) -> str:
    listed = ", ".join(map(str, indices[:most]))
    more = f" and {len(indices) - most} more" if len(indices) > most else ""
    return f"process{'es' if len(indices) > 1 else ''} {listed}{more}"
