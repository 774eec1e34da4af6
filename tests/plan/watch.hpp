// Counts every request for memory of this process while armed: malloc and its kin, free, operator new (which calls
// malloc), mmap, munmap and mremap. Under a sanitizer, whose runtime owns these names, only malloc and free,
// through its hooks.
#pragma once

#include <cstdint>
#include <string>

namespace logitless::test {

// Armed from construction to disarm() or destruction.
class MemoryWatch {
 public:
  MemoryWatch();
  ~MemoryWatch();
  MemoryWatch(const MemoryWatch&) = delete;
  MemoryWatch& operator=(const MemoryWatch&) = delete;
  void disarm();
  std::int64_t requests() const;
  const char* first() const;  // name of the first request's function; "" if none

  static bool sees_mmap();
};

}  // namespace logitless::test
