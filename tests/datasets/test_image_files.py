"""Promises:
- A file list is read as in the tutorial: classes by directory, relative and absolute paths, blank lines, explicit
  classes, ranks. See also `tests/image/test_decode.py`.
- An image folder gives the samples of torchvision's ImageFolder.
- An error in a list or a folder names the file or the line.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fastload.datasets import ImageFileList, ImageFolder
from fastload.datasets.image_files import PathTable
from fastload.errors import DecodeError, FileListError


def paint(path: Path, shade: int) -> Path:
    """Write a lossless image of one shade: what is read can be told apart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), (shade, 255 - shade, 7)).save(path, "PNG")
    return path


def shade_of(image: Image.Image) -> int:
    (_, (red, green, blue)), *others = image.getcolors()
    assert (green, blue, others) == (255 - red, 7, [])
    return red


def write_list(path: Path, lines: Sequence[str], end: str = "\n") -> Path:
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Six images of shades 0 to 5, in classes dog, cat and eel, two each in order of shade."""
    for shade in range(6):
        paint(tmp_path / "train" / ("dog", "cat", "eel")[shade % 3] / f"{shade}.jpg", shade)
    return tmp_path


LISTED = [f"train/{('dog', 'cat', 'eel')[shade % 3]}/{shade}.jpg" for shade in range(6)]


def test_samples_are_the_lines_in_order_and_classes_the_sorted_parent_directories(
    tree: Path,
) -> None:
    dataset = ImageFileList(write_list(tree / "list.txt", LISTED))
    assert len(dataset) == 6
    assert dataset.classes == ["cat", "dog", "eel"]
    assert dataset.class_to_idx == dataset.id_to_index == {"cat": 0, "dog": 1, "eel": 2}
    assert [(shade_of(image), label) for image, label in dataset] == [
        (0, 1), (1, 0), (2, 2), (3, 1), (4, 0), (5, 2),
    ]  # fmt: skip
    image, label = dataset.load_image(3)
    assert (type(image), image.mode, type(label)) == (Image.Image, "RGB", int)
    assert dataset.image_paths == [str(tree / line) for line in LISTED]
    assert dataset.targets.tolist() == [1, 0, 2, 1, 0, 2]
    assert dataset.samples[4] == (str(tree / LISTED[4]), 0)
    assert dataset.locate(4) == str(tree / LISTED[4])


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "  \n \t\n"])
def test_blank_lines_and_white_space_do_not_count(tree: Path, end: str) -> None:
    plain = ImageFileList(write_list(tree / "plain.txt", LISTED))
    lines = ["", *(" " + line for line in LISTED)]
    assert ImageFileList(write_list(tree / "list.txt", lines, end)).samples == plain.samples
    assert ImageFileList(write_list(tree / "list.txt", lines, "\n")).samples == plain.samples
    (tree / "list.txt").write_bytes(
        b"\xef\xbb\xbf" + end.join(LISTED).encode()
    )  # a mark, and no last end
    assert ImageFileList(tree / "list.txt").samples == plain.samples


def test_relative_paths_are_those_of_the_base_directory_absolute_ones_stay(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("lists")
    lines = [LISTED[0], str(tree / LISTED[1])]
    dataset = ImageFileList(write_list(elsewhere / "list.txt", lines), base_dir=tree)
    assert [shade_of(image) for image, _ in dataset] == [0, 1]
    assert dataset.image_paths == [str(tree / line) for line in LISTED[:2]]
    beside = ImageFileList(elsewhere / "list.txt")
    assert beside.image_paths == [str(elsewhere / LISTED[0]), str(tree / LISTED[1])]


def test_a_list_in_the_working_directory(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_list(tree / "list.txt", LISTED)
    monkeypatch.chdir(tree)
    dataset = ImageFileList("list.txt")
    assert dataset.image_paths == LISTED
    assert shade_of(dataset[5][0]) == 5


def test_a_line_may_occur_twice_and_a_class_in_several_directories(tree: Path) -> None:
    paint(tree / "more" / "cat" / "9.jpg", 9)
    lines = [LISTED[1], "more/cat/9.jpg", LISTED[1], "train//cat///1.jpg"]
    dataset = ImageFileList(write_list(tree / "list.txt", lines))
    assert dataset.classes == ["cat"]
    assert [shade_of(image) for image, _ in dataset] == [1, 9, 1, 1]


def test_names_that_are_not_utf8_are_read_as_the_file_system_has_them(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9/\xff.png")
    paint(tmp_path / name, 3)
    (tmp_path / "list.txt").write_bytes(os.fsencode(name))
    for dataset in (ImageFileList(tmp_path / "list.txt"), ImageFolder(tmp_path)):
        assert dataset.classes == [os.fsdecode(b"caf\xe9")]
        assert shade_of(dataset[0][0]) == 3


def test_transforms_see_image_and_class_number(tree: Path) -> None:
    dataset = ImageFileList(
        write_list(tree / "list.txt", LISTED),
        transform=shade_of,
        target_transform=lambda label: f"class {label}",
    )
    assert [dataset[k] for k in range(2)] == [(0, "class 1"), (1, "class 0")]


@pytest.mark.parametrize("world_size", [1, 4, 6])
def test_ranks_stride_through_the_list_and_agree_on_the_classes(
    tree: Path, world_size: int
) -> None:
    file_list = write_list(tree / "list.txt", LISTED)
    for make in (ImageFileList, ImageFolder):
        source = file_list if make is ImageFileList else tree / "train"
        whole = make(source)
        for rank in range(world_size):
            part = make(source, rank=rank, world_size=world_size)
            assert part.samples == whole.samples[rank::world_size]
            assert part.classes == whole.classes == ["cat", "dog", "eel"]
            assert part.targets.tolist() == whole.targets[rank::world_size].tolist()
            assert part.partitioned_by_rank == (world_size > 1)
            assert (part.rank, part.world_size) == (rank, world_size)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(tree: Path, rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"{rank=} and {world_size=}"):
        ImageFileList(write_list(tree / "l.txt", LISTED), rank=rank, world_size=world_size)
    with pytest.raises(ValueError, match=f"{rank=} and {world_size=}"):
        ImageFolder(tree / "train", rank=rank, world_size=world_size)


@pytest.mark.parametrize("rank", [0, 6])
def test_more_ranks_than_images_fail_on_every_rank(tree: Path, rank: int) -> None:
    with pytest.raises(FileListError, match="6 paths, too few for 7 ranks"):
        ImageFileList(write_list(tree / "l.txt", LISTED), rank=rank, world_size=7)
    with pytest.raises(FileListError, match="6 images are too few for 7 ranks"):
        ImageFolder(tree / "train", rank=rank, world_size=7)


def test_given_classes_number_the_samples_and_may_lack_some(tree: Path) -> None:
    file_list = write_list(tree / "list.txt", LISTED[:2])
    names = ["eel", "dog", "ant", "cat"]
    class_list = write_list(tree / "classes.txt", ["eel", "", " dog ", "ant", "cat"])
    for classes in (names, tuple(names), class_list, str(class_list)):
        dataset = ImageFileList(file_list, classes=classes)
        assert dataset.classes == names
        assert dataset.targets.tolist() == [1, 3]


def test_a_class_that_was_not_given_is_named_with_line_and_file(tree: Path) -> None:
    file_list = write_list(tree / "list.txt", ["", *LISTED])
    with pytest.raises(FileListError) as caught:
        ImageFileList(file_list, classes=["dog", "eel"])
    assert str(caught.value) == (
        f"{file_list}, line 3: the class 'cat' of 'train/cat/1.jpg' "
        "is not among the 2 given classes"
    )


def test_classes_must_be_there_and_differ(tree: Path) -> None:
    file_list = write_list(tree / "list.txt", LISTED)
    twice = write_list(tree / "classes.txt", ["dog", "cat", "eel", "cat"])
    with pytest.raises(FileListError, match=f"class list {twice}: 'cat' occurs more than once"):
        ImageFileList(file_list, classes=twice)
    with pytest.raises(FileListError, match=r"^classes: expected at least one class name"):
        ImageFileList(file_list, classes=[])
    with pytest.raises(FileListError, match=r"none\.txt: the class list cannot be read: No such"):
        ImageFileList(file_list, classes=tree / "none.txt")


@pytest.mark.parametrize("line", ["a.jpg", "./a.jpg", "../a.jpg", "/a.jpg", "x/../a.jpg"])
def test_a_path_without_a_parent_directory_is_named_with_its_line(tree: Path, line: str) -> None:
    file_list = write_list(tree / "list.txt", [*LISTED[:2], "", line])
    with pytest.raises(FileListError) as caught:
        ImageFileList(file_list)
    assert str(caught.value).startswith(f"{file_list}, line 4: {line!r} has no parent directory")


@pytest.mark.parametrize("ending", [" 3", "\tcat", ",0", ", 0.5"])
def test_a_label_after_a_path_is_named_with_the_format_that_is_expected(
    tree: Path, ending: str
) -> None:
    file_list = write_list(tree / "list.txt", [path + ending for path in LISTED])
    with pytest.raises(FileListError) as caught:
        ImageFileList(file_list)
    label = ending.strip(", \t")
    assert f"list.txt, line 1: found {LISTED[0]!r} and the label {label!r}" in str(caught.value)
    assert "Expected one path a line" in str(caught.value)
    named_so = tree / (LISTED[0] + ending)
    (tree / LISTED[0]).rename(named_so)
    assert ImageFileList(file_list).locate(0) == str(named_so), "a file may be named so"


def test_a_list_that_cannot_be_used_says_why(tree: Path) -> None:
    with pytest.raises(
        FileListError, match=r"none\.txt: the file list cannot be read: No such file"
    ):
        ImageFileList(tree / "none.txt")
    with pytest.raises(FileListError, match="the file list cannot be read: Is a directory"):
        ImageFileList(tree)
    with pytest.raises(FileListError, match="base_dir is not a directory: nowhere"):
        ImageFileList(tree / "none.txt", base_dir="nowhere")
    for lines in ([], ["", "  "]):
        with pytest.raises(FileListError, match=r"empty\.txt: the file list is empty"):
            ImageFileList(write_list(tree / "empty.txt", lines))
    with pytest.raises(FileListError, match=r"nul\.txt, line 2: the file list is not a text file"):
        ImageFileList(write_list(tree / "nul.txt", [LISTED[0], "cat/a\0b.jpg"]))


def test_an_index_outside_is_an_index_error_that_says_the_range(tree: Path) -> None:
    dataset = ImageFileList(write_list(tree / "list.txt", LISTED))
    for index in (-1, 6):
        with pytest.raises(IndexError, match=f"sample {index} of .*list.txt.* expected 0 to 5"):
            dataset[index]
        with pytest.raises(IndexError, match="expected 0 to 5"):
            dataset.locate(index)
    assert shade_of(dataset[np.int64(5)][0]) == 5


def test_a_missing_and_a_damaged_file_are_errors_that_name_it(tree: Path) -> None:
    (tree / LISTED[1]).unlink()
    (tree / LISTED[2]).write_bytes((tree / LISTED[2]).read_bytes()[:40])
    dataset = ImageFileList(write_list(tree / "list.txt", LISTED))
    with pytest.raises(FileNotFoundError) as missing:
        dataset[1]
    assert missing.value.filename == str(tree / LISTED[1])
    with pytest.raises(DecodeError) as damaged:
        dataset[2]
    assert damaged.value.path == str(tree / LISTED[2])


def test_a_dataset_says_what_it_is_and_survives_pickling_and_copying(tree: Path) -> None:
    file_list = write_list(tree / "list.txt", LISTED)
    dataset = ImageFileList(file_list, transform=shade_of, rank=1, world_size=2)
    expected = f"ImageFileList('{file_list}': 3 samples, 3 classes, rank 1 of 2)"
    for twin in (dataset, pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        assert repr(twin) == expected
        assert [twin[k] for k in range(3)] == [(1, 0), (3, 1), (5, 2)]
        assert twin.samples == dataset.samples
    assert repr(ImageFolder(tree)) == f"ImageFolder('{tree}': 6 samples, 1 class)"


def test_a_long_list_is_held_in_few_bytes_and_few_objects(tmp_path: Path) -> None:
    """Measured against the paths as a list of str: 40 bytes and their file's name at most."""
    count, root = 20_000, "/a/directory/that/lies/deep/down/in/some/file/system/train"
    names = [f"n{k // 20:08d}_{k}.JPEG" for k in range(count)]
    paths = [f"{root}/{name.partition('_')[0]}/{name}" for name in names]
    file_list = write_list(tmp_path / "list.txt", paths)
    ImageFileList(file_list)  # what is made once per process is made now
    gc.collect()
    objects = len(gc.get_objects())
    tracemalloc.start()
    try:
        dataset = ImageFileList(file_list)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert dataset.image_paths == paths
    assert held / count < 40 + np.mean([len(name) for name in names])
    assert held < sum(map(len, paths)) < count * 100
    assert len(gc.get_objects()) - objects < 200


