"""The error for a worker process that died: how it ended, and what to do."""

from __future__ import annotations

import signal
from contextlib import suppress

from fastload.errors import WorkerDiedError
from fastload.processes.child import SIGNALS

START_HINT = (
    'What it printed says why. A script whose workers do not fork needs `if __name__ == "__main__":` around what '
    "it runs, and must be a file"
)
_KILLED_HINT = (
    "The kernel kills a process if memory runs out: see `dmesg`, or memory.events of the job's cgroup. Use fewer "
    "workers, or smaller batches"
)
_SIGNAL_HINT = "Another program sent it, such as a batch system at its time limit"
_DIED_HINT = (
    "A sample, unpickling or worker_init_fn crashed in C, or called os._exit(). Run the loop with num_workers=0 under "
    "`python -X faulthandler`"
)


def death(who: str, doing: str, ended: bool, code: int | None, hint: str) -> WorkerDiedError:
    """Return the error for a process that died, from its exit code if that is known, and what to do about it."""
    if not ended:
        how = "closed its connection"
    elif code is None:
        how = "ended with an unknown status, which another wait() of this program took,"
    elif code < 0:
        hint = _KILLED_HINT if -code == signal.SIGKILL else hint
        hint = _SIGNAL_HINT if -code in SIGNALS else hint
        named = str(code)
        with suppress(ValueError):
            named = signal.Signals(-code).name
        how = f"was killed by {named}"
    else:
        how = f"exited with code {code}"
    return WorkerDiedError(f"{who} {how} while {doing}. {hint or _DIED_HINT}")
