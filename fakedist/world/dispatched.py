"""Dispatches a call through c10d's operation, as in a real job, whenever something else observes operations.

``dist.*`` calls a Python group's methods directly, unseen by dispatch modes and tensor subclasses. In a real job each
call is an operation (``c10d::allreduce_``; torch/csrc/distributed/c10d/Ops.cpp): ``make_fx`` traces it, fake tensors
run it with shapes alone, ``CommDebugMode`` counts it. So under a foreign mode, a functorch transform or with a tensor
subclass, the call goes through torch's dispatcher to kernels of ours below every observer, which pass it to the group.
A call with shapes alone never gets there: it moves nothing and is not recorded.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import empty
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import _disable_current_modes

from fakedist.world.checks import reduce_op, root
from fakedist.world.group import ProcessGroup
from fakedist.world.process_group import Done, RankGroup, done

if TYPE_CHECKING:
    from torch import FunctionSchema, ScriptObject

#: A tensor, or tensors in lists of any depth.
Nested = torch.Tensor | Sequence["Nested"]

_num_modes = torch._C._len_torch_dispatch_stack
_mode_at: Callable[[int], object] = torch._C._get_dispatch_stack_at
_transforms = torch._C._are_functorch_transforms_active
_PLAIN = torch.Tensor.__torch_dispatch__
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)

#: The group's methods behind each of c10d's operations; torch releases name them differently.
_METHODS = {
    "allreduce_": ("allreduce",),
    "allreduce_coalesced_": ("allreduce_coalesced",),
    "broadcast_": ("broadcast",),
    "reduce_": ("reduce",),
    "allgather_": ("allgather",),
    "allgather_coalesced_": ("allgather_coalesced",),
    "_allgather_base_": ("_allgather_base", "all_gather_single"),
    "allgather_into_tensor_coalesced_": ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    "gather_": ("gather",),
    "gather_into_tensor_": ("gather_single", "gather_into_tensor"),
    "scatter_": ("scatter",),
    "reduce_scatter_": ("reduce_scatter",),
    "_reduce_scatter_base_": ("_reduce_scatter_base", "reduce_scatter_single"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    "alltoall_": ("alltoall",),
    "alltoall_base_": ("alltoall_base", "all_to_all_single"),
    "send": ("send",),
    "recv_": ("recv",),
    "recv_any_source_": ("recv_anysource",),
}
#: What options hold in addition to the reduction, by the name of the operation's argument.
_OPTIONS = {"root_rank": "rootRank", "async_op": "asyncOp"}
_ALWAYS = {"root_tensor": 0, "timeout": -1, "sparse_indices": None}


class DispatchedGroup(RankGroup):
    """A process group whose calls become operations when something observes operations."""

    #: The work of the call that one of our kernels has just run.
    made: Done | None = None

    def barrier(self, opts: object = None, timeout: timedelta | None = None) -> Done:
        """barrier: every rank has already arrived."""
        if not _is_followed(()):
            return super().barrier(opts, timeout)
        self.made = None
        device = self._barrier_device(opts) or torch.device("cpu")
        ids = list(getattr(opts, "device_ids", None) or [])
        torch.ops.c10d.barrier(empty(0, device=device), self.boxed(), ids, getattr(opts, "asyncOp", True), -1)
        made, self.made = self.made, None
        return made if made is not None else done([])


@contextmanager
def operations_of_groups(keys: Sequence[str] = ("CPU", "CUDA")) -> Iterator[None]:
    """Register kernels that pass c10d's operations to our groups, of "CPU" or "CUDA" tensors.

    Raises:
        RuntimeError: This torch's operations take other arguments.
    """
    library = torch.library.Library("c10d", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*[Oo]verriding a previously registered kernel")
            for operation, methods in _METHODS.items():
                if (schema := _schema(operation)) is not None and _can_be_called(schema):
                    for key in keys:
                        library.impl(operation, _kernel(schema, methods[0]), key, allow_override=True)
            for key in keys:
                library.impl("barrier", _barrier, key, allow_override=True)
        yield
    finally:
        library._destroy()


def _schema(operation: str) -> FunctionSchema | None:
    packet = getattr(torch.ops.c10d, operation, None)
    return None if packet is None else packet.default._schema


def _can_be_called(schema: FunctionSchema) -> bool:
    """Torch 2.11 can neither pass a reduction to an operation from Python nor read it back."""
    return hasattr(dist.ReduceOp, "boxed") or all(argument.name != "reduce_op" for argument in schema.arguments)


def _kernel(schema: FunctionSchema, method: str) -> Callable[..., object]:
    names = [argument.name for argument in schema.arguments]
    call = getattr(RankGroup, method)
    gives_tensors = len(schema.returns) > 1
    has_options = "async_op" in names

    def kernel(*args: Any) -> object:  # the arguments of any operation
        arguments = dict(zip(names, args, strict=False))
        group = ProcessGroup.unbox(arguments.pop("process_group"))
        options = SimpleNamespace(asyncOp=arguments.get("async_op", True))
        if "root_rank" in arguments:
            options.rootRank = arguments["root_rank"]
        if "reduce_op" in arguments:
            options.reduceOp = dist.ReduceOp.unbox(arguments.pop("reduce_op"))
        plain = [value for name, value in arguments.items() if name not in _OPTIONS and name not in _ALWAYS]
        group.made = call(group, *plain, *([options] if has_options else []))
        work = FakeWork().boxed()  # a work of ours would not outlive its Python half
        return (args[0], work) if gives_tensors else work

    return kernel


def _barrier(
    tensor: torch.Tensor, boxed: ScriptObject, device_ids: list[int], is_async: bool = True, timeout: int = -1
) -> ScriptObject:
    group = ProcessGroup.unbox(boxed)
    options = SimpleNamespace(device=tensor.device, device_ids=device_ids, asyncOp=is_async)
    group.made = RankGroup.barrier(group, options)
    return FakeWork().boxed()


def _arguments(schema: FunctionSchema, group: DispatchedGroup, arguments: Sequence[object]) -> Iterator[object]:
    special = {"process_group", "reduce_op", *_OPTIONS, *_ALWAYS}
    own = [argument for argument in schema.arguments if argument.name not in special]
    values = {
        argument.name: _nested(value, str(argument.type)) for argument, value in zip(own, arguments, strict=False)
    }
    options = arguments[len(own)] if len(arguments) > len(own) else None
    values |= {**_ALWAYS, "process_group": group.boxed()}
    values["async_op"] = getattr(options, "asyncOp", True)
    for argument in schema.arguments:
        if argument.name == "reduce_op":
            op = reduce_op(options)
            yield (op if isinstance(op, dist.ReduceOp) else dist.ReduceOp(op)).boxed()
        else:
            yield root(options) if argument.name == "root_rank" else values[argument.name]


def _nested(value: object, kind: str) -> object:
    if kind == "List[int]" and isinstance(value, Iterable):
        return [int(one) for one in value]
    if "Tensor" not in kind:
        return value
    depth, inner = 0, value
    while isinstance(inner, Sequence):
        if not inner:
            return value
        depth, inner = depth + 1, inner[0]
    for _ in range(kind.count("List") - depth):
        value = [value]
    return value


def _is_followed(tensors: object) -> bool:
    for index in range(_num_modes()):
        if not type(_mode_at(index)).__module__.startswith("fakedist."):
            return True
    if _transforms():
        return True
    while type(tensors) not in _PLAIN_TYPES:
        if isinstance(tensors, torch.Tensor):
            return type(tensors).__torch_dispatch__ is not _PLAIN
        if not isinstance(tensors, Sequence) or not tensors:
            return False
        tensors = tensors[0]
    return False


def _outputs(tensors: Nested) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [one for listed in tensors for one in _outputs(listed)]


def _as_it_is(group: RankGroup, name: str, tensors: Nested, arguments: Sequence[object]) -> Done:
    made: Done = getattr(RankGroup, name)(group, tensors, *arguments)
    return made


def _dispatched(operation: str, schema: FunctionSchema, name: str) -> Callable[..., Done]:
    @functools.wraps(getattr(RankGroup, name))
    def method(self: DispatchedGroup, tensors: Nested, *args: object) -> Done:
        if not _is_followed(tensors):
            return _as_it_is(self, name, tensors, args)
        self.made = None
        getattr(torch.ops.c10d, operation)(*_arguments(schema, self, (tensors, *args)))
        made, self.made = self.made, None
        return made if made is not None else done(_outputs(tensors))

    return method


def _unseen(name: str) -> Callable[..., Done]:
    """Run without the observers' modes; shapes alone move nothing."""

    @functools.wraps(getattr(RankGroup, name))
    def method(self: DispatchedGroup, tensors: Nested, *args: object) -> Done:
        if not _is_followed(tensors):
            return _as_it_is(self, name, tensors, args)
        outputs = _outputs(tensors)
        if any(type(tensor) not in _PLAIN_TYPES for tensor in outputs):
            return done(outputs)
        with _disable_current_modes():
            return _as_it_is(self, name, tensors, args)

    return method


for _operation, _names in _METHODS.items():
    if (_torch_schema := _schema(_operation)) is not None:
        for _name in _names:
            _made = _dispatched(_operation, _torch_schema, _name) if _can_be_called(_torch_schema) else _unseen(_name)
            setattr(DispatchedGroup, _name, _made)
