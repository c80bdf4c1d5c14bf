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

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <vector>

// libtorch_cuda, which is not loaded, would call it. No header of torch's declares it.
namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*has)(DeviceIndex));
}

namespace {
using namespace c10::cuda;
constexpr int32_t EMPTY_CACHE = INT32_MIN, FREE_CARRIED = -(1 << 30);
constexpr int LOG_ERROR = 2; // c10/util/logging_is_not_google_glog.h
constexpr size_t MOST_STATES = 200;

// gpu/player.py has the same fields.
struct Program {
    int64_t num_events, num_blocks, num_streams;
    const int32_t *events; // n: block n is allocated; ~n: it is freed; EMPTY_CACHE
    const int64_t *base, *per; // bytes of each block: base + per * the count that it follows
    const int32_t *follows; // which count; -1: none
    const int32_t *stream; // of each block
    const uint8_t *is_shared; // another stream used the block: it can be given again once that stream has come there
};

// Steps of a few kinds, one after the other. The first kind is what comes before: it is played once, and what it does
// not free stays. gpu/player.py has the same fields.
struct Kinds {
    int64_t num_kinds, num_columns, num_carried, num_generations, num_streams;
    const int64_t *first_event, *first_block; // of each kind, and the end
    const int32_t *events; // as of a program, by the blocks of the kind; FREE_CARRIED - n: carried block n
    const int64_t *base, *per;
    const int32_t *follows, *stream;
    const uint8_t *is_shared;
    const int32_t *carried; // which carried block it is: one that a later step frees; -1: none
    const int32_t *generation; // so many steps before the last one of what comes before
    const int32_t *age; // of each carried block: so many steps later it is freed
};
struct Step {
    int64_t allocated_peak, reserved, num_retries, num_mallocs;
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

struct Outcome {
    int64_t failed_step, failed_event, requested, allocated, reserved; // where a request was refused; -1: nowhere
    int64_t is_whole;
};

// After how many steps the same ones follow, up to the end; 0: they do not repeat. A multiple of the generations.
int64_t period_of(const int64_t *steps, int64_t num_steps, int64_t width, int64_t num_generations) {
    for (int64_t period = num_generations; period <= 20 * num_generations && period < num_steps;
         period += num_generations)
        if (std::equal(steps + period * width, steps + num_steps * width, steps)) return period;
    return 0;
}

// What the allocator's next answers follow from: all blocks, and where the carried ones are.
std::vector<uint64_t> state_of(const std::vector<c10::DataPtr> &carried) {
    std::vector<uint64_t> state;
    for (const auto &segment : CUDACachingAllocator::snapshot().segments) {
        state.push_back(segment.address);
        for (const auto &block : segment.blocks) state.push_back(2 * block.size + block.allocated);
    }
    for (const auto &block : carried) state.push_back(reinterpret_cast<uint64_t>(block.get()));
    return state;
}

// The garbage collector also counts how long blocks are free.
bool collects_garbage() {
    for (const char *name : {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}) {
        const char *settings = std::getenv(name);
        if (settings && std::strstr(settings, "garbage_collection_threshold")) return true;
    }
    return false;
}

// Plays the steps: of each, its kind, whether the cache is emptied after it, and the counts of its columns.
void play_steps(const Kinds &of, const int64_t *steps, int64_t num_steps, Step *played, Outcome &outcome) {
    auto *allocator = CUDACachingAllocator::get();
    const CUDAStream other = getStreamFromExternal(streams.back(), 0);
    std::vector<c10::DataPtr> kept, local, carried(static_cast<size_t>(of.num_carried * of.num_generations));
    int32_t current = -1;
    outcome = {-1, -1, 0, 0, 0, 1};
    const auto slot = [&](int64_t which, int64_t step) -> c10::DataPtr & {
        return carried[static_cast<size_t>(which * of.num_generations +
                                           (step + of.num_generations) % of.num_generations)];
    };
    const int64_t width = 2 + of.num_columns, period = period_of(steps, num_steps, width, of.num_generations);
    std::deque<std::vector<uint64_t>> states;
    for (int64_t step = -1; step < num_steps; step++) {
        const int64_t *row = step < 0 ? nullptr : steps + step * width;
        const int64_t kind = row ? row[0] : 0, first = of.first_block[kind];
        auto &blocks = row ? local : kept;
        blocks.resize(static_cast<size_t>(of.first_block[kind + 1] - first));
        CUDACachingAllocator::resetPeakStats(0);
        for (int64_t event = of.first_event[kind]; event < of.first_event[kind + 1]; event++) {
            const int32_t what = of.events[event];
            if (what == EMPTY_CACHE) {
                CUDACachingAllocator::emptyCache();
            } else if (what <= FREE_CARRIED) {
                slot(FREE_CARRIED - what, step - of.age[FREE_CARRIED - what]).clear();
            } else if (what < 0) {
                blocks[static_cast<size_t>(~what)].clear();
            } else {
                const auto n = static_cast<size_t>(first + what);
                if (of.stream[n] != current)
                    setCurrentCUDAStream(
                        getStreamFromExternal(streams[static_cast<size_t>(current = of.stream[n])], 0));
                const int64_t bytes = of.base[n] + (of.follows[n] < 0 || !row ? 0 : of.per[n] * row[2 + of.follows[n]]);
                auto &to = of.carried[n] < 0 ? blocks[static_cast<size_t>(what)]
                                             : slot(of.carried[n], step - of.generation[n]);
                try {
                    to = allocator->allocate(static_cast<size_t>(bytes));
                } catch (const c10::OutOfMemoryError &) {
                    const auto stats = CUDACachingAllocator::getDeviceStats(0);
                    outcome = {step, event, bytes, stats.allocated_bytes[0].current, stats.reserved_bytes[0].current,
                               1};
                    return;
                }
                if (of.is_shared[n]) allocator->recordStream(to, other);
            }
        }
        if (!row) continue;
        if (row[1]) CUDACachingAllocator::emptyCache();
        const auto stats = CUDACachingAllocator::getDeviceStats(0);
        played[step] = {stats.allocated_bytes[0].peak, stats.reserved_bytes[0].peak, stats.num_alloc_retries,
                        stats.num_device_alloc};
        if (!period) continue;
        states.push_back(state_of(carried));
        if (states.size() > MOST_STATES) states.pop_front();
        int64_t length = period; // of the cycle in which the allocator's states are, too
        const auto num_states = static_cast<int64_t>(states.size());
        while (length < num_states && states[static_cast<size_t>(num_states - 1 - length)] != states.back())
            length += period;
        if (length >= num_states) continue;
        const int64_t mallocs = played[step].num_mallocs - played[step - length].num_mallocs;
        if (mallocs && collects_garbage()) continue;
        for (int64_t next = step + 1; next < num_steps; next++) { // as in the cycle before
            const Step &before = played[next - length];
            played[next] = {before.allocated_peak, before.reserved, before.num_retries, before.num_mallocs + mallocs};
        }
        return;
    }
}

// Run something in a fork, which writes to shared memory of this size. Returns whether it came to its end.
template <typename Run> bool in_fork(Run run, void *to, size_t size) {
    void *shared = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return false;
    const pid_t child = fork();
    if (child == 0) {
        try {
            run(shared);
        } catch (const std::exception &error) {
            std::fprintf(stderr, "fakedist: %s\n", error.what());
            _exit(1);
        }
        _exit(0);
    }
    int status = 1;
    if (child > 0) waitpid(child, &status, 0);
    std::memcpy(to, shared, size);
    munmap(shared, size);
    return status == 0;
}
} // namespace

#define API extern "C" __attribute__((visibility("default")))

// Prepare the allocator, and so many streams besides the default one, which comes first. Returns 0 if that fails.
API int fakedist_player_begin(int64_t num_streams) try {
    // The allocator warns of each refused piece of an expandable segment, as often as plays are full.
    if (auto *level = static_cast<int *>(dlsym(RTLD_DEFAULT, "FLAGS_caffe2_log_level"))) *level = LOG_ERROR;
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
    return in_fork([&](void *shared) { play(*of, counts, *static_cast<Played *>(shared)); }, to, sizeof *to) &&
           to->is_whole == 1;
}

// Play so many steps. What is played of them follows the outcome.
API int fakedist_player_play_steps(const Kinds *of, const int64_t *steps, int64_t num_steps, Outcome *to) {
    const size_t size = sizeof *to + static_cast<size_t>(num_steps) * sizeof(Step);
    const auto run = [&](void *shared) {
        auto *outcome = static_cast<Outcome *>(shared);
        play_steps(*of, steps, num_steps, reinterpret_cast<Step *>(outcome + 1), *outcome);
    };
    return in_fork(run, to, size) && to->is_whole == 1;
}
