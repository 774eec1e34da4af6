// Helpers beside the loss: next-token targets of packed sequences, the merge of row statistics of a vocabulary's parts,
// and classes by mean probability. On the calling thread, in one pass that checks and one that writes, so that a
// refusal leaves the outputs alone. Cost: N reads; R count merges in double; V log V comparisons.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "capi/views.hpp"
#include "contract/statistics.hpp"

namespace logitless::capi {
namespace {

using Statistics = contract::RowStatistics<double>;

std::int64_t whole_at(const View& view, std::int64_t i) {
  const std::int64_t at = i * view.row_stride;
  return view.dtype == DType::i32 ? static_cast<const std::int32_t*>(view.data)[at]
                                  : static_cast<const std::int64_t*>(view.data)[at];
}

void put_whole(const View& view, std::int64_t i, std::int64_t value) {
  const std::int64_t at = i * view.row_stride;
  if (view.dtype == DType::i32) {
    static_cast<std::int32_t*>(view.data)[at] = static_cast<std::int32_t>(value);
  } else {
    static_cast<std::int64_t*>(view.data)[at] = value;
  }
}

bool fits(DType dtype, std::int64_t value) {
  return dtype != DType::i32 ||
         (value >= std::numeric_limits<std::int32_t>::min() && value <= std::numeric_limits<std::int32_t>::max());
}

// ---- next-token targets ----------------------------------------------------------------------------------------------

void check_sequences(const View& ends, std::int64_t tokens) {
  if (ends.rows < 1) refuse("cu_seqlens: shape [0]; must be [S+1], 0 and the end of each of S sequences");
  if (const std::int64_t first = whole_at(ends, 0); first != 0) {
    refuse("cu_seqlens[0]: " + number(first) + "; must be 0");
  }
  for (std::int64_t i = 1; i < ends.rows; ++i) {
    if (whole_at(ends, i) >= whole_at(ends, i - 1)) continue;
    refuse("cu_seqlens[" + number(i) + "]: " + number(whole_at(ends, i)) + "; must be at least the one before, " +
           number(whole_at(ends, i - 1)));
  }
  if (const std::int64_t last = whole_at(ends, ends.rows - 1); last != tokens) {
    refuse("cu_seqlens[" + number(ends.rows - 1) + "]: " + number(last) + "; must be the number of ids, " +
           number(tokens));
  }
}

// Calls each(i, value) for every target, in order.
template <class Each>
void for_targets(const View& ids, const View& ends, const View& documents, std::int64_t ignore, const Each& each) {
  std::int64_t sequence = 1;
  for (std::int64_t i = 0; i < ids.rows; ++i) {
    bool last = i + 1 == ids.rows;
    if (ends) {
      while (whole_at(ends, sequence) <= i) ++sequence;
      last = whole_at(ends, sequence) == i + 1;
    } else if (documents && !last) {
      last = whole_at(documents, i) != whole_at(documents, i + 1);
    }
    each(i, last ? ignore : whole_at(ids, i + 1));
  }
}

// ---- statistics --------------------------------------------------------------------------------------------------------

struct Columns {
  Statistics sums;
  double z_y;
};

double at(const View& v, std::int64_t i, std::int64_t j) {
  return static_cast<double>(static_cast<const float*>(v.data)[i * v.row_stride + j * v.col_stride]);
}

Columns columns(const View& v, std::int64_t i) {
  Columns c{Statistics::identity(), at(v, i, 2)};
  c.sums.m = at(v, i, 0);
  c.sums.r = at(v, i, 1);
  c.sums.k = at(v, i, 3);
  if (v.cols == 8) {
    c.sums.t = at(v, i, 4);
    c.sums.n = at(v, i, 5);
  }
  return c;
}

// A row that is bad in one part is bad in the whole; -inf throughout is not bad in a part.
bool bad(const Columns& c) {
  return std::isnan(c.sums.m) || std::isnan(c.sums.r) || std::isnan(c.z_y) || (std::isinf(c.sums.m) && c.sums.m > 0);
}

Columns joined(const Columns& a, const Columns& b) {
  if (bad(a)) return a;
  if (bad(b)) return b;
  return {contract::merge(a.sums, b.sums), std::isinf(a.z_y) && a.z_y < 0 ? b.z_y : a.z_y};
}

void put(const View& v, std::int64_t i, const Columns& c) {
  const double values[8] = {c.sums.m, c.sums.r, c.z_y, c.sums.k, c.sums.t, c.sums.n, 0.0, 0.0};
  for (std::int64_t j = 0; j < v.cols; ++j) {
    static_cast<float*>(v.data)[i * v.row_stride + j] = static_cast<float>(values[j]);
  }
}

}  // namespace
}  // namespace logitless::capi

using namespace logitless::capi;
using namespace logitless;

