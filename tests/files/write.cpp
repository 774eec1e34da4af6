// Writing: what is written reads back, nothing half-written is ever visible, and failures leave the folder as it was.

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support.hpp"

namespace logitless::files::test {
namespace {

const float floats[6] = {1, 2, 3, 4, 5, 6};
const std::uint16_t halves[3] = {0x3f80, 0x4000, 0x4040};

TEST(Write, SafetensorsReadsBack) {
  Folder const folder;
  std::string const path = folder / "a.safetensors";
  std::vector<Source> const sources = {
      {"b \"q\"\n", LL_BF16, {3}, halves}, {"a", LL_F32, {2, 3}, floats}, {"none", LL_F32, {0, 3}, nullptr}};
  write(path, sources);
  EXPECT_EQ(folder.count(), 1U);
  File const file(path);
  ASSERT_EQ(file.tensors().size(), 3U);
  for (Source const& source : sources) {
    Tensor const tensor = file.read(source.name);
    EXPECT_EQ(tensor.info.dtype, source.dtype);
    EXPECT_EQ(tensor.info.shape, source.shape);
    if (tensor.info.bytes > 0) {
      EXPECT_EQ(std::memcmp(tensor.data, source.data, tensor.info.bytes), 0);
    }
  }
  // Widest elements first, so that reading never needs a copy.
  EXPECT_EQ(file.read("a").info.offset % 64, 0U);
}

TEST(Write, NpyReadsBackAndDataIsAligned) {
  Folder const folder;
  for (std::vector<std::int64_t> const& shape :
       {std::vector<std::int64_t>{}, std::vector<std::int64_t>{6}, std::vector<std::int64_t>{2, 3}}) {
    std::string const path = folder / "a.npy";
    std::vector<Source> const sources = {{"ignored", LL_F32, shape, floats}};
    write(path, sources);
    Tensor const tensor = read(path);
    EXPECT_EQ(tensor.info.shape, shape);
    EXPECT_EQ(tensor.info.offset % 64, 0U);
    EXPECT_EQ(std::memcmp(tensor.data, floats, tensor.info.bytes), 0);
  }
  EXPECT_TRUE(says(content(folder / "a.npy"), "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"));
}

TEST(Write, RefusesBeforeTouchingAnything) {
  Folder const folder;
  std::vector<Source> const one = {{"a", LL_F32, {6}, floats}};
  std::vector<Source> const two = {{"a", LL_F32, {6}, floats}, {"b", LL_F32, {6}, floats}};
  std::vector<Source> const half = {{"a", LL_BF16, {3}, halves}};
  auto const refused = [&](const std::string& path, const std::vector<Source>& sources) {
    std::string const text = failure([&] { check_target(path, sources); });
    EXPECT_EQ(failure([&] { write(path, sources); }), text);
    return text;
  };
  EXPECT_TRUE(says(refused(folder / "a.npy", half), ".safetensors"));
  EXPECT_TRUE(says(refused(folder / "a.npy", two), "one array, not 2"));
  EXPECT_TRUE(says(refused(folder / "a.bin", one), "ends in .safetensors or .npy"));
  EXPECT_TRUE(says(refused(folder / "missing/a.npy", one), "there is no directory"));
  EXPECT_EQ(folder.count(), 0U);
  std::filesystem::create_directory(folder / "d.npy");
  EXPECT_TRUE(says(refused(folder / "d.npy", one), "is a directory"));
  ASSERT_EQ(::mkfifo((folder / "f.npy").c_str(), 0600), 0);
  EXPECT_TRUE(says(refused(folder / "f.npy", one), "not a regular file"));
  EXPECT_EQ(folder.count(), 2U);
}

TEST(Write, StagedButNotCommittedLeavesTheOldFile) {
  Folder const folder;
  std::string const path = folder.put("a.npy", "old");
  std::vector<Source> const one = {{"a", LL_F32, {6}, floats}};
  {
    Staged const staged(path, one);
    EXPECT_EQ(folder.count(), 2U);
    EXPECT_EQ(content(path), "old");
  }
  EXPECT_EQ(folder.count(), 1U);
  EXPECT_EQ(content(path), "old");
}

TEST(Write, AFullDiskLeavesNothing) {
  // A limit on file size stands in for the full disk: write() fails half way with EFBIG.
  Folder const folder;
  std::string const path = folder.put("a.safetensors", "old");
  std::vector<float> const large(1 << 16, 1.0F);
  std::vector<Source> const one = {{"a", LL_F32, {1 << 16}, large.data()}};
  auto const write_with_limit = [&] {
    ::signal(SIGXFSZ, SIG_IGN);
    struct rlimit limit{};
    limit.rlim_cur = limit.rlim_max = 1 << 12;
    ::setrlimit(RLIMIT_FSIZE, &limit);
    std::string text;
    try {
      write(path, one);
    } catch (const Error& error) {
      text = error.what();
    }
    ::_exit(text.find("cannot be written: File too large") != std::string::npos ? 7 : 1);
  };
  EXPECT_EXIT(write_with_limit(), ::testing::ExitedWithCode(7), "");
  EXPECT_EQ(folder.count(), 1U);
  EXPECT_EQ(content(path), "old");
}

TEST(Write, KeepsPermissionsAndWritesThroughLinks) {
  Folder const folder;
  std::string const path = folder.put("real.npy", "old");
  std::filesystem::permissions(path, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  std::filesystem::create_symlink("real.npy", folder / "link.npy");
  std::vector<Source> const one = {{"a", LL_F32, {6}, floats}};
  write(folder / "link.npy", one);
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link.npy"));
  EXPECT_EQ(read(path).info.shape, (std::vector<std::int64_t>{6}));
  struct stat status{};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0600U);
}

}  // namespace
}  // namespace logitless::files::test
