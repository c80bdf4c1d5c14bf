// The history of torch's caching allocator, as columns. torch gives Python the same as one dict for each event and each
// frame; making those and reading them took most of the time of a recorded step's end.
//
// The events are kept as the allocator reports them. Where that is not all of the history, torch's snapshot has them: it
// copies every event and every block, which takes three times as long.
#include "nodes.h"
#include "view.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

// The virtual GPU's driver learns of blocks that the allocator hands out or takes back: they hold no values. On a real GPU
// there is no such function.
extern "C" __attribute__((weak)) void fakedist_handed_out(void *block, size_t size);

namespace {
using fakedist::View;
using fakedist::view;
using Snapshot = c10::cuda::CUDACachingAllocator::SnapshotInfo;
using Entry = decltype(Snapshot::device_traces)::value_type::value_type;

// Python names the actions in this order (rundir/schema.py).
static_assert(Entry::ALLOC == 0 && Entry::FREE_REQUESTED == 1 && Entry::FREE_COMPLETED == 2 &&
              Entry::SEGMENT_ALLOC == 3);
static_assert(Entry::SEGMENT_FREE == 4 && Entry::SEGMENT_MAP == 5 && Entry::SEGMENT_UNMAP == 6);
static_assert(Entry::SNAPSHOT == 7 && Entry::OOM == 8);
constexpr int MOST_DIGITS = 18; // of a number that fits into 64 bits

// The events of one device. Numbers of frames and stacks are those of the run.
struct Events {
    std::vector<uint8_t> action;
    std::vector<uint64_t> address;
    std::vector<int64_t> size;
    std::vector<uint64_t> stream;
    std::vector<int64_t> time_us, op;
    std::vector<int32_t> stack; // -1 without one
    std::vector<uint32_t> lengths, frames; // of each new stack: how many frames, and which, innermost first
    std::string named; // of each new frame: file, line and function, each ended by a zero byte
    std::vector<int64_t> pools; // of each segment of a private pool: index of the event, both numbers of the pool
    std::vector<int64_t> products; // of each block that a product of matrices allocated: index of the event, `highest`
    int64_t highest = -1; // operation so far
};

// The nodes of autograd's graph.
struct Nodes {
    std::vector<int64_t> op;
    std::vector<uint64_t> thread;
    std::vector<int64_t> sequence;
    std::vector<int32_t> stack; // -1: that of the operation's allocations
    Events named; // new stacks and frames alone
    fakedist::nodes::Ran ran;
    std::vector<int64_t> called; // operations of timed steps
    std::vector<int32_t> called_stack;
};

std::vector<Events> devices;
Nodes nodes;
std::string ours, operators; // the package's path, and the file by which it calls operators
std::unordered_map<std::string, uint32_t> frames; // of the run, by name
std::map<std::vector<uint32_t>, int32_t> stacks; // of the run

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

// What is read of an event.
struct Event {
    uint8_t action;
    uint64_t address;
    int64_t size;
    uint64_t stream;
    decltype(Entry::time_) time; // ticks as long as it is in `seen`, then Unix time in microseconds
    int64_t op;
    decltype(Entry::mempool_) pool;
    std::shared_ptr<c10::GatheredContext> context;

