"""The output of ``nvidia-smi`` for people: its table, and the long form of ``-q``."""

from __future__ import annotations

import time

from fakedist.gpu.smi.fields import IDLE_CELSIUS, IDLE_MILLIWATTS, LIMIT_MILLIWATTS, Gpu, refused


def table(gpus: list[Gpu]) -> str:
    """The output without arguments."""
    machine = gpus[0].machine
    version = machine.driver
    line = f"+{'-' * 41}+{'-' * 24}+{'-' * 22}+"
    whole = f"+{'-' * 89}+"
    first = f"NVIDIA-SMI {version:<22} Driver Version: {version:<14} CUDA Version: {machine.cuda}"
    lines = [time.strftime("%a %b %e %H:%M:%S %Y"), whole, f"| {first:<87} |", line]
    lines += [
        f"| {'GPU  Name':<25}{'Persistence-M':>14} | {'Bus-Id':<15} {'Disp.A':>6} | {'Volatile Uncorr. ECC':<20} |",
        f"| {'Fan  Temp   Perf':<25}{'Pwr:Usage/Cap':>14} | {'Memory-Usage':>22} | {'GPU-Util  Compute M.':<20} |",
        f"| {'':<39} | {'':<22} | {'MIG M.':>20} |",
        f"|{'=' * 41}+{'=' * 24}+{'=' * 22}|",
    ]
    power = f"{IDLE_MILLIWATTS // 1000}W / {LIMIT_MILLIWATTS // 1000:>4}W"
    for gpu in gpus:
        memory = f"0MiB / {gpu.memory_mib:>6}MiB"
        lines += [
            f"| {gpu.index:>3}  {gpu.name:<28.28}   {'On':<4}| {gpu.bus_id:>18} {'Off':<3} | {0:>20} |",
            f"| N/A {IDLE_CELSIUS:>4}C    P0  {power:>22} | {memory:>22} | {'0%':>7} {'Default':>12} |",
            f"| {'':<39} | {'':<22} | {'Disabled':>20} |",
            line,
        ]
    titles = f"{' GPU   GI   CI              PID   Type   Process name':<70}{'GPU Memory':>17}"
    more = f"{'       ID   ID':<77}{'Usage':<10}"
    lines += ["", whole, f"| {'Processes:':<87} |", f"| {titles} |", f"| {more} |", f"|{'=' * 89}|"]
    return "\n".join([*lines, f"| {' No running processes found':<87} |", whole, ""])


def _sections() -> dict[str, list[tuple[str, str]]]:
    """The sections of ``-q`` by their name in ``-d``: titles, each with its field."""
    clocks = [("Graphics", "graphics"), ("SM", "sm"), ("Memory", "memory")]
    return {
        "": [("Product Name", "name"), ("Persistence Mode", "persistence_mode"), ("GPU UUID", "uuid")],
        "COMPUTE": [("Compute Mode", "compute_mode")],
        "MEMORY": [(word, f"memory.{word.lower()}") for word in ("Total", "Reserved", "Used", "Free")],
        "UTILIZATION": [("Gpu", "utilization.gpu"), ("Memory", "utilization.memory")],
        "ECC": [("Current", "ecc.mode.current"), ("Pending", "ecc.mode.pending")],
        "TEMPERATURE": [("GPU Current Temp", "temperature.gpu")],
        "POWER": [("Power Draw", "power.draw"), ("Current Power Limit", "power.limit")],
        "CLOCK": [
            *((title, f"clocks.current.{name}") for title, name in clocks),
            *((f"Max {title}", f"clocks.max.{name}") for title, name in clocks),
        ],
        "PERFORMANCE": [("Performance State", "pstate")],
    }


def long_form(display: str, gpus: list[Gpu]) -> str:
    """The output of ``-q``: the sections that a GPU's model can fill.

    Raises:
        NoAnswerError: A section in ``display`` does not exist.
    """
    known = _sections()
    wanted = [each.strip().upper() for each in display.split(",") if each.strip()]
    if strays := [each for each in wanted if each not in known]:
        raise refused(f"-q -d {','.join(strays)}")
    machine = gpus[0].machine
    lines = ["", f"{'=' * 14}NVSMI LOG{'=' * 14}", ""]
    for title, text in (
        ("Timestamp", time.strftime("%a %b %e %H:%M:%S %Y")),
        ("Driver Version", machine.driver),
        ("CUDA Version", machine.cuda),
    ):
        lines.append(f"{title:<54}: {text}")
    lines += ["", f"{'Attached GPUs':<54}: {machine.devices}"]
    for gpu in gpus:
        lines.append(f"GPU {gpu.bus_id}")
        for section, titles in known.items():
            if wanted and section not in wanted:
                continue
            lines += [f"    {section.capitalize()}"] if section else []
            indent = " " * (8 if section else 4)
            for title, name in titles:
                value, unit = gpu.value(name)
                lines.append(
                    f"{indent + title:<54}: {value} {unit or ('C' if name == 'temperature.gpu' else '')}".rstrip()
                )
        lines.append("")
    return "\n".join(lines)
