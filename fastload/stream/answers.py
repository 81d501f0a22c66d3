"""`fastload.predict`: a model answers a stream of messages.

source -> reader -> decode -> batches by size or deadline -> model -> sink -> acknowledge
         (thread)  (threads)                             (the loop's thread)
         `batches` has these                             this file has these
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from fastload._kit.cores import usable_cores
from fastload._kit.evaluating import evaluating
from fastload._kit.nested import map_tensors
from fastload.errors import PredictError
from fastload.stream.batch import MessageBatch
from fastload.stream.batches import MessageBatches
from fastload.stream.message import Message, Plain, Poison, Sink, Source

OnFailed = Callable[[Message, Exception], None]


def predict(
    model: Callable[[Any], Any],
    source: Iterable[Any],
    *,
    batch_size: int = 64,
    max_wait_ms: float = 5.0,
    decode: Callable[[Any], Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int | None = None,
    device: torch.device | str | None = None,
    on_failed: OnFailed | None = None,
) -> Answers:
    """Return the answers to the messages of a source, in its order: pairs of (key, answer).

    The model gets batches of `batch_size` messages. A batch that is not full is answered `max_wait_ms` after its first
    message has arrived. If messages arrive faster than the model answers, the source is read only as fast as the model
    answers: at most `3 * batch_size` messages are in flight.

    A batch is acknowledged when the loop asks for the next message after it, or when the sink has its answers. So each
    message is answered *at least once*. If the process is killed, unacknowledged messages come again, and so do their
    answers. In a sink that keeps one answer per key, such as files or a table, the effect is *exactly once*.

    Args:
        model: takes a batch, and returns a tensor, an array or a list with one row per message, or a dict or tuple of
            these. A module runs in eval mode, without gradients; its modes are restored afterwards.
        source: an iterable of messages (see `fastload.stream`) or of plain values, which get the keys "0", "1" ...
        decode: turns the value of a message into a sample, on the worker threads. Each thread has its own copy, unless
            the class sets `fastload_per_worker`. None: the value is the sample.
        collate_fn: turns samples into a batch. None: torch's default.
        num_workers: number of threads that decode. 0: the loop's thread decodes. None: one per core, or one without
            `decode`.
        device: the model is moved there and back, and batches are moved there. None: the device of the model.
        on_failed: called for *poison* messages: those that cannot be decoded, or on which the model raises. They get no
            answer. The function gets the message and the error, on the loop's thread; then the message is acknowledged.
            None: raise `PredictError`, after the answers of earlier messages.
        batch_size: the most messages in a batch.
        max_wait_ms: the most milliseconds that a batch waits for more messages.

    If a batch fails, each of its messages is answered separately, to find the poison. If the model fails on all of
    them, it gets again the last batch that it answered. If it fails on that too, or has answered none, the model itself
    is broken: its error is raised, and nothing is acknowledged.

    Raises:
        PredictError: see `on_failed`. Errors of the source are raised as they are, after the answers of earlier
            messages.

    Examples:
        >>> values = torch.rand(3, 48)
        >>> with fastload.predict(model, values, num_workers=0) as answers:
        ...     [(key, answer.shape) for key, answer in answers]
        [('0', torch.Size([2])), ('1', torch.Size([2])), ('2', torch.Size([2]))]
    """
    if num_workers is None:
        num_workers = 1 if decode is None else usable_cores()
    batches = MessageBatches(
        source if isinstance(source, Source) else Plain(source),
        decode or _itself,
        collate_fn or default_collate,
        batch_size=batch_size,
        max_wait_ms=max_wait_ms,
        num_workers=num_workers,
    )
    return Answers(model, batches, device, on_failed)


class Answers(Iterable[tuple[str | int | float, Any]]):
    """The result of `predict`: an iterable of (key, answer) for one pass.

    The source is closed at the end of the pass, or of a `with` block.

    Attributes:
        answered, failed: numbers of messages.
        idle_s: seconds in which the loop waited and there were no messages.

    Args:
        model, device, on_failed: see `predict`, which creates it.
        batches: batches of messages.

    Examples:
        >>> with fastload.predict(model, torch.rand(3, 48)) as answers:
        ...     _ = list(answers)
        >>> answers.answered, answers.failed
        (3, 0)
    """

    fastload_per_worker = ()  # workers share it, because `decode` may call `stop`

    def __init__(
        self,
        model: Callable[[Any], Any],
        batches: MessageBatches,
        device: torch.device | str | None,
        on_failed: OnFailed | None,
    ) -> None:
        self.answered = self.failed = 0
        self._model, self._batches, self._device = model, batches, device
        self._worked: list[Any] = []  # the last batch that the model answered
        self._on_failed = on_failed
        self._began = False

    @property
    def idle_s(self) -> float:
        """Seconds in which the loop waited and there were no messages."""
        return self._batches.idle_s

    def __iter__(self) -> Iterator[tuple[str | int | float, Any]]:
        """Yield the key and the answer of each message, in the order of the source."""
        for batch in self._run():
            for message, answer in batch:
                self.answered += 1
                yield message.key, answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write_to(self, sink: Sink) -> None:
        """Write all answers to a sink, batch by batch. Acknowledge a batch when the sink has its answers."""
        self._check_first()
        try:
            for batch in self._run():
                if batch:
                    sink.write(batch)
                    self.answered += len(batch)
        finally:
            self.close()

    def stop(self) -> None:
        """Read no further messages. The iteration ends after the answers of those that were read.

        Any thread may call this, and a signal handler too. A plain iterable that waits ends only at its next value.
        """
        self._batches.source.stop()

    def close(self) -> None:
        """End the threads and close the source. Messages without an acknowledgement will come again.

        Wait at most five seconds for calls in progress, and warn of those that hang. A loop that ends early without a
        `with` block does not wait: the reader's thread then closes the source.
        """
        self._batches.close()

    def _run(self) -> Iterator[_Answered]:
        """Yield the answers of each batch. Acknowledge a batch when the loop asks for the next one."""
        self._check_first()
        self._began = True
        try:
            with evaluating(self._model, self._device) as device:
                self._batches.start(device)
                for batch in self._batches:
                    yield from self._answers_of(batch, device)
            if self._batches.error is not None:
                raise self._batches.error
        except GeneratorExit:  # the loop has left, or the garbage collector runs: never wait here
            self._batches.end(reader_closes=True)
            raise
        except BaseException:
            self.close()
            raise
        self.close()

    def _check_first(self) -> None:
        if self._began:
            raise RuntimeError(
                "the answers of a stream can be read only once. Call predict() again for another stream"
            )

    def _answers_of(self, batch: MessageBatch, device: torch.device) -> Iterator[_Answered]:
        messages, failures, error = batch.messages, batch.failures, batch.error
        good = [k for k in range(len(messages)) if k not in failures]
        rows: dict[int, Any] = {}
        if good and error is None:
            try:
                outputs = self._outputs(batch.data, device)
            except Exception as raised:
                error = raised
            else:
                rows = dict(zip(good, _rows(outputs, len(good)), strict=True))
        if good and error is not None:
            rows, failed = self._one_by_one({k: batch.samples[k] for k in good}, error, device)
            failures |= failed
        done: list[Message] = []
        answered: _Answered = []
        for k, message in enumerate(messages):
            if (failure := failures.get(k)) is not None:
                if self._on_failed is None:
                    yield answered
                    self._batches.source.acknowledge(done)
                    raise PredictError(
                        f"message {message.key} has no answer ({type(failure).__name__}: {failure}). Give predict() "
                        "on_failed= to continue after such messages"
                    ) from failure
                self.failed += 1
                self._on_failed(message, failure)
                message = message._replace(value=Poison(str(message.key), failure))
            else:
                answered.append((message, rows[k]))
            done.append(message)
        yield answered
        self._batches.source.acknowledge(done)

    def _one_by_one(
        self, samples: Mapping[int, Any], error: Exception, device: torch.device
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Answer the samples of a failed batch one by one. Return the answers and the errors, by position.

        Raise `error` if the model itself is broken.
        """
        rows: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        of_model: Exception | None = None
        for k, sample in samples.items():
            reached = False
            try:
                batch = self._batches.collate_fn([sample])
                reached = True
                outputs = self._outputs(batch, device)
            except Exception as raised:
                failed[k] = raised
                of_model = raised if reached else of_model
            else:
                [rows[k]] = _rows(outputs, 1)
        if of_model is not None and not rows and not self._still_works(device):
            raise of_model from error
        return rows, failed

    def _still_works(self, device: torch.device) -> bool:
        """Return True if the model still answers a batch that it has answered before."""
        try:
            for batch in self._worked:
                self._outputs(batch, device)
        except Exception:
            return False
        return bool(self._worked)

    def _outputs(self, batch: Any, device: torch.device) -> Any:
        """Return the model's outputs for a batch, on the CPU."""
        # Pass new containers, because the model may remove items from them.
        given = map_tensors(batch, lambda part: part.detach().to(device))
        try:
            with torch.no_grad():
                outputs = map_tensors(self._model(given), Tensor.cpu)
        except StopIteration as error:
            raise RuntimeError("the model raised StopIteration") from error
        self._worked = [batch]
        return outputs


_Answered = list[tuple[Message, Any]]


def _itself(value: Any) -> Any:
    return value


def _rows(outputs: Any, n: int) -> list[Any]:
    """Return the answer of each of `n` messages. Raise TypeError if there is not one output per message."""
    if isinstance(outputs, Mapping):
        parts = [_rows(part, n) for part in outputs.values()]
        return [dict(zip(outputs, row, strict=True)) for row in zip(*parts, strict=True)]
    if isinstance(outputs, tuple):
        return [*zip(*(_rows(part, n) for part in outputs), strict=True)]
    shape = getattr(outputs, "shape", (len(outputs),) if isinstance(outputs, list) else ())
    if not isinstance(outputs, Tensor | np.ndarray | list) or not shape or shape[0] != n:
        found = type(outputs).__name__ + (f"{[*shape]}" if shape else "")
        raise TypeError(
            f"the model must return {n} rows, one per message: a tensor, an array, a list, or a dict or tuple of "
            f"these. It returned {found}"
        )
    return [*outputs.unbind()] if isinstance(outputs, Tensor) else [*outputs]
