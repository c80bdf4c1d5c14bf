"""Memory that is mapped and shared: handles for other processes, multicast objects, and what counts against the GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gpu.driver import on_driver

_SCRIPT = """
import os, socket

FILE, FABRIC = 1, 8

class Properties(ctypes.Structure):
    _fields_ = [(name, c_int) for name in ("type", "handles", "location", "device")]
    _fields_ += [("win32", c_void_p), ("flags", c_uint64)]

class Multicast(ctypes.Structure):
    _fields_ = [("devices", c_uint), ("bytes", c_size_t), ("handles", c_uint64), ("flags", c_uint64)]

def call(function, *arguments):
    return getattr(driver, function)(*arguments)

def used():
    free, total = c_size_t(), c_size_t()
    call("cuMemGetInfo_v2", byref(free), byref(total))
    return (total.value - free.value) // MIB

def create(mib, handles=FILE | FABRIC):
    return c_void_p(make("cuMemCreate", c_size_t(mib * MIB), byref(Properties(1, handles, 1, 0)), c_uint64(0)))

def mapped(handle, mib):
    address = c_void_p(make("cuMemAddressReserve", c_size_t(mib * MIB), c_size_t(0), None, c_uint64(0)))
    status = call("cuMemMap", address, c_size_t(mib * MIB), c_size_t(0), handle, c_uint64(0))
    return address if status == 0 else status

def unmap(address, mib):
    return call("cuMemUnmap", address, c_size_t(mib * MIB))

def export(handle, kind):
    out = c_int(-1) if kind == FILE else (c_char * 64)()
    status = call("cuMemExportToShareableHandle", byref(out), handle, kind, c_uint64(0))
    return status or (out.value if kind == FILE else out)

def imported(shared, kind):
    given = c_void_p(shared) if kind == FILE else shared
    return c_void_p(make("cuMemImportFromShareableHandle", given, kind))

def properties(handle):
    out = Properties()
    call("cuMemGetAllocationPropertiesFromHandle", byref(out), handle)
    return [out.handles, out.location, out.device]

def access(address):
    out = c_uint64(7)
    status = call("cuMemGetAccess", byref(out), byref(Properties()), address)
    return [status, out.value]
"""

_SHARED = """
# Eight peers' handles are this rank's own, and take nothing of this GPU.
own = create(4)
fd = export(own, FILE)
peers = [imported(fd, FILE) for _ in range(7)]
found["peers"] = [used(), len({peer.value for peer in peers})]
addresses = [mapped(peer, 4) for peer in peers]
found["mapped"] = [used(), len({address.value for address in addresses})]
found["properties"] = properties(peers[0])
found["access"] = [access(addresses[0]), access(c_void_p(addresses[0].value + MIB))]
found["retained"] = make("cuMemRetainAllocationHandle", c_void_p(addresses[0].value + 3 * MIB)) == peers[0].value
call("cuMemRelease", peers[0])
found["released"] = call("cuMemRelease", own)
found["kept_by_peers"] = used()
for peer, address in zip(peers, addresses):
    unmap(address, 4), call("cuMemRelease", peer)
found["unmapped"] = [used(), access(addresses[0])]
found["nothing_retained"] = make("cuMemRetainAllocationHandle", addresses[0])

# A file descriptor crosses a socket to another process of the machine.
own = create(2)
here, there = socket.socketpair()
if not (child := os.fork()):
    _, fds, _, _ = socket.recv_fds(there, 1, 1)
    before = used()
    other = imported(fds[0], FILE)
    address = mapped(other, 2)
    there.send(json.dumps([used() - before, properties(other), unmap(address, 2)]).encode())
    os._exit(0)
socket.send_fds(here, [b"x"], [export(own, FILE)])
os.waitpid(child, 0)
found["other_process"] = json.loads(here.recv(999))
call("cuMemRelease", own)

# Fabric handles; what cannot be shared; what is not a handle.
own = create(2)
found["fabric"] = [mapped(imported(export(own, FABRIC), FABRIC), 2) is not None, used()]
found["not_shareable"] = [export(create(2, 0), FILE), export(create(2, FILE), FABRIC), export(own, 2)]
with open("/dev/zero") as zeros:
    found["not_a_handle"] = make("cuMemImportFromShareableHandle", c_void_p(zeros.fileno()), FILE)
found["windows"] = make("cuMemCreate", c_size_t(2 * MIB), byref(Properties(1, 2, 1, 0)), c_uint64(0))
found["unanswered"] = gpu.refused()
"""

_MULTICAST = """
def object_of(mib, devices=8, handles=FILE):
    return c_void_p(make("cuMulticastCreate", byref(Multicast(devices, mib * MIB, handles, 0))))

def bind(of, mib, memory, within=0, offset=0):
    return call("cuMulticastBindMem", of, c_size_t(offset * MIB), memory, c_size_t(within * MIB), c_size_t(mib * MIB),
                c_uint64(0))

