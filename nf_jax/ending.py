"""How one process of several ends: with one clear line, and without waiting for the others.

An orderly exit of JAX waits for all processes, and they may be waiting for this one. So it leaves at once
(`os._exit`): its connections break, and the others' next collective fails instead of hanging.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import traceback
from typing import NoReturn

GRACE_SECONDS = 2.0
Witness = subprocess.Popen[bytes]

# Errors of collectives (gloo's are ValueErrors) and of the coordination service (RuntimeErrors).
_LOST = re.compile(
    r"(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED): |(UNKNOWN|INTERNAL): .*(gloo|nccl|connection)",
    re.IGNORECASE,
)


def leave(error: BaseException, name: str, witness: Witness | None = None, *, is_last: bool) -> NoReturn:
    """Ends this process because of `error`.

    Args:
      error: what ended its work.
      name: of this process, for the message.
      witness: see `start_witness`.
      is_last: it is the coordinator. JAX aborts whoever loses that, so the others first get
        `GRACE_SECONDS` to say their own word.
    """
    code = 1
    reason = " ".join(str(error).split())[:300]
    if isinstance(error, KeyboardInterrupt):
        message, code = f"{name}: interrupted.", 130
    elif isinstance(error, SystemExit):
        message, code = f"{name}: left early.", error.code if type(error.code) is int else 1
    elif isinstance(error, ValueError | RuntimeError) and _LOST.match(reason):
        message = (
            f"{name}: lost its connection to another process ({reason}). That one has ended or cannot be "
            "reached: its own last lines say why. Then start all processes again, experiments with --resume."
        )
    else:
        traceback.print_exception(error)
        message = f"{name}: ends because of the error above, and the other processes with it."
    say(message)
    dismiss(witness)
    if is_last:
        time.sleep(GRACE_SECONDS)
    os._exit(code)


def say(message: str) -> None:
    """One line on stderr, if anybody still reads it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        print(f"error: {message}", file=sys.stderr, flush=True)


def start_witness(name: str) -> Witness:
    """Starts a tiny process that speaks for this one if it ends without a word.

    Nothing in a process can speak when it is killed, or when JAX's runtime aborts it in C++.
    """
    text = (
        f"error: {name} ended before its work was done: it was killed (out of memory? a scheduler?), or JAX "
        "ended it because another process was lost (then JAX says so above, and that one's last lines say "
        "why). Start all processes again, experiments with --resume."
    )
    code = "import sys\nif not sys.stdin.read(): print(sys.argv[1], file=sys.stderr)"
    # A session of its own: Ctrl-C is for the process it watches, whose end ends this one too.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, text],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def dismiss(witness: Witness | None) -> None:
    """The process that it watches needs it no longer."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if witness is not None:
            witness.communicate(b"done", timeout=5)
