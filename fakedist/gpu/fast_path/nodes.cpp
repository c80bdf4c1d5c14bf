// The nodes of autograd's graph, as record/nodes.py notes them. A node is made just before the first operation that our
// key sees of its operator, so a new number of this thread is that operation's. Views would not come to our key: those
// whose nodes allocate have kernels here, which call torch's own.
#include "nodes.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/as_strided_ops.h>
#include <ATen/ops/diagonal_ops.h>
#include <ATen/ops/expand_ops.h>
#include <ATen/ops/select_ops.h>
#include <ATen/ops/slice_ops.h>
#include <ATen/ops/split_ops.h>
#include <ATen/ops/split_with_sizes_ops.h>
#include <ATen/ops/unbind_ops.h>
#include <ATen/ops/unfold_ops.h>
#include <ATen/ops/view_ops.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <mutex>
#include <optional>
#include <typeinfo>
#include <utility>

namespace fakedist::nodes {
std::atomic<bool> is_on{false};

namespace {
constexpr c10::DispatchKey OURS = c10::DispatchKey::Fake;
const c10::DispatchKeySet BELOW(c10::DispatchKeySet::FULL_AFTER, OURS);
constexpr int64_t LAST_NODE = int64_t{1} << 62; // AccumulateGrad's numbers are above it

std::mutex nodes_lock;
std::vector<Made> made;
std::vector<Called> called;
Ran ran;
thread_local uint64_t next = 0; // number of the node that this thread would make, when last looked at
thread_local int64_t num_allocations = 0, last_allocation = -1;

// Whether this thread has made a node since the last call.
bool is_new() {
    if (!is_on.load(std::memory_order_relaxed) || !c10::GradMode::is_enabled()) return false;
    const uint64_t now = at::sequence_number::peek();
    if (now == next) return false;
    next = now;
    return now > 0;
}

std::shared_ptr<c10::GatheredContext> python_stack() {
    return torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false);
}

void add(int64_t op, int64_t sequence) {
    std::shared_ptr<c10::GatheredContext> stack;
    if (op < 0) stack = python_stack();
    const std::lock_guard<std::mutex> held(nodes_lock);
    made.push_back({op, at::RecordFunction::currentThreadId(), sequence, std::move(stack)});
}

template <typename Op, typename Schema = typename Op::schema> struct View;
template <typename Op, typename Result, typename... Arguments> struct View<Op, Result(Arguments...)> {
    static Result run(c10::DispatchKeySet keys, Arguments... arguments) {
        view_runs();
        return Op::redispatch(keys & BELOW, std::forward<Arguments>(arguments)...);
    }
};

auto &views = *new std::vector<c10::RegistrationHandleRAII>; // never destroyed: torch may be gone by then

template <typename Op> void watch() {
    views.push_back(c10::Dispatcher::singleton().registerImpl(
        {Op::name, Op::overload_name}, OURS, c10::KernelFunction::makeFromUnboxedFunction(TORCH_FN((&View<Op>::run))),
        std::nullopt, nullptr, "fakedist"));
}
} // namespace

void allocated(int64_t op) { num_allocations++, last_allocation = op; }

void runs(int64_t op) {
    if (!is_on.load(std::memory_order_relaxed)) return;
    const auto node = torch::autograd::get_current_node();
    if (!node) return;
    auto sequence = static_cast<int64_t>(node->sequence_nr());
    if (sequence < 0 || sequence >= LAST_NODE) return;
    // Made after the node of the operation that wrote to a view.
    if (typeid(*node) == typeid(torch::autograd::CopySlices)) sequence--;
    const std::lock_guard<std::mutex> held(nodes_lock);
    ran.op.push_back(op), ran.thread.push_back(node->thread_id()), ran.sequence.push_back(sequence);
}

void is_called(int64_t op) {
    if (!is_on.load(std::memory_order_relaxed)) return;
    auto stack = python_stack(); // which may wait for Python's lock, so nothing else may be held
    const std::lock_guard<std::mutex> held(nodes_lock);
    called.push_back({op, std::move(stack)});
}

void view_runs() {
    if (is_new()) add(-1, static_cast<int64_t>(next) - 1);
}

std::vector<Made> take_made() {
    const std::lock_guard<std::mutex> held(nodes_lock);
    return std::exchange(made, {});
}

std::vector<Called> take_called() {
    const std::lock_guard<std::mutex> held(nodes_lock);
    return std::exchange(called, {});
}

Ran take_ran() {
    const std::lock_guard<std::mutex> held(nodes_lock);
    return std::exchange(ran, {});
}

void forget() {
    take_made();
    take_called();
    take_ran();
}

Operation::Operation() : made_node(is_new()), allocations(num_allocations) {}

void Operation::ended() const {
    add(num_allocations > allocations ? last_allocation : -1, static_cast<int64_t>(next) - 1);
}
} // namespace fakedist::nodes

#define API extern "C" __attribute__((visibility("default")))

// Note the views whose nodes allocate, or leave them to another kernel. The names are also in compiled.py.
API void fakedist_nodes_views(int wanted) {
    using namespace fakedist::nodes;
    views.clear();
    if (!wanted) return;
    watch<at::_ops::as_strided>();
    watch<at::_ops::diagonal>();
    watch<at::_ops::expand>();
    watch<at::_ops::select_int>();
    watch<at::_ops::slice_Tensor>();
    watch<at::_ops::split_Tensor>();
    watch<at::_ops::split_with_sizes>();
    watch<at::_ops::unbind_int>();
    watch<at::_ops::unfold>();
    watch<at::_ops::view>();
}

// An operation of a timed step begins in this thread.
API void fakedist_nodes_called(int64_t op) { fakedist::nodes::is_called(op); }

// This thread has made the node of an autograd function that is written in Python, or is about to.
API void fakedist_nodes_function(int is_made) {
    using namespace fakedist::nodes;
    if (!is_on.load(std::memory_order_relaxed)) return;
    const uint64_t after = at::sequence_number::peek() + (is_made ? 0 : 1);
    add(-1, static_cast<int64_t>(after) - 1);
    next = after;
}
