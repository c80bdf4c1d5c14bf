"""Runs many small programs that torch compiles, and prints what Dynamo and AOTAutograd made of each.

compiled_programs.py [--backend NAME] [PROGRAM ...]    without names: all; NAME: the compiler of most of them

Each line is ``PROGRAM name {...}``: graphs and operations that were captured, graph breaks with their reasons, frames
that were compiled with the reasons for it, warnings, and the exception that ended it. VERBOSE=1 in the environment
prints that exception's traceback.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.utils
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from tests.support.compiled_seen import observed

#: The programs, by name.
PROGRAMS: dict[str, Callable[[], None]] = {}
#: What compiles a program that needs no other backend. Set by ``main``.
backend = "aot_eager"


def program(run: Callable[[], None]) -> Callable[[], None]:
    """Enter a program under its function's name."""
    PROGRAMS[run.__name__] = run
    return run


def compiled(function: Any, **options: Any) -> Any:  # of the function's own type
    """``torch.compile`` with the chosen backend."""
    return torch.compile(function, **({"backend": backend} | options))


def mlp(width: int = 32) -> nn.Sequential:
    """Two linear layers, on the GPU."""
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)).cuda()


def x(*shape: int, grad: bool = False) -> Tensor:
    """A tensor on the GPU, of 4 x 32 by default."""
    return torch.randn(shape or (4, 32), device="cuda", requires_grad=grad)


# ---- attention


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def _qkv() -> list[Tensor]:
    return [x(1, 2, 256, 64, grad=True) for _ in range(3)]


@program
def flex_dense() -> None:
    torch.compile(flex_attention)(*_qkv()).sum().backward()


@program
def flex_block_mask() -> None:
    mask = create_block_mask(_causal, None, None, 256, 256, device="cuda")
    torch.compile(flex_attention)(*_qkv(), block_mask=mask).sum().backward()


@program
def flex_compiled_mask() -> None:
    offset = torch.zeros((), dtype=torch.int64, device="cuda")

    def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < 128 + offset)

    mask = torch.compile(create_block_mask)(window, None, None, 256, 256, device="cuda")

    def attention(*qkv: Tensor) -> Any:
        return flex_attention(*qkv, block_mask=mask, score_mod=lambda s, b, h, q, k: s + (q - k) * 0.1)

    torch.compile(attention, fullgraph=True)(*_qkv()).sum().backward()


@program
def flex_eager() -> None:
    mask = create_block_mask(_causal, None, None, 256, 256, device="cuda")
    flex_attention(*_qkv(), block_mask=mask).sum().backward()


@program
def attention_backends() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    compiled(attend)(*_qkv()).sum().backward()


# ---- graph breaks and sizes


@program
def breaks_of_every_kind() -> None:
    def run(x: Tensor) -> Tensor:
        y = x.sin()
        print(end="")
        y.sum().item()
        torch._dynamo.graph_break()
        if y.sum() > float("inf"):
            y = y.cos()
        return y * 2

    compiled(run)(x())


@program
def explained() -> None:
    def run(x: Tensor) -> Tensor:
        y = mlp()(x)
        torch._dynamo.graph_break()
        return y.relu()

    found = torch._dynamo.explain(run)(x())
    print("EXPLAINED", found.graph_count, found.graph_break_count, found.op_count)


@program
def scalars_in_the_graph() -> None:
    def run(x: Tensor, times: Tensor) -> Tensor:
        count = times.item()
        torch._check(count >= 0)
        return x.sin() + torch.zeros(4, device=x.device) * count if count > -1 else x

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled(run, fullgraph=True)(x(4), torch.tensor(3))


@program
def automatic_dynamic_shapes() -> None:
    model = compiled(mlp())
    for batch in (2, 3, 5, 7):
        model(x(batch, 32)).sum().backward()


@program
def marked_dynamic_shapes() -> None:
    @functools.partial(compiled, dynamic=True)
    def run(x: Tensor) -> Tensor:
        return F.softmax(x @ x.T, dim=-1).reshape(-1)[: x.shape[0]]

    run(x(8, 32))
    given = x(16, 64)
    torch._dynamo.mark_dynamic(given, 0)
    run(given)


@program
def recompiles() -> None:
    @compiled
    def run(x: Tensor, times: float, names: tuple[str, ...]) -> Tensor:
        return x * times if "double" in names else x + times

    for times in (1.0, 2.0, 3.0):
        run(x(), times, ("double",))
        run(x(), times, ("single",))
    run(x().to(torch.bfloat16), 1.0, ())


