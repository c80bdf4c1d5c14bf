// Which operation ran at each event of the caching allocator's history.
//
// Torch 2.8 and 2.9 have no metadata in that history. They call a tracker for every event, in the history's order, under
// the allocator's lock. This one keeps the operation's number, and the event's action to compare with the history's.
// Compiled against torch's own headers, because TraceEntry differs between releases.
#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

// The virtual GPU's driver learns of blocks that the allocator hands out or takes back: they hold no values. On a real GPU
// there is no such function.
extern "C" __attribute__((weak)) void fakedist_handed_out(void *block, size_t size);

namespace {
struct Event {
    int64_t operation;
    int64_t action; // TraceEntry::Action
};

constexpr int MAX_DEVICES = 128;
std::atomic<int64_t> running{-1};
std::mutex lock; // the allocator has one lock per device
std::vector<Event> events[MAX_DEVICES];

void keep(const c10::cuda::CUDACachingAllocator::TraceEntry &entry) {
    using Entry = c10::cuda::CUDACachingAllocator::TraceEntry;
    if (fakedist_handed_out && (entry.action_ == Entry::ALLOC || entry.action_ == Entry::FREE_COMPLETED))
        fakedist_handed_out(reinterpret_cast<void *>(entry.addr_), static_cast<size_t>(entry.size_));
    // Torch reports a snapshot of any device as one of device 0, but writes it into that device's own history.
    if (entry.action_ == Entry::SNAPSHOT) return;
    const std::lock_guard<std::mutex> held(lock);
    if (entry.device_ >= 0 && entry.device_ < MAX_DEVICES)
        events[entry.device_].push_back({running.load(std::memory_order_relaxed), entry.action_});
}
} // namespace

#define API extern "C" __attribute__((visibility("default")))

// Call it once, after CUDA was initialised: the allocator passes the tracker on to the devices that it knows.
API void fakedist_track_allocator() { c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(keep); }

API void fakedist_operation(int64_t number) { running.store(number, std::memory_order_relaxed); }

// Copy up to `capacity` events of a device since fakedist_forget_events(), and return how many there are.
API size_t fakedist_events(int device, Event *out, size_t capacity) {
    const std::lock_guard<std::mutex> held(lock);
    const std::vector<Event> &found = events[device];
    for (size_t i = 0; i < found.size() && i < capacity; i++) out[i] = found[i];
    return found.size();
}

API void fakedist_forget_events() {
    const std::lock_guard<std::mutex> held(lock);
    for (std::vector<Event> &found : events) found.clear();
}
