// .safetensors: what is read, and every way in which a header can lie.

#include "support.hpp"

namespace logitless::files::test {
namespace {

std::vector<TensorInfo> parse(const std::string& header, const std::string& data) {
  return parse_safetensors(bytes(safetensors(header, data)));
}
std::string refused(const std::string& header, std::size_t data = 16) {
  return failure([&] { parse(header, std::string(data, 'x')); });
}

TEST(Safetensors, ReadsTensorsInAnyOrder) {
  auto const tensors =
      parse(R"({"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[8,20]},)"
            R"( "__metadata__":{"format":"pt"},"a":{"data_offsets":[0,8],"shape":[],"dtype":"F64"}}  )",
            std::string(20, 'x'));
  ASSERT_EQ(tensors.size(), 2U);
  EXPECT_EQ(tensors[0].name, "b");
  EXPECT_EQ(tensors[0].type, "BF16");
  EXPECT_EQ(tensors[0].dtype, LL_BF16);
  EXPECT_EQ(tensors[0].shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(tensors[0].bytes, 12U);
  EXPECT_EQ(tensors[1].dtype, LL_F64);
  EXPECT_TRUE(tensors[1].shape.empty());
  EXPECT_EQ(tensors[0].offset, tensors[1].offset + 8);
}

TEST(Safetensors, ReadsEveryDtypeOfOurs) {
  struct Row {
    const char* name;
    ll_dtype dtype;
    std::size_t bytes;
  };
  for (Row const row : {Row{"F64", LL_F64, 8}, Row{"F32", LL_F32, 4}, Row{"F16", LL_F16, 2}, Row{"BF16", LL_BF16, 2},
                        Row{"I64", LL_I64, 8}, Row{"I32", LL_I32, 4}, Row{"U8", LL_U8, 1}, Row{"BOOL", LL_NONE, 1},
                        Row{"F8_E4M3", LL_NONE, 1}}) {
    auto const tensors = parse(std::string(R"({"t":{"dtype":")") + row.name + R"(","shape":[3],"data_offsets":[0,)" +
                                   std::to_string(3 * row.bytes) + "]}}",
                               std::string(3 * row.bytes, 'x'));
    ASSERT_EQ(tensors.size(), 1U);
    EXPECT_EQ(tensors[0].dtype, row.dtype) << row.name;
  }
}

TEST(Safetensors, ListsDtypesOfTheFuture) {
  auto const tensors = parse(R"({"t":{"dtype":"F2","shape":[8],"data_offsets":[0,2]}})", "xx");
  ASSERT_EQ(tensors.size(), 1U);
  EXPECT_EQ(tensors[0].dtype, LL_NONE);
}

TEST(Safetensors, ReadsEmptyFilesAndEmptyTensors) {
  EXPECT_TRUE(parse("{}", "").empty());
  auto const tensors = parse(R"({"t":{"dtype":"F32","shape":[0,5],"data_offsets":[0,0]}})", "");
  ASSERT_EQ(tensors.size(), 1U);
  EXPECT_EQ(tensors[0].bytes, 0U);
}

TEST(Safetensors, ReadsEscapedNames) {
  auto const tensors = parse(
      "{\"a\\u00e9\\ud83d\\ude00\\n\\\"\xc3\xa9\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", "xxxx");
  ASSERT_EQ(tensors.size(), 1U);
  EXPECT_EQ(tensors[0].name, "a\xc3\xa9\xf0\x9f\x98\x80\n\"\xc3\xa9");
}

TEST(Safetensors, RefusesWhatIsCutOff) {
  std::string const whole =
      safetensors(R"({"t":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}})", std::string(16, 'x'));
  parse_safetensors(bytes(whole));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    failure([&] { parse_safetensors(bytes(whole.substr(0, size))); });
  }
  failure([&] { parse_safetensors(bytes(whole + "x")); });
}

TEST(Safetensors, RefusesLyingHeaderLengths) {
  for (std::uint64_t const length :
       {std::uint64_t{9}, std::uint64_t{1} << 40, std::uint64_t{1} << 63, ~std::uint64_t{0}}) {
    EXPECT_TRUE(says(failure([&] { parse_safetensors(bytes(little_endian(length, 8) + "{}      ")); }),
                     std::to_string(length)));
  }
}

TEST(Safetensors, RefusesLyingOffsets) {
  EXPECT_TRUE(says(refused(R"({"t":{"dtype":"F32","shape":[4],"data_offsets":[0,12]}})"), "needs 16 bytes"));
  EXPECT_TRUE(says(refused(R"({"t":{"dtype":"F32","shape":[8],"data_offsets":[0,32]}})"), "which has 16"));
  EXPECT_TRUE(says(refused(R"({"t":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}})"), "backwards"));
  EXPECT_TRUE(says(refused(R"({"t":{"dtype":"F32","shape":[3],"data_offsets":[4,16]}})"), "begins at byte 4"));
  EXPECT_TRUE(says(refused(R"({"t":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}})"), "end at byte 12"));
  EXPECT_TRUE(says(refused(R"({"t":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},)"
                           R"("u":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})"),
                   "begins at byte 8"));
  // Sums of offsets must not wrap round.
  EXPECT_TRUE(
      says(refused(R"({"t":{"dtype":"F2","shape":[1],"data_offsets":[9223372036854775800,9223372036854775807]}})"),
           "which has 16"));
}

TEST(Safetensors, RefusesShapesThatOverflow) {
  EXPECT_TRUE(
      says(refused(R"({"t":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,16]}})"), "too many"));
  EXPECT_TRUE(
      says(refused(R"({"t":{"dtype":"F32","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}})", 0), "too many"));
  EXPECT_TRUE(says(refused(R"({"t":{"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,16]}})"), "2^63"));
  std::string ones = "1";
  for (int i = 0; i < 40; ++i) ones += ",1";
  EXPECT_TRUE(says(refused(R"({"t":{"dtype":"F32","shape":[)" + ones + R"(],"data_offsets":[0,16]}})"), "dimensions"));
}

