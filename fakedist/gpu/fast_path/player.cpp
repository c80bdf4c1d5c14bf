// Plays a sequence of allocations and frees through torch's own caching allocator, with other sizes than recorded.
//
// Each play runs in a fork, because the allocator breaks ties by address: it begins with the addresses that a new process
// has.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#if __has_include(<c10/cuda/PeerToPeerAccess.h>)
#include <c10/cuda/PeerToPeerAccess.h>
#define HAS_PEER_CACHE
#endif

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <vector>

// libtorch_cuda, which is not loaded, would call it. No header of torch's declares it.
namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*has)(DeviceIndex));
}

namespace {
using namespace c10::cuda;
constexpr int32_t EMPTY_CACHE = INT32_MIN;

// gpu/player.py has the same fields.
struct Program {
    int64_t num_events, num_blocks, num_streams;
    const int32_t *events; // n: block n is allocated; ~n: it is freed; EMPTY_CACHE
    const int64_t *base, *per; // bytes of each block: base + per * the count that it follows
    const int32_t *follows; // which count; -1: none
    const int32_t *stream; // of each block
    const uint8_t *is_shared; // another stream used the block: it can be given again once that stream has come there
};

struct Played {
    int64_t allocated_peak, reserved_peak, num_retries, num_mallocs;
    int64_t failed; // the event whose request was refused; -1: none
    int64_t is_whole; // 0: the process ended before its end
};

std::vector<cudaStream_t>
    streams; // in the order of their recorded handles, which breaks ties, too; the last is for sharing

void play(const Program &of, const int64_t *counts, Played &played) {
    auto *allocator = CUDACachingAllocator::get();
    std::vector<c10::DataPtr> blocks(static_cast<size_t>(of.num_blocks));
    const CUDAStream other = getStreamFromExternal(streams.back(), 0);
    int32_t current = -1;
    int64_t event = 0;
    try {
        for (; event < of.num_events; event++) {
            const int32_t what = of.events[event];
            if (what == EMPTY_CACHE) {
                CUDACachingAllocator::emptyCache();
            } else if (what < 0) {
                blocks[static_cast<size_t>(~what)].clear();
            } else {
                const auto n = static_cast<size_t>(what);
                if (of.stream[n] != current)
                    setCurrentCUDAStream(
                        getStreamFromExternal(streams[static_cast<size_t>(current = of.stream[n])], 0));
                const int64_t bytes = of.base[n] + (of.follows[n] < 0 ? 0 : of.per[n] * counts[of.follows[n]]);
                blocks[n] = allocator->allocate(static_cast<size_t>(bytes));
                if (of.is_shared[n]) allocator->recordStream(blocks[n], other);
            }
        }
        event = -1;
    } catch (const c10::OutOfMemoryError &) {}
    const auto stats = CUDACachingAllocator::getDeviceStats(0);
    played = {stats.allocated_bytes[0].peak,
              stats.reserved_bytes[0].peak,
              stats.num_alloc_retries,
              stats.num_device_alloc,
              event,
              1};
}
} // namespace

#define API extern "C" __attribute__((visibility("default")))

// Prepare the allocator, and so many streams besides the default one, which comes first. Returns 0 if that fails.
API int fakedist_player_begin(int64_t num_streams) try {
    _internal::setHasPrimaryContext(+[](c10::DeviceIndex) { return true; });
#ifdef HAS_PEER_CACHE
    detail::init_p2p_access_cache(1); // expandable segments ask it
#endif
    CUDACachingAllocator::init(1);
    streams.assign(static_cast<size_t>(num_streams) + 1, nullptr);
    for (auto &stream : streams)
        if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return 0;
    std::sort(streams.begin(), streams.end());
    streams.insert(streams.begin(), nullptr);
    return 1;
} catch (const std::exception &) {
    return 0;
}

// Play a program with these counts. Returns 0 if the fork failed or ended early.
API int fakedist_player_play(const Program *of, const int64_t *counts, Played *to) {
    void *shared = mmap(nullptr, sizeof(Played), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return 0;
    auto *played = static_cast<Played *>(shared);
    const pid_t child = fork();
    if (child == 0) {
        try {
            play(*of, counts, *played);
        } catch (const std::exception &error) {
            std::fprintf(stderr, "fakedist: %s\n", error.what());
            _exit(1);
        }
        _exit(0);
    }
    if (child > 0) waitpid(child, nullptr, 0);
    *to = *played;
    munmap(shared, sizeof(Played));
    return to->is_whole == 1;
}
