"""Promise: Every Python example of the README runs as it stands, and so does that of docs/rows.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.M | re.S)


class Small(torch.utils.data.Dataset[Any]):
    """What the examples call `dataset`: pictures, and their labels."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 4, 4), index % 100, dtype=torch.uint8) + (
            torch.rand(1) < 0.5
        ), index % 7


@pytest.mark.filterwarnings("ignore::FutureWarning")  # lightning's own
@pytest.mark.filterwarnings("ignore:.*pin_memory")  # there may be no accelerator here
@pytest.mark.filterwarnings("ignore:The `srun` command")  # lightning again, on a machine with Slurm
def test_the_examples_run_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds what those before it defined, and what they leave to the reader."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTLOAD_STORE", str(tmp_path / "sets"))
    names: dict[str, Any] = {
        "torch": torch,
        "device": "cpu",
        "dataset": Small(),
        "rank": 1,
        "world_size": 4,
        "order": list(range(500)),
    }
    skipped = []
    for code in EXAMPLES:
        try:
            names.update(_missing(code, tmp_path))
        except ImportError as error:
            skipped.append(str(error))
            continue
        code = code.replace("/data/imagenet", str(tmp_path / "imagenet"))
        exec(compile(code, "README.md", "exec"), names)
    assert len(EXAMPLES) > 10
    assert isinstance(names["resumed"].state_dict(), dict)
    if skipped:
        pytest.skip(f"the others ran: {skipped}")


@pytest.mark.parametrize(
    "page", ["elastic", "flow", "parameters", "predict", "rows", "sets", "twister2"]
)
def test_the_examples_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTLOAD_STORE", str(tmp_path / "store"))
    names: dict[str, Any] = {"torch": torch, "__name__": "page"}
    text = (README.parent / f"docs/{page}.md").read_text()
    for code in re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S):
        exec(compile(code, f"{page}.md", "exec"), names)
    names.clear()  # files that the examples opened


def _missing(code: str, folder: Path) -> dict[str, Any]:
    """What an example needs beside those before it."""
    if "ImageFileList" in code:
        from PIL import Image

        images = folder / "imagenet"
        (images / "cat").mkdir(parents=True)
        Image.new("RGB", (300, 300)).save(images / "cat" / "1.jpg")
        (folder / "train.txt").write_text("cat/1.jpg\n")
        (images / "train").symlink_to(images, target_is_directory=True)
        return {}
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
