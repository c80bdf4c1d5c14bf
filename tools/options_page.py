"""docs/options.md, made from the declarations of the options: ``python -m tools.options_page``."""

from __future__ import annotations

import sys

from fakedist.options.definition import OPTIONS
from fakedist.options.kinds import Door, Option, OptionGroup
from fakedist.options.pricing import MICRO_BATCHES, PRICING_OPTIONS, TOKENS_PER_STEP

_INTRODUCTION = """# Options of a job

A job has the same options everywhere: on the command line (`fakedist profile`), in the configuration of
`fakedist check` ([ci.md](ci.md)), and as keywords of `fakedist.profile` and of the pytest mark. `fakedist sweep`
leaves out those that would have no effect there.

`fakedist profile --rank stages` runs one rank of each pipeline stage ([time.md](time.md)), `--rank distinct` ranks of
each kind ([match.md](match.md#ranks-that-run-alike)), and a sweep has words of its own for the ranks that run
([sweeps.md](sweeps.md#what-runs)).

`python -m tools.options_page` prints this page, and a test keeps it true.

The script, or a module, and its arguments:

| command line | `check` | Python |
|---|---|---|
| `train.py --lr 0.1` | `script = "train.py"`, `arguments = ["--lr", "0.1"]` | `"train.py", "--lr", "0.1"` |
| `-m pkg.main --lr 0.1` | `module = "pkg.main"`, `arguments = "--lr 0.1"` | `"pkg.main", "--lr", "0.1", module=True` |

On the command line, torchrun's spelling with underscores works too (`--nproc_per_node`). Options that only torchrun's
own processes need are ignored: `--standalone`, `--node-rank`, `--master-addr`, `--master-port`, `--rdzv-*`.
"""

_PRICING = """## Pricing

Options of `fakedist time`, and keywords of `Run.priced_for` and `fakedist.time_job` (the last two of `time_job`
alone). A sweep gives those that are a job's options as such, and the others as [sweeps.md](sweeps.md) describes.
"""


def markdown() -> str:
    """The page."""
    lines = [_INTRODUCTION]
    for group in (OptionGroup.JOB, OptionGroup.DEVICE, OptionGroup.RECORDING):
        lines += [f"## {group.value}\n", "| command line | `check` | Python | default | |", "|---|---|---|---|---|"]
        lines += [_row(option, Door.TOML, Door.PYTHON) for option in OPTIONS if option.group is group]
        lines.append("")
    lines += [_PRICING, "| command line | Python | default | |", "|---|---|---|---|"]
    lines += [_row(option, Door.PYTHON) for option in (*PRICING_OPTIONS, TOKENS_PER_STEP, MICRO_BATCHES)]
    return "\n".join(lines).rstrip() + "\n"


def _row(option: Option, *doors: Door) -> str:
    metavar = option.metavar or option.kind.metavar
    flags = [flag if option.kind.is_switch else f"{flag} {metavar}" for flag in option.flags]
    cells = (
        ", ".join(f"`{flag}`" for flag in (*flags, option.off_flag) if flag),
        *(f"`{option.written(door, option.example)}`" for door in doors),
        _default(option),
        option.help,
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _default(option: Option) -> str:
    if option.default_text or not option.field or option.default in (None, ()):
        return option.default_text
    if option.kind.is_switch:
        return "on" if option.default else "off"
    (text,) = option.kind.texts(option.default)
    return f"`{text}`"


if __name__ == "__main__":
    sys.stdout.write(markdown())
