"""A report of Nsight Systems, made by hand in the schema of nsys 2025 or of an older one."""

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

PID = 0x1000007 << 24
MAIN, AUTOGRAD = PID | 11, PID | 12
PUSH_POP, START_END, DOMAIN, MARK = 59, 60, 75, 34


@dataclass
class MadeUp:
    """A report's contents; ``write`` makes it a file.

    Attributes:
        old: Has the tables' names and columns of nsys 2022.
        without: Columns that the version does not have.
        ranges: start, end, text or number of a string, thread, type, domain.
        calls: start, correlation, thread.
        kernels: start, end, correlation, name, graph node, process.
        copies: start, end, correlation, bytes, kind.
        graphs: start, end, correlation.
        nodes: graph node, original node, thread, start.
        waits: start, end, stream, correlation, type, event.
        events: stream, correlation, event: one for each recorded.
    """

    old: bool = False
    without: tuple[str, ...] = ()
    ranges: list[tuple[int, int | None, str | int | None, int, int, int]] = field(default_factory=list)
    calls: list[tuple[int, int, int]] = field(default_factory=list)
    kernels: list[tuple[int, int, int, str, int | None, int]] = field(default_factory=list)
    copies: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    graphs: list[tuple[int, int, int]] = field(default_factory=list)
    nodes: list[tuple[int, int, int, int]] = field(default_factory=list)
    waits: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    events: list[tuple[int, int, int]] = field(default_factory=list)
    strings: dict[str, int] = field(default_factory=dict)

    def range(self, start: int, end: int | None, text: str, thread: int = MAIN, kind: int = PUSH_POP) -> None:
        self.ranges.append((start, end, text, thread, kind, 0))

    def kernel(self, launched: int, name: str = "kernel", thread: int = MAIN, node: int | None = None) -> None:
        """A kernel of 5 ns that begins 100 ns after its launch."""
        correlation = len(self.calls) + 1
        self.calls.append((launched, correlation, thread))
        self.kernels.append((launched + 100, launched + 105, correlation, name, node, thread >> 24 << 24))

    def write(self, path: Path) -> Path:
        connection = sqlite3.connect(path)
        texts = [(number, text) for text, number in self.strings.items()]
        numbered = {name: 1000 + place for place, name in enumerate(dict.fromkeys(row[3] for row in self.kernels))}
        texts += [(number, name) for name, number in numbered.items()]
        self._table(connection, "StringIds", "id value", texts)
        meta = "EXPORT_META_DATA" if self.old else "META_DATA_EXPORT"
        self._table(
            connection, meta, "name value", [("EXPORT_PRODUCT_VERSION", "2022.4.2" if self.old else "2025.5.1")]
        )
        self._table(connection, "TARGET_INFO_GPU", "id name", [(0, "NVIDIA H100 80GB HBM3")])
        ranges = [
            (start, end, kind, *((None, text) if isinstance(text, int) else (text, None)), thread, domain)
            for start, end, text, thread, kind, domain in self.ranges
        ]
        if ranges:
            self._table(connection, "NVTX_EVENTS", "start end eventType text textId globalTid domainId", ranges)
        calls = [(start, start + 2, correlation, thread) for start, correlation, thread in self.calls]
        self._table(connection, "CUPTI_ACTIVITY_KIND_RUNTIME", "start end correlationId globalTid", calls)
        if self.kernels:
            columns = "start end deviceId streamId correlationId globalPid demangledName gridX gridY gridZ blockX"
            kernels = [
                (start, end, 0, 7, correlation, process, numbered[name], 8, 4, 1, 128, 1, 1, node)
                for start, end, correlation, name, node, process in self.kernels
            ]
            self._table(connection, "CUPTI_ACTIVITY_KIND_KERNEL", f"{columns} blockY blockZ graphNodeId", kernels)
        on_stream = "start end deviceId streamId correlationId globalPid"
        optional = [
            ("MEMCPY", f"{on_stream} bytes copyKind", [(*row[:2], 0, 7, row[2], PID, *row[3:]) for row in self.copies]),
            ("GRAPH_TRACE", f"{on_stream} graphId", [(*row[:2], 0, 7, row[2], PID, 1) for row in self.graphs]),
            (
                "SYNCHRONIZATION",
                "start end deviceId contextId streamId correlationId globalPid syncType eventId",
                [(*row[:2], 0, 1, *row[2:4], PID, *row[4:]) for row in self.waits],
            ),
            (
                "CUDA_EVENT",
                "deviceId contextId streamId correlationId globalPid eventId",
                [(0, 1, *row[:2], PID, row[2]) for row in self.events],
            ),
        ]
        for name, columns, rows in optional:
            if rows:
                self._table(connection, f"CUPTI_ACTIVITY_KIND_{name}", columns, rows)
        if self.nodes:
            name = "CUDA_GRAPH_EVENTS" if self.old else "CUDA_GRAPH_NODE_EVENTS"
            self._table(connection, name, "graphNodeId originalGraphNodeId globalTid start", self.nodes)
        connection.commit()
        connection.close()
        return path

    def _table(self, connection: sqlite3.Connection, name: str, columns: str, rows: list[tuple[object, ...]]) -> None:
        names = columns.split()
        kept = [place for place, column in enumerate(names) if column not in self.without]
        connection.execute(f"CREATE TABLE {name} ({', '.join(f'{names[place]!r}' for place in kept)})")
        marks = ", ".join("?" * len(kept))
        connection.executemany(f"INSERT INTO {name} VALUES ({marks})", [[row[place] for place in kept] for row in rows])


def training(**given: object) -> MadeUp:
    """Two layers, forward and backward: the second is checkpointed, autograd has a thread of its own."""
    report = MadeUp(**given)  # type: ignore[arg-type]
    report.range(1000, 9000, "step 3")
    report.range(1000, 1990, "forward")
    for layer, start in (("layers.0", 1100), ("layers.1", 1500)):
        report.range(start, start + 300, layer)
        report.range(start + 10, start + 90, f"aten::mm, seq = {start // 100}, op_id = {start}")
        report.kernel(start + 50, "gemm")
        report.range(start + 100, start + 190, "attention")
        report.range(start + 110, start + 150, f"aten::softmax, seq = {start // 100 + 1}")
        report.kernel(start + 120, "softmax")
    report.range(2000, 6000, "backward")
    node = "autograd::engine::evaluate_function: "
    report.range(2100, 3900, f"{node}MmBackward0, op_id = 70", AUTOGRAD)
    report.range(2110, 3890, "MmBackward0, seq = 15", AUTOGRAD)
    report.range(2200, 2600, "layers.1", AUTOGRAD)  # its forward runs again
    report.range(2300, 2400, "aten::mm, seq = 2", AUTOGRAD)
    report.kernel(2350, "gemm", AUTOGRAD)
    report.range(2700, 2800, "aten::mm", AUTOGRAD)
    report.kernel(2750, "gemm", AUTOGRAD)
    report.range(4000, 4100, f"{node}torch::autograd::AccumulateGrad, op_id = 80", AUTOGRAD)
    report.kernel(4050, "add", AUTOGRAD)
    report.range(4200, 4400, f"{node}SoftmaxBackward0, op_id = 90", AUTOGRAD)
    report.range(4210, 4390, "SoftmaxBackward0, seq = 12, op_id = 91", AUTOGRAD)
    report.kernel(4300, "softmax_back", AUTOGRAD)
    report.range(7000, 8000, "Optimizer.step#AdamW.step")
    report.kernel(7500, "multi_tensor_apply")
    report.range(9500, 9900, "step 4")  # has no kernel
    report.range(9950, 9990, "the end")
    return report
