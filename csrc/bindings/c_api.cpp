// Errors cross the language border here and nowhere else.
#include "bindings/c_api.h"

#include <exception>
#include <new>
#include <string>

#include "base/arrays.h"
#include "bindings/ops.h"

struct magi_arrays : magi::Arrays {};

namespace {

thread_local std::string last_error;

// Runs body; an exception becomes a status and a text.
template <class Body>
int guarded(Body body) noexcept {
    try {
        body();
        return 0;
    } catch (const magi::InputError& error) {
        last_error = error.what();
        return 1;
    } catch (const std::bad_alloc&) {
        last_error = "out of memory";
        return 3;
    } catch (const std::exception& error) {
        last_error = error.what();
        return 2;
    } catch (...) {
        last_error = "unknown exception";
        return 2;
    }
}

}  // namespace

extern "C" {

magi_arrays* magi_arrays_new(void) { return new (std::nothrow) magi_arrays; }

void magi_arrays_free(magi_arrays* arrays) { delete arrays; }

int magi_arrays_set(magi_arrays* arrays, const char* name, const void* data, int64_t count, int32_t item_bytes) {
    return guarded([&] { arrays->set_view(name, data, count, item_bytes); });
}

const char* magi_arrays_name(const magi_arrays* arrays, int64_t idx) { return arrays->name_at(idx); }

int magi_arrays_get(const magi_arrays* arrays, const char* name, const void** data, int64_t* count, int32_t* item_bytes) {
    return guarded([&] {
        const magi::Arrays::Entry& entry = arrays->at(name);
        *data = entry.data;
        *count = entry.count;
        *item_bytes = entry.item_bytes;
    });
}

int magi_run(const char* operation, const magi_arrays* inputs, magi_arrays* outputs) {
    return guarded([&] { magi::find_operation(operation)(*inputs, *outputs); });
}

const char* magi_last_error(void) { return last_error.c_str(); }

const char* magi_build_info(void) { return "solver C++20, compiler " __VERSION__; }

}  // extern "C"
