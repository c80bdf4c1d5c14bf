"""Values that are read on the virtual GPU but that no kernel computed: made up sensibly, once, and counted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tests.support.virtual_worker import invented_values, on_virtual_gpu

if TYPE_CHECKING:
    from fakedist.gpu.values.engine import ValueEngine


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
    assert filename.endswith("test_values_made_up.py")
    assert line > 0
    assert (count, values) == (1, 1)
    assert engine.invented() == []


@on_virtual_gpu
def test_a_time_between_events_counts_as_made_up(engine: ValueEngine) -> None:
    import torch

    from fakedist.gpu.tuning import event_times

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with event_times(engine.host.inventions.count):
        begin.record()
        end.record()
        assert begin.elapsed_time(end) >= 0
    (row,) = engine.invented()
    assert (row.operation, row.num_values) == ("cuda.Event.elapsed_time", 1)
    assert row.filename.endswith("test_values_made_up.py")


@on_virtual_gpu
def test_what_follows_from_a_made_up_mask_is_never_known(engine: ValueEngine) -> None:
    import torch

    def blocks(mask: torch.Tensor) -> torch.Tensor:
        counts = mask.view(16, 128, 16, 128).sum((1, 3))
        return ((counts > 0) & (counts < 128 * 128)).sum(-1, dtype=torch.int32)

    scores = torch.randn(2048, 2048, device="cuda") @ torch.randn(2048, 2048, device="cuda")
    made_up = blocks(scores > 0)
    assert engine.known(made_up) is None
    assert made_up.tolist() == [16] * 16
    assert invented_values(engine) > 0
    assert engine.known(made_up) is None
    assert engine.known(made_up + 1) is None
    assert engine.known((scores > 0).nonzero()[:1]) is None

    places = torch.arange(2048, device="cuda")
    band = (places[:, None] >= places) & (places[:, None] - places < 300)
    computed = blocks(band)
    assert invented_values(engine) == 1  # the size of nonzero()
    values = engine.known(computed)
    assert values is not None
    assert values.tolist() == [1, 1, 2] + [3] * 13 == computed.tolist()
    band &= places > 1000
    computed = blocks(band)  # kept: the values are a view of its memory
    values = engine.known(computed)
    assert values is not None
    host = torch.arange(2048)
    expected = (host[:, None] >= host) & (host[:, None] - host < 300) & (host > 1000)
    assert values.tolist() == blocks(expected).tolist()
    band[0] = True  # a part of it: what the rest holds is not followed
    assert engine.known(blocks(band)) is None


@on_virtual_gpu
def test_a_view_of_what_was_read_is_not_told_again(engine: ValueEngine) -> None:
    import torch

    with torch.inference_mode():  # reshape and flatten are one operation each
        rewards = torch.empty(16, device="cuda")
        read = rewards.tolist()
        assert invented_values(engine) == 16
        assert rewards.reshape(4, 4).flatten().tolist() == read
        assert invented_values(engine) == 0
        assert rewards.view(4, 4).t().reshape(-1).tolist() == torch.tensor(read).view(4, 4).t().flatten().tolist()
        assert invented_values(engine) == 0


@on_virtual_gpu
def test_an_element_of_a_large_tensor_stays_what_it_was(engine: ValueEngine) -> None:
    import torch

    large = torch.empty(1024, 1024, device="cuda")
    assert large[3, 5].item() == large[3, 5].item()
    assert math.isfinite(large[3, 6].item())


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
def test_a_routing_map_too_large_to_compute_has_its_share_of_tokens(engine: ValueEngine) -> None:
    import torch

    experts, chosen = 256, 8
    for tokens in (16384, 2048):  # masks of 4 MiB, and of 512 KiB made from 2 MiB
        logits = torch.randn(tokens, 64, device="cuda") @ torch.randn(64, experts, device="cuda")
        _, indices = torch.topk(logits, chosen, dim=1)
        routing = torch.zeros_like(logits).int().scatter(1, indices, 1).bool()
        counts = routing.sum(dim=0).long()
        assert counts.tolist() == [tokens * chosen // experts] * experts
        by_expert = routing.T.contiguous()
        assert logits.T.contiguous().masked_select(by_expert).shape == (tokens * chosen,)
        assert by_expert.sum(dim=1).tolist() == counts.tolist()
        taken = logits.masked_select(routing)
        assert taken.shape == (tokens * chosen,)
        rows, columns = routing.nonzero(as_tuple=True)
        assert rows.shape == columns.shape == (tokens * chosen,)
        assert logits[routing].shape == (tokens * chosen,)


@on_virtual_gpu
def test_a_large_tensor_on_the_host_is_finite(engine: ValueEngine) -> None:
    import torch

    large = torch.empty(3000, 1000, device="cuda")
    host = large.cpu()
    assert torch.isfinite(host).all()
    target = torch.full((3000, 1000), float("nan"))
    target.copy_(large)
    assert torch.isfinite(target).all()
    assert engine.not_computed_on_host()[0] > 0
    assert invented_values(engine) > 0  # what isfinite() said


@on_virtual_gpu
def test_a_copy_that_the_host_can_hold_has_made_up_values_and_not_zeros(engine: ValueEngine) -> None:
    import torch

    large = torch.empty(512, 512, device="cuda") @ torch.empty(512, 512, device="cuda")
    host = large.cpu()
    assert math.isclose(host.norm().item(), 512, rel_tol=0.05)  # of 512 * 512 normal values
    assert invented_values(engine) == 512 * 512
    target = torch.empty(512, 512, pin_memory=True)
    assert torch.equal(target.copy_(large, non_blocking=True), host)
    assert (large.square().cpu() >= 0).all()
    assert torch.zeros(512, 512, device="cuda").cpu().count_nonzero() == 0
    assert torch.ones(2048, 1024, dtype=torch.bool, device="cuda").cpu().all()


@on_virtual_gpu
def test_offloaded_training_costs_the_host_nothing(engine: ValueEngine) -> None:
    import resource

    import torch

    def host_mib() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

    before = host_mib()
    weights = [torch.nn.Parameter(torch.randn(8192, 8192)) for _ in range(16)]  # 4 GiB, and as much for each of:
    optimizer = torch.optim.AdamW(weights)  # gradients and two states
    for _ in range(2):
        x = torch.ones(64, 8192, device="cuda")
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            for weight in weights:
                x = torch.nn.functional.linear(x, weight.to("cuda", non_blocking=True)).relu()
        x.sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert norm.item() > 0
    assert optimizer.state[weights[0]]["exp_avg"].shape == (8192, 8192)
    assert float(optimizer.state[weights[0]]["step"]) == 2
    assert host_mib() - before < 500


@on_virtual_gpu
def test_a_step_leaves_large_host_floats_out_only_if_it_has_some_itself(engine: ValueEngine) -> None:
    import torch

    from fakedist.gpu.bare_steps import ReadTape

    large = torch.randn(1408, 1024)  # as a script initialises its model
    engine.keep_reads(ReadTape())
    torch.ones(4).add_(1.0)
    engine.keep_reads(None)
    assert not engine.leaves_host_out()
    engine.keep_reads(ReadTape())
    large.mul_(2.0)
    engine.keep_reads(None)
    assert engine.leaves_host_out()


@on_virtual_gpu
def test_what_follows_from_large_host_floats_is_neither_known_nor_read(engine: ValueEngine) -> None:
    import torch

    large = torch.nn.Parameter(torch.randn(1408, 1024))
    half = large.to(torch.bfloat16)  # 2.75 MiB, which would be computed
    loaded = torch.ones(1408, 1024, dtype=torch.bfloat16)
    listed = torch.ones(1408, 1024, dtype=torch.bfloat16)
    with torch.no_grad():
        loaded.copy_(large)
        torch._foreach_copy_([listed, torch.ones(4)], [large, torch.zeros(4)])
        half.mul_(2.0)
    for host in (large, half, loaded, listed):
        assert engine.known(host) is None
        rows, eighth = host[:8].cuda(), torch.zeros(8, 1024, device="cuda")
        with torch.no_grad():
            eighth.copy_(host[8:16])
        assert engine.known(rows) is engine.known(eighth) is None
        assert host.cuda().shape == host.shape
    assert invented_values(engine) == 0
    assert half[0, 0].item() != 0
    assert half.float().norm().item() > 0
    assert invented_values(engine) == 2
    real = torch.ones(1408, 1024, dtype=torch.bfloat16)
    assert (real + 1).mean().item() == 2
    assert invented_values(engine) == 0


@on_virtual_gpu
def test_small_and_whole_numbers_are_computed_on_the_host_as_ever(engine: ValueEngine) -> None:
    import torch

    assert torch.arange(1 << 21).sum().item() == (1 << 20) * ((1 << 21) - 1)  # 16 MiB of integers
    assert torch.full((1 << 18,), 2.0).sum().item() == 1 << 19
    assert engine.not_computed_on_host() == (0, "")
    large = torch.full((1 << 22,), 2.0)
    assert large[5].item() != 2.0
    assert engine.not_computed_on_host()[0] > 0
    assert invented_values(engine) == 1


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
    assert invented_values(engine) == 4


@on_virtual_gpu
def test_probabilities_that_only_a_draw_reads_are_not_counted(engine: ValueEngine) -> None:
    import torch

    logits = torch.empty(4, 2048, device="cuda") @ torch.empty(2048, 2048, device="cuda")
    tokens = torch.multinomial(logits.softmax(-1), 1)
    assert invented_values(engine) == 0
    assert engine.known(tokens) is None
    assert len(tokens.tolist()) == 4
    assert invented_values(engine) == 4


@on_virtual_gpu
def test_an_output_that_is_given_gets_its_shape_on_the_host_too(engine: ValueEngine) -> None:
    import torch

    large = torch.empty(2048, 1024)
    output, total = large.new_empty(0), torch.full((1,), 7.0)
    assert torch.add(large, 1, out=output) is output
    assert output.shape == (2048, 1024)
    torch.sum(large, 0, True, out=total)
    assert total.shape == (1, 1024)
    assert sum(row.num_values for row in engine.invented()) == 1024


@on_virtual_gpu
def test_a_large_host_tensor_changes_its_shape_in_place(engine: ValueEngine) -> None:
    import torch

    def changed(device: str) -> list[tuple[int, ...]]:
        makes = [torch.empty(2048, 1024, device=device) for _ in range(6)]
        makes[0].t_()
        makes[1].unsqueeze_(0).squeeze_(0).transpose_(0, 1)
        makes[2].as_strided_((1024, 2048), (1, 1024))
        makes[3].resize_(4096, 512)
        makes[4].swapaxes_(0, 1)
        makes[5].set_(torch.empty(3000, 1000, device=device))
        return [tuple(made.shape) for made in makes]

    assert changed("cpu") == changed("cuda")
    assert changed("cpu")[:3] == [(1024, 2048)] * 3
    assert torch.nn.init.orthogonal_(torch.empty(512, 3136)).shape == (512, 3136)


@on_virtual_gpu
def test_what_another_rank_did_not_send_is_counted_where_the_script_reads_it(engine: ValueEngine) -> None:
    import torch

    reads: list[int] = []
    flags = torch.tensor([0, 0, 0], device="cuda")
    assert engine.not_sent(flags, lambda: reads.append(1))
    wanted = flags[1:] + 1
    assert reads == []
    assert wanted.tolist() == [1, 1]
    assert (len(reads), invented_values(engine)) == (1, 2)
    assert not engine.not_sent(torch.zeros(1 << 21, dtype=torch.int64, device="cuda"), lambda: reads.append(2))
    assert len(reads) == 1


@on_virtual_gpu
def test_a_saved_tensor_counts_its_values_and_not_its_bytes(engine: ValueEngine) -> None:
    import io

    import torch

    product = torch.randn(512, 4096, device="cuda") @ torch.randn(4096, 4096, device="cuda")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        large, small = product.to(dtype), product.sum(0).to(dtype)
        torch.save({"large": large}, io.BytesIO())
        assert invented_values(engine) == large.numel()
        torch.save([small[:100]], io.BytesIO())  # saves its whole storage
        assert invented_values(engine) == 4096
    large.untyped_storage().cpu()
    assert invented_values(engine) == large.nbytes // 4
    bits = (product > 0).to(torch.uint8)
    torch.save(bits, io.BytesIO())
    assert invented_values(engine) == bits.numel()
    torch.empty(4096, 512, dtype=torch.uint8).copy_((product.T < 0).to(torch.uint8))
    assert invented_values(engine) == bits.numel()


@on_virtual_gpu
def test_assertions_on_values_that_no_kernel_computed_hold(engine: ValueEngine) -> None:
    import torch

    def scores() -> torch.Tensor:
        return torch.empty(2048, 1024, device="cuda") @ torch.empty(1024, 2048, device="cuda")

    def is_valid(values: torch.Tensor) -> bool:
        return bool((values >= 0).all())

    rounds = 0
    for _ in range(4):  # a coin would fail one of these
        assert torch.all(scores() >= 0)
        assert is_valid(scores())
        assert not (scores() > 0.5).any().item()
        assert scores().min().item() >= 3
        torch._assert((scores() > 0).all(), "not positive")
        torch.testing.assert_close(scores(), scores())
        if (scores() < 0).any():
            raise ValueError("negative")
        if not torch.equal(scores(), scores()):
            raise ValueError("different")
        if len((scores() > 0).nonzero()) > 0:
            raise ValueError("positive")
        assert scores()[scores() > 0].numel() == 0
        torch._check(bool((scores() > 0).all()), lambda: "not positive")
        while (scores() > 0).any() or torch.where(scores()[:2, :2] > 0)[0].shape[0]:
            rounds += 1
        while (scores() > 0).nonzero().numel():
            rounds += 1
    assert rounds == 0
    assert (scores() > 1e4).any().item() is False
    notes = {note.code: note.text for note in engine.decisions()}
    assert notes["assertions_hold"].count("test_values_made_up.py:") == 4
    assert "more lines" in notes["assertions_hold"]
    rows, idle = engine.host.inventions.take()
    assert len(rows) > len(idle) > 5  # of the loop's condition, a figure may depend


@on_virtual_gpu
def test_bounds_and_distributions_that_are_known_decide(engine: ValueEngine) -> None:
    import torch

    boxes = torch.rand(7, 1 << 19, device="cuda") * 800 + 1
    iou = boxes / (boxes + 5)
    assert not bool((iou < 0).any())
    assert bool((boxes > 700).any())
    assert bool(torch.randn(1 << 20, device="cuda").mul_(0.02).abs().lt(2).all())
    weight = torch.empty(1 << 20, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.nn.init.trunc_normal_(weight, std=0.02)
    assert torch.cuda.max_memory_allocated() - before < weight.nbytes
    assert invented_values(engine) == 0
    assert engine.decisions() == []
    engine.host.spoil(boxes)
    if bool((boxes < 0).any()):
        pass
    assert invented_values(engine) == 1


@on_virtual_gpu
def test_reads_that_change_nothing_are_counted_apart(engine: ValueEngine) -> None:
    import io

    import torch

    def norm() -> torch.Tensor:
        return (torch.empty(2048, 1024, device="cuda") @ torch.empty(1024, 2048, device="cuda")).norm()

    logged = {"norm": norm().item()}
    print(f"{norm().item():.2f}", logged, file=io.StringIO())
    weight = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        weight.square().sum().backward()
    rows, idle = engine.host.inventions.take()
    assert len(rows) >= 3
    assert idle == list(range(len(rows)))
    torch.nn.init.trunc_normal_(torch.empty(16 << 20), std=0.02)
    rows, idle = engine.host.inventions.take()
    assert rows
    assert idle == list(range(len(rows)))
    best = 1.0
    if norm().item() < best:
        best = 0.0
    rows, idle = engine.host.inventions.take()
    assert (len(rows), idle) == (1, [])
