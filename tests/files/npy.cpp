// .npy: the three versions, the dtypes, and what is refused.

#include "support.hpp"

namespace logitless::files::test {
namespace {

std::string dict(const std::string& descr, const std::string& shape, const std::string& order = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }   \n";
}
std::string refused(const std::string& header, std::size_t data = 16) {
  return failure([&] { parse_npy(bytes(npy(header, std::string(data, 'x')))); });
}

TEST(Npy, ReadsAllVersions) {
  for (int const version : {1, 2, 3}) {
    TensorInfo const tensor = parse_npy(bytes(npy(dict("<f4", "(2, 3)"), std::string(24, 'x'), version)));
    EXPECT_EQ(tensor.dtype, LL_F32);
    EXPECT_EQ(tensor.shape, (std::vector<std::int64_t>{2, 3}));
    EXPECT_EQ(tensor.bytes, 24U);
  }
  EXPECT_TRUE(says(failure([] { parse_npy(bytes(npy(dict("<f4", "(1,)"), "xxxx", 4))); }), "version 4.0"));
}

TEST(Npy, ReadsEveryDtypeOfOurs) {
  struct Row {
    const char* descr;
    ll_dtype dtype;
    std::size_t bytes;
  };
  for (Row const row : {Row{"<f8", LL_F64, 8}, Row{"<f4", LL_F32, 4}, Row{"<f2", LL_F16, 2}, Row{"<i8", LL_I64, 8},
                        Row{"<i4", LL_I32, 4}, Row{"=f4", LL_F32, 4}}) {
    TensorInfo const tensor = parse_npy(bytes(npy(dict(row.descr, "(3,)"), std::string(3 * row.bytes, 'x'))));
    EXPECT_EQ(tensor.dtype, row.dtype) << row.descr;
  }
}

TEST(Npy, ReadsOtherSpellingsOfTheDict) {
  TensorInfo const tensor =
      parse_npy(bytes(npy("{\"shape\":(2,),\"descr\":\"<i4\",\"fortran_order\":True}", std::string(8, 'x'))));
  EXPECT_EQ(tensor.shape, (std::vector<std::int64_t>{2}));
  EXPECT_TRUE(parse_npy(bytes(npy(dict("<f8", "()"), std::string(8, 'x')))).shape.empty());
  EXPECT_EQ(parse_npy(bytes(npy(dict("<f8", "(0, 4)"), ""))).bytes, 0U);
  EXPECT_EQ(parse_npy(bytes(npy(dict("|u1", "(2, 3)"), std::string(6, 'x')))).dtype, LL_U8);
}

TEST(Npy, RefusesColumnMajorUnlessOneDimensional) {
  EXPECT_TRUE(says(refused(dict("<f4", "(2, 2)", "True")), "ascontiguousarray"));
  EXPECT_EQ(parse_npy(bytes(npy(dict("<f4", "(4,)", "True"), std::string(16, 'x')))).shape.size(), 1U);
}

TEST(Npy, RefusesDtypesWithAHint) {
  EXPECT_TRUE(says(refused(dict(">f4", "(4,)")), "big endian"));
  EXPECT_TRUE(says(refused(dict("|i1", "(16,)")), "'<f4'"));
  EXPECT_TRUE(says(refused(dict("<c8", "(2,)")), "'<f4'"));
  EXPECT_TRUE(says(refused(dict("|O", "(2,)")), "cannot be read"));
  EXPECT_TRUE(says(refused(dict("f4", "(4,)")), "cannot be read"));
  EXPECT_TRUE(says(refused("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (4,), }"), "structured"));
  for (const char* const descr : {"|V2", "<V2"}) {
    std::string const file = npy(dict(descr, "(8,)"), std::string(16, 'x'));
    EXPECT_TRUE(says(failure([&] { parse_npy(bytes(file)); }), "--npy-bf16"));
    EXPECT_EQ(parse_npy(bytes(file), true).dtype, LL_BF16);
  }
}

TEST(Npy, RefusesWhatIsCutOffOrTooLong) {
  std::string const whole = npy(dict("<f4", "(4,)"), std::string(16, 'x'));
  parse_npy(bytes(whole));
  for (std::size_t size = 0; size < whole.size(); ++size) failure([&] { parse_npy(bytes(whole.substr(0, size))); });
  EXPECT_TRUE(says(failure([&] { parse_npy(bytes(whole + "x")); }), "needs 16 bytes of data, the file has 17"));
}

TEST(Npy, RefusesWhatIsNotItsDict) {
  for (const char* const header :
       {"", "{", "{}", "[]", "{'descr': '<f4'}", "{'descr': '<f4', 'fortran_order': False}",
        "{'descr': '<f4', 'fortran_order': 0, 'shape': (4,)}", "{'descr': '<f4', 'fortran_order': False, 'shape': [4]}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (4.0,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-4,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (4,), 'more': 1}",
        "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (4,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (4,)} x", "{'descr: '<f4'}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (4"}) {
    SCOPED_TRACE(header);
    refused(header);
  }
  EXPECT_TRUE(says(refused(dict("<f4", "(4294967296, 4294967296)")), "too many"));
  EXPECT_TRUE(says(refused(dict("<f4", "(99999999999999999999,)")), "2^63"));
}

TEST(Npy, FileTakesNoName) {
  Folder const folder;
  std::string const path = folder.put("a.npy", npy(dict("<i4", "(1,)"), std::string("\7\0\0\0", 4)));
  EXPECT_EQ(read(path).info.dtype, LL_I32);
  EXPECT_TRUE(says(failure([&] { read(path + ":x"); }), "without a name"));
  // Known by its content, whatever its name.
  EXPECT_EQ(read(folder.put("b.bin", content(path))).info.dtype, LL_I32);
}

}  // namespace
}  // namespace logitless::files::test
