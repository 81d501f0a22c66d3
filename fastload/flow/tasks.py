"""The tasks of a graph. Each is a command. Nothing runs here."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastload._kit.integers import integer, positive
from fastload.distributed.execute import find_launcher, start_line
from fastload.distributed.launch import LAUNCHERS, Host, Job, Launcher, parse_hosts, place
from fastload.errors import FlowError
from fastload.flow.values import AnyPath, checked_name, path_of, paths_of, several, variables

EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "FASTLOAD_STORE")
"""Variables that ranks on other hosts, and batch jobs, get from this process."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources that the batch job of a task requests.

    Attributes:
        walltime: time limit, H:MM:SS.
        ppn: ranks per host. None: all ranks on one host.
        cores: cores per rank. None: 1, or the default of the batch system.
        directives: extra lines for the header of the batch job, such as "-A PROJECT" or "-l filesystems=home".

    Examples:
        >>> resources = fastload.flow.Resources(walltime="0:30:00", ppn=4)
    """

    walltime: str = "1:00:00"
    ppn: int | None = None
    cores: int | None = None
    directives: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError if a value is not allowed."""
        positive("ppn", self.ppn)
        positive("cores", self.cores)
        several("directives", self.directives)


class Task:
    """A command, such as a compiled program.

    Args:
        name: 1 to 64 letters, digits and `_.-`. It is also the name of the log.
        command: program with its arguments: a list, or a string that is split as a shell would.
        script: script that the program runs. Its path follows `command`.
        args: extra arguments.
        exec_path: folder in which the task runs. Relative paths start from it. None: the folder of the graph.
        inputs: files and folders that the task reads: one path, or a list. With `resume`, it runs again if one changed.
        outputs: files and folders that it makes. If one is missing at the end, the task has failed.
        env: environment variables, in addition to those of this process.
        resources: resources of its batch job.

    Raises:
        TypeError, ValueError: a value is not allowed.
        FlowError: there is nothing to run, when it starts.

    Examples:
        >>> task = fastload.flow.Task("hello", command=["echo", "hello"], outputs=[])
        >>> task.name
        'hello'
    """

    kind = "command"
    _shown: tuple[str, ...] = ()
    """The usual command, as it is shown to users."""

    def __init__(
        self,
        name: str,
        *,
        command: str | Sequence[AnyPath] | None = None,
        script: AnyPath | None = None,
        args: Sequence[object] = (),
        exec_path: AnyPath | None = None,
        inputs: AnyPath | Sequence[AnyPath] = (),
        outputs: AnyPath | Sequence[AnyPath] = (),
        env: Mapping[str, object] | None = None,
        resources: Resources | None = None,
    ) -> None:
        self.name = checked_name("a task's", name)
        self.args = [str(arg) for arg in several(f"task {name}: args", args)]
        self.inputs = paths_of(f"task {name}: inputs", inputs)
        self.outputs = paths_of(f"task {name}: outputs", outputs)
        self.env = variables(f"task {name}: env", env)
        self.resources = resources or Resources()
        self.set_command(command)
        self.set_script_path(script)
        self.set_exec_path(exec_path)

    def set_command(self, command: str | Sequence[AnyPath] | None = None) -> None:
        """Set the program, with arguments. None: the usual one for this kind of task."""
        self.command = (
            shlex.split(command)
            if isinstance(command, str)
            else [str(word) for word in several(f"task {self.name}: command", command or ())]
        )

    def set_script_path(self, script_path: AnyPath | None) -> None:
        """Set the script that the program runs."""
        what = f"task {self.name}: script"
        self.script = None if script_path is None else path_of(what, script_path)

    def set_exec_path(self, exec_path: AnyPath | None) -> None:
        """Set the folder in which the task runs. None: that of the graph."""
        what = f"task {self.name}: exec_path"
        self.exec_path = None if exec_path is None else path_of(what, exec_path)

    def folder(self, base: Path) -> Path:
        """Return the folder in which the task runs, if that of the graph is `base`."""
        return base / (self.exec_path or ".")

    def argv(self, base: Path) -> list[str]:
        """Return the argument list.

        Raises:
            FlowError: there is nothing to run.
        """
        if not self.command and self.script is None:
            raise FlowError("it has no command. Set command= or script=")
        return [*self.command, *([] if self.script is None else [self.script]), *self.args]

    def identity(self) -> tuple[object, ...]:
        """Return the values, besides the content of files, whose change makes the task run again."""
        return (self.kind, self.command, self.script, self.args, self.exec_path, self.env)

    def __str__(self) -> str:
        shown = shlex.join(
            [*(self.command or self._shown), *filter(None, [self.script]), *self.args]
        )
        return f"Name: {self.name}, Command: {shown}, Execution Path: {self.exec_path or '.'}"


