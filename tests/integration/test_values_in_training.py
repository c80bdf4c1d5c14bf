"""Training scripts that read values on the virtual GPU must decide as in a healthy run."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

from tests.conftest import RunFakedist
from tests.support.runs import ProfileOnce
from tests.support.virtual_worker import invented_values, on_virtual_gpu

if TYPE_CHECKING:
    from fakedist.gpu.values.engine import ValueEngine


@on_virtual_gpu
def test_an_mlp_learns(engine: ValueEngine) -> None:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(64, 8, device="cuda")
    y = x.sum(-1, keepdim=True)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert invented_values(engine) == 0


@on_virtual_gpu
def test_all_optimizer_flavours_agree(engine: ValueEngine) -> None:
    import torch

    results = []
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        weight = torch.ones(4, device="cuda", requires_grad=True)
        optimizer = torch.optim.AdamW([weight], lr=0.1, **options)
        for _ in range(3):
            (weight * torch.arange(4.0, device="cuda")).sum().backward()
            optimizer.step()
        results.append(weight.detach().cpu())
    assert torch.allclose(results[0], results[1])
    assert torch.allclose(results[0], results[2])
    assert invented_values(engine) == 0


@on_virtual_gpu
def test_a_healthy_run_has_no_nan(engine: ValueEngine) -> None:
    import torch

    loss = (torch.randn(4096, 4096, device="cuda") @ torch.randn(4096, 4096, device="cuda")).mean()
    assert loss == loss
    assert not torch.isnan(loss)
    assert not torch.isinf(loss).item()
    assert torch.isfinite(loss)
    large = torch.randn(4096, 4096, device="cuda")
    assert not torch.isnan(large).any()
    assert torch.isfinite(large).all()
    assert not (torch.isnan(large) | torch.isinf(large)).any().item()
    assert not torch.isnan(large).sum().item()
    assert not torch.logical_not(torch.isfinite(large)).any()
    assert torch.isnan(large).any().cpu().item() is False
    assert torch.isfinite(torch.stack([large.sum(), loss])).all()


@on_virtual_gpu
def test_a_nan_of_the_script_is_one(engine: ValueEngine) -> None:
    import torch

    assert torch.isnan(torch.tensor([1.0, float("nan")], device="cuda")).any()
    assert not torch.isfinite(torch.log(torch.zeros(3, device="cuda"))).all()


@on_virtual_gpu
def test_gradient_scaling_skips_no_step(engine: ValueEngine) -> None:
    import torch

    model = torch.nn.Linear(2048, 2048, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(4, 2048, device="cuda")).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        assert norm.item() >= 0
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert len(steps) == 3
    assert scaler.get_scale() == 1024.0


@on_virtual_gpu
def test_small_gradients_are_really_unscaled(engine: ValueEngine) -> None:
    import torch

    weight = torch.ones(4, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    scaler.scale((weight * 2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [-1.0] * 4


@on_virtual_gpu
def test_two_dropouts_differ(engine: ValueEngine) -> None:
    import torch

    x = torch.ones(256, device="cuda")
    first, second = (torch.nn.functional.dropout(x, 0.5) for _ in range(2))
    assert not torch.equal(first, second)
    assert set(first.tolist()) == {0.0, 2.0}


@on_virtual_gpu
def test_checkpointing_repeats_the_same_dropout(engine: ValueEngine) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.dropout(x, 0.5)
        seen.append(y.detach().cpu())
        return y * 2

    x = torch.ones(64, device="cuda", requires_grad=True)
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        checkpoint(block, x, use_reentrant=False).sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), seen[0] * 2)


@on_virtual_gpu
def test_a_state_dict_is_saved_and_loaded(engine: ValueEngine) -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(1024, 1024)).cuda()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, map_location="cuda")
    assert torch.equal(loaded["0.weight"], model[0].weight)
    file.seek(0)
    model.load_state_dict(torch.load(file, map_location="cpu"))
    file.seek(0)
    assert torch.load(file)["0.bias"].tolist() == model[0].bias.tolist()


@on_virtual_gpu
def test_half_precision_is_computed(engine: ValueEngine) -> None:
    import torch

    x = torch.full((4, 4), 2.0, device="cuda", dtype=torch.float16)
    y = torch.full((4, 4), 2.0, device="cuda", dtype=torch.bfloat16)
    assert (x @ x).tolist() == [[16.0] * 4] * 4
    assert torch.nn.functional.layer_norm(y, (4,)).sum().item() == 0
    with torch.autocast("cuda", dtype=torch.bfloat16):
        z = torch.nn.functional.linear(x.float(), x.float())
    assert z.dtype == torch.bfloat16
    assert z.tolist() == [[16.0] * 4] * 4


@on_virtual_gpu
def test_small_attention_and_norms_are_finite_and_computed(engine: ValueEngine) -> None:
    import torch

    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, device="cuda", batch_first=True)
    out = layer(torch.randn(2, 4, 16, device="cuda"))
    out.sum().backward()
    assert math.isfinite(out.sum().item())
    q = torch.randn(1, 2, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    assert q.grad is not None
    assert math.isfinite(q.grad.float().norm().item())


@on_virtual_gpu
def test_an_embedding_and_its_gradient(engine: ValueEngine) -> None:
    import torch

    table = torch.nn.Embedding(10, 4, device="cuda")
    out = table(torch.tensor([1, 1, 3], device="cuda"))
    out.sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad[:, 0].tolist() == [0, 2, 0, 1, 0, 0, 0, 0, 0, 0]
    assert invented_values(engine) == 0


@on_virtual_gpu
def test_norms_that_were_made_up_are_not_negative(engine: ValueEngine) -> None:
    import torch

    for _ in range(8):
        large = torch.randn(2048, 2048, device="cuda")
        assert large.norm().item() >= 0
        assert torch.linalg.vector_norm(large).item() >= 0
        assert (large**2).sum().sqrt().item() >= 0
        assert torch.nn.utils.get_total_norm([large, large]).item() >= 0
        assert large.std().item() >= 0
        # all_reduce clamps to the type's range; a norm that a library's own kernel wrote is squared before
        assert (torch.empty(1, device="cuda") ** 2.0).mul_(8).clamp_(-3e38, 3e38).item() >= 0
        assert torch.randn(2048, 2048, device="cuda").clamp_(0, 1).mean().item() >= 0


@on_virtual_gpu
def test_a_norm_that_is_tested_in_detail_is_valid(engine: ValueEngine) -> None:
    """DeepSpeed skips the step where a norm is not finite or, by a sentinel of its own, negative."""
    import torch

    for _ in range(8):
        gradient = torch.randn(2048, 2048, device="cuda")
        norm = torch.stack([torch.linalg.vector_norm(gradient.double())]).pow(2.0).sum().float().pow(0.5)
        norm.masked_fill_(norm.isnan().logical_or(norm.isinf()), torch.tensor(-1.0, device="cuda"))
        stacked = torch.stack([norm])
        invalid = (~torch.isfinite(stacked) | (stacked < 0)).any()
        combined = torch.linalg.vector_norm(stacked)
        combined = torch.where(invalid, torch.full_like(combined, float("inf")), combined)
        assert not bool((~torch.isfinite(combined) | (combined < 0)).any())
        assert 0 <= combined.item() < float("inf")
    assert invented_values(engine) <= 8  # the norms that were read


@on_virtual_gpu
def test_rotary_embeddings_meet_activations_too_large_to_compute(engine: ValueEngine) -> None:
    import torch

    angles = torch.outer(torch.arange(64, device="cuda"), torch.arange(8, device="cuda").float())
    rotations = torch.polar(torch.ones_like(angles), angles)
    assert not engine.is_undefined(rotations)
    queries = torch.view_as_complex(torch.randn(64, 64, 16, 8, 2, device="cuda"))
    rotated = torch.view_as_real(queries * rotations[:, None]).flatten(3)
    assert rotated.shape == (64, 64, 16, 16)
    assert math.isfinite(rotated.sum().item())


@on_virtual_gpu
def test_threads_share_the_values(engine: ValueEngine) -> None:
    import torch

    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
            seen.append((gradient * 3).tolist())
            return gradient * 2

    x = torch.ones(2, device="cuda", requires_grad=True)
    Double.apply(x).sum().backward()
    assert seen == [[3.0, 3.0]]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


def test_threads_that_compute_at_once_get_the_values_of_one(profile_once: ProfileOnce) -> None:
    job = Path(__file__).parent / "jobs/counts_in_threads.py"
    ran = profile_once(job, world_size=1, options=("--until", "end"))
    assert "alike: True" in ran.finished.stdout + ran.finished.stderr
    assert not len(ran.table("invented"))


_COLLECTIVES = """
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as funcol

dist.init_process_group("nccl")
torch.cuda.set_device(0)
mine = torch.tensor([1.0, 2.0], device="cuda")
dist.all_reduce(mine)
summed = funcol.all_reduce(mine, "sum", dist.group.WORLD)
print(mine.tolist(), summed.tolist())
"""


def test_values_pass_through_collectives_and_each_is_written_down_once(
    run_fakedist: RunFakedist, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(_COLLECTIVES)
    place = ("--world-size", "8", "--rank", "0", "--device", "virtual", "--json")
    finished = run_fakedist("profile", *place, tmp_path / "job.py")
    assert "[8.0, 16.0] [64.0, 128.0]" in finished.stderr
    assert sum(call["num_calls"] for call in finished.json()["collectives"]) == 2
    assert finished.json()["invented_values"] == 0
