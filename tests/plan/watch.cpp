// Strong symbols in the executable stand before the C library's; each counts and passes on. Nothing here allocates.
#include "plan/watch.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstddef>

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define LOGITLESS_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LOGITLESS_SANITIZED 1
#endif

namespace logitless::test {
namespace {

std::atomic<bool> armed{false};
std::atomic<std::int64_t> count{0};
std::atomic<const char*> first_name{""};

void note(const char* name) {
  if (!armed.load(std::memory_order_relaxed)) return;
  if (count.fetch_add(1, std::memory_order_relaxed) == 0) first_name.store(name, std::memory_order_relaxed);
}

}  // namespace

void MemoryWatch::disarm() { armed.store(false); }
MemoryWatch::~MemoryWatch() { disarm(); }
std::int64_t MemoryWatch::requests() const { return count.load(); }
const char* MemoryWatch::first() const { return first_name.load(); }

}  // namespace logitless::test

#if defined(LOGITLESS_SANITIZED)

#include <sanitizer/allocator_interface.h>

namespace logitless::test {

MemoryWatch::MemoryWatch() {
  static const int installed = __sanitizer_install_malloc_and_free_hooks(
      [](const volatile void*, std::size_t) { note("malloc"); }, [](const volatile void*) { note("free"); });
  (void)installed;
  count.store(0);
  first_name.store("");
  armed.store(true);
}
bool MemoryWatch::sees_mmap() { return false; }

}  // namespace logitless::test

#elif defined(__GLIBC__)

namespace logitless::test {

MemoryWatch::MemoryWatch() {
  count.store(0);
  first_name.store("");
  armed.store(true);
}
bool MemoryWatch::sees_mmap() { return true; }

}  // namespace logitless::test

using logitless::test::note;

extern "C" {

// glibc's own entries under their second names.
void* __libc_malloc(std::size_t);
void __libc_free(void*);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t bytes) noexcept {
  note("malloc");
  return __libc_malloc(bytes);
}
void free(void* p) noexcept {
  note("free");
  __libc_free(p);
}
void* calloc(std::size_t n, std::size_t bytes) noexcept {
  note("calloc");
  return __libc_calloc(n, bytes);
}
void* realloc(void* p, std::size_t bytes) noexcept {
  note("realloc");
  return __libc_realloc(p, bytes);
}
void* memalign(std::size_t alignment, std::size_t bytes) noexcept {
  note("memalign");
  return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) noexcept {
  note("aligned_alloc");
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** out, std::size_t alignment, std::size_t bytes) noexcept {
  note("posix_memalign");
  *out = __libc_memalign(alignment, bytes);
  return *out == nullptr ? ENOMEM : 0;
}
void* mmap(void* at, std::size_t bytes, int protection, int flags, int file, off_t offset) noexcept {
  note("mmap");
  return reinterpret_cast<void*>(syscall(SYS_mmap, at, bytes, protection, flags, file, offset));
}
int munmap(void* at, std::size_t bytes) noexcept {
  note("munmap");
  return static_cast<int>(syscall(SYS_munmap, at, bytes));
}
void* mremap(void* at, std::size_t old_bytes, std::size_t bytes, int flags, ...) noexcept {
  note("mremap");
  void* to = nullptr;
  if ((flags & MREMAP_FIXED) != 0) {
    va_list rest;
    va_start(rest, flags);
    to = va_arg(rest, void*);
    va_end(rest);
  }
  return reinterpret_cast<void*>(syscall(SYS_mremap, at, old_bytes, bytes, flags, to));
}

}  // extern "C"

#else
#error "the second names of malloc are known for glibc only"
#endif
