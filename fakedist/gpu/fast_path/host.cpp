// The host's memory: blocks of 1 MiB and more that tensors take from torch's CPU allocator, and pinned memory, of which
// the virtual GPU's driver tells. A page that nothing has touched counts, too. On the virtual GPU, large blocks take
// address space alone until something is written there, however much memory this machine has.
#include "view.h"

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

// The virtual GPU's driver (driver/pinned.c): `size` is 0 for memory that is freed. On a real GPU there is no such function.
extern "C" __attribute__((weak)) void fakedist_watch_pinned(void (*tell)(uint64_t address, uint64_t size, int is_ours));
// The same (driver/virtual_gpu.c): this machine could not give so many bytes, and the run ends with that.
extern "C" __attribute__((weak)) void fakedist_machine_lacks(uint64_t size);

namespace {
constexpr size_t LEAST = 1 << 20;
// glibc gives larger blocks back to the kernel, too, as soon as they are freed (DEFAULT_MMAP_THRESHOLD_MAX).
constexpr size_t MOST_OF_MALLOC = 32 << 20;
// In the order of HOST_CHANGES (rundir/schema.py); MOVED: the rank is in another place, `address` is its number.
enum HostKind : uint8_t { PAGEABLE, PINNED, REGISTERED, MOVED };

struct HostEvent {
    HostKind kind;
    uint64_t address;
    int64_t size; // 0: freed
    int64_t time_us;
    std::shared_ptr<c10::GatheredContext> stack;
};

struct HostColumns {
    std::vector<uint8_t> kind;
    std::vector<uint64_t> address;
    std::vector<int64_t> size, time_us;
    std::vector<int32_t> stack;
    Events named; // new stacks and frames alone
};

std::atomic<bool> host_is_on{false};
std::mutex host_lock;
std::vector<HostEvent> host_events;
std::unordered_set<const void *> host_blocks; // those of 1 MiB and more that tensors hold
HostColumns host_columns;

void happened(HostKind kind, uint64_t address, size_t size) {
    if (!host_is_on.load(std::memory_order_relaxed)) return;
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    HostEvent event{kind, address, static_cast<int64_t>(size),
                    std::chrono::duration_cast<std::chrono::microseconds>(now).count(), nullptr};
    // Python's lock is taken for it, so ours must not be held.
    if (size) event.stack = torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false);
    const std::lock_guard<std::mutex> held(host_lock);
    if (kind == PAGEABLE && size) host_blocks.insert(reinterpret_cast<const void *>(address));
    host_events.push_back(std::move(event));
}

c10::Allocator *usual = nullptr; // torch's own
bool is_reserving = false;
std::unordered_map<const void *, size_t> reserved; // blocks that are address space
size_t reserved_bytes = 0;

void free_block(void *block) {
    bool is_known = false;
    size_t size = 0; // of address space
    {
        const std::lock_guard<std::mutex> held(host_lock);
        is_known = host_blocks.erase(block) > 0;
        if (const auto at = reserved.find(block); at != reserved.end()) {
            size = at->second;
            reserved_bytes -= size;
            reserved.erase(at);
        }
    }
    if (is_known) happened(PAGEABLE, reinterpret_cast<uint64_t>(block), 0);
    if (!size) return usual->raw_deleter()(block);
    c10::profiledCPUMemoryReporter().Delete(block);
    munmap(block, size);
}

bool is_limited() {
    rlimit limit{};
    return !getrlimit(RLIMIT_AS, &limit) && limit.rlim_cur != RLIM_INFINITY;
}

// A block of address space. Its pages are zero, and take memory once they are written.
c10::DataPtr reserve(size_t size) {
    void *block = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (block == MAP_FAILED) {
        if (is_limited() && fakedist_machine_lacks) fakedist_machine_lacks(size);
        return usual->allocate(size); // raises torch's error
    }
    c10::profiledCPUMemoryReporter().New(block, size);
    const std::lock_guard<std::mutex> held(host_lock);
    reserved.emplace(block, size);
    reserved_bytes += size;
    return {block, block, &free_block, c10::Device(c10::kCPU)};
}

