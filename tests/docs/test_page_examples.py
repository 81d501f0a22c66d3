"""Promise: every Python example of the README and of the pages runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


def examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)


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
@pytest.mark.filterwarnings("ignore:The `srun` command")  # lightning again, on a machine with Slurm
@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *filter(examples, PAGES)], ids=lambda page: page.stem
)
def test_the_examples_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds what those before it defined, and what they leave to the reader."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTLOAD_STORE", str(tmp_path / "sets"))
    names: dict[str, Any] = {
        "__name__": "page",
        "torch": torch,
        "device": "cpu",
        "dataset": Small(),
        "rank": 1,
        "world_size": 4,
    }
    skipped = []
    for code in examples(page):
        try:
            names.update(_missing(code, tmp_path))
            code = code.replace("/data/imagenet", str(tmp_path / "imagenet"))
            exec(compile(code, page.name, "exec"), names)
        except ImportError as error:
            skipped.append(str(error))
    names.clear()  # files that the examples opened
    if skipped:
        pytest.skip(f"the others ran: {skipped}")


def _missing(code: str, folder: Path) -> dict[str, Any]:
    """What an example needs beside those before it."""
    if "ImageFileList" in code or "import PackedDataset" in code:
        from PIL import Image

        images = folder / "imagenet"
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
    if "trainer.fit" in code:
        return _lightning()
    if "accelerator" in code:
        import accelerate

        model = torch.nn.Linear(3, 1)
        return {
            "accelerator": accelerate.Accelerator(cpu=True),
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "dataset": TensorDataset(torch.zeros(100, 3), torch.zeros(100)),
        }
    if "transformers." in code:
        import transformers

        return {"transformers": transformers}
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
