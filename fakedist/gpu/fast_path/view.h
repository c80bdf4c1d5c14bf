// A column that is lent to Python, which copies it (gpu/fast_path/compiled.py).
#pragma once
#include <cstddef>
#include <vector>

namespace fakedist {
struct View {
    const void *data;
    size_t bytes;
};

template <typename T> View view(const std::vector<T> &column) { return {column.data(), column.size() * sizeof(T)}; }
} // namespace fakedist