TEST(Safetensors, RefusesWhatIsNotItsJson) {
  for (
      const char* const header :
      {"",
       "{",
       "[]",
       "null",
       "{\"t\"}",
       "{\"t\":}",
       "{\"t\":{}}",
       "{} x",
       "{,}",
       "\xff",
       "{\"t\":[]}",
       "{\"t\":{\"dtype\":\"F32\"}}",
       R"({"t":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},})",
       R"({"t":{"dtype":"F32","shape":[4],"data_offsets":[0]}})",
       R"({"t":{"dtype":"F32","shape":[4],"data_offsets":[0,16,16]}})",
       R"({"t":{"dtype":"F32","shape":[4.0],"data_offsets":[0,16]}})",
       R"({"t":{"dtype":"F32","shape":[4e0],"data_offsets":[0,16]}})",
       R"({"t":{"dtype":"F32","shape":[04],"data_offsets":[0,16]}})",
       R"({"t":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}})",
       R"({"t":{"dtype":32,"shape":[4],"data_offsets":[0,16]}})",
       R"({"t":{"dtype":"F32","shape":[4],"data_offsets":[0,16],"extra":1}})",
       R"({"t":{"dtype":"F32","shape":[4],"shape":[4],"data_offsets":[0,16]}})",
       R"({"t":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"t":{"dtype":"F32","shape":[0],"data_offsets":[16,16]}})",
       "{\"a\nb\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}",
       R"({"\ud800":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}})",
       R"({"\udc00":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}})",
       R"({"\x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}})",
       R"({"\u12":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}})",
       "{\"\xc0\xaf\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}",
       "{\"\xed\xa0\x80\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}",
       "{\"\xf4\x90\x80\x80\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}"}) {
    SCOPED_TRACE(header);
    refused(header);
  }
}

