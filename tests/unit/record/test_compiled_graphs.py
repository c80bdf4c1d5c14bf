"""Compiled graphs: when torch compiles, modules by number, and the lines of generated code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._higher_order_ops import triton_kernel_wrap
from torch.fx.experimental.proxy_tensor import make_fx

from fakedist.gpu.values.graph_values import GraphValues
from fakedist.gpu.values.host import Host
from fakedist.record.compiled_graphs import (
    COMPILED,
    Compilations,
    Generated,
    IntegerPart,
    Modules,
    compilations,
    integers_of,
    parse_generated,
    recomputed_buffers,
    with_modules,
)
from fakedist.record.graph_layers import Placing, find_layers, is_dynamos
from fakedist.record.module_names import LayerTable, remember_parents

CODE = """
async_compile = None

class Runner:
    def call(self, args):
        primals_1, mm, tangents_1 = args
        args.clear()
        with torch.cuda._DeviceGuard(0):
            buf0 = empty_strided_cuda((8, 8), (8, 1), torch.float32)
            # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.mm]
            extern_kernels.mm(primals_1, tangents_1, out=buf0)
            buf1 = mm; del mm  # reuse
            buf2 = empty_strided_cuda((8, ), (1, ), torch.float32)
            triton_poi_fused_add_0.run(buf1, buf0, buf2, 64, stream=raw_stream0)
            buf3 = torch.ops.aten.attention.default(buf0)
            del buf0
            buf4 = buf3[0]
            buf5 = reinterpret_tensor(buf4, (64, ), (1, ), 0); del buf4  # reuse
            buf6 = reinterpret_tensor(buf5, (8, 8), (8, 1), 0)
            triton_poi_fused_mul_1.run(buf5, 64, stream=raw_stream0)
        return (buf1, buf6, )
"""
MODULES = {"buf0": 0, "buf1": 1, "buf2": 2, "buf3": 3, "buf4": 3, "buf5": 4}


def line_of(text: str, source: str = CODE) -> int:
    return next(number for number, line in enumerate(source.splitlines(), start=1) if text in line)


def generated(modules: dict[str, int] = MODULES, source: str = CODE) -> Generated:
    parsed = parse_generated(with_modules(source, modules))
    assert parsed is not None
    return parsed


def test_what_a_statement_works_for_is_the_module_of_what_it_writes() -> None:
    lines = generated().lines
    expected = {"buf0 = empty": 0, "mm(primals": 0, "add_0": 2, "attention": 3, "mul_1": 4}
    assert {text: lines[line_of(text)] for text in expected} == expected
    assert line_of("return") not in lines
    unknown = generated(MODULES | {"buf0": COMPILED})
    assert unknown.lines[line_of("buf0 = empty")] == COMPILED


def test_memory_that_changes_hands_is_followed_to_who_allocated_it_or_to_an_input() -> None:
    allocated = (line_of("buf3 = "), line_of("buf5 ="), 4)  # buf6 is only another name
    assert generated().holders == [(-2, line_of("buf1 = mm"), 1), allocated]  # the second input
    part = generated(source=CODE.replace("def call(self, args)", "def partition_0(args)"))  # has other inputs
    assert part.holders == [allocated]


def test_a_graph_that_computes_no_integers_has_none_to_follow() -> None:
    def graph(x: torch.Tensor, more: int) -> fx.Graph:
        return make_fx(lambda x: (x > more).sum() if more else x * 2, tracing_mode="fake")(x).graph

    assert integers_of(graph(torch.ones(3), 0), {}) is None
    assert integers_of(graph(torch.ones(3), 1), {}) is not None


def test_what_a_triton_kernel_of_the_script_writes_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A histogram: ``counts`` is zeros, to which the kernel adds; ``index`` is only read."""
    monkeypatch.setattr(triton_kernel_wrap, "get_mutated_tensors", lambda kernel, constants, given, descriptors: ["y"])
    counts = torch.zeros(8, dtype=torch.int64)
    graph = fx.Graph()
    index = graph.placeholder("index")
    made = graph.call_function(torch.ops.aten.zeros.default, ([8],), {"dtype": torch.int64})
    before = graph.call_function(torch.ops.aten.add.Tensor, (made, 1))
    call = {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1,)], "tma_descriptor_metadata": {}}
    kernel = {**call, "kwargs": {"x": index, "y": made, "n": 8}}
    graph.call_function(triton_kernel_wrap.triton_kernel_wrapper_mutation, (), kernel)
    after = graph.call_function(torch.ops.aten.add.Tensor, (made, 1))
    read = graph.call_function(torch.ops.aten.add.Tensor, (index, 1))
    graph.output((made, before, after, read))
    for node in (index, made, before, after, read):
        node.meta["val"] = counts
    part = integers_of(graph, {})
    assert part is not None
    assert part.outputs == {1: before.name, 3: read.name}