    explicit Event(const Entry &entry)
        : action(static_cast<uint8_t>(entry.action_)), address(entry.addr_), size(static_cast<int64_t>(entry.size_)),
          stream(reinterpret_cast<uint64_t>(entry.stream_)), time(entry.time_), op(number(entry.user_metadata_)),
          pool(entry.mempool_), context(entry.context_) {}
};
using Traces = std::vector<std::vector<Event>>; // by device

std::atomic<bool> is_watching{false};
std::mutex history_lock; // the allocator has one for each device
Traces seen;
bool is_whole = true; // whether `seen` is all that happened

void keep(const Entry &entry) {
    if (fakedist_handed_out && (entry.action_ == Entry::ALLOC || entry.action_ == Entry::FREE_COMPLETED))
        fakedist_handed_out(reinterpret_cast<void *>(entry.addr_), static_cast<size_t>(entry.size_));
    if (!is_watching.load(std::memory_order_relaxed)) return;
    if (entry.action_ == Entry::ALLOC) fakedist::nodes::allocated(number(entry.user_metadata_));
    const std::lock_guard<std::mutex> held(history_lock);
    // torch reports a snapshot of any device as one of device 0, but writes it into that device's own history.
    if (entry.action_ == Entry::SNAPSHOT || entry.action_ > Entry::OOM) is_whole = false;
    const auto device = static_cast<size_t>(entry.device_);
    if (seen.size() <= device) seen.resize(device + 1);
    seen[device].emplace_back(entry);
}

c10::ApproximateClockToUnixTimeConverter &ticks() {
    static c10::ApproximateClockToUnixTimeConverter converter;
    return converter;
}

// The events since the last call, or since the history began.
Traces taken() {
    Traces found;
    if (is_watching) {
        const std::lock_guard<std::mutex> held(history_lock);
        if (is_whole) found.swap(seen);
        if (is_whole && found.empty()) return found;
    }
    if (!found.empty()) {
        const auto unix_time = ticks().makeConverter();
        for (auto &trace : found)
            for (auto &event : trace) event.time.t_ = unix_time(event.time.approx_t_) / 1000;
        return found;
    }
    const Snapshot snapshot = c10::cuda::CUDACachingAllocator::snapshot();
    for (const auto &trace : snapshot.device_traces) found.emplace_back(trace.begin(), trace.end());
    return found;
}

void add(Events &to, const Event &event) {
    if ((event.action == Entry::SEGMENT_ALLOC || event.action == Entry::SEGMENT_MAP) &&
        (event.pool.first || event.pool.second)) {
        to.pools.push_back(static_cast<int64_t>(to.action.size()));
        to.pools.push_back(static_cast<int64_t>(event.pool.first));
        to.pools.push_back(static_cast<int64_t>(event.pool.second));
    }
    to.action.push_back(event.action);
    to.address.push_back(event.address);
    to.size.push_back(event.size);
    to.stream.push_back(event.stream);
    to.time_us.push_back(event.time.t_);
    to.op.push_back(event.op);
}

bool begins(std::string_view text, std::string_view with) { return text.substr(0, with.size()) == with; }

// Whether a frame is there because of us: allocator_history._without_ours.
bool is_ours(const torch::unwind::Frame &frame, const torch::unwind::Frame *caller) {
    if (begins(frame.filename, ours) || begins(frame.filename, "<frozen ")) return true;
    return frame.filename == operators && caller && begins(caller->filename, ours);
}

// The number of a stack in the run, which may be new.
int32_t numbered(Events &to, const std::vector<torch::unwind::Frame> &all, const std::vector<uint64_t> &traceback) {
    std::vector<uint32_t> found;
    for (size_t i = 0; i < traceback.size(); i++) {
        const auto &frame = all[traceback[i]];
        if (is_ours(frame, i + 1 < traceback.size() ? &all[traceback[i + 1]] : nullptr)) continue;
        std::string name;
        for (const auto &text : {frame.filename, std::to_string(frame.lineno), frame.funcname})
            name.append(text).push_back('\0');
        const auto [at, is_new] = frames.emplace(name, static_cast<uint32_t>(frames.size()));
        if (is_new) to.named += name;
        found.push_back(at->second);
    }
    const auto [at, is_new] = stacks.emplace(found, static_cast<int32_t>(stacks.size()));
    if (is_new) {
        to.lengths.push_back(static_cast<uint32_t>(found.size()));
        to.frames.insert(to.frames.end(), found.begin(), found.end());
    }
    return at->second;
}
} // namespace

#define API extern "C" __attribute__((visibility("default")))

// Begin a run: no frame and no stack has a number.
API void fakedist_history_begin(const char *package, const char *calls_operators) {
    ours = package, operators = calls_operators;
    frames.clear(), stacks.clear();
    fakedist::nodes::forget();
}

// The history has begun again, or goes on after it was read: keep its events. CUDA is initialised.
API void fakedist_history_watch() {
    static bool is_attached = false; // torch cannot detach
    if (!is_attached) c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(keep);
    is_attached = true;
    ticks();
    const std::lock_guard<std::mutex> held(history_lock);
    if (!is_watching || !is_whole) seen.clear();
    is_watching = is_whole = fakedist::nodes::is_on = true;
}

// The history has ended.
API void fakedist_history_stop() {
    is_watching = fakedist::nodes::is_on = false;
    fakedist::nodes::forget();
    const std::lock_guard<std::mutex> held(history_lock);
    seen.clear();
}