@given(
    paths=st.lists(
        st.tuples(st.sampled_from(["", "a/", "b/c/", "/"]), st.text("xyzé\udcff/", max_size=5))
    ),
    ranks=st.integers(1, 5).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))),
)
def test_packed_paths_equal_the_list_of_them(
    paths: list[tuple[str, str]], ranks: tuple[int, int]
) -> None:
    rank, world_size = ranks
    files = [(os.fsencode(directory), os.fsencode(name)) for directory, name in paths]
    table = PathTable(iter(files), rank=rank, world_size=world_size)
    expected = ["".join(path) for path in paths][rank::world_size]
    assert list(table) == expected
    assert table == expected
    assert table != [*expected, "another"]
    assert table[::-2] == expected[::-2]
    assert table[1:] == expected[1:]
    assert table.total == len(paths)
    for position in range(-len(expected), len(expected)):
        assert table[position] == expected[position]
    for position in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            table[position]


@pytest.fixture
def odd_tree(tmp_path: Path) -> Path:
    """A tree with everything that decides what is found, and in which order."""
    root = tmp_path / "set"
    for shade, name in enumerate(
        [
            "dog/b.png", "dog/a.JPEG", "dog/a/z.jpg", "dog/a-b/y.Png", "dog/a/c/x.webp",
            "cat/10.jpg", "cat/9.jpg", "Zebra/1.bmp", "äffin/1.ppm", "äffin/.hidden.jpg",
        ]
    ):  # fmt: skip
        paint(root / name, shade)
    paint(tmp_path / "linked" / "far" / "f.jpg", 90)
    (root / "ghost").symlink_to(tmp_path / "linked")
    (root / "dog" / "link").symlink_to(tmp_path / "linked" / "far")
    for name in ("README.txt", "stray.jpg", "dog/notes.txt", "dog/jpg", "cat/9.jpg.part"):
        (root / name).write_text("no image")
    return root