def test_what_follows_from_the_result_of_an_operation_that_the_graph_calls_is_of_its_part() -> None:
    """A router's choices: ``topk`` is called, its logits have no values; a kernel makes counts of its indices."""

    def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = logits.topk(2, -1).indices
        return torch.zeros(70_000, 4, dtype=torch.bool).scatter(-1, chosen, True).sum(0), logits * 2

    logits = torch.randn(70_000, 4)
    graph = make_fx(route, tracing_mode="fake")(logits).graph
    chosen, counts = (next(node for node in graph.nodes if node.name == name) for name in ("getitem_1", "sum_1"))
    called = SimpleNamespace(origin_node=chosen, op_overload=torch.ops.aten.topk.default)
    part = integers_of(graph, {"buf6": called, "buf9": SimpleNamespace(origin_node=counts)})
    assert part is not None
    assert (part.results, part.buffers, part.inputs) == ({chosen.name: "buf6"}, {"buf9": counts.name}, {})
    assert IntegerPart.from_json(part.as_json()) == part
    run = GraphValues(Host(0)).begin(part, [logits])
    assert run.known(counts.name) is None
    indices = logits.topk(2, -1).indices
    run.computed({chosen.name: indices})
    assert (known := run.known(counts.name)) is not None
    assert known.tolist() == indices.flatten().bincount(minlength=4).tolist()


def test_code_that_was_compiled_without_us_tells_nothing() -> None:
    assert parse_generated(CODE) is None
    assert parse_generated("") is None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])


