"""The memory that NCCL would take, from a whole run: groups, calls and the environment that the script changed."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import RunFakedist

MIB = 1 << 20
SCRIPT = """
import os
import torch
import torch.distributed as dist
os.environ["NCCL_LL128_BUFFSIZE"] = "0"
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
pair = dist.new_group([dist.get_rank() ^ 1, dist.get_rank()], group_desc="pair")
host = dist.new_group(backend="gloo", group_desc="host")
dist.all_reduce(torch.ones(4, device="cuda"), group=pair)
dist.all_reduce(torch.ones(4), group=host)
"""


def test_groups_calls_and_the_environment_of_a_run_make_the_estimate(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    place = ("--world-size", "16", "--rank", "2", "--device", "virtual")
    finished = run_fakedist("profile", *place, "--nccl-env", "NCCL_MAX_NCHANNELS=2", "--json", script)
    result = finished.json()
    assert finished.code == 0, finished.stderr
    outside = result["estimated_outside"]
    assert outside["nccl_environment"] == {"NCCL_MAX_NCHANNELS": "2", "NCCL_LL128_BUFFSIZE": "0"}
    assert int(outside["nccl_version"].split(".")[0]) == 2
    # The default group was bound to its device: it has its channels. The pair's two channels have 2 + 6 MiB each.
    assert {each["group"]: list(each["parts"]) for each in outside["communicators"]} == {
        "pair": ["channels", "rings"],
        "default_pg": ["channels"],
    }
    assert (
        next(each for each in outside["communicators"] if each["group"] == "pair")["parts"]["rings"] == [16 * MIB] * 2
    )
    assert outside["measured_bytes"] is None
    assert result["fits"] is True
    assert outside["beside_reserved"] == "fits"
    assert result["capacity_bytes"] - result["peak_reserved_bytes"] > outside["high_bytes"] > 0


def test_a_variable_that_does_not_count_is_a_wrong_argument(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    finished = run_fakedist("profile", "--world-size", "2", "--rank", "0", "--nccl-env", "NCCL_DEBUG=INFO", script)
    assert finished.code == 2
    assert "--env NCCL_DEBUG=INFO sets it for the script alone" in finished.stderr
