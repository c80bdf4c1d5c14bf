// The history of torch's caching allocator, as columns. torch gives Python the same as one dict for each event and each
// frame; making those and reading them took most of the time of a recorded step's end.
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <cstdint>
#include <exception>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace {
using Snapshot = c10::cuda::CUDACachingAllocator::SnapshotInfo;
using Trace = decltype(Snapshot::device_traces)::value_type;
using Entry = Trace::value_type;

// Python names the actions in this order (run/schema.py).
static_assert(Entry::ALLOC == 0 && Entry::FREE_REQUESTED == 1 && Entry::FREE_COMPLETED == 2 && Entry::SEGMENT_ALLOC == 3);
static_assert(Entry::SEGMENT_FREE == 4 && Entry::SEGMENT_MAP == 5 && Entry::SEGMENT_UNMAP == 6);
static_assert(Entry::SNAPSHOT == 7 && Entry::OOM == 8);
constexpr int MOST_DIGITS = 18; // of a number that fits into 64 bits

// The events of one device.
struct Events {
    std::vector<uint8_t> action;
    std::vector<uint64_t> address;
    std::vector<int64_t> size;
    std::vector<uint64_t> stream;
    std::vector<int64_t> time_us, op;
    std::vector<int32_t> stack;           // place among this device's stacks, -1 without one
    std::vector<uint32_t> lengths, frames; // of each stack: how many frames, and which, innermost first
    std::vector<int64_t> pools;           // of each segment of a private pool: place of the event, both numbers of the pool
};

// Memory that Python copies.
struct View {
    const void *data;
    size_t bytes;
};

std::vector<Events> devices;
std::string frames; // of each frame: file, line and function, each ended by a zero byte

// The number of the operation, which the recorder sets as metadata.
int64_t number(const std::string &metadata) {
    if (metadata.empty() || metadata.size() > MOST_DIGITS) return -1;
    int64_t found = 0;
    for (const char digit : metadata) {
        if (digit < '0' || digit > '9') return -1;
        found = found * 10 + (digit - '0');
    }
    return found;
}

void add(Events &to, const Entry &entry) {
    if ((entry.action_ == Entry::SEGMENT_ALLOC || entry.action_ == Entry::SEGMENT_MAP) &&
        (entry.mempool_.first || entry.mempool_.second)) {
        to.pools.push_back(static_cast<int64_t>(to.action.size()));
        to.pools.push_back(static_cast<int64_t>(entry.mempool_.first));
        to.pools.push_back(static_cast<int64_t>(entry.mempool_.second));
    }
    to.action.push_back(static_cast<uint8_t>(entry.action_));
    to.address.push_back(entry.addr_);
    to.size.push_back(static_cast<int64_t>(entry.size_));
    to.stream.push_back(reinterpret_cast<uint64_t>(entry.stream_));
    to.time_us.push_back(entry.time_.t_);
    to.op.push_back(number(entry.user_metadata_));
}

template <typename T> View view(const std::vector<T> &column) { return {column.data(), column.size() * sizeof(T)}; }
} // namespace

#define API extern "C" __attribute__((visibility("default")))

// Read the history. Returns the number of devices, or -1 if torch raised an error. Needs Python's lock.
API int fakedist_history_read() try {
    devices.clear(), frames.clear();
    const Snapshot snapshot = c10::cuda::CUDACachingAllocator::snapshot();
    std::vector<torch::CapturedTraceback *> found;
    for (const auto &trace : snapshot.device_traces)
        for (const auto &entry : trace)
            if (entry.context_) found.push_back(dynamic_cast<torch::CapturedTraceback *>(entry.context_.get()));
    for (const auto *each : found)
        if (!each) return -1;
    const auto named = torch::symbolize(found);
    for (const auto &frame : named.all_frames)
        for (const auto &text : {frame.filename, std::to_string(frame.lineno), frame.funcname})
            frames.append(text).push_back('\0');
    auto traceback = named.tracebacks.begin();
    for (const auto &trace : snapshot.device_traces) {
        auto &to = devices.emplace_back();
        std::map<std::vector<uint64_t>, int32_t> known;
        for (const auto &entry : trace) {
            add(to, entry);
            if (!entry.context_) {
                to.stack.push_back(-1);
                continue;
            }
            const auto [at, is_new] = known.emplace(*traceback++, static_cast<int32_t>(known.size()));
            to.stack.push_back(at->second);
            if (!is_new) continue;
            to.lengths.push_back(static_cast<uint32_t>(at->first.size()));
            to.frames.insert(to.frames.end(), at->first.begin(), at->first.end());
        }
    }
    return static_cast<int>(devices.size());
} catch (const std::exception &) {
    return -1;
}

// The columns of a device's events, in the order of `Events`. They stay where they are until the next call of read.
API void fakedist_history_events(int device, View *to) {
    const Events &from = devices[static_cast<size_t>(device)];
    for (const View &column : {view(from.action), view(from.address), view(from.size), view(from.stream),
                               view(from.time_us), view(from.op), view(from.stack), view(from.lengths),
                               view(from.frames), view(from.pools)})
        *to++ = column;
}

API void fakedist_history_frames(View *to) { *to = {frames.data(), frames.size()}; }
