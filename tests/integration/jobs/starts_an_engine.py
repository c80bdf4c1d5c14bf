"""A rank that starts the two processes of an engine, each on a GPU of its own."""

import json
import multiprocessing
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "engine"))

import sglang
import torch


def main() -> None:
    context = multiprocessing.get_context("spawn")
    answers, over = context.Queue(), context.Event()
    torch.cuda.init()
    with tempfile.TemporaryDirectory() as directory:
        processes = [context.Process(target=sglang.work, args=(rank, directory, answers, over)) for rank in range(2)]
        for process in processes:
            process.start()
        found = sorted((answers.get(timeout=240) for _ in processes), key=lambda answer: answer["rank"])
        used = [sglang.used(0), sglang.used(1)]
        over.set()
        for process in processes:
            process.join()
    after = [sglang.used(0), sglang.used(1)]
    pids, codes = [process.pid for process in processes], [process.exitcode for process in processes]
    print("FOUND", json.dumps({"ranks": found, "used": used, "after": after, "pids": pids, "codes": codes}), flush=True)


if __name__ == "__main__":
    main()
