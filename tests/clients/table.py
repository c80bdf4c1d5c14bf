"""Results of the catalogue's jobs when they last ran (results/), and docs/clients.md made from them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fakedist.units import format_bytes
from tests.clients.catalogue import Entry, version
from tests.clients.running import Ran
from tests.conftest import ROOT

RESULTS = Path(__file__).parent / "results"
DOCUMENT = ROOT / "docs/clients.md"
HEAD = """# Frameworks

`make clients` made this page from real runs. `fakedist profile` ran each job below on the virtual GPU, unmodified,
once for each rank named. Then its records were checked: steps counted correctly; parameters, gradients, optimizer
state and activations found; the job's collectives called. The [glossary](glossary.md) defines these terms.

Where a row reads *by arithmetic*, the job's entry computes these figures from the job's sizes, and every rank's
records agree: bytes of parameters, gradients and optimizer state in the last step, the peak, FLOPs of its matrix
products and attention (6 per parameter and token), and the phases of every step.

The jobs are in `tests/clients/catalogue`. The frameworks come from PyPI (`constraints-clients.txt`). Jobs marked
*nightly* run every night (`make clients-fast`).

Recipes of public projects (`tests/clients/catalogue/recipes.py`) are the project's own loop with its own classes where
a package has them, and written anew where the project is a repository without one (CleanRL, DETR, DINO, minimind, SiT).
Some need packages that only `make recipes` installs (`requirements-recipes.txt`). That leaves out MACE, whose wheel
brings a package `tests`.

Projects that pin other versions (`tests/clients/catalogue/projects.py`) run by their own commands, each in an
environment of its own: `make .venv-NAME` puts what `tests/clients/environments/NAME.txt` lists in front of `.venv`'s
packages, `make clients-projects` runs their jobs. They load a Llama of four layers and conversations from files.
Where a version of a repository stands, its checkout was run, a folder of `$FAKEDIST_CHECKOUTS`.

Wall time covers the whole command, including process start and report. Peak is the allocator's peak allocated memory
(measured). Both are in the order of the ranks.

[pytorch-tests.md](pytorch-tests.md) shows which assertions of PyTorch's own tests hold here.

Not in the list:

- torchtune 0.6.1 needs torchao 0.15 or older. Its full finetune ran to the end on one rank, unchecked.
- OpenRLHF 0.11.2 imports flash-attn 2.8.3 in every trainer, which comes as source and takes hours of nvcc.
- NeMo Automodel 0.7.0 replaces a method of FSDP2 that torch 2.15 lacks (`to_accumulated_grad_if_needed`), on GPUs too.
- TorchRec 1.9.2 needs fbgemm_gpu 1.9.0, which lacks a symbol of torch 2.15 (`c10::report_overflow`).
- prime-rl 0.8.0 @559b44772 imports ring-flash-attn in its SFT and RL trainers, which needs flash-attn 2.8.3 (above);
  its wheels of flash-attn are built for torch 2.11.
- SkyRL 0.4.0 pins Ray 2.56.0; its main (@a9564572e) pins Ray 2.57.0 and flash-attn 2.8.3 for torch 2.11. Its SFT, too,
  trains in Ray's actors. It was not run.
- Megatron-Bridge 0.6.2 cannot be imported without Transformer Engine. Its recipes read a model's configuration from the
  Hub's cache. With Transformer Engine built and megatron-core 0.19.2, Transformers 5.12.1, tokenizers 0.22.2,
  megatron-energon and multi-storage-client installed, other packages are missing; no recipe reached its first step.
