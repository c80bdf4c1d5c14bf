"""The rollout that ``fakedist time`` simulates: an engine, and what it is asked to generate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fakedist.errors import JobError
from fakedist.options import kinds
from fakedist.options.kinds import Option, OptionGroup, declared, options_of

_MOST = 1 << 20


@dataclass(frozen=True)
class Rollout:
    """A rollout to simulate. Each field is described by its option; None takes the default."""

    engine: str | None = field(
        default=None,
        metadata=declared(
            Option(
                kind=kinds.plain_text(),
                group=OptionGroup.ROLLOUT,
                help="The config.json of the engine's model, as Hugging Face's models have it. Needs --kv-tokens.",
                metavar="CONFIG",
                default_text="the run's own engine, with its settings",
                example="llama/config.json",
            )
        ),
    )
    lengths: str | None = field(
        default=None,
        metadata=declared(
            Option(
                kind=kinds.plain_text(),
                group=OptionGroup.ROLLOUT,
                help="Tokens that each request generates: N, uniform:LEAST:MOST, lognormal:MEAN:SIGMA, "
                "lognormal:MEAN:SIGMA:MOST, or a file of a length a line.",
                metavar="LENGTHS",
                example="lognormal:1024:0.8:8192",
            )
        ),
    )
    requests: int | None = field(
        default=None,
        metadata=declared(
            Option(
                kind=kinds.whole_number(least=1, most=100_000),
                group=OptionGroup.ROLLOUT,
                help="Requests that one engine answers in a rollout.",
                default_text="the lines of the file of lengths",
                example=512,
            )
        ),
    )
    prompt_tokens: int | None = field(
        default=None,
        metadata=declared(
            Option(
                kind=kinds.whole_number(least=1, most=_MOST),
                group=OptionGroup.ROLLOUT,
                help="Tokens of a prompt.",
                example=512,
            )
        ),
    )
    kv_tokens: int | None = field(
        default=None,
        metadata=declared(
            Option(
                kind=kinds.whole_number(least=1, most=1 << 40),
                group=OptionGroup.ROLLOUT,
                help="Tokens that the engine's KV cache holds. vLLM prints them as it starts: GPU KV cache size.",
                default_text="the run's engine's",
                example=400_000,
            )
        ),
    )
    max_running: int | None = field(
        default=None,
        metadata=declared(
            Option(
                kind=kinds.whole_number(least=1, most=8192),
                group=OptionGroup.ROLLOUT,
                help="Requests that are computed at once (vLLM's max_num_seqs).",
                default_text="the run's engine's; of another vLLM's: 1,024 from 70 GiB on, but on an A100; else 256",
                example=256,
            )
        ),
    )
    step_tokens: int | None = field(
        default=None,
        metadata=declared(
            Option(
                kind=kinds.whole_number(least=1, most=_MOST),
                group=OptionGroup.ROLLOUT,
                help="Tokens that a step computes at most (vLLM's max_num_batched_tokens).",
                default_text="the run's engine's; of another vLLM's: 16,384 from 70 GiB on, but on an A100; else 8,192",
                example=8192,
            )
        ),
    )
    engine_tp: int | None = field(
        default=None,
        metadata=declared(
            Option(
                kind=kinds.whole_number(least=1, most=1024),
                group=OptionGroup.ROLLOUT,
                help="GPUs of the engine, by tensor parallelism.",
                default_text="the run's engine's; of another 1",
                example=2,
            )
        ),
    )


#: The options that set a field of :class:`Rollout`, in the order of ``--help``.
ROLLOUT_OPTIONS = options_of(Rollout)
_NEEDED = ("lengths", "prompt_tokens")


def read_rollout(stored: Mapping[str, object]) -> Rollout | None:
    """The rollout of the options that were given, by name; None if none was.

    Raises:
        JobError: One that has no default is missing.
    """
    if not stored:
        return None
    examples = {option.name: f"{option.flags[0]} {option.example}" for option in ROLLOUT_OPTIONS}
    given = examples[next(iter(stored))].partition(" ")[0]
    for name in (*_NEEDED, *(["kv_tokens"] if "engine" in stored else [])):
        if name not in stored:
            flag = examples[name].partition(" ")[0]
            raise JobError(f"{given} was given without {flag}, which a rollout needs", examples[name])
    return Rollout(**stored)  # type: ignore[arg-type]  # the options' kinds check the types