TEST(Safetensors, MessagesEscapeNamesFromTheFile) {
  std::string const text = refused(R"({"a\nb\u001b[31m":{"dtype":"F32","shape":[4],"data_offsets":[0,12]}})");
  EXPECT_TRUE(says(text, "\\x0a"));
  EXPECT_TRUE(says(text, "\\x1b"));
}

TEST(Safetensors, FileChoosesByName) {
  Folder const folder;
  std::string const path =
      folder.put("a.safetensors", safetensors(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                                              R"("q":{"dtype":"I8","shape":[4],"data_offsets":[8,12]}})",
                                              std::string("\0\0\x80\x3f\0\0\0\x40", 8) + "abcd"));
  File const file(path);
  Tensor const x = file.read("x");
  float values[2];
  std::memcpy(values, x.data, sizeof values);
  EXPECT_EQ(values[0], 1.0F);
  EXPECT_EQ(values[1], 2.0F);

  std::string const unknown = failure([&] { file.read("y"); });
  EXPECT_TRUE(says(unknown, path));
  EXPECT_TRUE(says(unknown, "'y'"));
  EXPECT_TRUE(says(unknown, "'x' F32 [2], 'q' I8 [4]"));
  EXPECT_TRUE(says(failure([&] { file.read(""); }), "holds 2 tensors, name one as FILE:NAME: 'x'"));
  EXPECT_TRUE(says(failure([&] { file.read("q"); }), "'I8'"));
}

TEST(Safetensors, TheOnlyTensorNeedsNoNameAndMayBeMisaligned) {
  Folder const folder;
  // The header's length makes the data begin at an odd address.
  std::string header = R"({"x":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}})";
  while ((8 + header.size()) % 8 != 1) header += ' ';
  std::string const path = folder.put("a.safetensors", safetensors(header, std::string("\0\0\0\0\0\0\xf0\x3f", 8)));
  Tensor const x = read(path);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(x.data) % 8, 0U);
  double value = 0;
  std::memcpy(&value, x.data, sizeof value);
  EXPECT_EQ(value, 1.0);
}

TEST(Safetensors, TensorOutlivesItsFile) {
  Folder const folder;
  std::string const path =
      folder.put("a.safetensors",
                 safetensors(R"({"x":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}})", std::string("\7\0\0\0", 4)));
  Tensor const x = read(path + ":x");
  std::filesystem::remove(path);
  std::int32_t value = 0;
  std::memcpy(&value, x.data, sizeof value);
  EXPECT_EQ(value, 7);
}

TEST(Spec, FileAndName) {
  Folder const folder;
  std::string const one = folder.put("a.safetensors", "x");
  std::string const colon = folder.put("b:c.safetensors", "x");
  auto const check = [](const std::string& text, const std::string& path, const std::string& name) {
    Spec const spec = parse_spec(text);
    EXPECT_EQ(spec.path, path);
    EXPECT_EQ(spec.name, name);
  };
  check(one, one, "");
  check(one + ":w", one, "w");
  check(one + ":w:0", one, "w:0");
  check(colon, colon, "");
  check(colon + ":w", colon, "w");
  check("nowhere/x:w", "nowhere/x", "w");
  check("nowhere", "nowhere", "");
  EXPECT_TRUE(says(failure([&] { parse_spec(one + ":"); }), "no tensor name"));
}

TEST(File, RefusesWhatCannotBeMapped) {
  Folder const folder;
  EXPECT_TRUE(says(failure([&] { File file(folder / "missing.safetensors"); }), "missing.safetensors': No such file"));
  EXPECT_TRUE(says(failure([&] { File file(folder / ""); }), "is a directory"));
  EXPECT_TRUE(says(failure([&] { File file("/dev/null"); }), "not a regular file"));
  EXPECT_TRUE(says(failure([&] { File file(folder.put("empty.safetensors", "")); }), "is empty"));
  EXPECT_TRUE(says(failure([&] { File file(folder.put("text.safetensors", "Sir Walter Elliot, of Kellynch Hall")); }),
                   "text.safetensors': not a .safetensors file"));
  EXPECT_TRUE(says(failure([&] { File file(folder.put("text.npy", "Sir Walter Elliot")); }), "not an .npy file"));
}

}  // namespace
}  // namespace logitless::files::test
