import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fakedist.record.hooks import backward_hook, module_hooks, optimizer_hooks
from fakedist.record.module_names import LayerTable
from fakedist.record.operations import Operations
from fakedist.record.position import GraphPart, Position
from fakedist.record.unseen import Unseen

Where = tuple[str, str, bool]


def _run(func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    return func(*args, **kwargs)


class Watch:
    """The recorder's wiring of hooks, without the allocator's part: runs on CPU tensors."""

    def __init__(self) -> None:
        self.layers = LayerTable()
        self.position = Position()
        self.tags: list[str] = []
        self.operations = Operations(self.position, _run, lambda: None, self.tags.append)

    @contextmanager
    def on(self) -> Iterator[None]:
        with ExitStack() as stack:
            position, unseen = self.position, Unseen()
            stack.enter_context(module_hooks(self._begins, self._ended, unseen))
            stack.enter_context(backward_hook(self._backward_begins, position.backward_ended))
            stack.enter_context(
                optimizer_hooks(lambda o: position.optimizer_begins(), lambda o: position.optimizer_ended(), unseen)
            )
            stack.enter_context(self.operations)
            yield

    def _begins(self, module: nn.Module, args: tuple[object, ...]) -> None:
        if self.position.is_root_call():
            self.position.root_forward()
        self.position.module_begins(self.layers.layer(module, self.position.layer))

    def _ended(self, module: nn.Module) -> None:
        self.position.module_ended(self.layers.layer(module))

    def _backward_begins(self, creates_graph: bool, roots: Sequence[object]) -> bool:
        self.position.backward_begins(creates_graph, roots)
        return True

    def where(self, *wanted: str) -> list[Where]:
        """(phase, layer, recompute) of each run of operations with these texts in their names, in order."""
        taken = self.operations.numbering.take()
        operations, scopes = taken.operation, taken.scope
        names = dict(self.operations.names)
        table = {
            scope: (phase, self.layers.name(layer), again) for scope, _, phase, layer, again in self.position.new_scopes
        }
        pairs = zip(memoryview(operations).cast("I"), memoryview(scopes).cast("I"), strict=True)
        return [table[scope] for number, scope in pairs if any(each in names[number] for each in wanted)]


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act = nn.GELU()
        self.checkpointed, self.reentrant = checkpointed, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with set_checkpoint_early_stop(False):  # else only the view of a layer's weight would be recomputed
            for layer in (self.first, self.second):
                x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.checkpointed else layer(x)
        return self.act(x)


@pytest.fixture
def watch() -> Watch:
    return Watch()


def run(watch: Watch, model: nn.Module) -> None:
    with watch.on():
        model(torch.randn(3, 4, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_run_forward_and_backward_in_backward_under_their_own_name(
    watch: Watch, reentrant: bool
) -> None:
    run(watch, Model(checkpointed=True, reentrant=reentrant))
    runs = watch.where("aten.")
    again = [(phase, layer) for phase, layer, recomputed in runs if recomputed]
    assert list(dict.fromkeys(again)) == [("backward", "second"), ("backward", "first")]
    regions = [watch.layers.name(layer) for _, _, layer in watch.position.regions]
    assert regions == ["", "second", "first"]


@pytest.mark.parametrize("kinds", [(False, False), (True, False), (True, True)])
def test_backward_operations_belong_to_the_layer_whose_forward_made_the_node(
    watch: Watch, kinds: tuple[bool, bool]
) -> None:
    run(watch, Model(*kinds))
    runs = watch.where("aten.mm.default")
    assert runs == [("backward", layer, False) for layer in ("second", "second", "first", "first")]


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.mul(2)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].div(0.5)


class _Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = _Twice.apply(x)  # type: ignore[no-untyped-call]
        return doubled


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("early_stop", [False, True])
def test_a_function_with_its_own_backward_is_recomputed_with_its_layer_and_its_backward_is_not(
    watch: Watch, reentrant: bool, early_stop: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), _Doubling(), nn.GELU())
    with watch.on(), set_checkpoint_early_stop(early_stop):
        for _ in range(2):
            checkpoint(model, torch.randn(3, 4, requires_grad=True), use_reentrant=reentrant).sum().backward()
    regions = [watch.layers.name(layer) for _, _, layer in watch.position.regions]
    both = watch.where("aten.mul.Tensor", "aten.div")
    assert both == [("forward", "1", False), ("backward", "1", True), ("backward", "1", False)] * 2
    assert regions[-1:] == ["0"]


def test_a_forward_without_grad_saves_nothing(watch: Watch) -> None:
    with watch.on(), torch.no_grad():
        Model()(torch.randn(3, 4))
        torch.ones(2)
    watch.position.close()
    assert watch.position.regions == []
    assert watch.where("aten.ones") == [("other", "", False)]


def test_a_gradient_of_a_gradient_is_not_a_recomputation(watch: Watch) -> None:
    with watch.on():
        x = torch.randn(3, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(Model()(x).sum(), x, create_graph=True)
        gradient.sum().backward()
    assert all(not again for _, _, again in watch.where("aten.mm.default"))


def test_a_backward_that_is_started_at_the_engine_itself_is_one(watch: Watch) -> None:
    with watch.on():
        loss = Model()(torch.randn(3, 4)).sum()
        torch.autograd.Variable._execution_engine.run_backward(
            tensors=(loss,),
            grad_tensors=(torch.ones(()),),
            keep_graph=False,
            create_graph=False,
            inputs=(),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    assert {phase for phase, _, _ in watch.where("aten.mm.default")} == {"backward"}
    assert len(watch.position.regions) == 1


def test_an_exception_inside_a_module_leaves_no_layer_behind(watch: Watch) -> None:
    class Broken(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first(x)
            raise ValueError("broken")

    with watch.on():
        with pytest.raises(ValueError, match="broken"):
            Broken()(torch.randn(3, 4))
        torch.ones(2)
    assert watch.where("aten.ones") == [("forward", "", False)]


def test_optimizer_operations_belong_to_the_optimizer(watch: Watch) -> None:
    model = Model()
    with watch.on():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        torch.ones(2)
    assert watch.where("aten.add_.Tensor")[-1][0] == "optimizer"
    assert watch.where("aten.ones") == []


def test_every_end_of_a_phase_is_told() -> None:
    phases: list[str] = []
    position = Position(phases.append)
    position.root_forward()
    position.backward_begins(creates_graph=False)
    position.optimizer_begins()  # in backward: a hook of a gradient
    position.optimizer_ended()
    position.backward_ended()
    position.optimizer_begins()
    position.optimizer_ended()
    assert phases == ["forward", "backward", "optimizer", "backward", "other", "optimizer", "other"]


def test_steps_that_were_init_leave_the_rank_in_init(watch: Watch) -> None:
    position = watch.position
    with watch.on():
        before, position.step = position.scope(), 1
        model = nn.Linear(2, 2)
        model(torch.ones(1, 2))
        ended = position.op - 1
        torch.ones(3)  # in "forward", where a loss would be
        position.step_went_on(0)
    assert (position.step, position.phase, position.has_loss) == (0, "init", False)
    assert position.scope() == before
    places = {(place.step, place.phase, place.layer > 0) for place in position.places}
    assert places == {(0, "init", False), (0, "forward", True)}
    assert [region.last for region in position.regions] == [ended]


def test_launches_of_an_evaluation_and_of_an_optimizer_inside_a_backward_are_not_the_models() -> None:
    position = Position()
    position.step = 2
    position.root_forward(evaluates=True)
    evaluation = position.scope()
    position.root_forward()
    training = position.scope()
    position.backward_begins(creates_graph=False)
    with torch.no_grad():  # as the engine runs nodes
        backward = position.scope(GraphPart(3, recomputes=False))
        again = position.scope(GraphPart(3, recomputes=True))
        position.optimizer_begins()
        optimizer = position.scope()
    found = [position.places[scope] for scope in (evaluation, training, backward, again, optimizer)]
    assert [(place.phase, place.recompute) for place in found] == [
        *(("other", False), ("forward", False), ("backward", False), ("backward", True), ("optimizer", False))
    ]
    memory = {row.scope: row.phase for row in position.new_scopes}
    assert (memory[evaluation], memory[optimizer]) == ("forward", "backward")


def _in_another_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _trains_beside(watch: Watch) -> Callable[..., None]:
    """A hook in which another thread runs a whole step of its own."""
    model = Model()

    def hook(*_: object) -> None:
        watch.operations.also_this_thread()
        model(torch.randn(3, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), foreach=False).step()

    return lambda *_: _in_another_thread(hook)


def test_phases_and_layers_of_a_thread_are_its_own(watch: Watch) -> None:
    model = Model()
    with watch.on():
        model.first.register_forward_hook(_trains_beside(watch))
        model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert watch.where("aten.addmm", "aten.mm", "aten.add_.") == [
        ("forward", "first", False),
        ("forward", "(Model#2).first", False),
        ("forward", "(Model#2).second", False),
        *[("backward", "(Model#2).second", False)] * 2,
        ("backward", "(Model#2).first", False),
        *[("optimizer", "", False)] * 4,
        ("forward", "second", False),
        *[("backward", "second", False)] * 2,
        *[("backward", "first", False)] * 2,
    ]
    ends = [region[:2] for region in watch.position.regions]
    assert [first for first, _ in ends[1:]] == [ends[0][1] + 1]  # what the first forward saves later is saved, too


def test_a_backward_within_another_threads_is_its_own(watch: Watch) -> None:
    model = Model()
    with watch.on():
        model.act.register_full_backward_hook(_trains_beside(watch))
        result = model(torch.randn(3, 4, requires_grad=True))
        result.sum().backward()
    runs = watch.where("aten.addmm", "aten.mm", "aten.add_.")[2:]
    assert runs[:2] == [("forward", "(Model#2).first", False), ("forward", "(Model#2).second", False)]
    assert runs[5:9] == [("optimizer", "", False)] * 4
    assert runs[9:] == [("backward", layer, False) for layer in ("second", "second", "first", "first")]


def test_another_threads_backward_may_end_while_a_thread_asks_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    position = Position()
    _in_another_thread(lambda: position.backward_begins(False))

    def task() -> int:
        position._engines.clear()
        return -1

    monkeypatch.setattr("fakedist.record.position._task", task)
    assert not position.in_backward()
