"""`fastload predict`: a model answers each sample of a dataset and saves a set, or answers each message of a stream."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import fields
from inspect import isclass, isroutine
from typing import Annotated, Any

import click

from fastload._kit.annotations import signature
from fastload._kit.options import Amount, Count, File, Option, options
from fastload.cli._command import Command
from fastload.cli._common import (
    Batches,
    Root,
    found_at,
    made_at,
    named_as_option,
    sigterm_raises,
)
from fastload.errors import PredictError, PrepareError, UsageError
from fastload.train.recipe import OnDevice


@options
class Predicted(Batches):
    """What predicts for what."""

    model: Annotated[str, Option("MODEL")]
    dataset: Annotated[str | None, Option("[DATASET]")] = None


@options
class ForSet(Root):
    """Options with a dataset."""

    name: str | None = None
    """With DATASET: name of the set, of letters, digits and _.+=-, or a path that ends in such a name. All ranks must
    see the folder of the set."""
    inputs: Annotated[str | None, Option("--inputs MODULE:NAME")] = None
    """With DATASET: function that takes a batch and returns the input of the model. [default: first item of a tuple or
    list, else the batch]"""
    parts: Count | None = None
    """With DATASET: number of parts of the set. The ranks divide them. [default: one per 512 samples, at most 1024]"""
    version: Annotated[str, Option("--data-version --version")] = ""
    """With DATASET: your name for the samples and the model's code. Change the version when one of them changes."""
    replace: bool = False
    """With DATASET: replace a set of this name that was made from other samples, another model or other options."""


@options
class ForStream:
    """Options without a dataset."""

    source: Annotated[str, Option("--source SOURCE")] = "-"
    """Source of the messages: - (standard input), a file of JSON lines, or a folder to watch. A folder needs
    the extra `stream`."""
    sink: Annotated[str, Option("--sink SINK")] = "-"
    """Destination of the answers: - (standard output), a file (.jsonl), or a folder."""
    decode: Annotated[str | None, Option("--decode MODULE:NAME")] = None
    """Function that turns a message into a sample. The function gets the JSON value of a line, or the path of a
    file. [default: JSON; numbers and lists of numbers become float32 tensors]"""
    key: str | None = None
    """Name of the member in each JSON object that is the key of its answer. [default: line 1, line 2 ...]"""
    failed: File | None = None
    """Write messages that failed, with their errors, to this file as JSON lines. [default: the first failure ends the
    command]"""
    max_wait_ms: Amount = 5.0
    """Maximum time that a batch waits to become full, in milliseconds after its first message."""


@Command
def predict(what: Predicted, on: OnDevice, for_set: ForSet, for_stream: ForStream) -> None:
    """Run a model on each sample of a dataset, or on each message of a stream.

    MODEL and DATASET are names in Python modules, written as MODULE:NAME. Modules in the current folder are found too.
    A class, or a function without required arguments, is called first, and returns the model or the dataset. A function
    with required arguments is the model itself, and is called with each batch.

    With DATASET, the answers are saved as a set, which is a folder of files with one row per sample (see `fastload
    set`). This needs the extra `arrow`. Row i is the answer for sample i. --name names the set. Its
    rows are divided into parts, of one file each.
    Under mpiexec, srun or torchrun, each process is a rank and makes some of the parts. If a run is stopped, run the
    same command again, on any number of ranks. It makes only the missing parts.

    Without DATASET, the command reads messages from the source, --source, and writes an answer for each to the
    destination, --sink. By default, these are standard input and standard output. After Ctrl-C or SIGTERM, the command
    reads no more, answers the messages that it has read, and ends with exit code 0. Ctrl-C more than 2 s later ends the
    process at once. Unanswered messages of a folder are read again at the next start. The last line on standard
    error counts the answered and the failed messages. It also has the time, and the time without messages.

    \b
    Examples:
        fastload predict my_project:load_model my_project:test_set --name answers
        mpiexec -n 4 fastload predict my_project:load_model my_project:test_set --name /project/sets/answers
        fastload predict my_project:load_model < questions.jsonl > answers.jsonl
        fastload predict my_project:load_model --source inbox --decode my_project:read_image --sink answers \\
            --failed failed.jsonl

    \b
    Then, in Python:
        answers = fastload.store.get("answers")
    """
    _check_form(what.dataset, for_set)
    with sigterm_raises():
        if what.dataset is not None:
            _predict_set(what, on, for_set)
        else:
            _predict_stream(what, on, for_stream)


