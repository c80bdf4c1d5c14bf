"""What the value engine must know of an operation, found once from its schema."""

from __future__ import annotations

from typing import Any

import torch

#: What these write does not depend on what was there before.
_OVERWRITES = {"fill_", "zero_", "copy_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_"}
_OVERWRITES |= {"_foreach_zero_", "_foreach_copy_", "cauchy_", "geometric_"}
#: These give memory that holds nothing yet.
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_", "set_"}
#: Results that are never negative, and operations that keep that.
_NON_NEGATIVE = {"norm", "linalg_vector_norm", "_foreach_norm", "abs", "nll_loss_forward", "mse_loss", "l1_loss", "exp"}
_NON_NEGATIVE |= {"nll_loss2d_forward", "binary_cross_entropy", "softplus", "sqrt", "square", "relu", "sigmoid"}
_NON_NEGATIVE |= {"_softmax", "huber_loss", "smooth_l1_loss", "var", "std"}
_KEEPS_SIGN = {"stack", "cat", "sum", "mean", "_to_copy", "clone", "max", "min", "amax", "div", "mul", "add"}


class Kind:
    """One operation.

    Attributes:
        name: Its name without namespace and overload, e.g. ``add_``.
        full_name: With both, e.g. ``aten.add_.Tensor``.
        is_view: Its result is a view: nothing is computed.
        empty: It gives memory that holds nothing.
        overwrites: What it writes does not depend on what was there.
        written: Positions of the arguments that it writes to.
        written_names: Their names, as they may come by keyword.
        dynamic: The size of its result depends on values.
        random: It draws random numbers.
        takes_generator: It has an argument for the generator.
        non_negative: Its result is never negative.
        keeps_sign: Its result is not negative where its inputs are not.
    """

    __slots__ = (
        "dynamic",
        "empty",
        "full_name",
        "is_view",
        "keeps_sign",
        "name",
        "non_negative",
        "overwrites",
        "random",
        "takes_generator",
        "written",
        "written_names",
    )

    def __init__(self, func: Any) -> None:
        self.full_name = str(func)
        schema = getattr(func, "_schema", None)
        arguments = list(schema.arguments) if schema is not None else []
        self.name = schema.name.rpartition("::")[2] if schema is not None else self.full_name
        tags = set(getattr(func, "tags", ()))
        written = [i for i, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write]
        self.written = tuple(written)
        self.written_names = frozenset(arguments[i].name for i in written)
        self.is_view = bool(getattr(func, "is_view", False)) and not written and not self.name.startswith("lift")
        self.empty = self.name in _EMPTY
        self.overwrites = self.name in _OVERWRITES or any(arguments[i].kwarg_only for i in written)
        self.dynamic = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
        self.random = torch.Tag.nondeterministic_seeded in tags
        self.takes_generator = any(argument.name == "generator" for argument in arguments)
        self.non_negative = self.name in _NON_NEGATIVE
        self.keeps_sign = self.name in _KEEPS_SIGN
