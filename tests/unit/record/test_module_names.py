import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fakedist.record.module_names import OUTSIDE, LayerTable, modules_of, remember_parents


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(2, 2)
        self.mlp = nn.Sequential(nn.Linear(2, 2), nn.GELU())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(2, 2)


class Wrapped(nn.Module):
    """As DistributedDataParallel keeps its module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def names(table: LayerTable) -> list[str]:
    return [name for _, name, _, _ in table.rows]


def test_rows_have_names_by_attribute_path_classes_and_parents_and_are_given_once() -> None:
    table, model = LayerTable(), Model()
    assert table.rows == [(OUTSIDE, "", "", -1)]
    assert table.name(table.layer(model)) == "(Model)"
    assert table.name(table.layer(model.layers[1].mlp[0])) == "layers.1.mlp.0"
    rows = {name: (of_class, parent) for _, name, of_class, parent in table.rows}
    ids = {name: layer for layer, name, _, _ in table.rows}
    assert rows["(Model)"] == ("Model", OUTSIDE)
    assert rows["head"] == ("Linear", ids["(Model)"])
    assert rows["layers.1.mlp.0"] == ("Linear", ids["layers.1.mlp"])
    assert len(table.new_rows()) == len(table.rows)
    assert table.new_rows() == []


@pytest.mark.parametrize("wrap", [Wrapped, lambda model: torch.compile(model), checkpoint_wrapper])
def test_wrappers_add_nothing_to_names_and_take_the_inner_class(wrap) -> None:  # type: ignore[no-untyped-def]
    table, model = LayerTable(), Model()
    root = wrap(model)
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    assert table.name(table.layer(root)) == "(Model)"
    assert table.name(table.layer(model.layers[0])) == "layers.0"
    assert "layers.0.attention" in names(table)
    assert next(row for row in table.rows if row[1] == "layers.0")[2] == "Block"


def test_a_child_that_runs_before_its_model_is_named_from_the_model_while_parents_are_remembered() -> None:
    table = LayerTable()
    with remember_parents(table):
        model = Model()
        assert table.name(table.layer(model.layers[0].attention)) == "layers.0.attention"
        model.adapter = nn.Linear(2, 2)  # added later
        twin = copy.deepcopy(model)
    assert table.name(table.layer(model.adapter)) == "adapter"
    assert table.layer(model) != table.layer(twin)
    assert table.layer(model.head) != table.layer(twin.head)
    assert table.name(table.layer(Block().attention)) == "(Linear)"


def test_layers_of_a_second_model_start_with_its_name_and_one_of_the_same_class_is_numbered() -> None:
    table, first, second, block = LayerTable(), Model(), Model(), Block()
    modules = (first, second, second.head, first.head, block, block.mlp)
    names = ["(Model)", "(Model#2)", "(Model#2).head", "head", "(Block)", "(Block).mlp"]
    assert [table.name(table.layer(module)) for module in modules] == names


def test_a_module_in_two_places_takes_the_name_under_the_calling_layer_and_ends_where_it_began() -> None:
    table, model = LayerTable(), Model()
    shared = model.layers[1].mlp = model.layers[0].mlp
    table.layer(model)
    for number, block in enumerate(model.layers):
        layer = table.layer(shared, calling=table.layer(block))
        assert table.name(layer) == f"layers.{number}.mlp"
        assert table.layer(shared, calling=layer) == layer


def test_a_module_that_no_other_has_and_without_parameters_is_its_callers() -> None:
    table, model = LayerTable(), Model()
    table.layer(model)
    first, second = (table.layer(block) for block in model.layers)
    under = [table.layer(nn.Softmax(dim=-1), calling=block) for block in (first, second, first)]
    assert [table.name(layer) for layer in under] == ["layers.0.(Softmax)", "layers.1.(Softmax)", "layers.0.(Softmax)"]
    assert [row[3] for row in table.rows if row[2] == "Softmax"] == [first, second]
    assert table.layer(nn.Softmax(dim=-1), calling=under[0]) == under[0]  # as at its own end
    root = table.layer(model)
    assert table.name(table.layer(nn.Softmax(dim=-1), calling=root)) == "(Model).(Softmax)"
    assert len({table.layer(nn.Softmax(dim=-1), calling=root) for _ in range(5)}) == 1


def test_a_shared_module_without_parameters_is_in_turn_that_of_each_caller() -> None:
    table, model = LayerTable(), Model()
    with remember_parents(table):
        shared = nn.Sequential(nn.Softmax(dim=-1), nn.Dropout())
    table.layer(model)
    for number, block in enumerate(model.layers):
        layer = table.layer(shared, calling=table.layer(block))
        assert table.name(layer) == f"layers.{number}.(Sequential)"
        assert table.name(table.layer(shared[1], calling=layer)) == f"layers.{number}.(Sequential).1"
        assert table.layer(shared[1], calling=table.layer(shared[1], calling=layer)) == table.layer(shared[1], layer)


def test_a_module_made_in_a_forward_is_its_callers_and_one_made_before_is_a_root() -> None:
    table, before = LayerTable(), Block()
    running = False
    with remember_parents(table, lambda: running):
        model = Model()
        table.layer(model)
        caller = table.layer(model.layers[0])
        running = True
        for _ in range(3):
            inside = Block()
            layer = table.layer(inside, calling=caller)
            assert table.name(layer) == "layers.0.(Block)"
            assert table.name(table.layer(inside.mlp[0], calling=layer)) == "layers.0.(Block).mlp.0"
        model.late = nn.Linear(2, 2)  # a part made in its model's own forward
        assert table.name(table.layer(model.late, calling=table.layer(model))) == "late"
    assert table.name(table.layer(before, calling=caller)) == "(Block)"


def test_roots_are_the_topmost_modules_alive() -> None:
    table, model = LayerTable(), Model()
    table.layer(model.head)
    table.layer(model)
    assert table.roots() == [model]


def test_modules_come_in_torchs_order_and_each_once() -> None:
    shared = nn.Linear(2, 2)
    root = nn.Sequential(nn.Sequential(shared, nn.Linear(2, 2)), nn.ModuleList([nn.ReLU(), shared]), shared)
    root.nothing = None
    root.register_module("none", None)
    assert [*map(id, modules_of(root))] == [*map(id, root.modules())]


def test_the_model_that_trains_takes_the_short_names_from_one_that_ran_before() -> None:
    table, probe, model = LayerTable(), Model(), Model()
    table.layer(probe)
    before = table.layer(probe.head)
    written = table.new_rows()
    table.name_first(model)
    assert table.name(before) == "(Model#2).head"
    assert table.name(table.layer(model)) == "(Model)"
    assert table.name(table.layer(model.head)) == "head"
    assert table.layer(probe.head) == before
    assert {row.layer: row.name for row in table.new_rows()}[before] == "(Model#2).head"
    assert before in {row.layer for row in written}
    assert len(set(names(table))) == len(table.rows)


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapped, lambda model: torch.compile(model), checkpoint_wrapper])
def test_two_models_that_are_known_swap_their_names_and_keep_their_numbers(wrap) -> None:  # type: ignore[no-untyped-def]
    table, first, second = LayerTable(), Model(), Model()
    layers = [table.layer(module) for module in (first, second, first.head, second.head)]
    root = wrap(second)
    for _ in range(2):
        table.name_first(root)
        assert [table.name(layer) for layer in layers] == ["(Model#2)", "(Model)", "(Model#2).head", "head"]
    assert table.layer(root) == layers[1]
    assert [table.layer(module) for module in (first, second, first.head, second.head)] == layers


def test_a_part_that_ran_alone_gives_the_short_names_to_its_model() -> None:
    table, part = LayerTable(), Block()
    table.layer(part)
    before = table.layer(part.mlp)
    with remember_parents(table):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    table.name_first(model)
    assert (table.name(before), table.name(table.layer(model[1]))) == ("(Block).mlp", "1")


@pytest.mark.parametrize("wrap", [lambda part: part, Wrapped])
@pytest.mark.parametrize("again", [False, True], ids=["trains at once", "runs before it trains"])
def test_a_model_that_ran_alone_and_then_in_another_has_its_place_there(wrap, again: bool) -> None:  # type: ignore[no-untyped-def]
    table, part, other = LayerTable(), Block(), Block()
    layers = [table.layer(module) for module in (part, part.mlp, part.mlp[0], other, other.mlp)]
    table.new_rows()
    model = nn.Sequential(nn.Linear(2, 2), wrap(part))
    if again:
        table.layer(model)
    table.name_first(model)
    assert table.name(table.layer(model)) == "(Sequential)"
    assert [table.layer(module) for module in (part, part.mlp, part.mlp[0], other, other.mlp)] == layers
    assert [table.name(layer) for layer in layers] == ["1", "1.mlp", "1.mlp.0", "(Block#2)", "(Block#2).mlp"]
    rows = {row.layer: (row.name, row.parent) for row in table.new_rows()}
    assert rows[layers[0]] == ("1", table.layer(model))
    assert rows[layers[1]] == ("1.mlp", layers[0])
    assert len(set(names(table))) == len(table.rows)


def test_what_the_root_only_calls_stays_below_it_under_a_new_name() -> None:
    table, first, second = LayerTable(), Model(), Model()
    called = table.layer(nn.Softmax(), table.layer(first))
    table.layer(second)
    table.name_first(second)
    assert table.name(called) == "(Model#2).(Softmax)"
    table.name_first(first)
    assert table.name(called) == "(Model).(Softmax)"


def test_the_model_that_ran_before_keeps_its_names_if_it_trains_or_is_gone() -> None:
    table, model = LayerTable(), Model()
    table.layer(model)
    layer = table.layer(model.head)
    table.name_first(model)
    assert table.name(layer) == "head"
    del model
    table.name_first(Model())
    assert table.name(layer) == "head"