# ---- optimizers


def _steps(optimizer: torch.optim.Optimizer, model: nn.Module, step: Callable[[], object], times: int = 3) -> None:
    for _ in range(times):
        model(x()).sum().backward()
        step()
        optimizer.zero_grad()


@program
def compiled_optimizer_step() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    _steps(optimizer, model, compiled(optimizer.step))


@program
def compiled_function_with_optimizer() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)

    @functools.partial(compiled, fullgraph=False)
    def step() -> None:
        optimizer.step()
        schedule.step()

    _steps(optimizer, model, step)


@program
def compiled_fused_optimizers() -> None:
    model = mlp()
    for kind, options in (("SGD", {"momentum": 0.9}), ("AdamW", {"fused": True}), ("RMSprop", {}), ("Adagrad", {})):
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
        _steps(optimizer, model, compiled(optimizer.step), 2)


@program
def compiled_optimizer_with_hooks() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    _steps(optimizer, model, compiled(optimizer.step))


@program
def compiled_training_step() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    @compiled
    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    for _ in range(3):
        train(x())


@program
def optimizer_in_backward() -> None:
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    @compiled
    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for _ in range(2):
        compiled(model)(x()).sum().backward()


# ---- autograd


@program
def backward_inside() -> None:
    model = mlp()

    @compiled
    def run(x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(model(x).sum(), [x], create_graph=False)
        loss = model(x).sum()
        loss.backward()
        return gradient

    run(x(grad=True))


@program
def double_backward() -> None:
    given = x(grad=True)

    @functools.partial(compiled, backend="eager")
    def run(x: Tensor) -> Tensor:
        return (x.sin() * x).sum()

    (gradient,) = torch.autograd.grad(run(given), given, create_graph=True)
    gradient.sum().backward()


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * 2 + x * 0


@program
def autograd_function() -> None:
    compiled(lambda x: _Double.apply(x).relu(), fullgraph=True)(x(grad=True)).sum().backward()


@program
def saved_tensor_hooks() -> None:
    model = mlp()

    def run(x: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(torch.bfloat16), lambda t: t.float()):
            return model(x).sum()

    compiled(run)(x()).backward()


@program
def compiled_autograd() -> None:
    model = mlp()

    def train(x: Tensor) -> None:
        model(x).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        run = compiled(train)
        for _ in range(2):
            run(x())


@program
def compiled_autograd_of_eager() -> None:
    model = mlp()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 1)
    loss = model(x()).sum() + _Double.apply(x(grad=True)).sum()
    with torch._dynamo.compiled_autograd._enable(compiled):
        loss.backward()


@program
def hooks_on_tensors() -> None:
    @compiled
    def run(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda gradient: gradient * 2)
        return y.cos()

    run(x(grad=True)).sum().backward()


@program
def checkpointed() -> None:
    model = mlp()
    first = compiled(lambda x: checkpoint(model, x, use_reentrant=False))
    first(x(grad=True)).sum().backward()

    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        is_product = operation is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    second = compiled(lambda x: checkpoint(model, x, use_reentrant=False, context_fn=contexts))
    second(x(grad=True)).sum().backward()


@program
def checkpointed_around_compiled() -> None:
    model = compiled(mlp())
    for reentrant in (False, True):
        y: Any = checkpoint(model, x(grad=True), use_reentrant=reentrant)
        y.sum().backward()


# ---- functorch


@program
def vmapped() -> None:
    model = mlp()
    weights = dict(model.named_parameters())

    @functools.partial(compiled, fullgraph=True)
    def run(x: Tensor) -> Tensor:
        return torch.vmap(lambda row: torch.func.functional_call(model, weights, (row,)))(x)

    run(x())
    torch.vmap(compiled(lambda row: row.sin() + 1))(x())


@program
def function_transforms() -> None:
    def loss(x: Tensor) -> Any:
        return x.sin().square().sum()

    compiled(torch.func.grad(loss))(x())
    compiled(torch.func.jacrev(lambda x: x.sin()))(x(4))
    compiled(lambda x: torch.func.jvp(loss, (x,), (torch.ones_like(x),)))(x())
    compiled(torch.func.hessian(loss))(x(4))
    compiled(lambda x: torch.func.vjp(loss, x)[1](torch.ones((), device="cuda")))(x())


