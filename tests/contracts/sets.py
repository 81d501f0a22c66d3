"""What every set promises: packed, of columns, of features, of predictions. A set joins by a class that says how it is
written and opened. Features and predictions are columns, and join as what is written.

- It is opened with all its rows, in order. `fastload set inspect` and `fastload set verify` read it.
- `fastload set verify` names each part that is flipped, cut off or missing. A part that is cut off or missing is an
  error as it is read, and is never copied.
- `fastload set stage` copies it byte for byte. A copy that is killed, or meets a full disk, is no set, and resumes
  after its last complete part. A folder with other files is left alone.
- A writer that is killed before any call that changes the disk leaves no set. Writing again gives the same bytes.
- A state resumes with the set that it was made on, and with no other of those that have an id.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from torch.utils.data import default_collate

from fastload import DataLoader
from fastload.cli import main
from fastload.errors import PackedDataError, StateError, StoreFullError
from fastload.store import shard_bytes
from tests.files import files, flip
from tests.promises.equal import check_same
from tests.resuming import resumes_twice

PART = "shard-00001.arrow"  # the one that is damaged
WRITES = ("replace", "rename", "write", "fsync", "unlink", "link")


def hidden(copy: Path) -> Path:
    """Return the folder in which a copy is made."""
    return copy.parent / ".unsealed" / copy.name


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@contextmanager
def at_change(number: int, act: Callable[[], None], names: tuple[str, ...]) -> Iterator[list[str]]:
    """Call `act` before the `number`-th call of one of the functions of `os` that change the disk. Yield the calls."""
    calls: list[str] = []

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            calls.append(real.__name__)
            if len(calls) == number:
                act()
            return real(*arguments, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(os, name, counted(getattr(os, name)))
        yield calls


def killed(number: int, names: tuple[str, ...], function: Callable[[], Any]) -> bool:
    """Run a function in a fork that kills itself at a change of the disk. Return whether it came that far."""
    child = os.fork()
    if not child:
        try:
            with at_change(number, lambda: os.kill(os.getpid(), signal.SIGKILL), names):
                function()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


class WrittenSet(ABC):
    """The cases of a writer. A set has at least three parts."""

    rows: int
    has_id = True

    @abstractmethod
    def write(self, path: Path, *, other: bool = False) -> None:
        """Write the set, or another one with as many bytes. Both have checksums."""

    @abstractmethod
    def opened(self, path: Path) -> Any:
        """Open a set. Samples are tensors and numbers."""

    @abstractmethod
    def sample(self, row: int) -> Any:
        """Return the sample that was written."""

    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("sets") / "set"
        cls().write(path)
        assert len(list(path.glob("*.arrow"))) >= 3
        return path

    def is_no_set(self, path: Path) -> bool:
        with pytest.raises(FileNotFoundError):
            self.opened(path)
        return True

    def test_it_has_the_rows_that_were_written(self, whole: Path) -> None:
        dataset = self.opened(whole)
        assert len(dataset) == self.rows
        expected = [self.sample(row) for row in range(self.rows)]
        check_same([dataset[row] for row in range(self.rows)], expected)
        with DataLoader(dataset, self.rows, num_workers=2) as loader:
            check_same(list(loader), [default_collate(expected)])
        with pytest.raises(IndexError):
            dataset[self.rows]

    def test_a_writer_that_is_killed_leaves_no_set_and_writing_again_gives_the_same_bytes(
        self, whole: Path, tmp_path: Path
    ) -> None:
        undisturbed = tmp_path / "undisturbed" / "set"
        undisturbed.parent.mkdir()
        with at_change(0, lambda: None, WRITES) as calls:
            self.write(undisturbed)
        assert files(undisturbed) == files(whole)
        last = len(calls)
        complete = 0
        for number in sorted({1, 2, last // 4, last // 2, last - 2, last - 1, last}):
            path = tmp_path / str(number) / "set"
            path.parent.mkdir()
            assert killed(number, WRITES, lambda: self.write(path))  # noqa: B023
            if (path / "index.json").exists():
                complete += 1
            else:
                assert self.is_no_set(path)
                self.write(path)
            assert files(path) == files(whole)
        assert complete < 4, "some were killed before the set was complete"

    def test_a_state_resumes_with_this_set_alone(self, whole: Path, tmp_path: Path) -> None:
        def loader(path: Path) -> DataLoader[Any]:
            return DataLoader(self.opened(path), 4, shuffle=True, seed=5, num_workers=2)

        with loader(whole) as first:
            batches = iter(first)
            next(batches)
            state, rest = first.state_dict(), [*batches]
        copy = shutil.copytree(whole, tmp_path / "copy")
        with loader(copy) as second:
            second.load_state_dict(state)
            check_same([*second], rest)
        resumes_twice(lambda: loader(whole))
        if self.has_id:
            self.write(tmp_path / "other", other=True)
            with loader(tmp_path / "other") as third, pytest.raises(StateError, match="set_id"):
                third.load_state_dict(state)


class SetContract(WrittenSet):
    """These cases, and those of the form in which parts lie on the disk, for one writer of each form."""

    @abstractmethod
    def stage(self, source: Path, target: Path, **options: Any) -> Any:
        """Stage by the function, in this process."""

    @pytest.fixture
    def path(self, whole: Path, tmp_path: Path) -> Path:
        return shutil.copytree(whole, tmp_path / "sources" / "set")

    @pytest.fixture
    def written(self, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
        """Count the bytes that staging writes, by file name."""
        count: Counter[str] = Counter()
        real = shard_bytes.write_all  # type: ignore[attr-defined]

        def write_all(descriptor: int, name: str, content: Any) -> int:
            done = int(real(descriptor, name, content))
            count[os.path.basename(name)] += done
            return done

        monkeypatch.setattr(shard_bytes, "write_all", write_all)
        return count

    def test_the_commands_read_it(self, whole: Path) -> None:
        inspected = call("set", "inspect", whole)
        assert inspected.exit_code == 0, inspected.output
        assert inspected.output.startswith(f"{whole}: {self.rows} r")
        for workers in (0, 2):
            verified = call("set", "verify", whole, "--workers", workers)
            assert verified.exit_code == 0, verified.output
            count, size = (
                len(list(whole.glob("*.arrow"))),
                sum(map(os.path.getsize, whole.glob("*.arrow"))),
            )
            assert f"{count} parts checked, {size:,} bytes read" in verified.output
            assert "All checked parts are valid." in verified.output

    @pytest.mark.parametrize("harm", ["first bit", "middle bit", "last bit", "cut off", "missing"])
    def test_a_damaged_part_is_named_and_never_copied(
        self, harm: str, path: Path, tmp_path: Path
    ) -> None:
        part, size = path / PART, (path / PART).stat().st_size
        if harm == "missing":
            part.unlink()
        elif harm == "cut off":
            os.truncate(part, size - 50)
        else:
            flip(part, {"first bit": 0, "middle bit": size // 2, "last bit": size - 1}[harm])
        verified = call("set", "verify", path)
        assert verified.exit_code == 1
        assert PART in verified.output
        assert "shard-00000" not in verified.output
        staged = call("set", "stage", path, tmp_path / "copy")
        assert staged.exit_code == 1
        assert PART in staged.output
        assert self.is_no_set(tmp_path / "copy")
        assert not (hidden(tmp_path / "copy") / PART).exists()
        if harm in ("cut off", "missing"):
            with pytest.raises(PackedDataError, match=PART):
                [*self.opened(path)]

    @pytest.mark.parametrize("workers", [0, 3])
    def test_a_copy_is_the_set_byte_for_byte(
        self, workers: int, whole: Path, tmp_path: Path, written: Counter[str]
    ) -> None:
        copy = tmp_path / "deep" / "copy"
        staged = call("set", "stage", whole, copy, "--workers", workers)
        assert staged.exit_code == 0, staged.output
        assert files(copy) == files(whole)
        assert os.listdir(copy.parent / ".unsealed") == ["copy.lock"]
        dataset = self.opened(copy)
        check_same(dataset[self.rows - 1], self.sample(self.rows - 1))
        assert getattr(dataset, "set_id", "") == getattr(self.opened(whole), "set_id", "")
        written.clear()
        assert "were copied before" in call("set", "stage", whole, copy).output
        assert not written

    def test_a_copy_that_lacks_a_part_is_named_and_left_alone(
        self, whole: Path, tmp_path: Path, written: Counter[str]
    ) -> None:
        copy = tmp_path / "copy"
        self.stage(whole, copy)
        written.clear()
        for harm in (lambda: os.truncate(copy / PART, 100)), (copy / PART).unlink:
            harm()
            with pytest.raises(FileExistsError, match=f"this copy lacks {PART}, or a part of it"):
                self.stage(whole, copy)
        assert not written
        shutil.rmtree(copy)
        self.stage(whole, copy)
        assert files(copy) == files(whole)

    @pytest.mark.parametrize("complete_parts", [0, 2, -1], ids=["none", "some", "all"])
    def test_a_killed_copy_is_no_set_and_resumes_after_its_last_complete_part(
        self, complete_parts: int, whole: Path, tmp_path: Path, written: Counter[str]
    ) -> None:
        """The first file that gets its name is a note, and the last one is the index."""
        copy = tmp_path / "copy"
        with at_change(0, lambda: None, ("replace",)) as calls:
            self.stage(whole, tmp_path / "undisturbed", workers=0)
        last = len(calls) if complete_parts < 0 else complete_parts + 2
        assert killed(last, ("replace",), lambda: self.stage(whole, copy, workers=0))
        assert self.is_no_set(copy)
        complete = {part.name for part in hidden(copy).glob("*.arrow")}
        assert len(complete) == complete_parts % (len(list(whole.glob("*.arrow"))) + 1)
        written.clear()
        self.stage(whole, copy)
        assert not complete & set(written)
        assert files(copy) == files(whole)

    def test_a_copy_that_is_killed_within_a_part_resumes_too(
        self, whole: Path, tmp_path: Path, written: Counter[str]
    ) -> None:
        copy = tmp_path / "copy"
        with at_change(0, lambda: None, ("write",)) as calls:
            self.stage(whole, tmp_path / "undisturbed", workers=0)
        assert killed(len(calls) // 2, ("write",), lambda: self.stage(whole, copy, workers=0))
        assert self.is_no_set(copy)
        complete = {part.name for part in hidden(copy).glob("*.arrow")}
        written.clear()
        self.stage(whole, copy)
        assert complete
        assert not complete & set(written)
        assert files(copy) == files(whole)

    def test_a_stopped_copy_of_another_set_is_replaced(self, whole: Path, tmp_path: Path) -> None:
        self.write(tmp_path / "other", other=True)
        copy = tmp_path / "copy"
        assert killed(4, ("replace",), lambda: self.stage(tmp_path / "other", copy, workers=0))
        self.stage(whole, copy)
        assert files(copy) == files(whole)

    def test_a_full_disk_leaves_no_set_and_no_piece(
        self, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: Counter[str]
    ) -> None:
        copy, counting = tmp_path / "copy", shard_bytes.write_all  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            patch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
            with pytest.raises(StoreFullError, match=r"only 1,000 are free") as caught:
                self.stage(whole, copy)
        assert caught.value.errno == errno.ENOSPC
        assert not written

        def full(descriptor: int, name: str, content: Any) -> int:
            if name.endswith(PART):
                os.write(descriptor, content[: len(content) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
            return int(counting(descriptor, name, content))

        with monkeypatch.context() as patch:
            patch.setattr(shard_bytes, "write_all", full)
            with pytest.raises(StoreFullError, match=PART):
                self.stage(whole, copy, workers=1)
        assert self.is_no_set(copy)
        assert not list(hidden(copy).glob("*.partial"))
        complete = {part.name for part in hidden(copy).glob("*.arrow")}
        assert "shard-00000.arrow" in complete
        written.clear()
        self.stage(whole, copy)
        assert not complete & set(written)
        assert files(copy) == files(whole)

    def test_what_is_no_copy_is_left_alone(self, whole: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        self.write(other, other=True)
        before = files(other)
        with pytest.raises(FileExistsError, match="a set of this name exists. Remove it"):
            self.stage(whole, other)
        assert files(other) == before
        mine = tmp_path / "mine"
        mine.mkdir()
        (mine / "mine.arrow").write_bytes(b"mine")
        with pytest.raises(FileExistsError, match="another file or folder of this name exists"):
            self.stage(whole, mine)
        assert files(mine) == {"mine.arrow": b"mine"}
        for target in (whole, whole / "copy"):
            result = call("set", "stage", whole, target)
            assert result.exit_code == 2
            assert "this is the folder of the set itself, or is inside it" in result.output
        assert not (whole / "copy").exists()