def _check_form(dataset: str | None, for_set: ForSet) -> None:
    """Raise UsageError for an option that belongs to the other form, or if --name is missing."""
    context = click.get_current_context()
    others = {field.name for field in fields(ForStream if dataset else ForSet)}
    given = click.core.ParameterSource.COMMANDLINE
    for param in context.command.params:
        if param.name in others and context.get_parameter_source(param.name) is given:
            option = param.opts[-1]
            why = f"a dataset. Give DATASET after MODEL, or remove {option}."
            if dataset:
                why = "a stream of messages, not with DATASET. Remove one of them."
            raise UsageError(f"{option} works only with {why}")
    if dataset and for_set.name is None:
        raise UsageError("The set for the answers has no name. Give --name.")


def _model(path: str) -> Any:
    """Return the model at MODULE:NAME. Call the object if it is a class or a function that needs no arguments."""
    found = found_at(path)
    if isclass(found) or (isroutine(found) and _takes_nothing(found)):
        found = made_at(path)
    if not callable(found):
        raise UsageError(
            f"{path} cannot be used as a model. It must be a torch module or a function that takes a batch, but it is "
            f"of type {type(found).__name__}"
        )
    return found


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


# ---- a dataset ----


def _predict_set(what: Predicted, on: OnDevice, for_set: ForSet) -> None:
    import torch

    from fastload import distributed, store
    from fastload.store.model_run import shown
    from fastload.train.devices import choose_device

    began = time.perf_counter()
    samples = _dataset(str(what.dataset))
    answering = _model(what.model)
    rank = distributed.detect_rank().rank
    device = choose_device(on.device, rank)
    if rank.world_size > 1:
        distributed.init("gloo")
        if device.type == "cpu":
            torch.set_num_threads(distributed.cores())
    try:
        with named_as_option(FileExistsError, "pass replace=True", "pass --replace"):
            found = store.predictions(
                str(for_set.name),
                dataset=samples,
                model=answering,
                inputs=found_at(for_set.inputs) if for_set.inputs else None,
                loader=what.loader,
                device=device,
                rank=rank,
                version=for_set.version,
                progress=True,
                parts=for_set.parts,
                root=for_set.root,
                replace=for_set.replace,
            )
    except PrepareError as error:
        if error.__cause__ is not None and rank.world_size > 1:
            traceback.print_exception(error.__cause__)
        raise
    if rank.rank == 0:
        shapes = ", ".join(
            f"{column} {shown(value).removesuffix('[]')}" for column, value in found[0].items()
        )
        click.echo(f"{len(found):,} rows of {shapes}, after {time.perf_counter() - began:.1f} s")
        click.echo(found.path)


def _dataset(path: str) -> Any:
    """Return the dataset at MODULE:NAME. Raise UsageError if it is none."""
    found = made_at(path)
    if not hasattr(found, "__getitem__") or not hasattr(found, "__len__"):
        raise UsageError(
            f"{path}: expected a dataset with __len__ and __getitem__, but found {type(found).__name__}"
        )
    return found


# ---- a stream ----


def _predict_stream(what: Predicted, on: OnDevice, of: ForStream) -> None:
    from fastload import stream
    from fastload._kit.guard import asked_to_end
    from fastload.distributed import detect_rank
    from fastload.train.devices import choose_device

    began = time.perf_counter()
    model, device = _model(what.model), choose_device(on.device, detect_rank().rank)
    decode = found_at(of.decode) if of.decode else stream.json_to_tensors
    with ExitStack() as stack:
        reading = stack.enter_context(closing(stream.open_source(of.source, key=of.key)))
        writing = stack.enter_context(closing(stream.open_sink(of.sink)))
        aside = stack.enter_context(closing(stream.SideList(of.failed))) if of.failed else None
        answers = stack.enter_context(
            stream.predict(
                model,
                reading,
                decode=decode,
                device=device,
                max_wait_ms=of.max_wait_ms,
                on_failed=aside,
                **what.loader,
            )
        )
        try:
            with (
                asked_to_end(lambda number: answers.stop()),
                named_as_option(PredictError, "Give predict() on_failed=", "Give --failed FILE"),
            ):
                answers.write_to(writing)
        finally:
            failed = f"{answers.failed:,} failed, " if answers.failed else ""
            click.echo(
                f"messages: {answers.answered:,} answered, {failed}{time.perf_counter() - began:.1f} s, "
                f"no messages for {answers.idle_s:.1f} s",
                err=True,
            )