- torchtitan 0.3.0's Qwen3-30B-A3B (FSDP 8, compiled; FSDP with EP 8 on 8, 16 and 32 GPUs) ran whole, rank 0 of each,
  with the figures of [truth.md](truth.md#not-rebuilt). The catalogue has no such job.
- dion, VAR, DeepSpeedExamples and PyTorch's ImageNet example are repositories without a package.
  What they showed has tests of its own: ranks that a script starts, static graphs, truncated initialization,
  assertions on made-up values, compiled embeddings.
- fms-fsdp @5a296af is a repository that runs with ibm-fms 0.0.8. Its Llama 2 7B (HSDP, compiled, 4,096 tokens,
  batch 2) is estimated to take 732 ms on 96 H100 and 1.98 s on 128 A100, where its README has 853 ms and 1.80 s, of
  2024, when attention was FlashAttention-2, about 30 ms more on an H100.
- vLLM, SGLang, and TRL and verl with them, have environments and figures of their own ([rl.md](rl.md)).
- Kernels of notebooks are not processes that the script starts, and have no virtual GPU.

The 8 GiB of bf16 that nanochat's issue 443 asks about, (65536, 65536), are logits: 32 sequences of 2,048 tokens, by the
65,536 words of the vocabulary of then.
"""


def load_results() -> dict[str, Any]:
    """Results by name of the entry; empty before the first run."""
    found: dict[str, Any] = {}
    for path in sorted(RESULTS.glob("*.json")):
        found |= json.loads(path.read_text())
    return found


def save_results(results: dict[str, Any], entries: Sequence[Entry]) -> None:
    """Write the results of the entries that there still are, a file for each framework, and the document."""
    RESULTS.mkdir(exist_ok=True)
    files: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if entry.name in results:
            name = "".join(letter if letter.isalnum() else "_" for letter in entry.framework.lower())
            files.setdefault(f"{name}.json", {})[entry.name] = results[entry.name]
    for path in RESULTS.glob("*.json"):
        if path.name not in files:
            path.unlink()
    for name, kept in files.items():
        (RESULTS / name).write_text(json.dumps(kept, indent=1) + "\n")
    DOCUMENT.write_text(document(results, entries))


def result_of(entry: Entry, runs: Sequence[Ran], failed: str = "") -> dict[str, Any]:
    """One entry's result: with which versions, and each rank's figures; or why it failed."""
    names = dict.fromkeys((entry.package, *entry.requires, *entry.exactly, "torch"))
    checkout = dict([entry.checkout.split("@")] if entry.checkout else [])
    return {
        "versions": checkout | {name: version(name) for name in names},
        "cores": os.cpu_count(),
        "ranks": [
            {
                "rank": rank,
                "wall_s": round(run.wall_s, 1),
                "disturbed": run.disturbed,
                "peak_allocated_bytes": run.summary.get("peak_allocated_bytes"),
                "peak_reserved_bytes": run.summary.get("peak_reserved_bytes"),
            }
            for rank, run in zip(entry.ranks, runs, strict=False)
        ],
        "failed": failed,
        "arithmetic": list(entry.arithmetic(entry.ranks[0]).named) if entry.arithmetic is not None else [],
    }


def document(results: dict[str, Any], entries: Sequence[Entry]) -> str:
    lines = [HEAD]
    for framework in dict.fromkeys(entry.framework for entry in entries):
        lines += [f"## {framework}", "", *_table(results, [e for e in entries if e.framework == framework]), ""]
    if any(rank["disturbed"] for result in results.values() for rank in result["ranks"]):
        lines += ["\\* the machine did other work at the time, so the wall time is too long.", ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(results: dict[str, Any], entries: Iterable[Entry]) -> Iterable[str]:
    yield "| feature | version | job | ranks | result | wall time | peak allocated | |"
    yield "|---|---|---|---|---|---|---|---|"
    for entry in entries:
        yield "| " + " | ".join(_cells(entry, results.get(entry.name))) + " |"


def _cells(entry: Entry, result: dict[str, Any] | None) -> list[str]:
    ranks = ", ".join(map(str, entry.ranks))
    job = f"`{' '.join((*entry.options, entry.script, *entry.arguments))}`".replace("|", "\\|")  # of a table's cell
    nightly = "nightly" if entry.fast else ""
    if result is None:
        return [entry.feature, "", job, f"{ranks} of {entry.world_size:,}", "not run yet", "", "", nightly]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items() if name != "torch")
    versions = versions or f"torch {result['versions']['torch']}"
    said = "works"
    if result["failed"]:
        said = f"fails: {result['failed']}"
    elif entry.refused:
        said = f"cannot run: {entry.refused.reason}"
    elif result.get("arithmetic"):
        figures = ", ".join(result["arithmetic"]).replace("_", " ").replace("flops", "FLOPs")
        said = f"works; by arithmetic: {figures}"
    walls = " / ".join(f"{rank['wall_s']:.0f}{'*' * rank['disturbed']}" for rank in result["ranks"])
    peaks = [format_bytes(rank["peak_allocated_bytes"] or 0) for rank in result["ranks"]]
    peak = f"{peaks[0]} each" if len(peaks) > 1 and len(set(peaks)) == 1 else " / ".join(peaks)
    peak = "" if entry.refused or result["failed"] else peak
    walls = walls and f"{walls} s"
    return [entry.feature, versions, job, f"{ranks} of {entry.world_size:,}", said, walls, peak, nightly]
