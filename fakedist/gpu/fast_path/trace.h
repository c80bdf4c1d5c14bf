// The operations of a timed step that run in compiled code: what the tracer (gpu/model_tracer.py) is told of them.
#pragma once
#include <ATen/core/ivalue.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fakedist::trace {
enum Mode { OFF, ON, PYTHON }; // PYTHON: the tracer is told of operations that run in Python alone
extern std::atomic<int> mode;

// All that an operation's demand depends on: its kind, and the sizes and numbers among its arguments.
using Key = std::vector<int64_t>;

// Make the key of a call. False if the arguments are of other kinds.
bool make_key(uint32_t kind, bool is_view, const c10::IValue *arguments, size_t count, Key &key);

// The number that Python gave to the demand of calls with this key; -1 if there was none yet.
int64_t find_demand(const Key &key);

// While Python runs an operation, the tracer may learn its demand: the key, or null.
class Asked {
  public:
    explicit Asked(const Key *key);
    ~Asked();

  private:
    const Key *before;
};

// An operation with a known demand begins in this thread. Returns its index among those of the step.
size_t operation_begins(int64_t op, int64_t scope, int64_t demand);

// It has returned.
void operation_ended(size_t index, int64_t scope);
} // namespace fakedist::trace