@pytest.mark.parametrize("relative", [False, True])
def test_a_folder_holds_the_same_samples_as_torchvisions(
    odd_tree: Path, relative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(odd_tree.parent)
    root = "set/" if relative else odd_tree
    ours, theirs = ImageFolder(root), torchvision.datasets.ImageFolder(root)
    assert ours.samples == theirs.samples
    assert ours.targets.tolist() == theirs.targets
    assert (ours.classes, ours.class_to_idx) == (theirs.classes, theirs.class_to_idx)
    assert len(ours) == len(theirs) == 12
    for (image, label), (expected, number) in zip(ours, theirs, strict=True):
        assert label == number
        assert image == expected
        assert (image.mode, image.size) == (expected.mode, expected.size)


def test_a_folder_without_classes_or_images_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none: this directory does not exist. Expected"):
        ImageFolder(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"file: this is not a directory. Expected"):
        ImageFolder(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match=r"found no class directory. Expected .*/<class>/"):
        ImageFolder(tmp_path)
    paint(tmp_path / "cat" / "1.jpg", 0)
    (tmp_path / "ant").mkdir()
    (tmp_path / "bee").mkdir()
    with pytest.raises(FileNotFoundError, match="found no image of class ant, bee. Expected"):
        ImageFolder(tmp_path)


def test_a_directory_that_cannot_be_listed_is_an_error_and_not_a_smaller_set(
    odd_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir, closed = os.scandir, str(odd_tree / "dog" / "a")

    def refuse(path: bytes | str) -> Iterator[os.DirEntry[Any]]:
        if os.fsdecode(path) == closed:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError) as caught:
        ImageFolder(odd_tree)
    assert caught.value.filename == closed


def test_a_folder_orders_names_of_any_bytes_as_torchvision_does(tmp_path: Path) -> None:
    names = [b"a.jpg", "\uffee.jpg".encode(), "\U0001f600.jpg".encode(), b"\xff.jpg", b"\x80.jpg"]
    for directory in (b"one", "\U0001f600".encode(), "\uffee".encode(), b"\xfe"):
        for name in names:
            path = os.path.join(os.fsencode(tmp_path), b"class", directory, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                open(path, "wb").close()
            except OSError:
                pytest.skip("this file system takes no names that are not UTF-8")
    expected = torchvision.datasets.ImageFolder(tmp_path).samples
    assert ImageFolder(tmp_path).samples == expected
    assert len(expected) == 20