// Read the history. `gemms` are the operations that are products of matrices, `highest` the highest number so far.
// Returns the number of devices, or -1 if torch raised an error. Needs Python's lock.
API int fakedist_history_read(const int64_t *gemms, size_t num_gemms, int64_t highest) try {
    devices.clear();
    const Traces traces = taken();
    // A block's events share one context: naming each once takes a third of the time.
    std::unordered_map<const void *, size_t> indices;
    std::vector<torch::CapturedTraceback *> found;
    for (const auto &trace : traces)
        for (const auto &event : trace)
            if (event.context && indices.emplace(event.context.get(), found.size()).second)
                found.push_back(dynamic_cast<torch::CapturedTraceback *>(event.context.get()));
    if (std::find(found.begin(), found.end(), nullptr) != found.end()) return -1;
    const auto named = torch::symbolize(found);
    const std::unordered_set<int64_t> products(gemms, gemms + num_gemms);
    constexpr int32_t UNKNOWN = -2;
    std::vector<int32_t> known(found.size(), UNKNOWN); // the stack of each context
    std::map<std::vector<uint64_t>, int32_t> raw; // and of each traceback
    for (const auto &trace : traces) {
        auto &to = devices.emplace_back();
        for (const auto &event : trace) {
            add(to, event);
            highest = std::max(highest, to.op.back());
            if (event.action == Entry::ALLOC && products.count(to.op.back()))
                to.products.insert(to.products.end(), {static_cast<int64_t>(to.op.size()) - 1, highest});
            if (!event.context) {
                to.stack.push_back(-1);
                continue;
            }
            const size_t index = indices.at(event.context.get());
            if (known[index] == UNKNOWN) {
                const auto [at, is_new] = raw.emplace(named.tracebacks[index], UNKNOWN);
                if (is_new) at->second = numbered(to, named.all_frames, at->first);
                known[index] = at->second;
            }
            to.stack.push_back(known[index]);
        }
        to.highest = highest;
    }
    return static_cast<int>(devices.size());
} catch (const std::exception &) {
    return -1;
}

// The columns of a device's events, in the order of `Events`. They stay where they are until the next call of read.
// Returns the highest operation up to the last of them.
API int64_t fakedist_history_events(int device, View *to) {
    const Events &from = devices[static_cast<size_t>(device)];
    for (const View &column :
         {view(from.action), view(from.address), view(from.size), view(from.stream), view(from.time_us), view(from.op),
          view(from.stack), view(from.lengths), view(from.frames), View{from.named.data(), from.named.size()},
          view(from.pools), view(from.products)})
        *to++ = column;
    return from.highest;
}

// Read what is known of autograd's nodes since the last call, in the order of `Nodes`. The columns stay where they are
// until the next call. Returns -1 if torch raised an error. Needs Python's lock.
API int fakedist_nodes_read(View *to) try {
    const auto made = fakedist::nodes::take_made();
    nodes = {};
    nodes.ran = fakedist::nodes::take_ran();
    const auto called = fakedist::nodes::take_called();
    std::vector<torch::CapturedTraceback *> found;
    for (const auto &node : made)
        if (node.stack) found.push_back(dynamic_cast<torch::CapturedTraceback *>(node.stack.get()));
    for (const auto &operation : called)
        found.push_back(dynamic_cast<torch::CapturedTraceback *>(operation.stack.get()));
    const auto named = torch::symbolize(found);
    size_t index = 0;
    std::map<std::vector<uint64_t>, int32_t> raw;
    const auto next_stack = [&] {
        const auto [at, is_new] = raw.emplace(named.tracebacks[index++], -1);
        if (is_new) at->second = numbered(nodes.named, named.all_frames, at->first);
        return at->second;
    };
    for (const auto &node : made) {
        nodes.op.push_back(node.op), nodes.thread.push_back(node.thread), nodes.sequence.push_back(node.sequence);
        nodes.stack.push_back(node.stack ? next_stack() : -1);
    }
    for (const auto &operation : called) {
        nodes.called.push_back(operation.op);
        nodes.called_stack.push_back(next_stack());
    }
    for (const View &column : {view(nodes.op), view(nodes.thread), view(nodes.sequence), view(nodes.stack),
                               view(nodes.ran.op), view(nodes.ran.thread), view(nodes.ran.sequence), view(nodes.called),
                               view(nodes.called_stack), view(nodes.named.lengths), view(nodes.named.frames),
                               View{nodes.named.named.data(), nodes.named.named.size()}})
        *to++ = column;
    return 0;
} catch (const std::exception &) {
    return -1;
}
