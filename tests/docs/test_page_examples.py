"""Promise: Every Python example of the README and of the pages runs as it stands, and prints what its comments say.

The blocks of a page run in order, in one namespace, in an empty folder. A page may use `dataset`, `device`,
`rank` and `world_size`. Blocks fenced as "```python other" show other libraries. Those fenced as "```python no-run"
are in NO_RUN, with the reason.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.pages import FENCE, PAGES, ROOT, Block, fenced

NO_RUN: dict[str, str] = {
    "predict.md: import confluent_kafka": "needs a broker",
    "twister2flow.md: fastload.distributed.init()  # so that a rank that fails ends all": "needs mpi4py and ranks",
}
"""Why a block is not run, by its page and its first line, "page.md: from nvidia.dali import fn"."""
PRINTED = re.compile(r"^ *print\(.*\)  # (?:\.\.\.)?(.+)$", re.M)
"""What a comment after `print(...)` says that is printed: lines, with commas between them."""
NOT_PRINTED = {"what bounds this loop", "then plg.execute(), beside the three scripts"}
QUICK = {"README.md", "docs/from-torch.md", "docs/resume.md", "docs/sets.md"}
FENCES = {"", "text", "toml", "json", "yaml"} | {
    f"python{how}" for how in ("", " no-run", " other", " signature")
}


class Small(torch.utils.data.Dataset[Any]):
    """What the examples call `dataset`: images and their labels."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 4, 4), index % 100, dtype=torch.uint8) + (
            torch.rand(1) < 0.5
        ), index % 7


@pytest.mark.filterwarnings("ignore::FutureWarning")  # lightning's own
@pytest.mark.filterwarnings("ignore:.*pin_memory")  # there may be no accelerator here
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of one process alone
@pytest.mark.filterwarnings("ignore:The `srun` command")  # lightning again, on a machine with Slurm
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if name in QUICK else pytest.mark.slow, id=name)
        for page in PAGES
        for name in [str(page.relative_to(ROOT))]
        if fenced(page, "python")
    ],
)
def test_the_examples_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each finds what those before it defined, and what they leave to the reader, and prints what its comments say."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTLOAD_STORE", str(tmp_path / "sets"))
    names: dict[str, Any] = {
        "__name__": "page",
        "device": "cpu",
        "dataset": Small(),
        "rank": 1,
        "world_size": 4,
    }
    skipped = []
    for block in fenced(page, "python"):
        try:
            names.update(_missing(block.text, tmp_path))
            code = block.text.replace("/data/imagenet", str(tmp_path / "imagenet"))
            capsys.readouterr()
            exec(compile("\n" * (block.line - 1) + code, str(page), "exec"), names)
            printed = ", ".join(capsys.readouterr().out.splitlines())
            for expected in set(PRINTED.findall(block.text)) - NOT_PRINTED:
                assert expected in printed, block
        except ModuleNotFoundError as error:  # not ImportError: that a name is gone fails the test
            if (error.name or "").partition(".")[0] == "fastload":
                raise
            skipped.append(str(error))
    names.clear()  # files that the examples opened
    if skipped:
        pytest.skip(f"the others ran: {skipped}")


def test_every_fence_is_one_that_the_tests_know_and_is_closed() -> None:
    texts = {page: page.read_text() for page in PAGES}
    assert not [
        page
        for page, text in texts.items()
        if not {fence for fence, _ in FENCE.findall(text)} <= FENCES
        or text.count("\n```") != 2 * len(FENCE.findall(text))
    ]


def test_what_does_not_run_has_a_reason() -> None:
    def key(block: Block) -> str:
        return f"{block.page.name}: {block.text.splitlines()[0]}"

    assert {key(block) for page in PAGES for block in fenced(page, "python no-run")} == set(NO_RUN)


def _missing(code: str, folder: Path) -> dict[str, Any]:
    """What an example needs beside those before it."""
    images = folder / "imagenet"
    on_disk = "ImageFileList", "import PackedDataset", "/data/imagenet"
    if any(name in code for name in on_disk) and not images.exists():
        from PIL import Image

        (images / "cat").mkdir(parents=True)
        Image.new("RGB", (300, 300)).save(images / "cat" / "1.jpg")
        (folder / "train.txt").write_text("cat/1.jpg\n")
        (images / "train").symlink_to(images, target_is_directory=True)
    if "import PackedDataset" in code:
        from fastload.datasets.packed.packing import pack

        pack(folder / "train.txt", folder / "packed", base_dir=folder / "imagenet")
        return {}
    if "store.get" in code:
        from fastload import store

        store.put({"images": torch.zeros(10, 28, 28), "labels": torch.arange(10)}, "mnist")
        return {}
    if "fastload.sequences" in code:
        texts = [torch.arange(50 + index % 600) for index in range(3000)]
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        sources = texts if "Packed(" in code else [text[:50] for text in texts]
        return {"texts": texts, "code": sources, "web": sources, "manual": sources, "pad": pad}
    if "trainer.fit" in code:
        return _lightning()
    if "datasets." in code:
        import datasets

        return {"datasets": datasets}
    return {}


def _lightning() -> dict[str, Any]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
            images, _ = batch
            return (images.float() * self.scale).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return {"module": Module(), "trainer": trainer, "dataset": Small()}