class PythonTask(Task):
    """A Python script. `command` is this Python by default. See `Task` for the arguments.

    Args:
        name, command, script, args, exec_path, inputs, outputs, env, resources: see `Task`. `command` is this Python by
            default.

    Examples:
        >>> task = fastload.flow.PythonTask("prepare", script="prepare.py", args=["--size", 256])
    """

    kind = "python"
    _shown = ("python",)

    def argv(self, base: Path) -> list[str]:
        """Return the argument list.

        Raises:
            FlowError: no script is set.
        """
        return [*(self.command or [sys.executable]), self._script_path(), *self.args]

    def _script_path(self) -> str:
        if self.script is None:
            raise FlowError("it has no script. Set script= to a path")
        return self.script


class MPITask(PythonTask):
    """A Python script on several ranks, started by `mpiexec`. See `Task` for the other arguments.

    Args:
        parallelism: number of ranks.
        hostfile: file with one host per line: `host`, `host slots=N` or `host:N`. None: the hosts of the batch job, or
            this host.
        launcher: "auto", "openmpi", "hydra", "pals", "srun" or "torchrun". "auto": `mpiexec` if it is on PATH, else
            srun in a Slurm job.
        launcher_options: extra arguments for the launcher, such as ["--oversubscribe"].
        name: see `Task`.

    A `command` that is set, such as "mpirun -n 4 python3", is used as it is.

    Examples:
        >>> task = fastload.flow.MPITask("train", script="train.py", parallelism=8)
    """

    kind = "mpi"
    _torchrun_will_do = False  # under torchrun, MPI does not connect the ranks

    def __init__(
        self,
        name: str,
        *,
        parallelism: int = 4,
        hostfile: AnyPath | None = None,
        launcher: Launcher | Literal["auto"] = "auto",
        launcher_options: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        if launcher not in ("auto", *LAUNCHERS):
            known = ", ".join(("auto", *LAUNCHERS))
            raise ValueError(f"task {name}: launcher must be one of {known}, got {launcher!r}")
        self.parallelism = integer(f"task {name}: parallelism", parallelism)
        positive(f"task {name}: parallelism", parallelism)
        self.hostfile = None if hostfile is None else path_of(f"task {name}: hostfile", hostfile)
        self.launcher = launcher
        found = several(f"task {name}: launcher_options", launcher_options)
        self.launcher_options = tuple(str(option) for option in found)

    def argv(self, base: Path) -> list[str]:
        """Return the argument list of the launcher.

        Raises:
            FlowError, LaunchError, OSError: it cannot be made.
        """
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
                    f"mpiexec, which starts the {self.parallelism} ranks, is not on PATH. Load a module or install an "
                    'MPI. If one process is enough, use kind "python"'
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
            # srun is the only launcher that limits each rank to one core by default.
            depth=self.resources.cores if launcher == "srun" else None,
            export=exported,
            options=self.launcher_options,
        )
        return start_line(job, launcher)

    def identity(self) -> tuple[object, ...]:
        """Return the values whose change makes the task run again."""
        launched = (self.parallelism, self.hostfile, self.launcher, self.launcher_options)
        return (*super().identity(), *launched)


class PytorchTask(MPITask):
    """A training script on several ranks, which connect by `fastload.distributed` or torch's own variables.

    It is like `MPITask`, but without `mpiexec`, torchrun starts the ranks.

    Args:
        name, parallelism, hostfile, launcher, launcher_options: see `MPITask`.

    Examples:
        >>> task = fastload.flow.PytorchTask("train", script="train.py", parallelism=8)
    """

    kind = "pytorch"
    _torchrun_will_do = True