class Watching final : public c10::Allocator {
  public:
    c10::DataPtr allocate(size_t size) override {
        const bool is_reserved = is_reserving && size > MOST_OF_MALLOC;
        c10::DataPtr block = is_reserved ? reserve(size) : usual->allocate(size);
        if (size < LEAST || !host_is_on.load(std::memory_order_relaxed)) return block;
        if (block.get_deleter() == &free_block || block.compare_exchange_deleter(usual->raw_deleter(), &free_block))
            happened(PAGEABLE, reinterpret_cast<uint64_t>(block.get()), size);
        return block;
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
    void copy_data(void *to, const void *from, size_t size) const override { usual->copy_data(to, from, size); }
};

void pinned_changed(uint64_t address, uint64_t size, int is_ours) {
    happened(is_ours ? PINNED : REGISTERED, address, size);
}

// A forked process, such as a DataLoader's worker, is not the rank.
void in_fork() {
    host_is_on = false;
    host_lock.unlock();
}

Watching &watching = *new Watching; // never destroyed: blocks may outlive everything

// Become the CPU's allocator. Returns false where another than torch's own is set.
bool take_over() {
    c10::Allocator *now = c10::GetCPUAllocator();
    if (now == &watching) return true;
    if (now != c10::GetDefaultCPUAllocator() || !now->raw_deleter()) return false;
    if (!usual) pthread_atfork([] { host_lock.lock(); }, [] { host_lock.unlock(); }, in_fork);
    usual = now;
    c10::SetCPUAllocator(&watching);
    return true;
}
} // namespace

#define API extern "C" __attribute__((visibility("default")))

// From here on, large blocks are address space.
API void fakedist_host_reserve() { is_reserving = take_over(); }

// The CPU's allocator while it is watched: torch does not ask the one that is set for storages that Python makes.
API c10::Allocator *fakedist_host_allocator() { return &watching; }

// Begin to watch, or end. Returns 0 where the CPU's allocator is not torch's own.
API int fakedist_host_watch(int wanted) {
    if (!wanted) {
        host_is_on = false;
        if (!is_reserving && usual && c10::GetCPUAllocator() == &watching) c10::SetCPUAllocator(usual);
        return 1;
    }
    if (!take_over()) return 0;
    if (fakedist_watch_pinned) fakedist_watch_pinned(pinned_changed);
    const std::lock_guard<std::mutex> held(host_lock);
    host_events.clear(), host_blocks.clear();
    host_is_on = true;
    return 1;
}

// The rank is in another step or phase.
API void fakedist_host_moved(int64_t place) { happened(MOVED, static_cast<uint64_t>(place), 0); }

// Bytes that malloc has given to all of this process, and those of address space; -1 where that is not known.
API int64_t fakedist_host_malloc() {
#if defined(__GLIBC__) && (__GLIBC__ > 2 || __GLIBC_MINOR__ >= 33)
    const auto known = mallinfo2();
    const std::lock_guard<std::mutex> held(host_lock);
    return static_cast<int64_t>(known.uordblks + known.hblkhd + reserved_bytes);
#else
    return -1;
#endif
}

// Read what happened since the last call, in the order of `HostColumns`. The columns stay where they are until the next
// call. Returns -1 if torch raised an error. Needs Python's lock.
API int fakedist_host_read(fakedist::View *to) try {
    std::vector<HostEvent> events;
    {
        const std::lock_guard<std::mutex> held(host_lock);
        events.swap(host_events);
    }
    host_columns = {};
    std::vector<torch::CapturedTraceback *> found;
    for (const auto &event : events)
        if (event.stack) found.push_back(dynamic_cast<torch::CapturedTraceback *>(event.stack.get()));
    const auto named = torch::symbolize(found);
    std::map<std::vector<uint64_t>, int32_t> raw;
    size_t index = 0;
    for (const auto &event : events) {
        host_columns.kind.push_back(event.kind), host_columns.address.push_back(event.address);
        host_columns.size.push_back(event.size), host_columns.time_us.push_back(event.time_us);
        host_columns.stack.push_back(-1);
        if (!event.stack) continue;
        const auto [at, is_new] = raw.emplace(named.tracebacks[index++], -1);
        if (is_new) at->second = numbered(host_columns.named, named.all_frames, at->first);
        host_columns.stack.back() = at->second;
    }
    for (const fakedist::View &column :
         {view(host_columns.kind), view(host_columns.address), view(host_columns.size), view(host_columns.time_us),
          view(host_columns.stack), view(host_columns.named.lengths), view(host_columns.named.frames),
          fakedist::View{host_columns.named.named.data(), host_columns.named.named.size()}})
        *to++ = column;
    return 0;
} catch (const std::exception &) {
    return -1;
}
