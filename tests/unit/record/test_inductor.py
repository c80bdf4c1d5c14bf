"""Modules of graphs: numbered in Dynamo's graph, found again in graphs that are made of it and in alike ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn

from fakedist.record.compiled_graphs import COMPILED, Compilations, Modules
from fakedist.record.graph_layers import Placing, find_layers, is_dynamos
from fakedist.record.module_names import LayerTable, remember_parents


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