@program
def per_sample_gradients() -> None:
    model = mlp()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights: dict[str, Tensor], row: Tensor) -> Any:
        return torch.func.functional_call(model, weights, (row,)).sum()

    compiled(torch.vmap(torch.func.grad(loss), in_dims=(None, 0)))(weights, x())


@program
def functorch_compilers() -> None:
    from functorch.compile import aot_function, make_boxed_func, nop
    from torch.fx.experimental.proxy_tensor import make_fx

    aot_function(lambda x: x.sin().cos(), fw_compiler=nop)(x(grad=True)).sum().backward()
    aot_function(lambda x: x.sin().cos(), fw_compiler=lambda graph, _: make_boxed_func(graph.forward))(x())
    for mode in ("real", "fake", "symbolic"):
        make_fx(lambda x: F.gelu(x @ x.T).sum(), tracing_mode=mode)(x())


# ---- operators of our own, and those that take functions


@torch.library.custom_op("programs::twice", mutates_args=())
def _twice(x: Tensor) -> Tensor:
    return x * 2


_twice.register_fake(torch.empty_like)
_twice.register_autograd(lambda context, gradient: gradient * 2)


@torch.library.custom_op("programs::add_one", mutates_args={"x"})
def _add_one(x: Tensor) -> None:
    x.add_(1)


@program
def custom_operators() -> None:
    compiled(lambda x: _twice(x.sin()), fullgraph=True)(x(grad=True)).sum().backward()

    @compiled
    def run(x: Tensor) -> Tensor:
        _add_one(x)
        return x + 1

    run(x())


@program
def allowed_and_disabled() -> None:
    @torch.compiler.allow_in_graph
    def allowed(x: Tensor) -> Tensor:
        return x.sin()

    @torch.compiler.disable
    def disabled(x: Tensor) -> Tensor:
        return mlp()(x)

    compiled(lambda x: disabled(allowed(x)).cos())(x())


@program
def conditions() -> None:
    def run(x: Tensor, first: Tensor) -> Tensor:
        return torch.cond(first, lambda x: x.sin(), lambda x: x.cos(), (x,))

    compiled(run, fullgraph=True)(x(grad=True), torch.ones((), dtype=torch.bool, device="cuda")).sum().backward()
    torch.cond(x().sum() > float("-inf"), lambda x: x.sin(), lambda x: x.cos(), (x(),))


@program
def loops() -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def run(count: Tensor, x: Tensor) -> Any:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (count, x))

    compiled(run, fullgraph=True)(torch.zeros((), dtype=torch.int64), x())


@program
def scans_and_maps() -> None:
    from torch._higher_order_ops.associative_scan import associative_scan
    from torch._higher_order_ops.map import map as mapped
    from torch._higher_order_ops.scan import scan

    compiled(lambda x: scan(lambda carry, row: (carry + row, carry * row), x[0].clone(), x))(x())
    compiled(lambda x: mapped(lambda row: row.sin() + 1, x))(x())
    compiled(lambda x: associative_scan(torch.add, x, dim=0, combine_mode="generic"))(x())


# ---- modules


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.batch = nn.LayerNorm(32), mlp(), nn.BatchNorm1d(32)
        self.register_buffer("calls", torch.zeros(()))
        self.times = 0

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        self.calls.add_(1)
        return F.dropout(x + self.mlp(self.norm(self.batch(x))), 0.1)  # type: ignore[no-any-return]


@program
def modules_with_state() -> None:
    model = compiled(nn.Sequential(_Block(), _Block()).cuda())
    for _ in range(3):
        model(x()).sum().backward()
    model.eval()
    model(x())


@program
def regional() -> None:
    blocks = nn.Sequential(*(_Block() for _ in range(3))).cuda()
    for block in blocks:
        block.compile(backend=backend, fullgraph=True, dynamic=False)
    for _ in range(2):
        blocks(x()).sum().backward()


@program
def modules_with_hooks() -> None:
    model = mlp()
    seen: list[int] = []
    for layer in model:
        layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        layer.register_forward_hook(lambda module, args, result: result * 2)
    model[0].register_full_backward_hook(lambda module, given, made: None)
    model.register_forward_hook(lambda *_: seen.append(1))
    run = compiled(model)
    for _ in range(2):
        run(x(grad=True)).sum().backward()


