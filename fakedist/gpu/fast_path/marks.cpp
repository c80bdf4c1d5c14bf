// Marks of what blocks of memory are for. Locating thousands of tensors in Python took a third of a recorded step's cost.
//
// All of it is called with Python's lock held. What cannot be located here, Python locates (record/marker.py).
#include "view.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {
using fakedist::View;
using fakedist::view;
using c10::DispatchKey;

// What to mark of a tensor, in the lower bits of a number; the layer is above them. As in record/marker.py.
enum What { PARAMETER, GRADIENT, STATE, ITS_GRADIENT, PARAMETER_AND_ITS_GRADIENT };
constexpr int WHAT_BITS = 3;

// A piece of a block. No bytes: the tensor has no memory on a device.
struct Piece {
    uint64_t address = 0;
    int64_t start = 0, bytes = 0;
};

struct State {
    const c10::TensorImpl *tensor;
    int64_t layer;
    Piece piece;
    bool operator==(const State &other) const {
        return tensor == other.tensor && layer == other.layer && piece.address == other.piece.address &&
               piece.start == other.piece.start && piece.bytes == other.piece.bytes;
    }
};
struct Hash {
    size_t operator()(const State &state) const {
        return std::hash<const void *>()(state.tensor) ^ std::hash<uint64_t>()(state.piece.address + state.layer) * 31 ^
               std::hash<int64_t>()(state.piece.start) * 127;
    }
};

// The columns of run.memory_records.MarksRecord.
struct Marks {
    std::vector<int64_t> op;
    std::vector<uint64_t> address;
    std::vector<uint8_t> category;
    std::vector<int32_t> layer;
    std::vector<int64_t> start, bytes;
};

// Codes of categories (rundir/schema.py).
struct Codes {
    int64_t parameter, gradient, state;
};

const int64_t *next_op = nullptr; // first of the recorder's cells
Codes codes{};
Marks marks;
std::unordered_set<State, Hash> states; // that are marked

// Locate a tensor as record.pieces.device_pieces does. False: Python must.
bool locate(const c10::TensorImpl *impl, Piece &found) {
    if (impl->key_set().has(DispatchKey::Python) || impl->key_set().has(DispatchKey::NestedTensor)) return false;
    if (!impl->has_storage() || impl->layout() != c10::kStrided || impl->has_symbolic_sizes_strides()) return false;
    if (!impl->is_cuda()) return true;
    const auto width = static_cast<int64_t>(impl->itemsize());
    const c10::StorageImpl *storage = impl->unsafe_storage().unsafeGetStorageImpl();
    const auto address = reinterpret_cast<uint64_t>(storage->data());
    if (address) found = {address, impl->storage_offset() * width, impl->numel() * width};
    return true;
}

void mark(int64_t op, const Piece &piece, int64_t category, int64_t layer) {
    marks.op.push_back(op);
    marks.address.push_back(piece.address);
    marks.category.push_back(static_cast<uint8_t>(category));
    marks.layer.push_back(static_cast<int32_t>(layer));
    marks.start.push_back(piece.start);
    marks.bytes.push_back(piece.bytes);
}

void mark_state(const c10::TensorImpl *impl, const Piece &piece, int64_t layer) {
    if (states.insert({impl, layer, piece}).second) mark(*next_op - 1, piece, codes.state, layer);
}

// The pieces that are wanted of a tensor: its own and its gradient's, either may have no bytes. False: Python must locate.
bool locate_wanted(const c10::TensorImpl *impl, int64_t wanted, Piece &own, Piece &gradient) {
    const int64_t what = wanted & ((1 << WHAT_BITS) - 1);
    if (what != ITS_GRADIENT && !locate(impl, own)) return false;
    if (what < ITS_GRADIENT) return true;
    const at::Tensor &its = impl->grad();
    return !its.defined() || locate(its.unsafeGetTensorImpl(), gradient);
}

bool mark_wanted(const c10::TensorImpl *impl, int64_t wanted) {
    Piece own, gradient;
    if (!locate_wanted(impl, wanted, own, gradient)) return false;
    const int64_t what = wanted & ((1 << WHAT_BITS) - 1), layer = wanted >> WHAT_BITS, op = *next_op - 1;
    if (own.bytes && what == STATE) mark_state(impl, own, layer);
    else if (own.bytes) mark(op, own, what == GRADIENT ? codes.gradient : codes.parameter, layer);
    if (gradient.bytes) mark(op, gradient, codes.gradient, layer);
    return true;
}
} // namespace

#define API extern "C" __attribute__((visibility("default")))

// Begin a run: nothing is marked.
API void fakedist_marks_begin(const int64_t *op, const Codes *given) {
    next_op = op, codes = *given, marks = {};
    states.clear();
}

API void fakedist_mark(int64_t op, uint64_t address, int64_t start, int64_t bytes, int64_t category, int64_t layer) {
    mark(op, {address, start, bytes}, category, layer);
}

API void fakedist_mark_state(const c10::TensorImpl *tensor, uint64_t address, int64_t start, int64_t bytes,
                             int64_t layer) {
    mark_state(tensor, {address, start, bytes}, layer);
}

// Mark one tensor. Returns 0 if Python must.
API int fakedist_mark_tensor(const c10::TensorImpl *tensor, int64_t wanted) { return mark_wanted(tensor, wanted); }

// Mark tensors from the one at `at` on. Returns the place of the first that Python must mark, or their number.
API size_t fakedist_mark_tensors(c10::TensorImpl *const *tensors, const int64_t *wanted, size_t number, size_t at) {
    while (at < number && mark_wanted(tensors[at], wanted[at])) at++;
    return at;
}

// Bytes of tensors, each piece once. Returns -1 if Python must locate one.
API int64_t fakedist_marks_bytes(c10::TensorImpl *const *tensors, const int64_t *wanted, size_t number) {
    std::vector<Piece> pieces;
    for (size_t i = 0; i < number; i++) {
        Piece own, gradient;
        if (!locate_wanted(tensors[i], wanted[i], own, gradient)) return -1;
        for (const Piece &piece : {own, gradient})
            if (piece.bytes) pieces.push_back(piece);
    }
    const auto before = [](const Piece &a, const Piece &b) {
        return a.address != b.address ? a.address < b.address : a.start < b.start;
    };
    std::stable_sort(pieces.begin(), pieces.end(), before); // of pieces at one place, the last counts
    int64_t sum = 0;
    for (size_t i = 0; i < pieces.size(); i++)
        if (i + 1 == pieces.size() || before(pieces[i], pieces[i + 1])) sum += pieces[i].bytes;
    return sum;
}

// The columns since the last call, in the order of `Marks`. They stay where they are until the next call.
API void fakedist_marks(View *to) {
    static Marks taken;
    taken = std::exchange(marks, {});
    for (const View &column : {view(taken.op), view(taken.address), view(taken.category), view(taken.layer),
                               view(taken.start), view(taken.bytes)})
        *to++ = column;
}
