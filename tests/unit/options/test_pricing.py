"""Each option of pricing reaches the step's price under its keyword."""

from __future__ import annotations

from dataclasses import fields

import click
import pytest

from fakedist.cli.job_options import pricing_of, pricing_options
from fakedist.errors import JobError
from fakedist.options.pricing import PRICING_OPTIONS, Pricing, PricingOptions

#: Written by hand: a command line, and the field of ``Pricing`` that it sets.
TYPED = {
    "gpu": ("--gpu=h200", "h200"),
    "power_watts": ("--gpu-power=500W", 500.0),
    "times": ("--times=mine.json", "mine.json"),
    "fabric": ("--fabric=p5-efa", "p5-efa"),
    "host": ("--host=grace", "grace"),
    "gpus_per_node": ("--gpus-per-node=72", 72),
    "interference": ("--no-interference", False),
    "nccl_env": ("--nccl-env=NCCL_BUFFSIZE=1048576", {"NCCL_BUFFSIZE": "1048576"}),
    "router_load": ("--router-load=zipf:0.5", "zipf:0.5"),
}


def priced(*arguments: str) -> Pricing:
    context = click.Command("time", params=pricing_options()).make_context("time", list(arguments))
    gpu, options = pricing_of(context.params)
    return Pricing(gpu, **options)


@pytest.mark.parametrize("name", [option.name for option in PRICING_OPTIONS])
def test_the_command_line_sets_the_field_of_each_option_alone(name: str) -> None:
    text, value = TYPED[name]
    assert priced(text) == Pricing(**{name: value})


def test_every_keyword_is_a_field() -> None:
    assert {field.name for field in fields(Pricing)} == {"gpu", *PricingOptions.__annotations__}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--gpus-per-node=0", "--gpus-per-node must be 1 or more, not 0"),
        ("--router-load=zipf:-1", "--router-load has a number from 0 to 10 after the colon, not '-1'"),
        ("--nccl-env=x", "--nccl-env is KEY=VALUE, not 'x'"),
    ],
)
def test_a_value_out_of_its_kind_is_refused_by_the_options_name(argument: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        priced(argument)