ll_status ll_next_token_targets(const ll_tensor* ids, const ll_tensor* cu_seqlens, const ll_tensor* document_ids,
                                int64_t ignore_index, const ll_tensor* targets) noexcept {
  return guarded([&] {
    Regions regions;
    Checker check(regions);
    const std::initializer_list<DType> whole = {DType::i64, DType::i32};
    if (cu_seqlens != nullptr && document_ids != nullptr) {
      refuse("document_ids: given with cu_seqlens; both say where sequences end: one must be null");
    }
    const View from = check.vector("ids", ids, Role::input, whole);
    View ends, documents;
    if (cu_seqlens != nullptr) ends = check.vector("cu_seqlens", cu_seqlens, Role::input, whole);
    if (document_ids != nullptr) documents = check.vector("document_ids", document_ids, Role::input, whole);
    const View to = check.vector("targets", targets, Role::output, whole);
    if (to.rows != from.rows) {
      refuse("targets: shape [" + number(to.rows) + "]; must be that of ids, [" + number(from.rows) + "]");
    }
    if (documents && documents.rows != from.rows) {
      refuse("document_ids: shape [" + number(documents.rows) + "]; must be that of ids, [" + number(from.rows) + "]");
    }
    regions.check(false);
    if (ends) check_sequences(ends, from.rows);
    if (!fits(to.dtype, ignore_index)) {
      refuse("ignore_index: " + number(ignore_index) + "; must fit targets' dtype, i32");
    }
    for_targets(from, ends, documents, ignore_index, [&](std::int64_t i, std::int64_t value) {
      if (fits(to.dtype, value)) return;
      fail(LL_ERROR_TARGET_RANGE,
           "ids[" + number(i + 1) + "]: " + number(value) + "; must fit targets' dtype, i32, or make targets i64");
    });
    for_targets(from, ends, documents, ignore_index,
                [&](std::int64_t i, std::int64_t value) { put_whole(to, i, value); });
  });
}

ll_status ll_merge_statistics(const ll_tensor* const* parts, int64_t count, const ll_tensor* merged) noexcept {
  return guarded([&] {
    if (parts == nullptr) refuse("parts: null; must point at count tensors");
    if (count < 1) refuse("count: " + number(count) + "; must be at least 1");
    const std::initializer_list<DType> f32 = {DType::f32};
    Regions unused;
    const View out = Checker(unused).matrix("merged", merged, Role::output, {4, 8}, f32);
    // Views are made anew for each row rather than kept: nothing is allocated, and a row costs far more than a view.
    const auto part = [&](std::int64_t p) {
      Regions regions;
      Checker check(regions);
      const View view = check.matrix("parts", parts[p], Role::input, out.rows, out.cols, f32);
      const bool same = view.data == out.data && view.row_stride == out.row_stride && view.col_stride == out.col_stride;
      if (!same) {
        check.matrix("merged", merged, Role::output, out.rows, out.cols, f32);
        regions.check(false);
      }
      return view;
    };
    for (std::int64_t p = 0; p < count; ++p) {
      const View view = part(p);
      for (std::int64_t i = 0; out.cols == 4 && count > 1 && i < out.rows; ++i) {
        // Moving k to another reference takes n, which four columns do not hold.
        if (at(view, i, 3) == 0.0 || std::isnan(at(view, i, 3))) continue;
        refuse("parts[" + number(p) + "]: k of row " + number(i) + " is " + number(at(view, i, 3)) +
               " in [R, 4]; must be 0, or give the [R, 8] of a problem with total_vocab");
      }
    }
    for (std::int64_t i = 0; i < out.rows; ++i) {
      Columns row = columns(part(0), i);
      for (std::int64_t p = 1; p < count; ++p) row = joined(row, columns(part(p), i));
      put(out, i, row);
    }
  });
}

ll_status ll_class_order(const ll_tensor* mean_probability, const ll_tensor* order) noexcept {
  return guarded([&] {
    Regions regions;
    Checker check(regions);
    const View mean = check.vector("mean_probability", mean_probability, Role::input, {DType::f32});
    const View to = check.vector("order", order, Role::output, mean.rows, {DType::i64, DType::i32});
    regions.check(false);
    if (mean.rows > 0 && !fits(to.dtype, mean.rows - 1)) {
      refuse("order: dtype i32; must be i64 for " + number(mean.rows) + " classes");
    }
    std::vector<float> of(static_cast<std::size_t>(mean.rows));
    for (std::int64_t j = 0; j < mean.rows; ++j) {
      const float p = static_cast<const float*>(mean.data)[j * mean.row_stride];
      if (std::isnan(p)) refuse("mean_probability[" + number(j) + "]: NaN; must be a number");
      of[static_cast<std::size_t>(j)] = p;
    }
    std::vector<std::int64_t> classes(of.size());
    std::iota(classes.begin(), classes.end(), std::int64_t{0});
    std::sort(classes.begin(), classes.end(), [&](std::int64_t a, std::int64_t b) {
      const float pa = of[static_cast<std::size_t>(a)], pb = of[static_cast<std::size_t>(b)];
      return pa != pb ? pa > pb : a < b;
    });
    for (std::int64_t n = 0; n < mean.rows; ++n) put_whole(to, n, classes[static_cast<std::size_t>(n)]);
  });
}
