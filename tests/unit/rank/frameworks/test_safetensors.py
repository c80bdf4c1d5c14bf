"""Large files of safetensors are written with holes, byte for byte as safetensors would write them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fakedist.rank.frameworks import safetensors
from fakedist.rank.frameworks.safetensors import sparse_safetensors
from fakedist.world import files
from fakedist.world.files import Saved, sparse_saving

MIB = 1 << 20


@pytest.fixture(autouse=True)
def saving(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    saved = Saved()
    for module in (files, safetensors):
        monkeypatch.setattr(module, "saved", saved)
    with sparse_saving():
        yield


def model() -> dict[str, torch.Tensor]:
    """128 MiB of zeros, and values among them."""
    weights = torch.zeros(32 * MIB)
    weights[5 * MIB] = 7.0
    return {"weights": weights, "bias": torch.arange(1000.0), "end": torch.zeros(4 * MIB)}


def on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_safetensors_are_as_their_own_writer_writes_them(tmp_path: Path) -> None:
    module = pytest.importorskip("safetensors.torch")
    save: Any = sparse_safetensors(module)["save_file"]
    for metadata in (None, {"format": "pt"}):
        save(model(), tmp_path / "ours", metadata)
        module.save_file(model(), tmp_path / "theirs", metadata)
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
        assert on_disk(tmp_path / "ours") < 6 * MIB < on_disk(tmp_path / "theirs")
    mixed = {**model(), "half": torch.ones(3, dtype=torch.bfloat16), "step": torch.tensor(3)}
    save(mixed, tmp_path / "mixed")
    assert all(torch.equal(value, mixed[name]) for name, value in module.load_file(tmp_path / "mixed").items())
    tied = model()
    with pytest.raises(RuntimeError, match="share memory"):
        save({**tied, "tied": tied["weights"]}, tmp_path / "tied")
