// The tags of a timed step's operations. A tag is a number that the driver's log keeps with each launch. Python asks
// for tags too, from the same counter, and is the reference for what follows: gpu/model_tracer.py.
#include "trace.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DefaultDtype.h>

#include <bit>
#include <functional>
#include <mutex>
#include <unordered_map>

namespace fakedist::trace {
std::atomic<int> mode{OFF};

namespace {
struct Hash {
    size_t operator()(const Key &key) const {
        uint64_t hash = 0x9e3779b97f4a7c15u;
        for (const int64_t word : key) {
            hash = (hash ^ static_cast<uint64_t>(word)) * 0xff51afd7ed558ccdu;
            hash ^= hash >> 32;
        }
        return hash;
    }
};

struct Operation {
    int64_t tag, op, scope, demand;
    bool has_returned;
};

std::mutex trace_lock; // never held while Python is called
std::unordered_map<Key, int64_t, Hash> demands;
std::unordered_map<int64_t, Key> asked; // by the tag of the operation
std::vector<Operation> operations;
std::vector<int64_t> outsides; // of each scope: the tag outside of operations; -1 where it is not known
int64_t next_tag = 0;
void (*set_tag)(int64_t) = nullptr;
int64_t (*ask_outside)(int64_t scope) = nullptr;

thread_local const Key *asking = nullptr;
thread_local int64_t here = -1; // scope of the last operation, until Python asks for it
thread_local int64_t call = -1; // tag of the extension's function that this thread is in

enum Word : int64_t { NOTHING, TENSOR, UNDEFINED, INTEGER, BOOLEAN, REAL, DEVICE, TEXT, LIST, GENERATOR };

bool add_tensor(const at::Tensor &tensor, Key &key) {
    if (!tensor.defined()) {
        key.push_back(UNDEFINED);
        return true;
    }
    const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    if (!impl->has_storage() || impl->layout() != c10::kStrided || impl->has_symbolic_sizes_strides()) return false;
    if (impl->key_set().has(c10::DispatchKey::Python) || impl->key_set().has(c10::DispatchKey::NestedTensor))
        return false;
    const auto sizes = impl->sizes(), strides = impl->strides();
    key.insert(key.end(), {TENSOR, static_cast<int64_t>(tensor.scalar_type()),
                           static_cast<int64_t>(tensor.device().type()), tensor.device().index(),
                           static_cast<int64_t>(impl->unsafe_storage().nbytes()), static_cast<int64_t>(sizes.size())});
    key.insert(key.end(), sizes.begin(), sizes.end());
    key.insert(key.end(), strides.begin(), strides.end());
    return true;
}

bool add(const c10::IValue &value, Key &key) {
    if (value.isTensor()) return add_tensor(value.toTensor(), key);
    if (value.isNone()) {
        key.push_back(NOTHING);
    } else if (value.isInt()) {
        key.insert(key.end(), {INTEGER, value.toInt()});
    } else if (value.isBool()) {
        key.insert(key.end(), {BOOLEAN, value.toBool()});
    } else if (value.isDouble()) {
        key.insert(key.end(), {REAL, std::bit_cast<int64_t>(value.toDouble())});
    } else if (value.isDevice()) {
        const c10::Device device = value.toDevice();
        key.insert(key.end(), {DEVICE, static_cast<int64_t>(device.type()), device.index()});
    } else if (value.isString()) {
        const std::string &text = value.toStringRef();
        key.insert(key.end(), {TEXT, static_cast<int64_t>(text.size())});
        key.insert(key.end(), text.begin(), text.end());
    } else if (value.isGenerator()) {
        key.push_back(GENERATOR);
    } else if (value.isList()) {
        const auto elements = value.toListRef();
        key.insert(key.end(), {LIST, static_cast<int64_t>(elements.size())});
        for (const c10::IValue &element : elements)
            if (!add(element, key)) return false;
    } else {
        return false;
    }
    return true;
}

int64_t outside(int64_t scope) {
    if (call >= 0) return call;
    const auto index = static_cast<size_t>(scope);
    {
        const std::lock_guard<std::mutex> held(trace_lock);
        if (index < outsides.size() && outsides[index] >= 0) return outsides[index];
    }
    const int64_t found = ask_outside(scope); // it may ask for a tag
    const std::lock_guard<std::mutex> held(trace_lock);
    if (index >= outsides.size()) outsides.resize(index + 1, -1);
    return outsides[index] = found;
}
} // namespace

bool make_key(uint32_t kind, bool is_view, const c10::IValue *arguments, size_t count, Key &key) {
    key.push_back(kind);
    if (is_view) return true;
    key.push_back(static_cast<int64_t>(c10::get_default_dtype_as_scalartype()));
    for (size_t i = 0; i < count; i++)
        if (!add(arguments[i], key)) return false;
    return true;
}

int64_t find_demand(const Key &key) {
    const std::lock_guard<std::mutex> held(trace_lock);
    const auto found = demands.find(key);
    return found == demands.end() ? -1 : found->second;
}

Asked::Asked(const Key *key) : before(asking) { asking = key; }
Asked::~Asked() { asking = before; }

size_t operation_begins(int64_t op, int64_t scope, int64_t demand) {
    size_t index = 0;
    int64_t tag = 0;
    {
        const std::lock_guard<std::mutex> held(trace_lock);
        tag = next_tag++, index = operations.size();
        operations.push_back({tag, op, scope, demand, false});
    }
    here = scope;
    set_tag(tag);
    return index;
}

void operation_ended(size_t index, int64_t scope) {
    {
        const std::lock_guard<std::mutex> held(trace_lock);
        if (index < operations.size()) operations[index].has_returned = true;
    }
    set_tag(outside(scope));
}
} // namespace fakedist::trace

