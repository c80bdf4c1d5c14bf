"""Settings that a step is priced for, each declared once: for ``fakedist time``, sweeps and Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypedDict

from fakedist.options import kinds
from fakedist.options.definition import FABRIC, GPU, GPU_POWER, HOST, NCCL_ENVIRONMENT, ROUTER_LOAD, TIMES
from fakedist.options.kinds import Option, OptionGroup, declared, named, options_of

_RUN_DEFAULT = "the run's"
_NVLINK_DOMAIN = Option(
    kind=kinds.whole_number(least=1, most=4096),
    group=OptionGroup.PRICING,
    help="GPUs in one NVLink domain.",
    default_text=_RUN_DEFAULT,
    example=72,
)
_INTERFERENCE = Option(
    kind=kinds.switch(),
    group=OptionGroup.PRICING,
    help="Let kernels and collectives that run at once slow each other down.",
    off_flag="--no-interference",
    example=False,
)
_ROUTER_LOAD = replace(
    ROUTER_LOAD,
    group=OptionGroup.PRICING,
    help="Expert load used for pricing: experts take as long as on the busiest rank. Does not change memory.",
    default_text=_RUN_DEFAULT,
)
TOKENS_PER_STEP = named(
    Option(
        name="tokens_per_step",
        kind=kinds.whole_number(least=1),
        group=OptionGroup.PRICING,
        help="Tokens in a step, over all ranks.",
        default_text="the rows that most of the model's layers multiply",
        example=4_194_304,
    )
)
MICRO_BATCHES = named(
    Option(
        name="micro_batches",
        kind=kinds.whole_number(least=1),
        group=OptionGroup.PRICING,
        help="Price a step of this many micro-batches, by repeating a steady one.",
        default_text="as recorded",
        example=64,
    )
)
#: What a number of tokens takes with the priced step, and what that costs.
BUDGET_OPTIONS = (
    named(
        Option(
            name="tokens",
            kind=kinds.large_count(),
            group=OptionGroup.BUDGET,
            help="Also show what training on so many tokens takes: GPU-hours, energy and, with --price, its cost.",
            example=2_000_000_000_000,
        )
    ),
    named(
        Option(
            name="price",
            kind=kinds.number(least=0, most=1_000_000, metavar="PRICE"),
            group=OptionGroup.BUDGET,
            help="Price of a GPU for an hour, in any currency.",
            example=2.5,
        )
    ),
)


def _priced(option: Option, name: str) -> Option:
    default = option.default_text if name == "power_watts" else _RUN_DEFAULT
    return replace(named(replace(option, name=option.name or name)), name=name, default_text=default)


@dataclass(frozen=True)
class Pricing:
    """Settings that runs are priced for. A field that is not listed here is described by its option.

    Attributes:
        gpu: A known GPU model, such as "b200", or a GPU file; None for the run's own.
        times: A calibration table of that GPU; None for the run's own, if it is for this GPU.
        fabric: A preset such as "p5-efa", or a fabric file; None for the run's own, or the GPU's usual one.
        host: A host model such as "grace", "this", a factor or a host file; None for the run's own choice, or the
            GPU's usual one.
        gpus_per_node: None for the run's own number, or the fabric's.
        nccl_env: NCCL's variables, which override those that the run had.
        what_if: A change of the job's communication, such as "merge=dp,tp" (``fakedist.cost_model.what_if``).
    """

    gpu: str | None = field(default=None, metadata=declared(_priced(GPU, "gpu")))
    power_watts: float | None = field(default=None, metadata=declared(_priced(GPU_POWER, "power_watts")))
    times: str | None = field(default=None, metadata=declared(_priced(TIMES, "times")))
    fabric: str | None = field(default=None, metadata=declared(_priced(FABRIC, "fabric")))
    host: str | None = field(default=None, metadata=declared(_priced(HOST, "host")))
    gpus_per_node: int | None = field(default=None, metadata=declared(_NVLINK_DOMAIN))
    interference: bool = field(default=True, metadata=declared(_INTERFERENCE))
    nccl_env: Mapping[str, str] = field(default_factory=dict, metadata=declared(_priced(NCCL_ENVIRONMENT, "nccl_env")))
    router_load: str | None = field(default=None, metadata=declared(_ROUTER_LOAD))
    what_if: str | None = None


class PricingOptions(TypedDict, total=False):
    """The keywords of :meth:`fakedist.Run.priced_for` and :func:`fakedist.time_job`: those of :class:`Pricing`."""

    power_watts: float | None
    times: str | None
    fabric: str | None
    host: str | None
    gpus_per_node: int | None
    interference: bool
    nccl_env: Mapping[str, str]
    router_load: str | None
    what_if: str | None


#: The options that set a field of :class:`Pricing`, in the order of ``--help``.
PRICING_OPTIONS = options_of(Pricing)
_BY_NAME = {option.name: option for option in PRICING_OPTIONS}


def pricing_option(name: str) -> Option:
    """The option that sets this field of :class:`Pricing`."""
    return _BY_NAME[name]