attribute = c_int(-1)
found["attribute"] = [call("cuDeviceGetAttribute", byref(attribute), 132, 0), attribute.value]
granularity = c_size_t()
found["granularity"] = [call("cuMulticastGetGranularity", byref(granularity), byref(Multicast(8, 2 * MIB, FILE, 0)), 0)]
found["granularity"].append(granularity.value)
if attribute.value:
    memory, team = create(8), object_of(8)
    found["object_takes"] = used()
    found["too_early"] = bind(team, 8, memory)
    found["added"] = [call("cuMulticastAddDevice", team, 0), call("cuMulticastAddDevice", team, 9)]
    found["too_much"] = [bind(team, 10, memory), bind(team, 4, memory, 6), bind(team, 4, memory, 0, 6)]
    found["odd"] = bind(team, 1, memory)
    again = imported(export(team, FILE), FILE)
    call("cuMemRelease", team)
    found["bound"] = [bind(again, 4, memory), bind(again, 2, memory, 4, 4), used()]
    view = mapped(again, 8)
    call("cuMemRelease", memory)
    found["kept_by_binding"] = used()
    found["unbound"] = [call("cuMulticastUnbind", again, 0, c_size_t(4 * MIB), c_size_t(4 * MIB)), used()]
    own = create(2)
    address = mapped(own, 2)
    bound = call("cuMulticastBindAddr", again, c_size_t(6 * MIB), address, c_size_t(2 * MIB), c_uint64(0))
    unmapped = call("cuMulticastBindAddr", again, c_size_t(0), c_void_p(64), c_size_t(2 * MIB), c_uint64(0))
    found["by_address"] = [bound, unmapped]
    unmap(address, 2), call("cuMemRelease", own)
    found["kept_by_address"] = used()
    found["twice"] = call("cuMulticastUnbind", again, 0, c_size_t(4 * MIB), c_size_t(2 * MIB))
    unmap(view, 8), call("cuMemRelease", again)
    found["ended"] = used()
    found["not_an_object"] = call("cuMulticastAddDevice", create(2), 0)
    fd = export(object_of(4, 2), FILE)
    here, there = socket.socketpair()
    if not (child := os.fork()):
        before, other, memory = used(), imported(fd, FILE), create(4)
        added = [call("cuMulticastAddDevice", other, 0), bind(other, 4, memory), bind(other, 6, memory)]
        view = mapped(other, 4)
        there.send(json.dumps([*added, unmap(view, 4), used() - before]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    found["of_another_process"] = json.loads(here.recv(999))
else:
    found["created"] = make("cuMulticastCreate", byref(Multicast(8, 2 * MIB, FILE, 0)))
    found["fabric"] = make("cuMemCreate", c_size_t(2 * MIB), byref(Properties(1, FABRIC, 1, 0)), c_uint64(0))
"""

_OUTSIDE = """
def outside():
    return {name: size // MIB for name, size in gpu.outside(0).items()}, gpu.outside_peak(0) // MIB

own = create(6)
plain = create(2, 0)
extension = make("cudaMalloc", c_size_t(4 * MIB))
managed = make("cuMemAllocManaged", c_size_t(10 * MIB), 1)
found["held"] = outside()
call("cudaFree", c_void_p(managed)), call("cuMemRelease", own)
create(4)
found["later"] = outside()
found["other_device"] = gpu.outside(1)
"""


@pytest.fixture(scope="module")
def shared() -> dict[str, Any]:
    return on_driver(_SCRIPT + _SHARED)


@pytest.fixture(scope="module")
def team() -> dict[str, Any]:
    return on_driver(_SCRIPT + _MULTICAST)


def test_handles_of_peers_take_no_memory_and_keep_what_peers_would_keep(shared: dict[str, Any]) -> None:
    assert shared["peers"] == [4, 7]
    assert shared["mapped"] == [4, 7]
    assert shared["properties"] == [9, 1, 0]
    assert shared["released"] == 0
    assert shared["kept_by_peers"] == 4
    assert shared["unmapped"][0] == 0


def test_an_address_knows_its_handle_and_its_access(shared: dict[str, Any]) -> None:
    assert shared["access"] == [[0, 3], [0, 3]]
    assert shared["retained"]
    assert shared["unmapped"][1] == [0, 0]
    assert shared["nothing_retained"] == "status 1"


def test_a_file_descriptor_reaches_another_process(shared: dict[str, Any]) -> None:
    assert shared["other_process"] == [0, [9, 1, 0], 0]


def test_what_was_not_asked_for_is_not_shared(shared: dict[str, Any]) -> None:
    assert shared["fabric"] == [True, 2]
    assert shared["not_shareable"] == [1, 1, 1]
    assert shared["not_a_handle"] == "status 1"
    assert shared["windows"] == "status 801"
    assert shared["unanswered"] == []


def test_a_multicast_object_takes_no_memory_and_keeps_what_is_bound(team: dict[str, Any]) -> None:
    assert team["attribute"] == [0, 1]
    assert team["granularity"] == [0, 2 << 20]
    assert team["object_takes"] == 8
    assert team["bound"] == [0, 0, 8]
    assert team["kept_by_binding"] == 8
    assert team["unbound"] == [0, 8]
    assert team["by_address"] == [0, 1]
    assert team["kept_by_address"] == 10
    assert team["ended"] == 0


def test_a_process_that_another_sends_a_multicast_object_binds_its_own_memory_to_it(team: dict[str, Any]) -> None:
    added, bound, too_much, unmapped, used = team["of_another_process"]
    assert (added, bound, unmapped) == (0, 0, 0)
    assert too_much == 1
    assert used == 4, "MiB of its own"


def test_a_multicast_object_refuses_what_it_has_no_room_for(team: dict[str, Any]) -> None:
    assert team["too_early"] == 1
    assert team["added"] == [0, 101]
    assert team["too_much"] == [1, 1, 1]
    assert team["odd"] == 1
    assert team["twice"] == 1
    assert team["not_an_object"] == 1


@pytest.mark.parametrize("gpu", ["a100-80g", "l40s"])
def test_gpus_whose_switches_do_not_multicast_say_so(gpu: str) -> None:
    found = on_driver(_SCRIPT + _MULTICAST, gpu=gpu)
    assert found["attribute"] == [0, 0]
    assert found["granularity"][0] == 801
    assert found["created"] == found["fabric"] == "status 801"


def test_memory_outside_the_allocator_is_counted_by_who_took_it() -> None:
    found = on_driver(_SCRIPT + _OUTSIDE)
    assert found["held"] == [{"user buffers": 6, "managed memory": 10, "extensions": 6}, 22]
    assert found["later"] == [{"user buffers": 6, "managed memory": 10, "extensions": 6}, 22]
    assert found["other_device"] == {}


def test_memory_of_a_peer_by_ipc_has_addresses_of_its_own_and_makes_a_user_buffer_of_what_is_shared() -> None:
    found = on_driver(
        _SCRIPT
        + """
class Handle(ctypes.Structure):
    _fields_ = [("bytes", c_char * 64)]

def outside():
    return {name: count // MIB for name, count in gpu.outside(0).items()}

base, handle = c_void_p(make("cudaMalloc", c_size_t(6 * MIB))), Handle()
call("cudaIpcGetMemHandle", byref(handle), base)
driver.cudaIpcOpenMemHandle.argtypes = [c_void_p, Handle, c_uint]
theirs = [c_void_p(), c_void_p()]
found["opened"] = [call("cudaIpcOpenMemHandle", byref(peer), handle, 1) for peer in theirs]
found["apart"] = len({base.value, theirs[0].value, theirs[1].value})
copies = []
told = ctypes.CFUNCTYPE(c_int, c_uint64, c_uint64, c_uint64, c_int)(lambda *copy: copies.append(copy) or 0)
driver.fakedist_tell_peer_copies(told)
call("cudaMemcpyAsync", theirs[1], base, c_size_t(MIB), 3, NULL)
call("cudaMemcpyAsync", base, base, c_size_t(MIB), 3, NULL)
found["told"] = [(to == theirs[1].value, size, ends) for to, _, size, ends in copies]
found["used"] = used()
found["outside"] = outside()
found["closed"] = [call("cudaIpcCloseMemHandle", peer) for peer in (*theirs, theirs[0])]
here, there = socket.socketpair()
if not (child := os.fork()):
    before, peer = used(), c_void_p()
    statuses = [call("cudaIpcOpenMemHandle", byref(peer), given, 1) for given in (Handle(), handle)]
    size = c_size_t()
    call("cuMemGetAddressRange_v2", byref(c_void_p()), byref(size), peer)
    statuses += [call("cudaIpcCloseMemHandle", peer) for _ in range(2)]
    there.send(json.dumps([*statuses, used() - before, size.value // MIB]).encode())
    os._exit(0)
os.waitpid(child, 0)
found["of_another_process"] = json.loads(here.recv(999))
"""
    )
    assert found["opened"] == [0, 0]
    assert found["apart"] == 3
    assert found["told"] == [[True, 1 << 20, 0], [True, 1 << 20, 1]]
    assert (found["used"], found["outside"]) == (6, {"user buffers": 6})
    assert found["closed"] == [0, 0, 1]
    nothing, opened, closed, again, taken, size = found["of_another_process"]
    assert (nothing, opened, closed, again) == (1, 0, 0, 1)
    assert (taken, size) == (0, 6), "the process that took it counts it"