def graph_of(*stacks: list[tuple[nn.Module, str]], key: str = "nn_module_stack") -> fx.GraphModule:
    """A graph of one addition after another, each in the modules that are given, outermost first."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    for stack in stacks:
        node = graph.call_function(torch.add, (node, 1))
        if stack:
            node.meta[key] = {str(id(module)): (path, type(module)) for module, path in stack}
    graph.output(node)
    return fx.GraphModule(nn.Module(), graph)


def block_graph(block: Block) -> fx.GraphModule:
    return graph_of([(block.up, "L['self'].up")], [], [(block.down, "L['self'].down")])


def test_nodes_of_a_backward_have_the_numbers_of_the_forwards() -> None:
    block = Block()
    modules = Modules(block_graph(block), calling=0)
    backward = graph_of([(block.down, "L['self'].down")], [(block.up, "L['self'].up")], key="fwd_nn_module_stack")
    assert modules.division(backward)[1:3] == (1, 0)
    assert modules.division(block_graph(block)) == (COMPILED, 0, COMPILED, 1, COMPILED)


def test_alike_graphs_of_other_modules_share_a_caches_key_and_those_divided_otherwise_do_not() -> None:
    def key(graph: fx.GraphModule) -> Any:
        return Modules(graph, calling=0).division(graph)

    one, other = Block(), Block()
    alike = graph_of([(other.up, "L['self'].q")], [], [(other.down, "L['self'].k")])
    divided = graph_of([(one.up, "L['self'].up")], [(one.down, "L['self'].down")], [(one.down, "L['self'].down")])
    assert key(block_graph(one)) == key(alike)
    assert key(block_graph(one)) != key(divided)


def test_a_buffer_is_of_the_last_node_that_is_fused_into_it() -> None:
    block = Block()
    graph = block_graph(block)
    _, up, plain, down, _ = graph.graph.nodes
    buffers = {"buf0": SimpleNamespace(origins=[down, up]), "buf1": SimpleNamespace(origins=[up, plain])} | {
        "buf2": SimpleNamespace(origins=[], origin_node=up), "buf3": SimpleNamespace(origins=[])
    }  # fmt: skip
    lowering = SimpleNamespace(graph=graph.graph, name_to_buffer=buffers)
    numbers = Modules(graph, calling=0).buffer_numbers(lowering)
    assert numbers == {"buf0": 1, "buf1": COMPILED, "buf2": 0, "buf3": COMPILED}


def test_layers_of_code_that_one_block_compiled_are_another_blocks_where_that_one_calls_it() -> None:
    table = LayerTable()
    with remember_parents(table):
        net = Net()
    first, second = (table.layer(block) for block in net.blocks)
    modules = Modules(block_graph(net.blocks[0]), calling=first)  # type: ignore[arg-type]
    find_layers(modules, table)
    assert [table.name(layer) for layer in modules.layers] == ["blocks.0.up", "blocks.0.down"]
    placing = Placing(table, Compilations(lambda _: None, lambda: first))
    assert [table.name(placing._moved(layer, first, second)) for layer in modules.layers] == [
        "blocks.1.up",
        "blocks.1.down",
    ]
    assert placing._moved(-1, first, second) == second


def test_pieces_that_dynamo_cuts_a_graph_into_are_no_layers_and_the_scripts_own_graphs_are() -> None:
    class Piece(nn.Module):
        pass

    Piece.__module__ = "torch._dynamo.backends.distributed"
    split = graph_of([])
    assert not is_dynamos(split)
    split.add_module("submod_0", Piece())
    assert is_dynamos(split)
    assert is_dynamos(Piece())
    assert is_dynamos(torch.compile(split))  # torch 2.15 calls the cut graph through one of these
    assert not is_dynamos(torch.compile(graph_of([])))
    assert not is_dynamos(torch.compile(nn.Linear(2, 2)))


def test_each_compilation_is_reported_with_its_end() -> None:
    reported: list[bool] = []

    def double(values: torch.Tensor) -> torch.Tensor:
        return values * 2

    torch._dynamo.reset()
    with compilations(reported.append):
        compiled = torch.compile(double, backend="eager", dynamic=False)
        compiled(torch.ones(2))
        assert reported == [True, False]
        compiled(torch.ones(2))
        assert reported == [True, False]
        torch._dynamo.reset()
        compiled(torch.ones(3))
    assert reported == [True, False] * 2
    torch._dynamo.reset()
    compiled(torch.ones(4))
    assert reported == [True, False] * 2


def test_lines_that_compute_a_forwards_result_again_are_known_by_their_buffers() -> None:
    for integers in (None, IntegerPart()):
        parsed = parse_generated(with_modules(CODE, MODULES, integers, ["buf0", "buf3"]))
        assert parsed is not None
        allocated = line_of("buf0 = empty")
        assert parsed.recomputed == {allocated, line_of("extern_kernels.mm"), line_of("buf3 = ")}
        assert (parsed.integers is None) == (integers is None)
    assert generated().recomputed == set()


def test_a_forward_that_holds_nodes_of_its_backward_computes_nothing_again() -> None:
    graph = fx.Graph()
    first, second = (graph.call_function(torch.relu, (graph.placeholder(name),)) for name in "ab")
    first.meta["partitioner_tag"], second.meta["partitioner_tag"] = "is_forward", "is_backward"
    buffers = {"buf0": SimpleNamespace(origins=[first]), "buf1": SimpleNamespace(origins=[second])}
    lowering = SimpleNamespace(graph=graph, name_to_buffer=buffers, is_backward=False)
    assert recomputed_buffers(lowering) == []
    lowering.is_backward = True
    assert recomputed_buffers(lowering) == ["buf0"]
