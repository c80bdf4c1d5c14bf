"""Tables of test_architecture.py: where each library is imported, and exceptions with their reasons."""

from __future__ import annotations

#: The extras with a module ``command``.
EXTRAS = ("calibration", "chakra", "confirm", "mcp", "plan", "play")
#: Third-party library -> where it may be imported ("room/" or "module").
LIBRARY_HOMES = {
    "torch": (
        "rank/surroundings",
        "rank/frameworks/",
        "frames",
        "graph_captures",
        "world/",
        "gpu/",
        "record/",
        "extras/confirm/jobs/",
        "extras/confirm/scripts/",
        *(f"extras/experts/{name}" for name in ("deep_ep", "dispatchers", "hybrid_ep", "stand_in")),
        "extras/plan/torch_orders",
        *(f"extras/rl/{name}" for name in ("step_hooks", "verl", "vllm")),
    ),
    "pandas": (
        "traces/",
        "cost_model/",
        "analysis/",
        "findings/",
        "results/",
        "report/",
        "extras/calibration/",
        "extras/chakra/",
        "extras/experts/library_times",
        "extras/plan/",
        "extras/play/",
        *(f"extras/rl/{name}" for name in ("engine_memory", "rollout_time", "schedule", "summary_parts")),
        "check/",
        "sweep/",
    ),
    "pyarrow": ("rundir/tables",),
    "plotly": ("report/", "sweep/charts"),
    "jinja2": ("report/",),
    "markupsafe": ("report/",),  # what jinja2 escapes with
    "click": (
        *("cli/", "extras/rl/time_options", "extras/plan/sweep_options"),
        *(f"extras/{name}/command" for name in EXTRAS),
    ),
    "google": ("extras/chakra/",),
    **dict.fromkeys(("anyio", "mcp", "mcp_types"), ("extras/mcp/",)),
    "pytest": ("check/plugin", "check/marked_test"),
    "rich": ("cli/", "report/", "check/", "sweep/"),
    "simpleeval": ("sweep/",),
    "ray": ("launcher/executors/",),
    "grpc": ("launcher/executors/",),  # what Ray speaks
    "yaml": ("sweep/",),
    "sitecustomize": ("rank/started/",),  # the environment's own
}

#: A name of several modules, or of several public classes ("class Name") -> what all of them are.
SAME_THING = {
    "build": "compiles one library of ours, with its flags",
    "doctor": "`fakedist doctor`: its checks, and its command",
    **dict.fromkeys(("match", "run_list"), "a subject: its report, and its command"),
    "run": "a run: the public object, and its report",
    "time": "a step's time: its report, and its command",
    "host_memory": "the host's memory: its records, and its report",
    "comparison": "runs: the engine that compares them, and its report",
    "topology": "the ranks' groups: their analysis, and their report",
    "command": "the command of an extra",
    "class Verdict": "the verdict on a rank, and what a report says first",
    "class Advice": "a change that would help: the record, and its block of a report",
    "lines": "lines of source: their sums, and their command",
    "job_time": "the step of a whole job: the record, and what makes it",
    "token_budget": "what a number of tokens takes: its figures, and their report",
    "__main__": "the program of a process, which is started by the file's path",
}
#: A module of fewer than 80 lines with one importer -> why it is one.
SMALL_FOR_A_REASON = {
    **dict.fromkeys(("__main__", "check/marked_test", "cli/job_file"), "run with `python -m`"),
    **dict.fromkeys(("rank/__main__", "gpu/smi/__main__", "launcher/executors/__main__"), "the program of a process"),
    **dict.fromkeys(
        ("cli/task_program", "launcher/count_gpus", "extras/plan/torch_orders"), "the program of a process"
    ),
    **dict.fromkeys(("extras/confirm/jobs/parallel", "extras/confirm/scripts/start"), "the program of a process"),
    "rank/started/sitecustomize": "Python imports it by this name where a process begins",
    "rank/leaving": "ends the process; it must stay this short",
    **dict.fromkeys(
        (
            *("cli/compare", "cli/doctor", "cli/explain"),
            *("cli/lines", "cli/match", "cli/run_list", "cli/view"),
        ),
        "one module a command",
    ),
    **dict.fromkeys(
        (
            "rank/frameworks/dynamo",
            "rank/frameworks/pipelining",
            "rank/frameworks/safetensors",
            "rank/frameworks/uneven_inputs",
        ),
        "one module a framework",
    ),
    **dict.fromkeys(("extras/calibration/command", "extras/mcp/command"), "the command of an extra"),
    **dict.fromkeys(
        ("extras/play/run_shares", "extras/rl/adapters", "extras/rl/summary_parts", "extras/rl/time_options"),
        "the core finds it by this name",
    ),
    **dict.fromkeys(("extras/rl/rollout_report", "report/content/token_budget"), "one module a subject"),
    "extras/rl/vllm": "one module a framework",
    "gpu/driver/elf": "the format of shared libraries, which the driver's build need not know",
    "gpu/smi/offer": "the rank's environment; the program next to it runs alone",
    "record/generation": "which forwards generate tokens: a subject of its own",
}
