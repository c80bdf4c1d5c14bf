"""Who may import what: the tables of test_architecture.py."""

from __future__ import annotations

#: Third-party library -> where it may be imported ("room/" or "module").
LIBRARY_HOMES = {
    "torch": ("rank/surroundings", "frames", "world/", "frameworks/", "gpu/", "record/"),
    "pandas": ("time/", "analysis/", "results/", "report/", "export/", "check/", "sweep/"),
    "pyarrow": ("run/tables",),
    "plotly": ("report/", "sweep/figures"),
    "jinja2": ("report/",),
    "markupsafe": ("report/",),  # what jinja2 escapes with
    "click": ("cli/",),
    "google": ("export/",),
    "pytest": ("check/plugin", "check/marked_test"),
    "rich": ("cli/", "report/", "check/", "sweep/"),
    "simpleeval": ("sweep/",),
    "optuna": ("sweep/sampling",),
    "ray": ("launch/executors/",),
    "grpc": ("launch/executors/",),  # what Ray speaks
    "yaml": ("sweep/",),
}

EVERYWHERE = (
    *("_version", "torch_releases", "errors", "units", "rank_list", "section", "bounded", "visible", "temporary"),
    *("gpu_models", "job"),
)
#: Room or module -> the rooms and modules of fakedist that it may import besides itself and those of EVERYWHERE.
MAY_IMPORT = {
    "__init__": ("api", "results", "sweep"),
    "__main__": ("cli",),
    "_version": (),
    "errors": (),
    "units": (),
    "torch_releases": (),
    "rank_list": (),
    "section": (),
    "bounded": (),
    "visible": (),
    "temporary": (),
    "gpu_models": (),
    "job": (),
    "importing": (),
    "patch": (),
    "frames": ("run",),
    "own_memory": (),
    "api": ("check", "results"),
    "cli": ("launch", "run", "analysis", "results", "report", "check", "time", "export", "sweep"),
    "launch": ("rank", "run", "gpu", "world", "time", "analysis", "results", "report"),
    "rank": ("importing", "patch", "run", "gpu", "world", "frameworks", "record"),
    "run": (),
    "world": ("run", "patch", "frames"),
    "frameworks": ("world", "patch", "importing"),
    "gpu": ("run", "patch", "frames", "importing", "own_memory"),
    "record": ("run", "frameworks", "patch", "frames", "importing", "own_memory"),
    "nccl": ("run",),
    "time": ("run", "nccl"),
    "analysis": ("run", "nccl", "time"),
    "results": ("run", "analysis", "report"),  # report only when a chart is wanted: run.figures
    "report": ("run", "analysis", "results"),
    "export": ("run", "nccl", "time", "results"),
    "check": ("api", "run", "analysis", "results", "report", "launch"),
    "sweep": ("launch", "run", "analysis", "results", "report"),
}
