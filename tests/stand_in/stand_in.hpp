// A CUDA backend without a device, for what is around one: the ABI's checks, the C++ face, the command line. Calls run
// on the reference at once; what a real device reports later, this one keeps for check_status too. Its memory is the
// host's, at addresses with a bit that no host address has: whoever follows one on the host faults, and a call that is
// given a host address says so. It says nothing about kernels, streams' order or time.
#pragma once

#include <cstdint>

namespace stand_in {

inline constexpr int devices = 2;
inline constexpr std::uintptr_t bit = std::uintptr_t{1} << 62;

inline bool is_there(const void* p) { return (reinterpret_cast<std::uintptr_t>(p) & bit) != 0; }
template <class T>
T* there(T* host) {
  return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(host) | bit);
}
template <class T>
T* here(T* device) {
  return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(device) & ~bit);
}

}  // namespace stand_in
