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
#include <cstring>
#include <exception>
#include <unordered_map>
#include <utility>
#include <vector>

// libtorch_cuda, which is not loaded, would call it. No header of torch's declares it.
namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*has)(DeviceIndex));
}

namespace {
using namespace c10::cuda;
constexpr int32_t EMPTY_CACHE = INT32_MIN, FREE_CARRIED = -(1 << 30);
constexpr int LOG_ERROR = 2; // c10/util/logging_is_not_google_glog.h

// player.py has the same fields.
struct Program {
    int64_t num_events, num_blocks, num_streams;
    const int32_t *events; // n: block n is allocated; ~n: it is freed; EMPTY_CACHE
    const int64_t *base, *per; // bytes of each block: base + per * the count that it follows
    const int32_t *follows; // which count; -1: none
    const int32_t *stream; // of each block
    const uint8_t *is_shared; // another stream used the block: it can be given again once that stream has come there
};

// Steps of a few kinds, one after the other. The first kind is what comes before: it is played once, and what it does
// not free stays. player.py has the same fields.
struct Kinds {
    int64_t num_kinds, num_columns, num_carried, num_generations, num_streams;
    const int64_t *first_event, *first_block; // of each kind, and the end
    const int32_t *events; // as of a program, by the blocks of the kind; FREE_CARRIED - n: carried block n
    const int64_t *base, *per;
    const int32_t *follows, *stream;
    const uint8_t *is_shared;
    const int32_t *group; // of each kind: it counts with the steps of this group
    const int32_t *carried; // which carried block it is: one that a later step frees; -1: none
    const int32_t *generation; // so many steps of its group before the last one of what comes before
    const int32_t *age, *maker; // of each carried block: so many steps of its group later it is freed
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

// The allocator merges free neighbours at once, so that its answers follow from its segments and the blocks in use. Steps
// that make and release no segment lead from one state to another, which is known when the same step comes again.
struct State {
    int64_t made, released; // bytes of segments, so far
    uint64_t in_use; // the blocks that steps leave to later ones, and those that wait for another stream
    bool operator==(const State &) const = default;
};
struct Known {
    Step step;
    State after;
};

uint64_t mixed(uint64_t one, uint64_t other) { // splitmix64
    uint64_t value = one + 0x9e3779b97f4a7c15 * (other + 1);
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9;
    value = (value ^ value >> 27) * 0x94d049bb133111eb;
    return value ^ value >> 31;
}

// Plays steps one after the other: of each, its kind, whether the cache is emptied after it, and the counts of its columns.
class Player {
  public:
    Player(const Kinds &of, Outcome &outcome)
        : of(of), outcome(outcome), other(getStreamFromExternal(streams.back(), 0)), follows(of.num_kinds),
          carried(static_cast<size_t>(of.num_carried * of.num_generations)) {
        for (int64_t kind = 0; kind < of.num_kinds; kind++) {
            follows[kind].assign(static_cast<size_t>(of.num_columns), false);
            for (int64_t n = of.first_block[kind]; n < of.first_block[kind + 1]; n++)
                if (of.follows[n] >= 0) follows[kind][static_cast<size_t>(of.follows[n])] = true;
        }
        turns.assign(static_cast<size_t>(1 + *std::max_element(of.group, of.group + of.num_kinds)), -1);
        outcome = {-1, -1, 0, 0, 0, 1};
    }

    // Play what comes before the first step, then the steps. A step in a known state is not played again: it gives what
    // it gave. Only when one must be played, those since the allocator was in this state are.
    void play(const int64_t *steps, int64_t num_steps, Step *played) {
        if (!play(nullptr, -1)) return;
        const auto width = 2 + of.num_columns;
        State state = physical;
        std::vector<std::pair<int64_t, State>> skipped; // steps, each with the state before it
        for (int64_t step = 0; step < num_steps; step++) {
            const int64_t *row = steps + step * width;
            const uint64_t key = key_of(state, row);
            if (const auto found = known.find(key); found != known.end()) {
                played[step] = found->second.step;
                played[step].num_retries = last.num_retries;
                played[step].num_mallocs = last.num_mallocs;
                skipped.emplace_back(step, state);
                state = found->second.after;
                const auto back =
                    std::find_if(skipped.begin(), skipped.end(), [&](auto &one) { return one.second == state; });
                skipped.erase(back, skipped.end());
                continue;
            }
            for (const auto &[before, _] : skipped)
                if (!play(steps + before * width, before)) return;
            skipped.clear();
            const State before = physical;
            if (!play(row, step)) return;
            played[step] = last;
            state = physical;
            if (!row[1] && state.made == before.made && state.released == before.released) known[key] = {last, state};
        }
    }

