"""Allowed imports: the tables of test_architecture.py."""

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
    "cli": ("launcher", "rank/fork_server", "rundir", "results", "report", "check", "cost_model", "export", "sweep"),
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
    "__main__": "the program of a process, which is started by the file's path",
}
#: The name of a public class that stands in several modules -> what all of them are.
SAME_CLASS: dict[str, str] = {}
#: A module of fewer than 80 lines with one importer -> why it is one.
SMALL_FOR_A_REASON = {
    **dict.fromkeys(("__main__", "check/marked_test", "cli/job_file", "options/options_page"), "run with `python -m`"),
    **dict.fromkeys(("rank/__main__", "gpu/smi/__main__", "launcher/executors/__main__"), "the program of a process"),
    **dict.fromkeys(("cli/task_program", "launcher/count_gpus"), "the program of a process"),
    "rank/leaving": "ends the process; it must stay this short",
    **dict.fromkeys(("cli/compare", "cli/doctor", "cli/report", "cli/view"), "one module a command"),
    **dict.fromkeys(("rank/frameworks/dynamo", "rank/frameworks/safetensors"), "one module a framework"),
    "rank/frameworks/symmetric_memory": "one module a framework",
    "gpu/smi/offer": "the rank's environment; the program next to it runs alone",
    "gpu/fast_path/event_tracker": "torch 2.8 and 2.9 alone need it: it goes with them",
    "record/generation": "which forwards generate tokens: a subject of its own",
    "report/page/serve": "the web server of `fakedist view --port`: pages need none",
    "report/page/job_page": "a page of its own, in no run's page",
}
