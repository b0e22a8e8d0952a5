// Named integer arrays: what crosses the language border, in both directions.
// Knows nothing of the solver, Python or torch.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace magi {

// What the caller got wrong; becomes magi_attention.errors.InputError in Python.
struct InputError : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

// A bag of named int32 / int64 vectors. Inputs are views (the caller keeps them alive), outputs are owned.
class Arrays {
public:
    struct Entry {
        const void* data = nullptr;
        int64_t count = 0;
        int32_t item_bytes = 0;
        std::vector<int32_t> owned32;
        std::vector<int64_t> owned64;
    };

    void set_view(const std::string& name, const void* data, int64_t count, int32_t item_bytes) {
        if (item_bytes != 4 && item_bytes != 8) throw InputError(name + ": items must have 4 or 8 bytes");
        Entry& entry = entries_[name];
        entry = Entry{data, count, item_bytes, {}, {}};
    }

    void set(const std::string& name, std::vector<int32_t> values) {
        Entry& entry = entries_[name];
        entry = Entry{nullptr, static_cast<int64_t>(values.size()), 4, std::move(values), {}};
        entry.data = entry.owned32.data();
    }

    void set(const std::string& name, std::vector<int64_t> values) {
        Entry& entry = entries_[name];
        entry = Entry{nullptr, static_cast<int64_t>(values.size()), 8, {}, std::move(values)};
        entry.data = entry.owned64.data();
    }

    void set(const std::string& name, int64_t value) { set(name, std::vector<int64_t>{value}); }

    bool has(const std::string& name) const { return entries_.count(name) != 0; }
    const Entry& at(const std::string& name) const {
        const auto it = entries_.find(name);
        if (it == entries_.end()) throw InputError("missing array '" + name + "'");
        return it->second;
    }

    // T must match the item size; records such as Slice are read from int32 arrays.
    template <class T>
    std::span<const T> view(const std::string& name) const {
        static_assert(sizeof(T) % 4 == 0, "arrays hold int32 or int64 items");
        const Entry& entry = at(name);
        const int64_t num_bytes = entry.count * entry.item_bytes;
        const bool item_fits = sizeof(T) == 8 ? entry.item_bytes == 8 : entry.item_bytes == 4;
        if (!item_fits || num_bytes % static_cast<int64_t>(sizeof(T)) != 0)
            throw InputError("array '" + name + "' has the wrong item size or length");
        return {static_cast<const T*>(entry.data), static_cast<size_t>(num_bytes / static_cast<int64_t>(sizeof(T)))};
    }

    int64_t scalar(const std::string& name) const {
        const auto values = view<int64_t>(name);
        if (values.size() != 1) throw InputError("'" + name + "' must be one number");
        return values[0];
    }

    // Name of the idx-th entry in alphabetical order, or nullptr past the end.
    const char* name_at(int64_t idx) const {
        for (const auto& [name, entry] : entries_)
            if (idx-- == 0) return name.c_str();
        return nullptr;
    }

private:
    std::map<std::string, Entry> entries_;
};

}  // namespace magi
