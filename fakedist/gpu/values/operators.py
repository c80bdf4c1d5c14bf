"""The facts about an operator of torch for the value engine, derived once from its schema."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._ops import OpOverload

from fakedist.gpu.values.means import FOLLOWED, ZEROS, followed_name
from fakedist.gpu.values.tensors import Arguments, Keywords

#: What these write does not depend on the previous contents.
_OVERWRITES = {"fill_", "zero_", "copy_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_"}
_OVERWRITES |= {"_foreach_zero_", "_foreach_copy_", "cauchy_", "geometric_"}
#: These use only the shape of their first argument.
_LIKE = {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"}
_LIKE |= {"new_zeros", "new_ones", "new_full"}
#: These return memory that holds nothing yet, or move a tensor's memory. Nothing is computed.
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_", "set_"}
_EMPTY |= {"_efficientzerotensor", "_empty_affine_quantized", "_empty_per_channel_affine_quantized", "empty_quantized"}
#: These check or read scales and zero points on the host, and then compute.
_READ_MIDWAY = {"quantize_per_channel", "dequantize", "quantize_per_tensor", "quantize_per_tensor_dynamic"}
_READ_MIDWAY |= {"isin", "matrix_exp", "fake_quantize_per_channel_affine_cachemask", "_fused_moving_avg_obs_fq_helper"}
_READ_MIDWAY |= {"_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", "fused_moving_avg_obs_fake_quant"}
#: These check on the host whether a factorisation worked, or choose by values how to go on: their kernels run others.
_FACTORISING = ("linalg_", "_linalg_", "cholesky", "_cholesky", "lu_", "svd", "geqrf", "ormqr", "triangular_solve")
#: How the names of operators on lists of tensors begin.
LISTED = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach")
#: These compute nothing and run no operations: the profiler's marks, and the wait for a collective and its wrapper.
_IDLE = {"profiler::_record_function_enter_new", "profiler::_record_function_exit", "_c10d_functional::wait_tensor"}
_IDLE |= {"_c10d_functional::_wrap_tensor_autograd"}
#: The namespaces of PyTorch's own kernels, as opposed to operations made of others.
_KERNELS = {"aten", "prims", "prim"}


class Operator:
    """One of torch's operators. Each call of it is an operation.

    Attributes:
        name: E.g. ``add_``; ``full_name``, e.g. ``aten.add_.Tensor``; ``qualified_name``, e.g. ``aten::add_.Tensor``.
        is_view: Its result is a view: nothing is computed.
        reshapes: It changes the shape or storage of a tensor in place, computing nothing.
        is_kernel: It is one of PyTorch's own. Others show their effect in the operations they are made of.
        empty: It returns memory that holds nothing; with ``zeros``, zeros.
        is_idle: It computes nothing, and runs no operations that do.
        like: It uses only the shape of its first argument.
        overwrites: The previous contents do not matter to it.
        written: Positions of the arguments that it writes to; ``written_names`` their names.
        dynamic: The size of its result, or its return value, depends on values.
        info_at: The position of the result that says whether a factorisation worked; -1 if it has none.
        reads_midway: Its device kernel reads values on the host before it computes.
        restores: Its device kernel is made of others and may copy to what it writes before the host computes that.
        followed: Something may be known about its result even if the result holds no values.
    """

    def __init__(self, func: OpOverload) -> None:
        self.func = func
        self.full_name = str(func)
        schema = func._schema
        arguments = schema.arguments
        namespace, _, name = schema.name.rpartition("::")
        self.name = name
        self.qualified_name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        tags = set(func.tags)
        written = [i for i, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write]
        if name == "record_stream":  # its schema says that it writes
            written = []
        self._positions = {argument.name: (i, argument.default_value) for i, argument in enumerate(arguments)}
        self.written = tuple(written)
        self.written_names = frozenset(arguments[i].name for i in written)
        self.is_kernel = namespace in _KERNELS
        looks_on = func.is_view or name == "record_stream"
        self.is_view = looks_on and not written and not name.startswith("lift")
        self.reshapes = torch.Tag.inplace_view in tags
        self.empty = name in _EMPTY
        self.is_idle = schema.name in _IDLE
        self.like = name in _LIKE
        self.zeros = name in ZEROS
        self.overwrites = name in _OVERWRITES or any(arguments[i].kwarg_only for i in written)
        is_dynamic = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
        is_least_squares = name == "linalg_lstsq"  # on CUDA its sizes follow from shapes, and nothing is checked
        self.dynamic = is_dynamic and not is_least_squares
        self.random = torch.Tag.nondeterministic_seeded in tags
        self.takes_generator = "generator" in self._positions
        self.reads_midway = name in _READ_MIDWAY or (name.startswith(_FACTORISING) and not is_least_squares)
        is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(self.qualified_name, "CompositeExplicitAutograd")
        self.restores = bool(written) and not self.overwrites and is_composite
        returned = [value.name for value in schema.returns]
        self.info_at = returned.index("info") if "info" in returned else -1
        self.followed = followed_name(name) in FOLLOWED

    def argument(self, name: str, args: Arguments, kwargs: Keywords) -> object:
        """An argument's value, passed by position or keyword; None if the operator has no such argument."""
        position, default = self._positions.get(name, (len(args), None))
        return args[position] if position < len(args) else kwargs.get(name, default)


#: Runs a call of an operator, and returns what the device's kernel returned.
Method = Callable[[Operator, Arguments, Keywords], object]
#: The same, for one operator.
Run = Callable[[Arguments, Keywords], object]
