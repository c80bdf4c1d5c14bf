"""User buffers of Transformer Engine in a world of 16, TP 8, of which one rank runs; without Transformer Engine.

The script's ``transformer_engine_torch`` makes the calls of userbuffers-host.cpp: a multicast object of the domain's
first rank, memory of which all ranks pass file descriptors over sockets, and kernels by their names.
"""

from __future__ import annotations

import pytest

from tests.support.runs import Profiled, ProfileOnce

MIB = 1 << 20
ENGINE = """
import ctypes, socket, torch
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

driver = ctypes.CDLL("libcuda.so.1")
FILE = 1

class Properties(ctypes.Structure):
    _fields_ = [(name, c_int) for name in ("type", "handles", "location", "device")]
    _fields_ += [("win32", c_void_p), ("flags", c_uint64)]

class Multicast(ctypes.Structure):
    _fields_ = [("devices", c_uint), ("bytes", c_size_t), ("handles", c_uint64), ("flags", c_uint64)]

def call(function, *arguments):
    status = getattr(driver, function)(*arguments)
    assert status == 0, (function, status)

def made(function, *arguments):
    out = c_void_p()
    call(function, byref(out), *arguments)
    return out

def name(rank, node):
    return ("\\0" + f"tmp/ub-ipc-socket-{rank}-{0xdeadcafe0000 + node:x}").encode().ljust(108, b"\\0")

def received(own):
    _, (file,), _, _ = socket.recv_fds(own, 1, 1)
    return file

def sent(own, file, name):
    own.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, file.value.to_bytes(4, "little"))], 0, name)

def exported(handle):
    file = c_int(-1)
    call("cuMemExportToShareableHandle", byref(file), handle, FILE, c_uint64(0))
    return file

def imported(file):
    return made("cuMemImportFromShareableHandle", c_void_p(file), FILE)

class CommOverlapHelper:
    def __init__(self, world, domain):
        self.world, self.domain = world, domain
        self.rank, self.size, self.node = domain.rank(), domain.size(), world.rank() // domain.size()

class CommOverlap:
    is_first = True

    def __init__(self, helper, num_bytes):
        own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        own.settimeout(20)
        rank, size, node = helper.rank, helper.size, helper.node
        own.bind(name(rank, node))
        if CommOverlap.is_first:
            helper.world.barrier().wait()
            if rank == 0:
                several = made("cuMulticastCreate", byref(Multicast(size, 512 << 30, FILE, 0)))
                file = exported(several)
            for peer in range(1, size):
                helper.domain.barrier().wait()
                if rank == 0:
                    sent(own, file, name(peer, node))
                elif rank == peer:
                    several = imported(received(own))
            call("cuMulticastAddDevice", several, torch.cuda.current_device())
            CommOverlap.several, CommOverlap.is_first, CommOverlap.bound = several, False, 0
        device = torch.cuda.current_device()
        mine = made("cuMemCreate", c_size_t(num_bytes), byref(Properties(1, FILE, 1, device)), c_uint64(0))
        files, file = {}, exported(mine)
        for step in range(1, size):
            helper.domain.barrier().wait()
            sent(own, file, name((rank + step) % size, node))
            files[(rank + size - step) % size] = received(own)
        own.close()
        bound, whole = c_size_t(CommOverlap.bound), c_size_t(num_bytes)
        call("cuMulticastBindMem", CommOverlap.several, bound, mine, c_size_t(0), whole, c_uint64(0))
        CommOverlap.bound += num_bytes
        base = made("cuMemAddressReserve", c_size_t(size * num_bytes), c_size_t(0), c_void_p(), c_uint64(0)).value
        for peer in range(size):
            handle = mine if peer == rank else imported(files[peer])
            call("cuMemMap", c_void_p(base + peer * num_bytes), c_size_t(num_bytes), c_size_t(0), handle, c_uint64(0))
        self.addresses = [base + peer * num_bytes for peer in range(size)]
        self.counters = made("cudaMalloc", c_size_t(4 * helper.world.size())).value

def launch(kernel, blocks, *arguments):
    function = made("cuModuleGetFunction", made("cuModuleLoadData", bytes(64)), kernel)
    pointers = (c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    stream = c_void_p(torch.cuda.current_stream().cuda_stream)
    call("cuLaunchKernel", function, blocks, 1, 1, 1, 1, 1, 0, stream, pointers, None)
"""
JOB = f"""
import ctypes, os
from ctypes import c_int, c_size_t, c_uint64, c_void_p
import torch
import torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
tensor_parallel, _ = dist.new_subgroups(8)
from transformer_engine.pytorch.module.base import tex as engine
helper = engine.CommOverlapHelper(dist.new_group(), dist.new_subgroups(8)[0])
buffers = [engine.CommOverlap(helper, megabytes << 20) for megabytes in (8, 6)]
model = torch.nn.Linear(16, 16, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
own, buffer, ranks = helper.rank, buffers[0], c_int(0)
to, source = 8 + (own + 1) % 8, 8 + (own - 1) % 8
counter, wide = c_uint64(buffer.counters + 4 * to), c_uint64(0)
for _ in range(3):
    loss = model(torch.randn(4, 16, device="cuda")).sum()
    there = buffer.addresses[(own + 1) % 8]
    engine.driver.cudaMemcpyAsync(c_void_p(there), c_void_p(buffer.addresses[own]), c_size_t({MIB}), 3, c_void_p(0))
    engine.launch(b"_Z21kuserbuffers_pushsendPiS_P4int4S1_i", 1, counter, wide, wide, wide, c_int(0))
    waits = (c_int(own), c_int(source), ranks, ranks, wide, wide, ranks, wide, wide, wide)
    engine.launch(b"_Z21kuserbuffers_pushrecviiiiPiS_imS_S_", 1, *waits)
    lines = [c_int(0)] * 6 + [c_int({MIB} // 16), wide, c_int(0), wide, wide]
    engine.launch(b"_Z38userbuffers_fp16_sum_inplace_gpu_mc_agILi8EEviiiiiiiPPviP5uint4m", 16, *lines)
    engine.launch(b"_Z16kuserbuffers_incPi", 1, wide)
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(scope="module", params=[8, 11])
def ran(
    request: pytest.FixtureRequest, profile_once: ProfileOnce, tmp_path_factory: pytest.TempPathFactory
) -> Profiled:
    directory = tmp_path_factory.mktemp("job")
    package = directory / "transformer_engine" / "pytorch" / "module"
    package.mkdir(parents=True)
    for above in (package, *package.parents[:2]):
        (above / "__init__.py").touch()
    (directory / "transformer_engine_torch.py").write_text(ENGINE)
    (package / "base.py").write_text("import transformer_engine_torch as tex")
    script = directory / "job.py"
    script.write_text(JOB)
    return profile_once(script, world_size=16, rank=request.param)


def test_buffers_are_exchanged_with_ranks_that_do_not_exist_and_count(ran: Profiled) -> None:
    assert ran.finished.code == 0, ran.finished.stderr
    taken = ran.summary["estimated_outside"]["taken"]
    assert taken == {"user buffers": 14 * MIB, "extensions": 2 * 2 * MIB}


def test_sends_waits_and_collectives_are_calls_of_the_tensor_parallel_group(ran: Profiled) -> None:
    calls = ran.table("calls")
    own = calls[calls["step"] == 2].astype({"operation": str})
    rank = ran.table("groups")["group_rank"].iloc[own["group"].iloc[0]]
    assert own[["operation", "bytes_in", "bytes_out", "peer"]].to_numpy().tolist() == [
        ["put", MIB, 0, (rank + 1) % 8],
        ["put_wait", 0, MIB, (rank - 1) % 8],
        ["userbuffers_multimem_all_gather_16sms", MIB, 8 * MIB, -1],
    ]
    assert own["group"].nunique() == 1
    assert own["group"].iloc[0] == 1, "the script's own group, not that of the exchange"


def test_the_step_has_each_once_on_its_stream(ran: Profiled) -> None:
    names = ran.table("kernels")["name"].astype(str)
    assert (names == "put").sum() == (names == "put_wait").sum() == 1
    assert not names.str.contains("kuserbuffers_push|Memcpy DtoD").any()
    assert names.str.contains("kuserbuffers_inc").sum() == 1
