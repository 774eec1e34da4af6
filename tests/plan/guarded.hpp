// Memory whose neighbours cannot be touched: whole pages between two pages without any access, the bytes in use flush
// with one of them. The rest of the pages holds a pattern that must survive.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>

namespace logitless::test {

// Where the bytes in use lie: at the page after (a read or write beyond the last byte faults) or at the one before.
enum class Flush { end, start };

class Guarded {
 public:
  Guarded(std::int64_t bytes, Flush flush) : bytes_(static_cast<std::size_t>(bytes)) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    inner_ = (bytes_ + page - 1) / page * page;
    mapped_ = inner_ + 2 * page;
    void* const at = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<char*>(at);
    pages_ = base_ + page;
    if (inner_ > 0 && mprotect(pages_, inner_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    std::memset(pages_, kPattern, inner_);
    data_ = flush == Flush::end ? pages_ + (inner_ - bytes_) : pages_;
  }
  ~Guarded() {
    if (base_ != nullptr) munmap(base_, mapped_);
  }
  Guarded(Guarded&& other) noexcept { *this = std::move(other); }
  Guarded& operator=(Guarded&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(pages_, other.pages_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(inner_, other.inner_);
    std::swap(mapped_, other.mapped_);
    return *this;
  }

  char* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  void fill(unsigned char value) const { std::memset(data_, value, bytes_); }
  // From now on a write faults.
  void make_read_only() const {
    if (inner_ > 0) mprotect(pages_, inner_, PROT_READ);
  }
  bool rest_intact() const {
    const auto untouched = [](const char* from, const char* to) {
      return std::all_of(from, to, [](char c) { return static_cast<unsigned char>(c) == kPattern; });
    };
    return untouched(pages_, data_) && untouched(data_ + bytes_, pages_ + inner_);
  }

 private:
  static constexpr unsigned char kPattern = 0xc3;
  char *base_ = nullptr, *pages_ = nullptr, *data_ = nullptr;
  std::size_t bytes_ = 0, inner_ = 0, mapped_ = 0;
};

}  // namespace logitless::test
