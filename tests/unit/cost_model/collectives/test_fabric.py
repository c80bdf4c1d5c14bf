from pathlib import Path

import pytest

from fakedist.cost_model.collectives.collective_times import FABRICS, default_fabric, find_fabric
from fakedist.errors import JobError


def test_every_preset_names_its_source_and_other_nodes_have_nics_in_proportion() -> None:
    for name, fabric in FABRICS.items():
        assert find_fabric(name) == fabric
        assert fabric.source
    assert find_fabric("dgx-h100-ndr", 4).nics_per_node == 4
    assert find_fabric("dgx-h100-ndr", 1).nics_per_node == 1


def test_a_model_has_its_usual_fabric() -> None:
    found = {gpu: default_fabric(gpu).name for gpu in ("a100-80g", "h100-80g", "h200", "b200", "gb200", "l40s")}
    assert found == {
        "a100-80g": "dgx-a100-hdr",
        "h100-80g": "dgx-h100-ndr",
        "h200": "dgx-h100-ndr",
        "b200": "dgx-b200-ndr",
        "gb200": "gb200-nvl72",
        "l40s": "dgx-h100-ndr",
    }


def test_a_file_changes_a_preset_and_can_say_how_close_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('like = "dgx-h100-ndr"\nnic_gbit_per_s = 200\nnics_per_node = 4\nhop_us = 12.5\n')
    found = find_fabric(str(path))
    assert (found.name, found.nic_bandwidth, found.nics_per_node, found.hop_us) == ("mine", 25e9, 4, 12.5)
    assert found.spread > FABRICS["dgx-h100-ndr"].spread
    file = tmp_path / "mine.toml"
    file.write_text("spread = 0.15\n")
    assert find_fabric(str(file)).spread == 0.15


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("nic_gbit_per_s = -1", "nic_gbit_per_s = -1 is not a number from 1 to 10,000"),
        ("nic_gbit_per_s = true", "is not a number"),
        ("nics_per_node = 2.5", "is not a whole number"),
        ("achieved = nan", "is not a number from"),
        ("speed = 3", "unknown key 'speed'"),
        ('like = "mine"', "names no preset"),
        ("like = [1]", "names no preset"),
        ("not toml", "is not TOML"),
    ],
)
def test_a_file_with_an_absurd_value_is_refused(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(JobError, match=match):
        find_fabric(str(path))


def test_an_unknown_name_lists_the_presets() -> None:
    with pytest.raises(JobError, match="no fabric 'infiniband'"):
        find_fabric("infiniband")
    with pytest.raises(JobError, match="cannot be read"):
        find_fabric("nowhere.toml")
