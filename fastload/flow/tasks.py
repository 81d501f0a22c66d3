"""What a graph is made of: tasks, each of which is a command of its own. Nothing runs here."""

from __future__ import annotations

import base64
import os
import pickle
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastload.distributed.execute import find_launcher
from fastload.distributed.launch import Host, Job, Launcher, command_line, parse_hosts, place
from fastload.errors import FlowError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "FASTLOAD_STORE")
"""Variables that ranks on other hosts, and batch jobs, get from this process."""
_Path = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a batch job asks for, if a graph is submitted.

    Attributes:
        walltime: H:MM:SS.
        ppn: ranks on each host; None: all on one.
        directives: further lines, such as "-A PROJECT" or "-l filesystems=home".
    """

    walltime: str = "1:00:00"
    ppn: int | None = None
    directives: tuple[str, ...] = ()


class Task:
    """A command, such as a compiled program.

    Args:
        name: 1 to 64 letters, digits and `_.-`; names its log.
        command: the program with its arguments: a list, or a text that is split as a shell would.
        script: what the program runs; its path follows `command`.
        args: further arguments.
        exec_path: the folder that the task runs in. None: that of the graph. Relative paths start from it.
        inputs: files and folders that the task reads. It runs again if one has changed.
        outputs: files and folders that it makes. It failed if one of them is not there in the end.
        env: variables that it has besides those of this process.
        retries: how often to start it again if it fails.
        time_limit_s: seconds after which it ends, and has failed.
        resources: of its batch job.

    Raises ValueError for a name that is none, and FlowError, once it is to run, if there is nothing to run.
    """

    kind = "command"

    def __init__(
        self,
        name: str,
        *,
        command: str | Sequence[_Path] | None = None,
        script: _Path | None = None,
        args: Sequence[object] = (),
        exec_path: _Path | None = None,
        inputs: Sequence[_Path] = (),
        outputs: Sequence[_Path] = (),
        env: Mapping[str, str] | None = None,
        retries: int = 0,
        time_limit_s: float | None = None,
        resources: Resources | None = None,
    ) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"a task's name has 1 to 64 letters, digits and _.-, and does not begin with . or -, got {name!r}"
            )
        if retries < 0 or (time_limit_s is not None and time_limit_s <= 0):
            raise ValueError(
                f"task {name}: retries must be 0 or more and time_limit_s positive, got {retries} and {time_limit_s}"
            )
        self.name = name
        self.args = [str(arg) for arg in args]
        self.inputs = [os.fspath(path) for path in inputs]
        self.outputs = [os.fspath(path) for path in outputs]
        self.env = dict(env or {})
        self.retries = retries
        self.time_limit_s = time_limit_s
        self.resources = resources or Resources()
        self.set_command(command)
        self.set_script_path(script)
        self.set_exec_path(exec_path)

    def set_command(self, command: str | Sequence[_Path] | None = None) -> None:
        """Set the program, with arguments; None: the usual one for this kind of task."""
        self.command = (
            shlex.split(command)
            if isinstance(command, str)
            else [os.fspath(word) for word in command or ()]
        )

    def set_script_path(self, script_path: _Path | None) -> None:
        """Set the script that the program runs."""
        self.script = None if script_path is None else os.fspath(script_path)

    def set_exec_path(self, exec_path: _Path | None) -> None:
        """Set the folder that the task runs in; None: that of the graph."""
        self.exec_path = None if exec_path is None else os.fspath(exec_path)

    def folder(self, base: Path) -> Path:
        """Return the folder that the task runs in, if the graph's is `base`."""
        return base / (self.exec_path or ".")

    def argv(self, base: Path) -> list[str]:
        """Return the argument list. Raises FlowError if there is nothing to run."""
        if not self.command and self.script is None:
            raise FlowError(f"task {self.name}: there is nothing to run: give it a command")
        return [*self.command, *([] if self.script is None else [self.script]), *self.args]

    def identity(self) -> tuple[object, ...]:
        """Return what makes it another task if it changes, besides the content of files."""
        return (self.kind, self.command, self.script, self.args, self.exec_path, self.env)

    def __str__(self) -> str:
        shown = shlex.join([*self.command, *filter(None, [self.script]), *self.args])
        return f"Name: {self.name}, Command: {shown}, Execution Path: {self.exec_path or '.'}"


