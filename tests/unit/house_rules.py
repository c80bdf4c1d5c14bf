"""Who may import what: the tables of test_architecture.py."""

from __future__ import annotations

#: Third-party library -> where it may be imported ("room/" or "module").
LIBRARY_HOMES = {
    "torch": ("rank/surroundings", "rank/frameworks/", "frames", "graph_captures", "world/", "gpu/", "record/"),
    "pandas": ("cost_model/", "analysis/", "results/", "report/", "export/", "check/", "sweep/"),
    "pyarrow": ("rundir/tables",),
    "plotly": ("report/", "sweep/page"),
    "jinja2": ("report/",),
    "markupsafe": ("report/",),  # what jinja2 escapes with
    "click": ("cli/",),
    "google": ("export/",),
    "pytest": ("check/plugin", "check/marked_test"),
    "rich": ("cli/", "report/", "check/", "sweep/"),
    "simpleeval": ("sweep/",),
    "optuna": ("sweep/sampling",),
    "ray": ("launcher/executors/",),
    "grpc": ("launcher/executors/",),  # what Ray speaks
    "yaml": ("sweep/",),
}

EVERYWHERE = (
    *("_version", "torch_releases", "errors", "units", "rank_list", "section", "bounded", "visible", "temporary"),
    *("gpu/models", "options"),
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
    "options": (),
    "importing": (),
    "patch": (),
    "frames": ("rundir",),
    "graph_captures": ("patch",),
    "own_memory": (),
    "api": ("check", "results"),
    "cli": ("launcher", "rundir", "results", "report", "check", "cost_model", "export", "sweep"),
    "launcher": ("rank", "rundir", "gpu", "world", "cost_model", "results", "report"),
    "rank": ("importing", "patch", "rundir", "gpu", "world", "record"),
    "rundir": (),
    "world": ("rundir", "patch", "frames"),
    "gpu": ("rundir", "patch", "frames", "importing", "own_memory", "graph_captures"),
    "record": ("rundir", "rank/frameworks", "patch", "frames", "importing", "own_memory", "graph_captures"),
    "cost_model": ("rundir", "analysis"),
    "analysis": ("rundir",),
    "results": ("rundir", "analysis", "cost_model", "report"),  # report only when a chart is wanted: run.figures
    "report": ("rundir", "analysis", "cost_model", "results"),
    "export": ("rundir", "cost_model", "results"),
    "check": ("api", "rundir", "results", "report", "launcher"),
    "sweep": ("launcher", "rundir", "cost_model", "results", "report"),
}

#: A module's name that stands in several rooms -> what all of them are.
SAME_THING = {
    "build": "compiles one library of ours, with its flags",
    "doctor": "`fakedist doctor`: its checks, and its command",
    "topology": "the ranks' groups: their analysis, and their command",
    "job_time": "the step of a whole job: the record, and what makes it",
    "recording": "the imports of a rank for its template; a run's journal in memory",
    "collector": "Python's cycle collector, kept out of work or in step",
}
#: A module of fewer than 80 lines with one importer -> why it is one.
SMALL_FOR_A_REASON = {
    **dict.fromkeys(("__main__", "check/marked_test", "cli/handed", "options/options_page"), "run with `python -m`"),
    "cli/program": "the console script",
    **dict.fromkeys(("cli/compare", "cli/doctor", "cli/nsys", "cli/report", "cli/view"), "one module a command"),
    **dict.fromkeys(("rank/frameworks/dynamo", "rank/frameworks/safetensors"), "one module a framework"),
    "rank/frameworks/symmetric_memory": "one module a framework",
    "gpu/smi/offer": "the rank's environment; the program next to it runs alone",
    "rank/script": "runs the script; its frames are cut from the script's errors",
    "record/generation": "which forwards generate tokens: a subject of its own",
    "report/page/job_page": "a page of its own, in no run's page",
}
