"""Training: recurrent, lazy, scripted and swapped modules, optimizers that are compiled, and RPC."""

from __future__ import annotations

import copy
from typing import Any

import torch
from cases import Rank, case, raises, same
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

UNSEEN = "the values are not looked at"
COMPILED = "inductor/test_compiled_optimizers.py: "


def batch(rank: Rank, *shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape or (2, 5, 4)).to(rank.device)


def trained(net: nn.Module, out: torch.Tensor) -> None:
    """Assert that a backward gives every parameter a gradient, and that a step can follow."""
    out.sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.shape == parameter.shape
    torch.optim.SGD(net.parameters(), lr=0.1).step()


@case("test_nn.py: test_LSTM_cell", "a cell's states keep their shapes, and train", UNSEEN)
def lstm_cell(rank: Rank) -> None:
    net = nn.LSTMCell(4, 6).to(rank.device)
    state: Any = (rank.full(0, 2, 6), rank.full(0, 2, 6))
    for _ in range(3):
        state = net(batch(rank, 2, 4), state)
    assert [tuple(each.shape) for each in state] == [(2, 6), (2, 6)]
    trained(net, state[0] + state[1])


@case("test_nn.py: test_RNN_cell", "a plain cell and a GRU's keep their shapes, and train", UNSEEN)
def other_cells(rank: Rank) -> None:
    for kind in (nn.RNNCell, nn.GRUCell):
        net = kind(4, 6).to(rank.device)
        out = net(batch(rank, 2, 4), net(batch(rank, 2, 4)))
        assert out.shape == (2, 6)
        trained(net, out)


@case("test_nn.py: test_rnn_retain_variables", "a graph that is kept runs backwards twice", UNSEEN)
def twice(rank: Rank) -> None:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        net = kind(4, 6, num_layers=2).to(rank.device)
        out = net(batch(rank))[0].sum()
        out.backward(retain_graph=True)
        out.backward(retain_graph=True)
        assert all(parameter.grad is not None for parameter in net.parameters())


@case("test_nn.py: test_rnn_initial_hidden_state", "no first state is a state of zeros: shapes of outputs", UNSEEN)
def first_state(rank: Rank) -> None:
    for kind in (nn.RNN, nn.GRU):
        net = kind(4, 6).to(rank.device)
        for state in (None, rank.full(0, 1, 5, 6)):
            out, last = net(batch(rank), state)
            assert (out.shape, last.shape) == ((2, 5, 6), (1, 5, 6))


@case("test_nn.py: test_RNN_change_dropout", "dropout between layers may change; one layer less has none", UNSEEN)
def dropout(rank: Rank) -> None:
    net = nn.LSTM(4, 6, num_layers=2, dropout=0.5).to(rank.device)
    for share in (0.5, 0.0):
        net.dropout = share
        out, _ = net(batch(rank))
        assert out.shape == (2, 5, 6)
    trained(net, out)


@case("test_nn.py: test_rnn_args_check", "wrong sizes are refused with torch's own words")
def wrong_sizes(rank: Rank) -> None:
    net = nn.GRU(4, 6).to(rank.device)
    raises(lambda: net(batch(rank, 2, 5, 3)), "input.size(-1) must be equal to input_size", "Expected")
    raises(lambda: net(batch(rank), rank.full(0, 1, 5, 7)), "Expected hidden size")


@case("test_nn.py: test_cudnn_weight_format", "weights that no longer lie in one piece still train", UNSEEN)
def weights_apart(rank: Rank) -> None:
    net = nn.LSTM(4, 6, bidirectional=True).to(rank.device)
    net.weight_hh_l0 = nn.Parameter(net.weight_hh_l0.detach().clone())
    out, _ = net(batch(rank))
    assert out.shape == (2, 5, 12)
    trained(net, out)


@case("nn/test_packed_sequence.py: test_pack_padded_sequence", "a batch of other lengths packs and unpacks")
def packed(rank: Rank) -> None:
    padded = batch(rank, 3, 2, 4)
    padded[2, 1] = 0
    whole = pack_padded_sequence(padded, torch.tensor([3, 2]))
    assert whole.batch_sizes.tolist() == [2, 2, 1]
    found, lengths = pad_packed_sequence(whole)
    same(found, padded)
    assert lengths.tolist() == [3, 2]


@case("test_nn.py: test_variable_sequence", "a packed batch trains an LSTM", UNSEEN)
def packed_training(rank: Rank) -> None:
    net = nn.LSTM(4, 6).to(rank.device)
    out, _ = net(pack_padded_sequence(batch(rank, 3, 2, 4), torch.tensor([3, 2])))
    assert out.data.shape == (5, 6)
    trained(net, out.data)


@case("nn/test_lazy_modules.py: test_lazy_linear", "a lazy layer takes its sizes from what it gets first")
def lazy(rank: Rank) -> None:
    net = nn.LazyLinear(3).to(rank.device)
    assert isinstance(net.weight, nn.UninitializedParameter)
    out = net(batch(rank, 2, 4))
    assert type(net) is nn.Linear
    assert net.weight.shape == (3, 4)
    trained(net, out)


