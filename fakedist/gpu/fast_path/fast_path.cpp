// The fast path of the recorder: the kernel of its dispatch key, which runs most operations without entering Python.
//
// An operation may run here if a rule (fast_path/rules.py) says what to look at, and what is looked at shows that the
// value engine would compute nothing, look nothing up and keep nothing. It is numbered, and passed on below the key.
// Everything else goes to the Python function, which is the reference: it is registered under another key, which no
// tensor has, and reached by redispatching.
//
// Backward runs without Python's lock, so one lock guards what this file keeps. It is never held while Python is called.
#include "nodes.h"
#include "trace.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

// The virtual GPU's driver (driver/effects.c, memory.c). On a real GPU there are no such functions.
extern "C" __attribute__((weak)) void fakedist_cover(int more);
extern "C" __attribute__((weak)) void fakedist_clock_stop();
extern "C" __attribute__((weak)) void fakedist_clock_go(uint64_t counted);
extern "C" __attribute__((weak)) void fakedist_operation_ran();
extern "C" __attribute__((weak)) void fakedist_know(const void *address, size_t size, int holding);

namespace {
namespace trace = fakedist::trace;
using c10::DispatchKey;
using c10::DispatchKeySet;
using torch::jit::Stack;

// Numbers that Python shares: Cells of record/marker.py.
struct Cells {
    std::atomic<int64_t> op; // number of the next operation
    std::atomic<int64_t> version; // changes whenever the position changes
};

// Where a thread is: its scope, and as long as what this is true.
struct Where {
    int64_t scope, version;
    int64_t needs; // NOTHING, GRAD_MODE: the same grad mode; NODE: also an autograd node numbered within the bounds
    int64_t grad, low, high;
};
enum { NOTHING, GRAD_MODE, NODE };

// Methods and flags of Rule in fast_path/rules.py.
enum Method { PYTHON, PLAIN, KERNEL, LISTS };
enum Flag {
    FOLLOWED = 1, // what is known about an argument says something about the result
    HOST_ONLY = 2, // only if no argument is on a device
    POSITIONS = 4, // not with masks as indices
    COPIES = 8, // not from a device to the host
    OVERWRITES = 16, // what it writes does not depend on the previous contents
    CONDENSES = 32, // comparisons and reductions make up more
    COUNTS = 64, // not of a mask
    MAKES_MASK = 128, // not if the result is a mask
    IS_VIEW = 256, // allocates nothing
    IS_GEMM = 512,
    LOOKS_ON = 1024, // a view: its result takes nothing, whatever its arguments
};

// The limits of gpu/values, in its words.
struct Limits {
    int64_t limit_bytes, mask_limit_bytes, host_limit_bytes, few, many;
};

struct Rule {
    uint32_t kind = 0;
    int method = PYTHON, flags = 0;
    size_t num_arguments = 0, num_positional = 0;
    int device = -1, dtype = -1;
    std::vector<bool> writes;
};

constexpr DispatchKey OURS = DispatchKey::Fake, PYTHONS = DispatchKey::TESTING_ONLY_GenericMode;
const DispatchKeySet BELOW(DispatchKeySet::FULL_AFTER, OURS);
const DispatchKeySet ABOVE =
    (DispatchKeySet(DispatchKeySet::FULL) - BELOW).remove(DispatchKey::Python).remove(DispatchKey::PythonTLSSnapshot);

std::atomic<bool> is_on{false};
std::atomic<int64_t> num_passed{0};
std::atomic<bool> graphs_replay{false}; // memory may hold values that no storage is known for
Cells *cells = nullptr;
Limits limits{};
int (*ask_where)(Where *) = nullptr;
void (*tell_loss)(uint64_t storage, uint64_t address) = nullptr;
thread_local Where here{0, -1, NOTHING, 0, 0, 0};

std::mutex lock;
std::unordered_map<c10::OperatorHandle, Rule> rules;
std::unordered_map<const void *, int> known; // storages that something is known about: how many facts
std::vector<uint32_t> kinds, scopes;
std::vector<int64_t> gemms; // of each: how many numbers follow, operation, address of the output, bytes of the operands
auto &registration = *new std::optional<c10::RegistrationHandleRAII>; // never destroyed: torch may be gone by then

// ---- what an operation's arguments are

// What was found while looking at an operation's arguments.
struct Seen {
    int num_device = 0, num_host = 0;
    bool is_large = false; // one argument is too large to be computed
    bool is_missing = false; // one argument holds no values, and none would be made up
};

bool is_known(const at::Tensor &tensor) {
    return !known.empty() && known.count(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

bool is_float(const at::Tensor &tensor) { return c10::isFloatingType(tensor.scalar_type()); }

bool is_small(const at::Tensor &tensor) { // contents.is_small
    const auto bytes = static_cast<int64_t>(tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes());
    return bytes <= limits.limit_bytes || (bytes <= limits.mask_limit_bytes && !is_float(tensor));
}

// Whether it is a plain tensor with memory, of which the engine would say what is said here.
bool is_plain(const at::Tensor &tensor) {
    const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    const DispatchKeySet keys = impl->key_set();
    if (keys.has(DispatchKey::Python) || keys.has(DispatchKey::NestedTensor) || !impl->has_storage()) return false;
    if (keys.has(DispatchKey::ZeroTensor)) return false; // holds zeros, without memory
    if (impl->layout() != c10::kStrided || impl->has_symbolic_sizes_strides()) return false;
    if (tensor.is_cuda()) return true;
    if (!tensor.is_cpu()) return false;
    if (is_known(tensor)) return false; // Host.has_no_data
    const auto bytes = static_cast<int64_t>(impl->unsafe_storage().nbytes());
    return bytes <= limits.host_limit_bytes || !(is_float(tensor) || tensor.is_complex());
}

// Whether a device tensor certainly does not hold its values.
bool is_empty(const at::Tensor &tensor) {
    if (!is_small(tensor)) return true;
    return tensor.numel() > 0 && !is_known(tensor) && !graphs_replay;
}

// Look at one tensor of an operation on tensors. False: it is for Python.
bool look(const Rule &rule, size_t position, const at::Tensor &tensor, Seen &seen) {
    if (!tensor.defined()) return true;
    if (!is_plain(tensor)) return false;
    if (!tensor.is_cuda()) {
        seen.num_host++;
        return true;
    }
    seen.num_device++;
    const bool writes = rule.writes[position], is_positional = position < rule.num_positional;
    if (writes && (is_known(tensor) || (graphs_replay && is_small(tensor)))) return false;
    if (!is_small(tensor) && !is_float(tensor) && is_known(tensor)) return false; // large.Large may follow it
    if (rule.flags & FOLLOWED && (!is_positional || !tensor.numel() || is_known(tensor))) return false;
    const int64_t bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
    const int64_t limit = is_float(tensor) ? limits.limit_bytes : limits.mask_limit_bytes;
    if (is_positional && bytes > limits.limit_bytes && bytes > limit) seen.is_large = true;
    if (!(writes && rule.flags & OVERWRITES) && is_empty(tensor)) {
        const int64_t most = rule.flags & CONDENSES ? limits.many : limits.few;
        if (!is_small(tensor) || tensor.numel() > most) seen.is_missing = true;
    }
    return true;
}

// Whether something holds for a tensor, or for each tensor of a list, also of optional ones.
template <typename Holds> bool all_of(const c10::IValue &value, Holds &&holds) {
    if (value.isTensor()) return holds(value.toTensor());
    if (value.isList())
        for (const c10::IValue &element : value.toListRef())
            if (element.isTensor() && !holds(element.toTensor())) return false;
    return true;
}

bool is_mask(const at::Tensor &tensor) {
    return tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
}

// engine._kernel: whether it ends in _not_computed and keeps nothing, or is an operation of the host alone.
bool kernel_passes(const Rule &rule, const c10::IValue *arguments, Seen &seen) {
    for (size_t i = 0; i < rule.num_arguments; i++)
        if (!all_of(arguments[i], [&](const at::Tensor &tensor) { return look(rule, i, tensor, seen); })) return false;
    const bool names_device = rule.device >= 0 && !arguments[rule.device].isNone();
    if (!seen.num_device) return seen.num_host && !names_device;
    if (rule.flags & HOST_ONLY || !(seen.is_large || seen.is_missing)) return false;
    const at::Tensor *first = arguments[0].isTensor() ? &arguments[0].toTensor() : nullptr;
    if (names_device &&
        !(rule.flags & COPIES && first && first->is_cuda() && arguments[rule.device].toDevice().is_cuda()))
        return false;
    if (rule.flags & COPIES && rule.device < 0 && !(first && first->is_cuda())) return false; // copy_
    if (rule.flags & COUNTS && first && first->scalar_type() == at::kBool) return false;
    if (rule.flags & POSITIONS && !all_of(arguments[1], [](const at::Tensor &index) { return !is_mask(index); }))
        return false;
    return true;
}

// foreach.Foreach.run: whether no position would be computed and nothing is known about what is written.
bool lists_pass(const Rule &rule, const c10::IValue *arguments) {
    const auto is_tensor = [](const c10::IValue &each) { return each.isTensor() && each.toTensor().defined(); };
    std::vector<c10::ArrayRef<c10::IValue>> read;
    std::optional<c10::ArrayRef<c10::IValue>> first;
    for (size_t i = 0; i < rule.num_arguments; i++) {
        const c10::IValue &value = arguments[i];
        if (!all_of(value, is_plain)) return false;
        if (!value.isList()) continue;
        const c10::ArrayRef<c10::IValue> list = value.toListRef();
        if (!first) first = list;
        if (list.empty() || !is_tensor(list[0])) continue;
        if (!rule.writes[i]) {
            read.push_back(list);
            continue;
        }
        if (!(rule.flags & OVERWRITES)) read.push_back(list);
        for (const c10::IValue &each : list)
            if (each.toTensor().is_cuda() && (graphs_replay || is_known(each.toTensor()))) return false;
    }
    for (size_t i = 0; first && i < first->size(); i++) {
        if (!is_tensor((*first)[i])) return false;
        const at::Tensor &tensor = (*first)[i].toTensor();
        if (!tensor.is_cuda() || !is_small(tensor)) continue;
        bool is_missing = false;
        for (const c10::ArrayRef<c10::IValue> &list : read)
            is_missing |= i < list.size() && list[i].toTensor().is_cuda() && is_empty(list[i].toTensor());
        if (!is_missing) return false;
    }
    return first.has_value();
}

bool passes(const Rule &rule, const c10::IValue *arguments, Seen &seen) {
    switch (rule.method) {
    case PLAIN:
        return !(rule.flags & MAKES_MASK) || rule.dtype < 0 || arguments[rule.dtype].isNone() ||
               arguments[rule.dtype].toScalarType() != at::kBool;
    case KERNEL: return kernel_passes(rule, arguments, seen);
    case LISTS: return lists_pass(rule, arguments);
    default: return false;
    }
}

// ---- running it

bool is_here(int64_t version) {
    if (here.version != version) return false;
    if (here.needs == NOTHING) return true;
    if (here.grad != c10::GradMode::is_enabled()) return false;
    if (here.needs == GRAD_MODE) return true;
    const auto node = torch::autograd::get_current_node();
    if (!node) return false;
    const auto number = static_cast<int64_t>(node->sequence_nr());
    return here.low <= number && number < here.high;
}

// The scope of what runs now in this thread; -1 if Python fails to say.
int64_t scope() {
    if (!is_here(cells->version.load(std::memory_order_relaxed)) && ask_where(&here)) {
        here.version = -1;
        return -1;
    }
    return here.scope;
}

int64_t number(uint32_t kind, uint32_t scope) {
    kinds.push_back(kind);
    scopes.push_back(scope);
    const int64_t op = cells->op.fetch_add(1, std::memory_order_relaxed);
    fakedist::nodes::runs(op);
    return op;
}

// engine._is_loss: a backward may begin at the result.
void look_for_loss(bool needs_gradient, const Stack &stack) {
    if (!needs_gradient || stack.empty() || !stack.back().isTensor()) return;
    const at::Tensor &result = stack.back().toTensor();
    if (!result.defined() || result.numel() != 1 || !result.is_cuda() || !is_float(result)) return;
    c10::StorageImpl *storage = result.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    c10::raw::weak_intrusive_ptr::incref(storage); // the engine's table keeps it
    tell_loss(reinterpret_cast<uint64_t>(storage), reinterpret_cast<uint64_t>(storage->data()));
}

bool may_be_loss(const Rule &rule, const c10::OperatorHandle &op, const c10::IValue *arguments) {
    if (rule.method != KERNEL || !c10::GradMode::is_enabled() || op.schema().returns().size() != 1) return false;
    const auto needs_none = [](const at::Tensor &tensor) { return !(tensor.defined() && tensor.requires_grad()); };
    for (size_t i = 0; i < rule.num_positional; i++)
        if (!all_of(arguments[i], needs_none)) return true;
    return false;
}

// A product of matrices, without the address of its output.
std::vector<int64_t> gemm(const Rule &rule, int64_t op, const c10::IValue *arguments) {
    std::vector<int64_t> found{0, op, 0};
    for (size_t i = 0; i < rule.num_positional; i++)
        if (arguments[i].isTensor() && arguments[i].toTensor().defined())
            found.push_back(static_cast<int64_t>(arguments[i].toTensor().nbytes()));
    found[0] = static_cast<int64_t>(found.size()) - 1;
    return found;
}

void keep_gemm(std::vector<int64_t> &found, const Stack &stack) {
    if (stack.empty() || !stack.back().isTensor() || !stack.back().toTensor().is_cuda()) return;
    found[2] = reinterpret_cast<int64_t>(stack.back().toTensor().const_data_ptr());
    const std::lock_guard<std::mutex> held(lock);
    gemms.insert(gemms.end(), found.begin(), found.end());
}

// What the operation writes holds no values from now on: nothing runs.
void lose_written(const Rule &rule, const c10::IValue *arguments) {
    for (size_t i = 0; i < rule.num_arguments; i++)
        if (rule.writes[i])
            all_of(arguments[i], [](const at::Tensor &tensor) {
                if (!tensor.defined() || !tensor.is_cuda() || !tensor.numel()) return true;
                const bool is_whole = !tensor.is_contiguous();
                const c10::Storage &storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
                fakedist_know(is_whole ? storage.data() : tensor.const_data_ptr(),
                              is_whole ? storage.nbytes() : tensor.nbytes(), 0);
                return true;
            });
}

// The driver need not find out what the launches of an operation write.
class Covered {
  public:
    Covered() {
        if (fakedist_cover) fakedist_cover(1);
    }
    ~Covered() {
        if (fakedist_cover) fakedist_cover(-1);
    }
};

class Still {
  public:
    Still() { stop(); }
    ~Still() {
        if (fakedist_clock_go) fakedist_clock_go(0);
    }
    static void stop() {
        if (fakedist_clock_stop) fakedist_clock_stop();
    }
};
class Going {
  public:
    Going() {
        if (fakedist_clock_go) fakedist_clock_go(0);
    }
    ~Going() { Still::stop(); }
};

void run(const c10::OperatorHandle &op, DispatchKeySet keys, Stack *stack) {
    const Still still;
    const fakedist::nodes::Operation here_runs;
    const auto to_python = [&](const trace::Key *key = nullptr) {
        const trace::Asked asked(key);
        op.redispatchBoxed(keys.add(PYTHONS), stack);
    };
    const int tracing = trace::mode.load(std::memory_order_relaxed);
    if (tracing == trace::PYTHON) return to_python();
    if (!is_on.load(std::memory_order_relaxed) || keys.has(DispatchKey::Python)) return to_python();
    if (!(cells->op.load(std::memory_order_relaxed) & 255)) return to_python(); // which also drains
    if (c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python) || c10::impl::TorchDispatchModeTLS::stack_len())
        return to_python();
    Seen seen;
    const Rule *found = nullptr;
    const c10::IValue *arguments = nullptr;
    bool is_ours = false;
    {
        const std::lock_guard<std::mutex> held(lock);
        const auto entry = rules.find(op);
        if (entry != rules.end()) {
            found = &entry->second; // stays until the next run begins
            arguments = stack->data() + stack->size() - found->num_arguments;
            is_ours = passes(*found, arguments, seen);
        }
    }
    const int64_t now = is_ours ? scope() : -1;
    if (now < 0) return to_python();
    const Rule &rule = *found;
    int64_t demand = -1;
    if (tracing) {
        trace::Key key;
        if (!trace::make_key(rule.kind, rule.flags & LOOKS_ON, arguments, rule.num_arguments, key)) return to_python();
        demand = trace::find_demand(key);
        if (demand < 0) return to_python(&key); // Python tells the demand of all calls with this key
    }
    int64_t this_op = 0;
    {
        const std::lock_guard<std::mutex> held(lock);
        this_op = number(rule.kind, static_cast<uint32_t>(now));
    }
    num_passed.fetch_add(1, std::memory_order_relaxed);
    if (!(rule.flags & IS_VIEW)) c10::cuda::CUDACachingAllocator::setUserMetadata(std::to_string(this_op));
    const bool needs_gradient = seen.num_device && may_be_loss(rule, op, arguments);
    std::vector<int64_t> product;
    if (rule.flags & IS_GEMM) product = gemm(rule, this_op, arguments);
    if (tracing && !(rule.flags & IS_VIEW)) fakedist::nodes::is_called(this_op);
    const size_t traced = tracing ? trace::operation_begins(this_op, now, demand) : 0;
    if (fakedist_know && rule.method != PLAIN) lose_written(rule, arguments);
    {
        const Covered covered;
        const c10::impl::ExcludeDispatchKeyGuard guard(ABOVE);
        if (fakedist_operation_ran) fakedist_operation_ran();
        const Going going;
        op.redispatchBoxed(keys & BELOW, stack);
    }
    if (tracing) trace::operation_ended(traced, now);
    if (rule.flags & IS_GEMM) keep_gemm(product, *stack);
    look_for_loss(needs_gradient, *stack);
}
} // namespace

#define API extern "C" __attribute__((visibility("default")))

// Begin a run: nothing is known and nothing passes yet.
API void fakedist_fast_begin(Cells *shared, const Limits *given, int (*where)(Where *),
                             void (*loss)(uint64_t, uint64_t)) {
    const std::lock_guard<std::mutex> held(lock);
    is_on = graphs_replay = false;
    num_passed = 0;
    cells = shared, limits = *given, ask_where = where, tell_loss = loss;
    rules.clear(), known.clear(), kinds.clear(), scopes.clear(), gemms.clear();
}

// Take the dispatch key, or give it back.
API void fakedist_fast_install(int wanted) {
    registration.reset();
    if (wanted)
        registration.emplace(c10::Dispatcher::singleton().registerFallback(
            OURS, c10::KernelFunction::makeFromBoxedFunction<&run>(), "fakedist"));
}

API void fakedist_fast_switch(int on) { is_on = on; }

// How many operations ran here.
API int64_t fakedist_fast_passed() { return num_passed; }

API void fakedist_fast_replays() { graphs_replay = true; }

// What an operator's calls need: its number among the kinds, and the method and flags of its rule.
API void fakedist_fast_rule(const char *name, const char *overload, uint32_t kind, int method, int flags) {
    const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
    if (!op) return;
    const auto &arguments = op->schema().arguments();
    Rule rule;
    rule.kind = kind, rule.method = method, rule.flags = flags;
    rule.num_arguments = arguments.size();
    for (size_t i = 0; i < arguments.size(); i++) {
        if (!arguments[i].kwarg_only()) rule.num_positional = i + 1;
        if (arguments[i].name() == "device") rule.device = static_cast<int>(i);
        if (arguments[i].name() == "dtype") rule.dtype = static_cast<int>(i);
        rule.writes.push_back(arguments[i].alias_info() && arguments[i].alias_info()->isWrite());
    }
    const std::lock_guard<std::mutex> held(lock);
    rules.insert_or_assign(*op, std::move(rule));
}

// One more fact is known about a storage, or one less.
API void fakedist_fast_known(const void *storage, int more) {
    const std::lock_guard<std::mutex> held(lock);
    if ((known[storage] += more) <= 0) known.erase(storage);
}

API int64_t fakedist_fast_number(uint32_t kind, uint32_t scope) {
    const std::lock_guard<std::mutex> held(lock);
    return number(kind, scope);
}

API size_t fakedist_fast_count() {
    const std::lock_guard<std::mutex> held(lock);
    return kinds.size();
}

// Move the kinds and the scopes of the first `count` operations out.
API void fakedist_fast_take(size_t count, uint32_t *to_kinds, uint32_t *to_scopes) {
    const std::lock_guard<std::mutex> held(lock);
    const auto end = static_cast<ptrdiff_t>(count);
    std::copy_n(kinds.begin(), count, to_kinds);
    std::copy_n(scopes.begin(), count, to_scopes);
    kinds.erase(kinds.begin(), kinds.begin() + end);
    scopes.erase(scopes.begin(), scopes.begin() + end);
}

// How many numbers are kept about products of matrices, once the first `count` of them were moved out.
API size_t fakedist_fast_gemms(int64_t *to, size_t count) {
    const std::lock_guard<std::mutex> held(lock);
    std::copy_n(gemms.begin(), count, to);
    gemms.erase(gemms.begin(), gemms.begin() + static_cast<ptrdiff_t>(count));
    return gemms.size();
}