  private:
    struct Carried {
        c10::DataPtr data;
        uint64_t bytes; // of the block, which may be more than was asked for
    };

    const Kinds &of;
    Outcome &outcome;
    const CUDAStream other;
    std::vector<std::vector<bool>> follows; // which columns the sizes of each kind follow
    std::vector<Carried> carried;
    std::vector<c10::DataPtr> kept, local;
    std::unordered_map<uint64_t, Known> known;
    State physical{};
    Step last{};
    int32_t current = -1;
    std::vector<int64_t> turns; // of the steps of each group that were played

    Carried &slot(int64_t which, int64_t age) {
        const int64_t turn = turns[static_cast<size_t>(of.maker[which])] - age + of.num_generations;
        return carried[static_cast<size_t>(which * of.num_generations + turn % of.num_generations)];
    }

    uint64_t key_of(const State &state, const int64_t *row) const {
        uint64_t key =
            mixed(mixed(static_cast<uint64_t>(state.made), static_cast<uint64_t>(state.released)), state.in_use);
        key = mixed(key, static_cast<uint64_t>(2 * row[0] + row[1]));
        for (int64_t n = 0; n < of.num_columns; n++)
            if (follows[static_cast<size_t>(row[0])][static_cast<size_t>(n)])
                key = mixed(key, static_cast<uint64_t>(row[2 + n]));
        return key;
    }

    // Play a step, or what comes before the first one. Returns whether there was memory for all of it.
    bool play(const int64_t *row, int64_t step) {
        auto *allocator = CUDACachingAllocator::get();
        const int64_t kind = row ? row[0] : 0, first = of.first_block[kind];
        auto &blocks = row ? local : kept;
        blocks.resize(static_cast<size_t>(of.first_block[kind + 1] - first));
        CUDACachingAllocator::resetPeakStats(0);
        uint64_t waiting = 0;
        if (row) turns[static_cast<size_t>(of.group[kind])]++;
        for (int64_t event = of.first_event[kind]; event < of.first_event[kind + 1]; event++) {
            const int32_t what = of.events[event];
            if (what == EMPTY_CACHE) {
                CUDACachingAllocator::emptyCache();
            } else if (what <= FREE_CARRIED) {
                auto &data = slot(FREE_CARRIED - what, of.age[FREE_CARRIED - what]).data;
                waiting = mixed(waiting, reinterpret_cast<uint64_t>(data.get()));
                data.clear();
            } else if (what < 0) {
                auto &data = blocks[static_cast<size_t>(~what)];
                if (of.is_shared[first + ~what]) waiting = mixed(waiting, reinterpret_cast<uint64_t>(data.get()));
                data.clear();
            } else {
                const auto n = static_cast<size_t>(first + what);
                if (of.stream[n] != current)
                    setCurrentCUDAStream(
                        getStreamFromExternal(streams[static_cast<size_t>(current = of.stream[n])], 0));
                const int64_t bytes = of.base[n] + (of.follows[n] < 0 || !row ? 0 : of.per[n] * row[2 + of.follows[n]]);
                auto *to = of.carried[n] < 0 ? nullptr : &slot(of.carried[n], of.generation[n]);
                auto &data = to ? to->data : blocks[static_cast<size_t>(what)];
                const int64_t before = to ? CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].current : 0;
                try {
                    data = allocator->allocate(static_cast<size_t>(bytes));
                } catch (const c10::OutOfMemoryError &) {
                    const auto stats = CUDACachingAllocator::getDeviceStats(0);
                    outcome = {step, event, bytes, stats.allocated_bytes[0].current, stats.reserved_bytes[0].current,
                               1};
                    return false;
                }
                if (to)
                    to->bytes = static_cast<uint64_t>(
                        CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].current - before);
                waiting = 0; // the allocator has looked at what waits
                if (of.is_shared[n]) allocator->recordStream(data, other);
            }
        }
        if (row && row[1]) CUDACachingAllocator::emptyCache();
        const auto stats = CUDACachingAllocator::getDeviceStats(0);
        last = {stats.allocated_bytes[0].peak, stats.reserved_bytes[0].peak, stats.num_alloc_retries,
                stats.num_device_alloc};
        for (int64_t which = 0; which < of.num_carried; which++)
            for (int64_t age = 0; age < std::max(of.age[which], 1); age++) {
                const auto &[data, bytes] = slot(which, age);
                waiting = mixed(mixed(waiting, reinterpret_cast<uint64_t>(data.get())), data ? bytes : 0);
            }
        physical = {stats.reserved_bytes[0].allocated, stats.reserved_bytes[0].freed, waiting};
        return true;
    }
};

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
        Player(*of, *outcome).play(steps, num_steps, reinterpret_cast<Step *>(outcome + 1));
    };
    return in_fork(run, to, size) && to->is_whole == 1;
}
