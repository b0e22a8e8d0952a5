// Tells the build how much dynamic shared memory a launcher asks for; ptxas knows of static shared memory only.
// Knows no kernel. At namespace scope of a .cu file: MAGI_REPORT_DYNAMIC_SHARED(kShared)
#pragma once

#include <type_traits>

// The number is in the mangled name of a function that nothing calls; ci/kernel_build/report.py reads it from the object file.
#define MAGI_REPORT_DYNAMIC_SHARED(bytes) \
    [[gnu::used]] static void magi_dynamic_shared(std::integral_constant<int, static_cast<int>(bytes)>) {}
