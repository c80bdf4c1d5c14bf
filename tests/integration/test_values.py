"""What scripts do with values, on the virtual GPU: their decisions must be those of a healthy run."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

from tests.conftest import RunFakedist
from tests.integration.virtual_worker import on_virtual_gpu

if TYPE_CHECKING:
    from fakedist.gpu.values import ValueEngine


def invented_values(engine: ValueEngine) -> int:
    return sum(values for *_, values in engine.invented())


@on_virtual_gpu
def test_a_small_computation_is_that_of_the_host(engine: ValueEngine) -> None:
    import torch

    a = torch.arange(12, device="cuda", dtype=torch.float32).view(3, 4)
    b = torch.tensor([[1.0, -1.0, 0.5, 2.0]], device="cuda")
    c = (a * b).softmax(-1) @ a.t()
    expected = (a.cpu() * b.cpu()).softmax(-1) @ a.cpu().t()
    assert torch.allclose(c.cpu(), expected)
    assert c.is_cuda
    assert c.sum().item() == expected.sum().item()
    assert invented_values(engine) == 0


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
def test_what_is_read_and_was_not_computed_is_made_up_once_and_told(engine: ValueEngine) -> None:
    import torch

    logits = torch.randn(512, 4096, device="cuda") @ torch.randn(4096, 4096, device="cuda")
    loss = torch.nn.functional.cross_entropy(logits, torch.zeros(512, dtype=torch.long, device="cuda"))
    first = loss.item()
    assert math.isfinite(first)
    assert first >= 0
    assert loss.item() == first
    assert float(loss) == first
    assert loss.cpu().item() == first
    (row,) = engine.invented()
    operation, filename, line, count, values = row
    assert operation == "aten._local_scalar_dense.default"
    assert filename.endswith("test_values.py")
    assert line > 0
    assert (count, values) == (1, 1)
    assert engine.invented() == []


@on_virtual_gpu
def test_an_element_of_a_large_tensor_stays_what_it_was(engine: ValueEngine) -> None:
    import torch

    large = torch.empty(1024, 1024, device="cuda")
    assert large[3, 5].item() == large[3, 5].item()
    assert math.isfinite(large[3, 6].item())


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
def test_a_router_of_known_logits_sends_every_token(engine: ValueEngine) -> None:
    import torch

    tokens, experts, chosen = 64, 8, 2
    hidden = torch.randn(tokens, 16, device="cuda")
    gate = torch.randn(16, experts, device="cuda")
    weights, indices = torch.topk((hidden @ gate).softmax(-1), chosen)
    counts = torch.bincount(indices.flatten(), minlength=experts)
    splits = counts.tolist()
    assert sum(splits) == tokens * chosen
    by_mask = torch.nn.functional.one_hot(indices, experts).sum((0, 1)).tolist()
    assert by_mask == splits
    order = indices.flatten().argsort(stable=True)
    permuted = hidden.repeat_interleave(chosen, dim=0).index_select(0, order)
    chunks = permuted.split(splits)
    assert [len(chunk) for chunk in chunks] == splits
    assert (weights > 0).all()
    rows, slots = torch.where(indices == 3)
    assert len(rows) == splits[3]
    assert slots.max().item() <= 1
    assert invented_values(engine) == 0


@on_virtual_gpu
def test_a_router_of_unknown_logits_sends_every_token(engine: ValueEngine) -> None:
    import torch

    tokens, experts, chosen = 4096, 64, 8
    logits = torch.randn(tokens, 1024, device="cuda") @ torch.randn(1024, experts, device="cuda")
    _, indices = torch.topk(logits.softmax(-1), chosen)
    splits = torch.bincount(indices.flatten(), minlength=experts).tolist()
    assert sum(splits) == tokens * chosen
    assert all(split >= 0 for split in splits)
    histogram = torch.histc(indices.float(), bins=experts, min=0, max=experts - 1).tolist()
    assert sum(histogram) == tokens * chosen
    assert invented_values(engine) > 0


@on_virtual_gpu
def test_a_routing_map_too_large_to_compute_has_its_share_of_tokens(engine: ValueEngine) -> None:
    import torch

    tokens, experts, chosen = 16384, 256, 8
    logits = torch.randn(tokens, 64, device="cuda") @ torch.randn(64, experts, device="cuda")
    _, indices = torch.topk(logits, chosen, dim=1)
    routing = torch.zeros_like(logits).int().scatter(1, indices, 1).bool()
    counts = routing.sum(dim=0).long()
    assert counts.tolist() == [tokens * chosen // experts] * experts
    taken = logits.masked_select(routing)
    assert taken.shape == (tokens * chosen,)
    rows, columns = routing.nonzero(as_tuple=True)
    assert rows.shape == columns.shape == (tokens * chosen,)
    assert logits[routing].shape == (tokens * chosen,)


@on_virtual_gpu
def test_random_numbers_follow_the_generator_of_the_device(engine: ValueEngine) -> None:
    import torch

    torch.manual_seed(5)
    first = [torch.rand(4, device="cuda").tolist(), torch.randn(4, device="cuda").tolist()]
    state = torch.cuda.get_rng_state()
    third = torch.randperm(9, device="cuda").tolist()
    assert sorted(third) == list(range(9))
    torch.cuda.set_rng_state(state)
    assert torch.randperm(9, device="cuda").tolist() == third
    torch.manual_seed(5)
    assert [torch.rand(4, device="cuda").tolist(), torch.randn(4, device="cuda").tolist()] == first
    torch.manual_seed(6)
    assert torch.rand(4, device="cuda").tolist() != first[0]
    generator = torch.Generator(device="cuda").manual_seed(5)
    mine = [torch.rand(4, device="cuda", generator=generator).tolist() for _ in range(2)]
    assert mine[0] != mine[1]
    generator.manual_seed(5)
    assert torch.rand(4, device="cuda", generator=generator).tolist() == mine[0]


@on_virtual_gpu
def test_random_numbers_of_the_device_leave_those_of_the_host_alone(engine: ValueEngine) -> None:
    import torch

    torch.manual_seed(0)
    expected = torch.rand(3).tolist()
    torch.manual_seed(0)
    x = torch.ones(100, device="cuda")
    torch.nn.functional.dropout(x, 0.5)
    torch.rand(5, device="cuda")
    torch.bernoulli(x * 0.5)
    torch.multinomial(x, 3)
    x.normal_().uniform_()
    assert torch.rand(3).tolist() == expected


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
def test_memory_that_is_used_again_holds_nothing(engine: ValueEngine) -> None:
    import torch

    first = torch.full((32,), 7, device="cuda")
    address = first.data_ptr()
    assert first.tolist() == [7] * 32
    del first
    second = torch.empty(32, dtype=torch.long, device="cuda")
    assert second.data_ptr() == address
    assert engine.is_undefined(second)
    assert second.tolist() == [0] * 32


@on_virtual_gpu
def test_a_buffer_is_defined_where_it_was_written(engine: ValueEngine) -> None:
    import torch

    buffer = torch.empty(8, dtype=torch.long, device="cuda")
    buffer[2:4] = torch.tensor([5, 6], device="cuda")
    assert engine.is_undefined(buffer)
    assert not engine.is_undefined(buffer[2:4])
    assert (buffer[2:4] + 1).tolist() == [6, 7]
    assert engine.is_undefined(buffer + 1)
    assert buffer.tolist() == [0, 0, 5, 6, 0, 0, 0, 0]
    assert invented_values(engine) == 6


@on_virtual_gpu
def test_views_of_views_and_writes_through_them(engine: ValueEngine) -> None:
    import torch

    x = torch.zeros(4, 4, device="cuda")
    x.t()[0] = 3.0
    x.view(-1)[5:7].add_(1.0)
    x[torch.tensor([3], device="cuda"), torch.tensor([3], device="cuda")] = 9.0
    x.diagonal()[2:3].fill_(4.0)
    expected = [[3, 0, 0, 0], [3, 1, 1, 0], [3, 0, 4, 0], [3, 0, 0, 9]]
    assert x.int().tolist() == expected
    torch.add(x, 1.0, out=x)
    assert x[0, 0].item() == 4.0


@on_virtual_gpu
def test_what_comes_from_the_host_is_there(engine: ValueEngine) -> None:
    import numpy
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(8).view(8, 1), torch.arange(8) * 10)
    for x, y in DataLoader(data, batch_size=4, pin_memory=True):
        x, y = x.to("cuda", non_blocking=True), y.cuda(non_blocking=True)
        assert (x[:, 0] * 10).tolist() == y.tolist()
    assert torch.as_tensor(numpy.arange(3), device="cuda").tolist() == [0, 1, 2]
    assert torch.asarray([1, 2], device="cuda").tolist() == [1, 2]
    assert torch.tensor(3.5, device="cuda").item() == 3.5
    flag = torch.empty(2, dtype=torch.long, device="cuda")
    flag.copy_(torch.tensor([4, 5]))
    assert flag.tolist() == [4, 5]
    half = torch.tensor([1.5], device="cuda").to(torch.bfloat16)
    assert half.cpu().float().item() == 1.5
    assert torch.tensor([1, 2], device="cuda").to("cuda:1").tolist() == [1, 2]
    assert invented_values(engine) == 0


@on_virtual_gpu
def test_a_large_tensor_on_the_host_is_finite(engine: ValueEngine) -> None:
    import torch

    large = torch.empty(3000, 1000, device="cuda")
    host = large.cpu()
    assert torch.isfinite(host).all()
    target = torch.full((3000, 1000), float("nan"))
    target.copy_(large)
    assert torch.isfinite(target).all()
    assert invented_values(engine) == 6_000_000


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
def test_sizes_that_depend_on_values(engine: ValueEngine) -> None:
    import torch

    x = torch.tensor([3, 1, 3, 0], device="cuda")
    assert x.nonzero().flatten().tolist() == [0, 1, 2]
    assert x[x > 1].tolist() == [3, 3]
    assert torch.masked_select(x, x == 1).tolist() == [1]
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    assert values.tolist() == [0, 1, 3]
    assert inverse.tolist() == [2, 1, 2, 0]
    assert counts.tolist() == [1, 1, 2]
    assert torch.unique_consecutive(x).tolist() == [3, 1, 3, 0]
    assert torch.repeat_interleave(x, torch.tensor([1, 0, 2, 0], device="cuda")).tolist() == [3, 3, 3]
    assert torch.bincount(x).tolist() == [1, 1, 0, 2]
    assert torch.equal(x, x.clone())
    assert torch.allclose(x.float(), x.float() + 1e-9)
    assert bool(x[0])
    x[x == 3] = 7
    assert x.tolist() == [7, 1, 7, 0]
    assert torch.combinations(x[:3]).shape == (3, 2)
    assert invented_values(engine) == 0


@on_virtual_gpu
def test_the_size_of_a_selection_by_an_unknown_mask_is_half(engine: ValueEngine) -> None:
    import torch

    x = torch.randn(2000, 1000, device="cuda")
    assert x[x > 0].numel() == 1_000_000
    assert (x > 0).nonzero().shape == (1_000_000, 2)
    assert x[torch.isfinite(x)].numel() == 2_000_000
    assert torch.isnan(x).nonzero().shape == (0, 2)
    assert invented_values(engine) > 0


@on_virtual_gpu
def test_a_count_agrees_with_the_size_of_the_selection(engine: ValueEngine) -> None:
    import torch

    mask = torch.empty(64, 65536, device="cuda") > 0.5
    assert mask.sum().item() == len(torch.where(mask)[0]) == 64 * 65536 // 2
    assert torch.empty(64, 65536, device="cuda")[mask].shape == (64 * 65536 // 2,)
    assert invented_values(engine) > 0


@on_virtual_gpu
def test_values_are_written_where_a_mask_is_true(engine: ValueEngine) -> None:
    import torch

    small = torch.zeros(4, 6, 2, device="cuda")
    chosen = torch.zeros(4, 6, dtype=torch.bool, device="cuda")
    chosen[1, 2] = True
    chosen[3, 4:] = True
    small[chosen] = torch.arange(6.0, device="cuda").view(3, 2)
    assert small[chosen].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert small.sum().item() == 15
    assert invented_values(engine) == 0
    large, mask = torch.empty(64, 65536, device="cuda"), torch.empty(64, 65536, device="cuda") > 0
    large[mask] = torch.empty(12345, device="cuda")  # the script knows how many there are


@on_virtual_gpu
def test_tokens_are_drawn_from_probabilities(engine: ValueEngine) -> None:
    import torch

    certain = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], device="cuda")
    assert torch.multinomial(certain, 1).tolist() == [[1], [2]]
    assert invented_values(engine) == 0
    tokens = torch.multinomial(torch.randn(4, 131072, device="cuda").softmax(-1), 1)
    assert tokens.shape == (4, 1)
    assert 0 <= tokens.min().item() <= tokens.max().item() < 131072


@on_virtual_gpu
def test_a_generator_that_nobody_seeded_is_the_same_in_every_run(engine: ValueEngine) -> None:
    import torch

    from fakedist.gpu.values import ValueEngine

    first = torch.rand(4, device="cuda").tolist()
    ValueEngine(0)
    assert torch.rand(4, device="cuda").tolist() == first
    ValueEngine(1)
    assert torch.rand(4, device="cuda").tolist() != first


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


@on_virtual_gpu
def test_losses_that_were_made_up_are_not_negative(engine: ValueEngine) -> None:
    import torch

    labels = torch.zeros(32, dtype=torch.long, device="cuda")
    total = torch.zeros((), device="cuda")
    for _ in range(8):
        logits = torch.randn(32, 2048, device="cuda") @ torch.randn(2048, 50, device="cuda")
        loss = torch.nn.functional.cross_entropy(logits, labels)
        assert (loss / 4).item() >= 0
        assert loss.exp().item() >= 0
        total.zero_()
        total += loss
        assert total.item() >= 0


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
def test_sequence_statistics_of_tokens_from_the_host(engine: ValueEngine) -> None:
    import torch

    tokens = torch.randint(0, 32000, (4, 8192))
    on_device = tokens.cuda()
    assert on_device.shape == tokens.shape
    assert (on_device != -100).sum().item() == tokens.numel()
    lengths = torch.tensor([3, 5], device="cuda")
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    assert offsets.tolist() == [0, 3, 8]
    assert lengths.max().item() == 5


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
