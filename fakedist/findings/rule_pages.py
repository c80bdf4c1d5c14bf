"""docs/findings.md, and the page of a rule: ``python -m fakedist.findings.rule_pages`` prints the former."""

from __future__ import annotations

import sys

from fakedist.errors import JobError, did_you_mean
from fakedist.findings import finding_all  # noqa: F401 - registers the rules
from fakedist.findings.registry import RULES

_INTRODUCTION = """# Findings

A finding is a fault that a rule found in a job's run. It has a code, figures, the line, what to change, and what that
gains. `fakedist report` shows the five gravest, `fakedist report --section findings` shows all of them,
`fakedist report --json` has them as `findings`, and `fakedist explain FD101` prints a section of this page.

Rules FD1xx concern memory, FD2xx time, FD3xx distribution; FD301, FD302 and FD303 compare the ranks of a job that ran
(`fakedist profile --rank 0,1`). Gains in bytes are *estimated*: the run's own history is replayed without the blocks
that would go, which gives a lower and an upper bound. Gains in time are estimated as the step is. A rule that lacks a
table finds nothing: a memory snapshot of a real GPU has no kernels, so no FD2xx rule applies to it.

`fakedist check` fails with exit code 3 on the findings that its configuration selects ([ci.md](ci.md#findings)).
A line's own findings are ignored by a comment at it:

```python
losses.append(loss)  # fakedist: ignore[FD108]
```

The comment may also be at the first or the last line of a statement of several lines.

`python -m fakedist.findings.rule_pages` prints this page, and a test keeps it true.
"""


def page_of(code: str) -> str:
    """The page of a rule as Markdown; JobError if there is no such code."""
    rule = RULES.get(code.upper())
    if rule is None:
        group = ", ".join(known for known in sorted(RULES) if known.startswith(code.upper()))
        hint = f"known are: {group}" if group else did_you_mean(code.upper(), sorted(RULES))
        raise JobError(f"there is no rule {code!r}", hint)
    return f"## {rule.code}: {rule.name}\n\n{rule.page}\n"


def markdown() -> str:
    """The page of all rules."""
    return "\n".join([_INTRODUCTION, *(page_of(code) for code in sorted(RULES))])


if __name__ == "__main__":
    sys.stdout.write(markdown())