@case("nn/test_lazy_modules.py: test_chained_initialization", "lazy layers in a row, and a lazy norm")
def lazy_chain(rank: Rank) -> None:
    net = nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2)).to(rank.device)
    trained(net, net(batch(rank, 3, 4)))
    assert [tuple(p.shape) for p in net.parameters()] == [(6, 4), (6,), (6,), (6,), (2, 6), (2,)]


@case("nn/test_lazy_modules.py: test_lazy_conv2d", "a lazy convolution", UNSEEN)
def lazy_convolution(rank: Rank) -> None:
    net = nn.LazyConv2d(2, 3).to(rank.device)
    trained(net, net(batch(rank, 1, 4, 5, 5)))
    assert net.weight.shape == (2, 4, 3, 3)


@case("test_jit.py: test_script_module", "a scripted module gives what the module gives, and trains")
def scripted(rank: Rank) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).to(rank.device)
    compiled = torch.jit.script(net)
    for _ in range(3):
        same(compiled(batch(rank, 2, 4)), net(batch(rank, 2, 4)))
    trained(compiled, compiled(batch(rank, 2, 4)))


@case("jit/test_tracer.py: test_trace_module", "a traced module gives what the module gives, and trains")
def traced(rank: Rank) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).to(rank.device)
    recorded = torch.jit.trace(net, batch(rank, 2, 4))
    for _ in range(3):
        same(recorded(batch(rank, 2, 4)), net(batch(rank, 2, 4)))
    trained(recorded, recorded(batch(rank, 2, 4)))


@case("test_torch.py: test_swap_basic", "two tensors swap what they hold and keep their identity")
def swapped(rank: Rank) -> None:
    first, second = nn.Parameter(rank.full(1, 3)), nn.Parameter(rank.full(2, 4))
    ids = (id(first), id(second))
    torch.utils.swap_tensors(first, second)
    assert (id(first), id(second)) == ids
    same(first, torch.full((4,), 2.0))
    same(second, torch.full((3,), 1.0))


@case("test_nn.py: test_swap_module_params_poisons_acc_grad", "to() swaps parameters after a step")
def swapped_module(rank: Rank) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net = nn.Linear(4, 3).to(rank.device)
        trained(net, net(batch(rank, 2, 4)))
        net.zero_grad()
        ids = [id(parameter) for parameter in net.parameters()]
        net.double()
        assert [id(parameter) for parameter in net.parameters()] == ids
        trained(net, net(batch(rank, 2, 4).double()))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _steps(rank: Rank, make: Any, compiled: bool) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(rank.device)
    optimizer = make(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
    for _ in range(2):
        step()
    return net


def _same_compiled(rank: Rank, make: Any) -> None:
    wanted, found = _steps(rank, make, False), _steps(rank, make, True)
    for first, second in zip(found.parameters(), wanted.parameters(), strict=True):
        same(first, second)


@case(COMPILED + "test_sgd", "compiled steps are those of the optimizer", "the backend is aot_eager")
def compiled_sgd(rank: Rank) -> None:
    _same_compiled(rank, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))


@case(COMPILED + "test_adam", "compiled steps are those of the optimizer", "the backend is aot_eager")
def compiled_adam(rank: Rank) -> None:
    _same_compiled(rank, lambda parameters: torch.optim.Adam(parameters, lr=0.1))


@case(COMPILED + "test_adamw (foreach)", "compiled steps are those of the optimizer", "the backend is aot_eager")
def compiled_adamw(rank: Rank) -> None:
    _same_compiled(rank, lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True))


@case(COMPILED + "test_adagrad", "compiled steps are those of the optimizer", "the backend is aot_eager")
def compiled_adagrad(rank: Rank) -> None:
    _same_compiled(rank, lambda parameters: torch.optim.Adagrad(parameters, lr=0.1))


@case("test_optim.py: test_state_dict_deterministic", "an optimizer that loads a state goes on as the other")
def loaded_state(rank: Rank) -> None:
    torch.manual_seed(0)
    first = nn.Linear(4, 4).to(rank.device)
    second = copy.deepcopy(first)
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.1) for net in (first, second)]
    for net, optimizer, times in ((first, optimizers[0], 2),):
        for _ in range(times):
            net(batch(rank, 2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    second.load_state_dict(first.state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for net, optimizer in zip((first, second), optimizers, strict=True):
        net(batch(rank, 2, 4)).sum().backward()
        optimizer.step()
    same(second.weight, first.weight)


@case("distributed/rpc: rpc_test.py: test_self_add", "a worker calls itself", "a world of one worker")
def rpc_of_one(rank: Rank) -> None:
    import torch.distributed.rpc as rpc

    rpc.init_rpc("alone", rank=0, world_size=1)
    same(rpc.rpc_sync("alone", torch.add, (torch.ones(2), 1)), 2)
    rpc.shutdown()
