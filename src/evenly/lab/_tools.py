"""Calls the programs that build the lab."""

import subprocess

from evenly.errors import LabError


def call(*words: str, lines: list[str] | None = None, what: str) -> str:
    """Returns the program's output; raises `LabError` with `what` failed and the program's error.

    `lines` are fed to its standard input. It runs in a session of its own, so that Ctrl-C in a terminal reaches the lab
    and not a half-done step of it.
    """
    text = None if lines is None else "".join(f"{line}\n" for line in lines)
    stdin = subprocess.DEVNULL if text is None else None
    done = subprocess.run(
        words, input=text, stdin=stdin, capture_output=True, text=True, start_new_session=True, check=False
    )
    if done.returncode != 0:
        complaint = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LabError(f"cannot {what}: `{' '.join(words)}` says: {complaint}. See `evenly lab check`.")
    return done.stdout