@program
def global_module_hooks() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        compiled(mlp())(x()).sum().backward()
    finally:
        handle.remove()


@program
def parametrized() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)).cuda()
    compiled(layer)(x()).sum().backward()


@program
def subclass_of_tensor() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    given = TwoTensor(x(), x()).requires_grad_()
    compiled(lambda x: x.sin() * 2)(given).sum().backward()


@program
def data_parallel() -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = compiled(DistributedDataParallel(nn.Sequential(mlp(1024), mlp(1024)), bucket_cap_mb=1))
    for _ in range(2):
        model(x(4, 1024))  # torch's own stand-in for a group can do no backward


@program
def fully_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(mlp(), mlp())
    for block in model:
        fully_shard(block)
        block.compile(backend=backend)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    _steps(optimizer, model, optimizer.step, 2)
    _steps(optimizer, compiled(model), optimizer.step, 2)


@program
def distributed_tensors() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    run = compiled(model)
    for _ in range(2):
        run(x()).sum().backward()

    @compiled
    def redistribute(x: Tensor) -> Tensor:
        sharded = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
        return sharded.redistribute(mesh, [Replicate()]).to_local() + 1

    redistribute(x())


@program
def collectives() -> None:
    from torch.distributed import _functional_collectives as functional

    @compiled
    def run(x: Tensor) -> Tensor:
        y = functional.all_reduce(x.sin(), "sum", dist.group.WORLD)
        out = torch.empty(y.shape[0] * dist.get_world_size(), *y.shape[1:], device="cuda")
        dist.all_gather_into_tensor(out, y)
        dist.all_reduce(out)
        return out.cos()

    run(x())


# ---- modes and contexts


@program
def modes_around() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = compiled(mlp())
    with FlopCounterMode(display=False):
        model(x()).sum().backward()
    torch.set_default_device("cuda")
    try:
        compiled(lambda: torch.ones(4).sin())()
    finally:
        torch.set_default_device(None)
    with torch.device("cuda"):
        compiled(lambda: torch.arange(32) + 1)()


@program
def inference() -> None:
    model = mlp().eval()
    run = compiled(model)
    with torch.inference_mode():
        run(x())
    with torch.no_grad():
        run(x())
    compiled(torch.no_grad()(lambda x: model(x)))(x())


@program
def mixed_precision() -> None:
    model = mlp()
    run = compiled(model)
    with torch.autocast("cuda", torch.bfloat16):
        run(x()).sum().backward()

    @compiled
    def inside(x: Tensor) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return model(x).sum()

    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler.scale(inside(x())).backward()
    scaler.step(optimizer)
    scaler.update()


@program
def streams_and_ranges() -> None:
    model, side = mlp(), torch.cuda.Stream()

    @compiled
    def run(x: Tensor) -> Tensor:
        with torch.profiler.record_function("run"):
            y = model(x)
        with torch.cuda.stream(side):
            return y * 2  # type: ignore[no-any-return]

    run(x()).sum().backward()


@program
def every_backend() -> None:
    def mine(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        return graph.forward

    for each in ("eager", "aot_eager", "aot_eager_decomp_partition", mine):
        torch.compile(mlp(), backend=each)(x(grad=True)).sum().backward()  # type: ignore[operator]


@program
def inductor() -> None:
    model = torch.compile(mlp())
    for _ in range(2):
        model(x()).sum().backward()


@program
def cuda_graphs() -> None:
    model = torch.compile(mlp(), mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        model(x()).sum().backward()
        model.zero_grad()


@program
def cuda_graphs_by_hand() -> None:
    model, given = compiled(mlp()), x()
    with torch.no_grad():
        model(given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(given)
    graph.replay()


@program
def exported() -> None:
    rows = torch.export.Dim("rows", min=2, max=64)
    for strict in (True, False):
        found = torch.export.export(mlp(), (x(),), dynamic_shapes=({0: rows},), strict=strict)
        found.module()(x(8, 32))
        compiled(found.run_decompositions().module())(x())


def main() -> None:
    global backend
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=backend)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    backend = options.backend
    if not dist.is_initialized():
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    set_limit = getattr(torch._dynamo.utils, "set_compilation_metrics_limit", None)
    if set_limit is not None:
        set_limit(10_000)
    for name in options.names or PROGRAMS:
        began = time.monotonic()
        print("PROGRAM", name, json.dumps(observed(PROGRAMS[name])), flush=True)
        print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
