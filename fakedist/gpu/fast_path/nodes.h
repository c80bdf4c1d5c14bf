// Which operation made each node of autograd's graph, and which operations a node runs in a backward: an operation of a
// backward has no Python stack, but the one that made its node had.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

namespace c10 {
struct GatheredContext;
}

namespace fakedist::nodes {
// The maker of a node, which is known by a thread and a number of that thread's.
struct Made {
    int64_t op; // whose allocations have the stack; -1 if it allocated nothing
    uint64_t thread;
    int64_t sequence;
    std::shared_ptr<c10::GatheredContext> stack; // without an operation
};

// An operation, and the Python code that called it.
struct Called {
    int64_t op;
    std::shared_ptr<c10::GatheredContext> stack;
};

// The columns of the operations that nodes ran.
struct Ran {
    std::vector<int64_t> op;
    std::vector<uint64_t> thread;
    std::vector<int64_t> sequence;
};

extern std::atomic<bool> is_on;

// This thread allocated a block for an operation.
void allocated(int64_t op);
// This thread begins an operation.
void runs(int64_t op);
// This thread begins an operation of a timed step, whose stack is wanted.
void is_called(int64_t op);
// A view runs in this thread, which allocates nothing.
void view_runs();
std::vector<Made> take_made();
std::vector<Called> take_called();
Ran take_ran();
void forget();

// The operation that runs in this thread as long as this lives. It may have made a node.
class Operation {
  public:
    Operation();
    ~Operation() {
        if (made_node && exceptions == std::uncaught_exceptions()) ended();
    }
    Operation(const Operation &) = delete;
    Operation &operator=(const Operation &) = delete;

  private:
    void ended() const;
    bool made_node;
    int exceptions = std::uncaught_exceptions();
    int64_t allocations = 0;
};
} // namespace fakedist::nodes
