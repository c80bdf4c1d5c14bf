"""Does ahead, on another core while the rank runs, what its tables and its page need."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from fakedist.errors import FakedistError
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.options import Job

if TYPE_CHECKING:
    from fakedist.results.building import Computed


def import_ahead(page: bool, gpu: str) -> None:
    """Import what makes the tables and, if wanted, the page, and load what they need at first use.

    ``gpu`` is the model for which the tables price a step, as they do for faster ones; empty if they price none.
    """
    with suppress(ImportError, FakedistError):  # raised again where it is needed
        import fakedist.report.content.run
        import fakedist.results.building
        import fakedist.results.opening  # noqa: F401
        from fakedist.rundir.tables import import_parquet

        import_parquet()
        if page:
            from fakedist.report.render.html import load_page

            load_page()
        if gpu:
            from fakedist.cost_model.gains import faster_gpus
            from fakedist.cost_model.kernels.kernel_times import KernelTimes

            own = find_gpu(gpu)
            for spec in (own, *faster_gpus(own)):
                KernelTimes(spec).load()


def priced_gpu(job: Job) -> str:
    """The GPU model for which a job's tables price a step. Empty if they price none."""
    return job.gpu if job.device == "virtual" and job.kernels else ""


class Ahead:
    """A thread that imports and loads while the rank runs, and computes the tables once all of it is recorded.

    A rank that has written its last record needs a while to end: a large job has a gigabyte to free. ``computed`` is
    known at the end of the ``with`` block: None if the rank's process ended before all was recorded.
    """

    def __init__(self, job: Job, run_directory: Path) -> None:
        self._job, self._run_directory = job, run_directory
        self._may_go_on = threading.Event()
        self._is_recorded = False
        self._thread = threading.Thread(target=self._work, name="ahead")
        self.computed: Computed | None = None

    def __enter__(self) -> Ahead:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_recorded &= kind is None
        self._may_go_on.set()
        self._thread.join()  # two threads must not import modules that import each other

    def recorded(self) -> None:
        """The rank has written its last record."""
        self._is_recorded = True
        self._may_go_on.set()

    def _work(self) -> None:
        import_ahead(self._job.page, priced_gpu(self._job))
        with suppress(Exception):  # raised again where it is needed
            self._may_go_on.wait()
            if self._is_recorded and not self._job.nsys:  # what nsys saw is joined to the recording later
                from fakedist.results.building import compute_tables

                self.computed = compute_tables(self._run_directory)
