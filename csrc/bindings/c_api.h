// The C ABI of the solver library: named arrays in, named arrays out, errors as text.
// One signature for every operation, so a new operation changes only the table in ops.cpp.
// Loaded by magi_attention/_native.py with ctypes: no Python or torch header, one binary for every Python.
#pragma once

#include <stdint.h>

#if defined(__GNUC__)
#define MAGI_API __attribute__((visibility("default")))
#else
#define MAGI_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct magi_arrays magi_arrays;

MAGI_API magi_arrays* magi_arrays_new(void);
MAGI_API void magi_arrays_free(magi_arrays* arrays);
// The data is not copied; it must live until the operation returns. item_bytes is 4 or 8. Returns 0 when stored.
MAGI_API int magi_arrays_set(magi_arrays* arrays, const char* name, const void* data, int64_t count, int32_t item_bytes);
// Name of the idx-th array, or NULL past the end.
MAGI_API const char* magi_arrays_name(const magi_arrays* arrays, int64_t idx);
MAGI_API int magi_arrays_get(const magi_arrays* arrays, const char* name, const void** data, int64_t* count, int32_t* item_bytes);

// Runs one operation. Returns 0; 1: the caller's input is wrong; 2: an invariant of ours broke; 3: out of memory. magi_last_error tells.
MAGI_API int magi_run(const char* operation, const magi_arrays* inputs, magi_arrays* outputs);
// Text of this thread's last failure; valid until the thread's next call.
MAGI_API const char* magi_last_error(void);
MAGI_API const char* magi_build_info(void);

#ifdef __cplusplus
}
#endif
