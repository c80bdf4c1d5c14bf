// Finds Python's objects by their types. A large job has a million objects, and looking at each in Python takes a
// quarter of a second.
#include <cstddef>
#include <cstdint>
#include <unordered_set>

namespace {
// The beginning of every object of CPython (PyObject), with Python's lock. Python has checked it (fast_path/objects.py).
struct Object {
    int64_t references;
    const void *type;
};
// The beginning of a list (PyVarObject) and of a dict (PyDictObject).
struct Holder {
    Object object;
    int64_t length;
};

// Writes the indices of the objects of some types that are wanted. Returns how many there are.
template <typename Wanted> size_t indices(const Object *const *objects, size_t count, const void *const *types,
                                          size_t num_types, uint32_t *to, Wanted is_wanted) {
    const std::unordered_set<const void *> known(types, types + num_types);
    const void *last = nullptr;
    bool is_known = false;
    size_t found = 0;
    for (size_t i = 0; i < count; i++) {
        if (objects[i]->type != last) last = objects[i]->type, is_known = known.count(last) > 0;
        if (is_known && is_wanted(objects[i])) to[found++] = static_cast<uint32_t>(i);
    }
    return found;
}
} // namespace

#define API extern "C" __attribute__((visibility("default")))

// The distinct types of objects, in the order of the first of each. Returns how many there are, even if there is less room.
API size_t fakedist_objects_types(const Object *const *objects, size_t count, const void **to, size_t room) {
    std::unordered_set<const void *> seen;
    const void *last = nullptr;
    for (size_t i = 0; i < count; i++) {
        const void *type = objects[i]->type;
        if (type == last) continue;
        last = type;
        if (!seen.insert(type).second) continue;
        if (seen.size() <= room) to[seen.size() - 1] = type;
    }
    return seen.size();
}

// The indices of the objects of some types, of which there may be as many as objects. Returns how many there are.
API size_t fakedist_objects_of(const Object *const *objects, size_t count, const void *const *types, size_t num_types,
                               uint32_t *to) {
    return indices(objects, count, types, num_types, to, [](const Object *) { return true; });
}

// The same for lists and dicts that hold one of so many items.
API size_t fakedist_objects_holding(const Object *const *objects, size_t count, const void *const *types,
                                    size_t num_types, const int64_t *lengths, size_t num_lengths, uint32_t *to) {
    const std::unordered_set<int64_t> wanted(lengths, lengths + num_lengths);
    return indices(objects, count, types, num_types, to, [&wanted](const Object *each) {
        return wanted.count(reinterpret_cast<const Holder *>(each)->length) > 0;
    });
}
