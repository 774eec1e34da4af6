// Writing without ever showing a half-written file: everything goes to a new file in the target's own directory, is
// synced, and only then takes the target's name. Several outputs can be staged first and committed together, so that
// a full disk leaves none of them.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "files/format.hpp"

namespace logitless::files {
namespace {

Error wrong(const std::string& path, const std::string& what) { return Error(quote(path) + ": " + what); }

std::string extension_of(const std::string& path) { return std::filesystem::path(path).extension().string(); }

std::string directory_of(const std::string& path) {
  std::string const parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

// A link is written through, as the shell's > does: renaming over it would replace the link.
std::string resolved(const std::string& path) {
  std::error_code none;
  if (!std::filesystem::is_symlink(path, none)) return path;
  std::filesystem::path const real = std::filesystem::weakly_canonical(path, none);
  return none ? path : real.string();
}

Layout layout_of(const std::string& path, std::span<const Source> tensors) {
  std::string const extension = extension_of(path);
  try {
    if (extension == ".safetensors") return safetensors_layout(tensors);
    if (extension == ".npy") return npy_layout(tensors);
  } catch (const Error& error) {
    throw wrong(path, error.what());
  }
  throw wrong(path, "the name of an output ends in .safetensors or .npy");
}

void write_all(int file, const void* data, std::uint64_t bytes, const std::string& path) {
  auto const* at = static_cast<const char*>(data);
  constexpr std::uint64_t most = std::uint64_t{1} << 30;  // write() takes at most 2 GiB
  while (bytes > 0) {
    ssize_t const done = ::write(file, at, std::min(bytes, most));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) throw wrong(path, std::string("cannot be written: ") + std::strerror(errno));
    at += done;
    bytes -= static_cast<std::uint64_t>(done);
  }
}

// A new file beside `path`, open for writing.
int create_beside(const std::string& path, std::string* name) {
  static std::atomic<unsigned> counter{0};
  std::filesystem::path const target(path);
  for (int attempt = 0; attempt < 100; ++attempt) {
    std::string const own = "." + target.filename().string().substr(0, 200) + "." + std::to_string(::getpid()) + "." +
                            std::to_string(counter.fetch_add(1)) + ".tmp";
    *name = (std::filesystem::path(directory_of(path)) / own).string();
    int const file = ::open(name->c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file >= 0) return file;
    if (errno != EEXIST) break;
  }
  int const reason = errno;
  name->clear();
  throw wrong(path, "cannot be written: " + directory_of(path) + ": " + std::strerror(reason));
}

}  // namespace

void check_target(const std::string& path, std::span<const Source> tensors) {
  if (path.empty() || path.find('\0') != std::string::npos) throw wrong(path, "is not the name of a file");
  layout_of(path, tensors);
  std::string const target = resolved(path);
  struct stat status{};
  if (::stat(target.c_str(), &status) == 0) {
    if (S_ISDIR(status.st_mode)) throw wrong(path, "is a directory");
    // Renaming a file over /dev/null would be a bad surprise.
    if (!S_ISREG(status.st_mode)) throw wrong(path, "exists and is not a regular file");
  }
  std::string const directory = directory_of(target);
  if (::stat(directory.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) {
    throw wrong(path, "there is no directory " + quote(directory));
  }
  if (::access(directory.c_str(), W_OK | X_OK) != 0) {
    throw wrong(path, "directory " + quote(directory) + ": " + std::strerror(errno));
  }
}

Staged::Staged(const std::string& path, std::span<const Source> tensors) : path_(resolved(path)) {
  check_target(path, tensors);
  Layout const layout = layout_of(path, tensors);
  int const file = create_beside(path_, &temporary_);
  try {
    write_all(file, layout.header.data(), layout.header.size(), path);
    for (std::size_t const i : layout.order) {
      std::uint64_t bytes = 0;
      bytes_of(tensors[i].shape, static_cast<std::uint64_t>(size_of(tensors[i].dtype)), &bytes);
      write_all(file, tensors[i].data, bytes, path);
    }
    struct stat status{};
    if (::stat(path_.c_str(), &status) == 0) {  // a file that is replaced keeps its permissions
      if (::fchmod(file, status.st_mode & 07777U) != 0) throw wrong(path, std::strerror(errno));
    }
    if (::fsync(file) != 0) throw wrong(path, std::string("cannot be written: ") + std::strerror(errno));
  } catch (...) {
    ::close(file);
    ::unlink(temporary_.c_str());
    throw;
  }
  if (::close(file) != 0) {
    int const reason = errno;
    ::unlink(temporary_.c_str());
    throw wrong(path, std::string("cannot be written: ") + std::strerror(reason));
  }
}

Staged::Staged(Staged&& other) noexcept
    : path_(std::move(other.path_)), temporary_(std::exchange(other.temporary_, std::string())) {}

Staged::~Staged() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void Staged::commit() {
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    throw wrong(path_, std::string("cannot be renamed into place: ") + std::strerror(errno));
  }
  temporary_.clear();
  // The name itself reaches the disk with its directory. Not every file system can sync one, and the data is safe.
  int const directory = ::open(directory_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory >= 0) {
    ::fsync(directory);
    ::close(directory);
  }
}

void write(const std::string& path, std::span<const Source> tensors) {
  Staged staged(path, tensors);
  staged.commit();
}

}  // namespace logitless::files
