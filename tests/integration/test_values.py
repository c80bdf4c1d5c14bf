"""Small tensors on the virtual GPU: they hold what a real GPU's would."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.support.virtual_worker import invented_values, on_virtual_gpu

if TYPE_CHECKING:
    import torch

    from fakedist.gpu.values.engine import ValueEngine


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
def test_zeros_replace_what_a_tensor_held(engine: ValueEngine) -> None:
    import torch

    used = torch.full((64, 1024), 3.0, device="cuda")
    address = used.data_ptr()
    del used
    fresh = torch.zeros(64, 1024, device="cuda")  # the same block
    assert fresh.data_ptr() == address
    assert fresh.sum().item() == 0
    part = torch.ones(8, 8, device="cuda")
    part[:, ::2].zero_()  # not contiguous
    assert part.sum().item() == 32
    part[2:4].zero_()
    assert part.sum().item() == 24
    assert torch.zeros_like(part).count_nonzero().item() == 0
    assert invented_values(engine) == 0


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
    assert buffer.tolist() == [0, 0, 5, 6, 0, 0, 0, 0]
    assert invented_values(engine) == 6
    assert (buffer + 1).tolist() == [1, 1, 6, 7, 1, 1, 1, 1]
    assert invented_values(engine) == 0


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
def test_what_comes_from_the_host_has_values(engine: ValueEngine) -> None:
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
    is_three, num_allocations = x == 3, torch.cuda.memory_stats()["allocation.all.allocated"]
    x.index_put_((is_three,), torch.tensor(7))  # torch fills, and counts nothing
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == num_allocations
    assert x.tolist() == [7, 1, 7, 0]
    assert torch.combinations(x[:3]).shape == (3, 2)
    assert invented_values(engine) == 0


@on_virtual_gpu
def test_an_unseeded_generator_is_the_same_in_every_run(engine: ValueEngine) -> None:
    import torch

    from fakedist.gpu.values.engine import ValueEngine

    first = torch.rand(4, device="cuda").tolist()
    ValueEngine(0)
    assert torch.rand(4, device="cuda").tolist() == first
    ValueEngine(1)
    assert torch.rand(4, device="cuda").tolist() != first


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
def test_a_tensor_of_scalars_of_the_device_has_their_values(engine: ValueEngine) -> None:
    """torch.tensor reads them where no operation of ours is seen (gradient norms, one by one, of Megatron)."""
    import torch

    norm = torch.ones(4 << 20, device="cuda").exp().norm()  # of more than is computed
    assert torch.tensor([norm, norm]).tolist() == [norm.item(), norm.item()]
    assert torch.tensor([[norm]], device="cuda").item() == norm.item() > 0
    assert torch.tensor([norm.int()]).tolist() == [int(norm)]
    assert invented_values(engine) == 1


@on_virtual_gpu
def test_a_replay_writes_what_its_capture_computed(engine: ValueEngine) -> None:
    """Graphs of one pool share memory: a copy is replayed, of a mask over which another graph has written."""
    import torch

    logits, pool = torch.rand(256, 8, device="cuda"), torch.cuda.graph_pool_handle()
    masks, graphs = [], []
    with engine.below_dispatch():
        for _ in range(2):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], pool=pool):
                indices = torch.topk(logits, 2, dim=1).indices
                masks.append(torch.zeros(256, 8, device="cuda").scatter(1, indices, 1.0).bool().clone())
                for size in (2048, 8192, 16384):
                    torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        expected = masks[0].cpu()
        assert int(expected.sum()) == 512
        for graph, mask in zip(graphs, masks, strict=True):
            graph.replay()
            assert torch.equal(mask.cpu(), expected)
            # As Transformer Engine sees a graph's results: a tensor made from their address.
            where = {"shape": (256, 8), "typestr": "|b1", "data": (mask.data_ptr(), False), "version": 3}
            seen = torch.as_tensor(type("Seen", (), {"__cuda_array_interface__": where})(), device="cuda")
            assert seen.sum(dim=0).tolist() == expected.sum(dim=0).tolist()
    assert invented_values(engine) == 0


@on_virtual_gpu
def test_lazy_conjugates_and_negatives_have_their_values(engine: ValueEngine) -> None:
    import torch

    a, b = torch.tensor([[1 + 2j, 3j], [2.0, 1 - 1j]]), torch.tensor([[1j, 1], [0, 2 - 1j]])
    there = a.cuda(), b.cuda()
    for run in (
        lambda a, b: a.conj() @ b,
        lambda a, b: b @ a.mH,
        lambda a, b: a.conj().clone(),
        lambda a, b: a.conj().imag.clone(),
        lambda a, b: torch.empty_like(a).copy_(a.conj()),
        lambda a, b: torch.zeros_like(a).conj().add_(b.conj()),
    ):
        expected = run(a, b).resolve_conj().resolve_neg()
        assert torch.allclose(run(*there).cpu().resolve_conj().resolve_neg(), expected)
    assert there[0].conj()[0, 0].item() == 1 - 2j
    assert there[0].conj().tolist() == a.conj().tolist()
    assert invented_values(engine) == 0


@on_virtual_gpu
def test_a_tensor_of_zeros_without_memory_is_zero(engine: ValueEngine) -> None:
    import torch

    nothing = torch._efficientzerotensor((3,), device="cuda")
    assert nothing.data_ptr() == 0
    assert nothing.cpu().tolist() == [0, 0, 0]
    assert torch.ones(3, device="cuda").copy_(nothing).tolist() == [0, 0, 0]
    assert (torch.ones(3, device="cuda") + nothing).tolist() == [1, 1, 1]
    assert nothing.clone().tolist() == [0, 0, 0]
    assert invented_values(engine) == 0


@on_virtual_gpu
def test_sparse_tensors_have_the_values_of_their_parts(engine: ValueEngine) -> None:
    import torch

    where = torch.tensor([[0, 1, 1], [2, 0, 0]])
    near = torch.sparse_coo_tensor(where, torch.tensor([3.0, 4.0, 5.0]), (2, 4))
    there = torch.sparse_coo_tensor(where.cuda(), torch.tensor([3.0, 4.0, 5.0], device="cuda"), (2, 4))
    dense = torch.arange(8.0).view(2, 4)
    assert there.to_dense().tolist() == near.to_dense().tolist()
    assert there.coalesce()._nnz() == 2
    assert (dense.cuda() + there).tolist() == (dense + near).tolist()
    changed = dense.cuda()
    changed.add_(there, alpha=-0.5)
    assert changed.tolist() == dense.add(near, alpha=-0.5).tolist()
    rows = there.to_dense().to_sparse_csr()
    assert (rows @ torch.ones(4, device="cuda")).tolist() == [3, 9]
    assert torch.sparse.sum(there.coalesce()).item() == 12
    assert invented_values(engine) == 0
    # Where the values are not known, what was written by them is not known either.
    large = torch.sparse_coo_tensor(
        torch.zeros(1, 1 << 20, dtype=torch.int64, device="cuda"), torch.randn(1 << 20, device="cuda"), (4,)
    )
    known = torch.ones(4, device="cuda")
    known.add_(large)
    known.tolist()
    assert invented_values(engine) == 4


@on_virtual_gpu
def test_quantized_tensors_have_values_and_made_up_ones_are_counted(engine: ValueEngine) -> None:
    import torch

    numbers = torch.tensor([[-1.0, 0.26], [2.0, 30.0]])
    for quantize in (
        lambda x: torch.quantize_per_tensor(x, 0.1, 2, torch.qint8),
        lambda x: torch.quantize_per_tensor(x, *(torch.tensor(v, device=x.device) for v in (0.1, 2)), torch.qint8),
        lambda x: torch.quantize_per_channel(
            x, torch.tensor([0.1, 0.5], device=x.device), torch.tensor([2, 0], device=x.device), 0, torch.qint8
        ),
    ):
        there, near = quantize(numbers.cuda()), quantize(numbers)
        assert there.dequantize().tolist() == near.dequantize().tolist()
        assert there.int_repr().tolist() == near.int_repr().tolist()
        assert there.clone().cpu().dequantize().tolist() == near.dequantize().tolist()
    assert invented_values(engine) == 0
    unknown = torch.quantize_per_tensor(torch.empty(300, 300, device="cuda"), 0.1, 0, torch.qint8)
    unknown.int_repr()[0, :3].tolist()
    assert invented_values(engine) == 3


def _given(value: float, size: int = 64) -> torch.Tensor:
    import torch

    return torch.full((size,), value, device="cuda")


@on_virtual_gpu
def test_what_kernels_of_triton_write_holds_nothing_and_what_they_read_stays(engine: ValueEngine) -> None:
    import torch

    from tests.support import writing_kernels as kernels

    launches: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
        kernel.__name__: functools.partial(lambda kernel, x, y: kernel[(1,)](x, y, size=64), kernel)
        for kernel in (
            *(
                kernels.through_helpers,
                kernels.through_a_call,
                kernels.in_assembly,
                kernels.in_a_loop,
                kernels.in_gluon,
            ),
        )
    }
    launches["through_a_tuple"] = lambda x, y: kernels.through_a_tuple[(1,)]((x, y), size=64)

    @torch.library.custom_op("fakedist_tests::written", mutates_args=("y",), schema="(Tensor x, Tensor(a!) y) -> ()")
    def written(x: torch.Tensor, y: torch.Tensor) -> None:
        kernels.through_helpers[(1,)](x, y, size=64)

    launches["custom_op"] = written
    found = {}
    for name, launch in launches.items():
        x, y = _given(3.0), _given(0.0)
        with engine.below_dispatch():
            launch(x, y)
        found[name] = (engine.is_undefined(x), engine.is_undefined(y))
    assert found == dict.fromkeys(launches, (False, True)), found
    x, y = _given(3.0), _given(0.0)
    kernels.at_addresses_in_memory[(1,)](torch.tensor([y.data_ptr()], device="cuda"), x, size=64)
    assert engine.is_undefined(y)


@on_virtual_gpu
def test_all_that_an_unknown_kernel_gets_holds_nothing(engine: ValueEngine) -> None:
    import torch

    source = (
        'extern "C" __global__ void five(float* y, const float* x, int n) { if (threadIdx.x < n) y[threadIdx.x] = 5; }'
    )
    five = torch.cuda._compile_kernel(source, "five")

    @torch.library.custom_op("fakedist_tests::fives", mutates_args=(), schema="(Tensor x) -> Tensor")
    def fives(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        five((1, 1, 1), (64, 1, 1), (y, x, 64))
        return y

    x, y, other = _given(3.0), _given(0.0), _given(1.0)
    five((1, 1, 1), (64, 1, 1), (y, x, 64))
    assert [engine.is_undefined(tensor) for tensor in (x, y, other)] == [True, True, False]
    y.fill_(2.0)
    assert y.tolist() == [2.0] * 64
    # What its schema says that an operation does not write, it does not.
    x = _given(3.0)
    assert engine.is_undefined(fives(x))
    assert not engine.is_undefined(x)
    large = torch.zeros(1 << 20, device="cuda")
    assert not large.any()
    five((1, 1, 1), (64, 1, 1), (large, other, 64))
    assert invented_values(engine) == 0
    large.sum().item()
    assert invented_values(engine) == 1


@on_virtual_gpu
def test_operations_whose_kernels_are_made_of_others_are_computed(engine: ValueEngine) -> None:
    import torch

    torch.manual_seed(0)
    matrix, row = torch.randn(8, 8), torch.randint(0, 9, (3000,))
    for inference in (False, True):
        with torch.inference_mode(inference):
            near, far = matrix.clone(), matrix.cuda()
            for name, call in {
                "matrix_exp": torch.matrix_exp,
                "mvlgamma_": lambda x: (x.abs() + 3).mvlgamma_(2),
                "mode": lambda x: (row.to(x.device) + x[0, 0]).mode().values,
                "isin": lambda x: torch.isin(row.to(x.device), row[:500].to(x.device)),
                "chunk of an expanded one": lambda x: x.sum().expand(1024, 256).chunk(8)[1].sum(0),
                "sampled_addmm": lambda x: torch.sparse.sampled_addmm(
                    torch.eye(8).to(x.device).to_sparse_csr(), x, x
                ).values(),
            }.items():
                found, expected = call(far).cpu(), call(near)
                assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4), name
    assert invented_values(engine) == 0


@on_virtual_gpu
def test_fused_sgd_keeps_the_values_of_parameters(engine: ValueEngine) -> None:
    import torch

    weights: list[torch.Tensor] = []
    for device in ("cpu", "cuda"):
        weight = torch.nn.Parameter(torch.arange(4.0, device=device))
        options = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "fused": True}
        optimizer = torch.optim.SGD([weight], 0.1, **options)  # type: ignore[arg-type]
        for _ in range(3):
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
        weights.append(weight.detach().cpu())
    assert torch.allclose(weights[0], weights[1])
    assert invented_values(engine) == 0


@on_virtual_gpu
def test_results_whose_size_depends_on_values_are_written_to_out(engine: ValueEngine) -> None:
    import torch

    values = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    on_gpu = values.cuda()
    for held in (0, 4):
        rows = torch.full((held,), 7, device="cuda")
        assert torch.nonzero(on_gpu, out=rows) is rows
        assert rows.tolist() == values.nonzero().tolist()
        chosen = torch.full((held,), 7.0, device="cuda")
        torch.masked_select(on_gpu, on_gpu > 0, out=chosen)
        assert chosen.tolist() == [1.0, 3.0]
    assert invented_values(engine) == 0
    large = torch.randn(1024, 1024, device="cuda")
    assert not engine.host.holds(torch.nonzero(large > 0, out=rows))