class PythonTask(Task):
    """A Python script. `command` is this Python, unless another is set. See `Task` for the arguments."""

    kind = "python"

    def argv(self, base: Path) -> list[str]:
        """Return the argument list. Raises FlowError if no script is set."""
        return [*(self.command or [sys.executable]), self._script_path(), *self.args]

    def _script_path(self) -> str:
        if self.script is None:
            raise FlowError(f"task {self.name}: no script is set: give it script=, a path")
        return self.script


class MPITask(PythonTask):
    """A Python script on several ranks, started by the `mpiexec` that is there. See `Task` for the other arguments.

    Args:
        parallelism: the number of ranks.
        hostfile: hosts to run on, one a line: `host`, `host slots=N` or `host:N`. None: those of the batch job, or
            this one.
        launcher: "openmpi", "hydra", "pals", "srun", "torchrun"; "auto": the `mpiexec` on the PATH, or srun in a
            Slurm job.

    A `command` that is set, such as "mpirun -n 4 python3", is used as it is.
    """

    kind = "mpi"
    _torchrun_will_do = False  # its ranks would find no MPI

    def __init__(
        self,
        name: str,
        *,
        parallelism: int = 4,
        hostfile: _Path | None = None,
        launcher: Launcher | Literal["auto"] = "auto",
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        if parallelism < 1:
            raise ValueError(f"task {name}: parallelism must be 1 or more, got {parallelism}")
        self.parallelism = parallelism
        self.hostfile = None if hostfile is None else os.fspath(hostfile)
        self.launcher = launcher

    def argv(self, base: Path) -> list[str]:
        """Return the argument list of the launcher. Raises FlowError, LaunchError, OSError."""
        program = (self._script_path(), *self.args)
        if self.command:
            return [*self.command, *program]
        hosts: tuple[Host, ...] = ()
        hostfile = self.hostfile or os.environ.get("PBS_NODEFILE")
        if hostfile is not None:
            path = self.folder(base) / hostfile
            found = parse_hosts(path.read_text(), path=str(path))
            hosts = place(found, self.parallelism, path=str(path), ppn=self.resources.ppn)
        launcher = self.launcher
        if launcher == "auto" and "SLURM_JOB_ID" in os.environ and self.parallelism > 1:
            launcher = "srun"
        if launcher == "auto":
            launcher = find_launcher(self.parallelism, hosts)
            if launcher == "torchrun" and not self._torchrun_will_do:
                raise FlowError(
                    f"task {self.name}: there is no mpiexec on the PATH to start {self.parallelism} ranks: load a "
                    'module, install an MPI, or make it a task of kind "python", if it runs as one process, too'
                )
        if launcher in ("torchrun", "none"):
            hosts = ()
        exported = tuple(
            name for name in (*EXPORTED, *self.env) if name in {*os.environ, *self.env}
        )
        job = Job(
            program=(sys.executable, *program),
            ranks=self.parallelism,
            hosts=hosts,
            export=exported,
        )
        return command_line(job, launcher, python=sys.executable, root=os.geteuid() == 0)

    def identity(self) -> tuple[object, ...]:
        """Return what makes it another task if it changes."""
        return (*super().identity(), self.parallelism, self.hostfile, self.launcher)


class PytorchTask(MPITask):
    """A training script on several ranks, which find each other by `fastload.distributed` or torch's own variables.

    As `MPITask`; if there is no `mpiexec`, torchrun starts the ranks.
    """

    kind = "pytorch"
    _torchrun_will_do = True


class FunctionTask(Task):
    """A call of a Python function in a process of its own. See `Task` for the other arguments.

    Args:
        function: of a module or a script, not a lambda nor one within another function.
        args, kwargs: its arguments, which are pickled.
    """

    kind = "function"

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        if "<" in function.__qualname__:
            raise ValueError(
                f"task {name}: {function.__qualname__} cannot be called by another process: it must be a function of a "
                "module or a script"
            )
        self.function = function
        self._call = base64.b64encode(pickle.dumps((tuple(args), dict(kwargs or {})))).decode()

    def argv(self, base: Path) -> list[str]:
        """Return the argument list of the process that calls the function."""
        module, name = self.function.__module__, self.function.__qualname__
        if module == "__main__":
            module = os.path.abspath(sys.modules["__main__"].__file__ or "")
        return [sys.executable, "-m", "fastload.flow.call", module, name, self._call]

    def identity(self) -> tuple[object, ...]:
        """Return what makes it another task if it changes: the function's own code too."""
        return (*super().identity(), self.function, self._call)

    def __str__(self) -> str:
        return (
            f"Name: {self.name}, Function: {self.function.__module__}.{self.function.__qualname__}"
        )