using namespace fakedist::trace;

#define API extern "C" __attribute__((visibility("default")))

// Begin a run, whose kinds of operations have other numbers.
API void fakedist_trace_start(void (*tag)(int64_t), int64_t (*outside)(int64_t)) {
    const std::lock_guard<std::mutex> held(trace_lock);
    mode = OFF;
    set_tag = tag, ask_outside = outside;
    demands.clear(), asked.clear(), operations.clear(), outsides.clear();
    next_tag = 0;
}

API void fakedist_trace_mode(int wanted) { mode = wanted; }

// Forget the tags outside of operations.
API void fakedist_trace_forget() {
    const std::lock_guard<std::mutex> held(trace_lock);
    outsides.clear();
}

// A tag for what is no operation.
API int64_t fakedist_trace_tag() {
    const std::lock_guard<std::mutex> held(trace_lock);
    return next_tag++;
}

// A tag for an operation that begins in Python in this thread.
API int64_t fakedist_trace_operation() {
    const std::lock_guard<std::mutex> held(trace_lock);
    here = -1;
    if (asking) asked.emplace(next_tag, *asking);
    asking = nullptr;
    return next_tag++;
}

// Whether the demand of the operation with this tag is that of all calls with its key.
API int fakedist_trace_learns(int64_t tag) {
    const std::lock_guard<std::mutex> held(trace_lock);
    return asked.count(tag) > 0;
}

// The demand of the operation with this tag, by a number; -1 if other calls have others.
API void fakedist_trace_learn(int64_t tag, int64_t demand) {
    const std::lock_guard<std::mutex> held(trace_lock);
    const auto found = asked.find(tag);
    if (found == asked.end()) return;
    if (demand >= 0) demands.emplace(std::move(found->second), demand);
    asked.erase(found);
}

// This thread is in a function of an extension, by its tag; -1 if it left them.
API void fakedist_trace_call(int64_t tag) { call = tag; }

// Scope of this thread's last operation; -1 if it ran in Python, or was asked for before.
API int64_t fakedist_trace_scope() {
    const int64_t found = here;
    here = -1;
    return found;
}

API size_t fakedist_trace_count() {
    const std::lock_guard<std::mutex> held(trace_lock);
    return operations.size();
}

// Move the first `count` operations out: of each its tag, number, scope and demand; -1 if it did not return.
API void fakedist_trace_take(size_t count, int64_t *to) {
    const std::lock_guard<std::mutex> held(trace_lock);
    for (size_t i = 0; i < count; i++)
        for (const int64_t number : {operations[i].tag, operations[i].op, operations[i].scope,
                                     operations[i].has_returned ? operations[i].demand : -1 - operations[i].demand})
            *to++ = number;
    operations.clear(), asked.clear();
}
