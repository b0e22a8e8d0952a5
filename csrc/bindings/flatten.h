// Records of int32 fields as the flat arrays that Python reads. Knows no operation.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace magi {

// int32 [records, fields], row after row.
template <class Record>
std::vector<int32_t> flatten(const std::vector<Record>& records) {
    static_assert(std::is_trivially_copyable_v<Record> && sizeof(Record) % sizeof(int32_t) == 0, "records are made of int32 fields");
    std::vector<int32_t> values(records.size() * (sizeof(Record) / sizeof(int32_t)));
    if (!records.empty()) std::memcpy(values.data(), records.data(), values.size() * sizeof(int32_t));
    return values;
}

}  // namespace magi
