// The unfused pipeline: see dense.hpp. Products pack blocks of up to 2048 steps of K into panels, then fill macro tiles
// of about 192 x 256 from them in a buffer per member, so that C is touched once per block of K.
//
// Cost: packing reads and writes each operand once per product; the loss moves about nine arrays of R·V fp32 numbers
// forward and ten backward. Numerics: sums in fp32 (the loss over rows in double), bf16 operands rounded to nearest.
#include "bench/dense.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "bench/dense_kernels.hpp"

namespace logitless::bench {

namespace {

constexpr std::int64_t pack_block = 2048;  // K steps packed at a time
constexpr std::int64_t inner_block = 256;  // K steps a tile runs over: its B panel stays in L1

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Where (row r, step k) of an operand lies inside its packed panel of WIDTH rows; K goes in units of KU.
template <int WIDTH, int KU>
struct PanelLayout {
  static constexpr int width = WIDTH;
  static constexpr int k_unit = KU;
  static std::int64_t offset(std::int64_t r, std::int64_t k) { return k / KU * (WIDTH * KU) + r * KU + k % KU; }
};
// AMX's B tiles: [k/32][tile of 16 columns][k%32/2][16][2].
struct AmxLayout {
  static constexpr int width = 32;
  static constexpr int k_unit = 32;
  static std::int64_t offset(std::int64_t r, std::int64_t k) {
    return k / 32 * 1024 + r / 16 * 512 + k % 32 / 2 * 32 + r % 16 * 2 + k % 2;
  }
};

void assign(float& to, float from) { to = from; }
void assign(float& to, bfloat16 from) { to = from; }
void assign(float& to, float16 from) { to = from; }
void assign(bfloat16& to, float from) { to = bfloat16(from); }
void assign(bfloat16& to, bfloat16 from) { to = from; }
void assign(bfloat16& to, float16 from) { to = bfloat16(static_cast<float>(from)); }

// One panel of m: rows [first, first + width) and steps [k0, k0 + k) -> out; what lies outside m becomes 0.
template <class Layout, class To, class From>
void pack_panel(const Matrix& m, std::int64_t first, std::int64_t k0, std::int64_t k, To* out) {
  const auto* data = static_cast<const From*>(m.data);
  const std::int64_t rows = std::min<std::int64_t>(Layout::width, m.rows - first);
  const std::int64_t padded = ceil_div(k, Layout::k_unit) * Layout::k_unit;
  if (rows < Layout::width || padded > k) {
    std::memset(static_cast<void*>(out), 0, static_cast<std::size_t>(padded * Layout::width) * sizeof(To));
  }
  if (m.col_stride == 1) {
    for (std::int64_t r = 0; r < rows; ++r) {
      const From* from = data + (first + r) * m.row_stride + k0;
      for (std::int64_t i = 0; i < k; ++i) assign(out[Layout::offset(r, i)], from[i]);
    }
  } else {
    for (std::int64_t i = 0; i < k; ++i) {
      const From* from = data + first * m.row_stride + (k0 + i) * m.col_stride;
      for (std::int64_t r = 0; r < rows; ++r) assign(out[Layout::offset(r, i)], from[r * m.row_stride]);
    }
  }
}

template <class Layout, class To>
void pack_panel_of(const Matrix& m, std::int64_t first, std::int64_t k0, std::int64_t k, void* out) {
  To* const to = static_cast<To*>(out);
  if (m.dtype == DType::bf16) return pack_panel<Layout, To, bfloat16>(m, first, k0, k, to);
  if (m.dtype == DType::f16) return pack_panel<Layout, To, float16>(m, first, k0, k, to);
  pack_panel<Layout, To, float>(m, first, k0, k, to);
}

using PackPanel = void (*)(const Matrix& m, std::int64_t first, std::int64_t k0, std::int64_t k, void* out);

// How one unit multiplies: its register tile, its panels, and the kernels that fill them.
struct UnitKernels {
  std::int64_t tile_rows, tile_cols, k_unit, element;
  PackPanel pack_a, pack_b;
  TileKernel tile;
};

UnitKernels kernels_of(Unit unit) {
  switch (unit) {
#if defined(__x86_64__)
    case Unit::amx:
      return {32,      32, 32, 2, pack_panel_of<PanelLayout<32, 32>, bfloat16>, pack_panel_of<AmxLayout, bfloat16>,
              tile_amx};
    case Unit::dot_bf16:
      return {14,
              32,
              2,
              2,
              pack_panel_of<PanelLayout<14, 2>, bfloat16>,
              pack_panel_of<PanelLayout<32, 2>, bfloat16>,
              tile_dot_bf16};
    case Unit::avx512:
      return {14,
              32,
              1,
              4,
              pack_panel_of<PanelLayout<14, 1>, float>,
              pack_panel_of<PanelLayout<32, 1>, float>,
              dense_kernels_avx512().tile_f32};
    case Unit::avx2:
      return {6,
              16,
              1,
              4,
              pack_panel_of<PanelLayout<6, 1>, float>,
              pack_panel_of<PanelLayout<16, 1>, float>,
              dense_kernels_avx2().tile_f32};
#endif
    default:
      return {6,
              8,
              1,
              4,
              pack_panel_of<PanelLayout<6, 1>, float>,
              pack_panel_of<PanelLayout<8, 1>, float>,
              dense_kernels_sse2().tile_f32};
  }
}

// Tile registers hold their configuration per thread, and only while a product needs it.
struct TileSession {
  explicit TileSession([[maybe_unused]] Unit unit) {
#if defined(__x86_64__)
    active = unit == Unit::amx;
    if (active) configure_amx();
#endif
  }
  ~TileSession() {
#if defined(__x86_64__)
    if (active) release_amx();
#endif
  }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
  bool active = false;
};

void grow(Array& array, std::int64_t bytes) {
  if (static_cast<std::int64_t>(array.bytes()) < bytes) array = Array(static_cast<std::size_t>(bytes));
}

template <class Body>
void for_chunks(Team& team, std::int64_t n, const Body& body) {
  constexpr std::int64_t chunk = 1 << 16;
  team.parallel_for(ceil_div(n, chunk),
                    [&](std::int64_t task, int) { body(task * chunk, std::min(n, (task + 1) * chunk)); });
}

template <class From, class To>
void convert_range(const void* from, void* to, std::int64_t first, std::int64_t last) {
  const auto* source = static_cast<const From*>(from);
  auto* target = static_cast<To*>(to);
  for (std::int64_t i = first; i < last; ++i) target[i] = static_cast<To>(static_cast<float>(source[i]));
}

}  // namespace

Unit unit_of(const std::string& cpu_target, bool bf16_operands) {
  if (bf16_operands && cpu_target == "amx") return Unit::amx;
  if (bf16_operands && cpu_target == "avx512bf16") return Unit::dot_bf16;
  if (cpu_target == "amx" || cpu_target == "avx512bf16" || cpu_target == "avx512") return Unit::avx512;
  return cpu_target == "avx2" ? Unit::avx2 : Unit::sse2;
}

const char* name_of(Unit unit) {
  switch (unit) {
    case Unit::sse2: return "fp32 sse2";
    case Unit::avx2: return "fp32 avx2";
    case Unit::avx512: return "fp32 avx512";
    case Unit::dot_bf16: return "bf16 avx512";
    case Unit::amx: return "bf16 amx";
  }
  return "?";
}

Product::Product(Team& team, Unit unit) : team_(team), unit_(unit) {}

// A [M,K] · B [K,N] -> C [M,N]
void Product::operator()(const Matrix& a, const Matrix& b, float* c) {
  const UnitKernels unit = kernels_of(unit_);
  const std::int64_t m = a.rows, k = a.cols, n = b.cols;
  const Matrix columns = b.transposed();
  const std::int64_t a_panels = ceil_div(m, unit.tile_rows), b_panels = ceil_div(n, unit.tile_cols);
  const std::int64_t packed_k = ceil_div(std::min(k, pack_block), unit.k_unit) * unit.k_unit;
  const std::int64_t a_panel_bytes = packed_k * unit.tile_rows * unit.element;
  const std::int64_t b_panel_bytes = packed_k * unit.tile_cols * unit.element;
  // 4 KiB more: the AMX tile prefetches that far.
  grow(packed_a_, a_panels * a_panel_bytes + 4096);
  grow(packed_b_, b_panels * b_panel_bytes);

  const std::int64_t macro_a = std::max<std::int64_t>(1, 192 / unit.tile_rows);
  const std::int64_t macro_b = std::max<std::int64_t>(1, 256 / unit.tile_cols);
  const std::int64_t a_blocks = ceil_div(a_panels, macro_a), b_blocks = ceil_div(b_panels, macro_b);
  const std::int64_t ldc = macro_b * unit.tile_cols;
  std::vector<Array> buffers;
  for (int i = 0; i < team_.size(); ++i) {
    buffers.emplace_back(static_cast<std::size_t>(macro_a * unit.tile_rows * ldc) * sizeof(float));
  }

  for (std::int64_t k0 = 0; k0 < k; k0 += pack_block) {
    const std::int64_t k_here = std::min(pack_block, k - k0);
    const std::int64_t k_padded = ceil_div(k_here, unit.k_unit) * unit.k_unit;
    team_.parallel_for(a_panels + b_panels, [&](std::int64_t task, int) {
      if (task < a_panels) {
        unit.pack_a(a, task * unit.tile_rows, k0, k_here, packed_a_.as<char>() + task * a_panel_bytes);
      } else {
        task -= a_panels;
        unit.pack_b(columns, task * unit.tile_cols, k0, k_here, packed_b_.as<char>() + task * b_panel_bytes);
      }
    });
    // Neighbouring tasks share their columns, so that one block of B serves from L2 or L3.
    team_.parallel_for(a_blocks * b_blocks, [&](std::int64_t task, int member) {
      const TileSession session(unit_);
      const std::int64_t a0 = task % a_blocks * macro_a, a1 = std::min(a_panels, a0 + macro_a);
      const std::int64_t b0 = task / a_blocks * macro_b, b1 = std::min(b_panels, b0 + macro_b);
      float* const buffer = buffers[static_cast<std::size_t>(member)].as<float>();
      std::memset(buffer, 0, static_cast<std::size_t>((a1 - a0) * unit.tile_rows * ldc) * sizeof(float));
      for (std::int64_t step = 0; step < k_padded; step += inner_block) {
        const std::int64_t steps = std::min(inner_block, k_padded - step) / unit.k_unit;
        for (std::int64_t j = b0; j < b1; ++j) {
          const char* pb = packed_b_.as<char>() + j * b_panel_bytes + step * unit.tile_cols * unit.element;
          for (std::int64_t i = a0; i < a1; ++i) {
            const char* pa = packed_a_.as<char>() + i * a_panel_bytes + step * unit.tile_rows * unit.element;
            unit.tile(steps, pa, pb, buffer + (i - a0) * unit.tile_rows * ldc + (j - b0) * unit.tile_cols, ldc);
          }
        }
      }
      const std::int64_t row0 = a0 * unit.tile_rows, rows = std::min(m, a1 * unit.tile_rows) - row0;
      const std::int64_t col0 = b0 * unit.tile_cols, cols = std::min(n, b1 * unit.tile_cols) - col0;
      for (std::int64_t r = 0; r < rows; ++r) {
        float* const to = c + (row0 + r) * n + col0;
        const float* const from = buffer + r * ldc;
        if (k0 == 0) {
          std::copy(from, from + cols, to);
        } else {
          for (std::int64_t j = 0; j < cols; ++j) to[j] += from[j];
        }
      }
    });
  }
}

Dense::Dense(Team& team, Unit unit, std::int64_t rows, std::int64_t vocab)
    : team_(team), product_(team, unit), rows_(rows), vocab_(vocab) {
  const auto bytes_each = static_cast<std::size_t>(rows * vocab) * sizeof(float);
  for (Array* array : {&z_, &p_, &logp_}) {
    *array = Array(bytes_each);
    float* const x = array->as<float>();
    for_chunks(team, rows * vocab,
               [x](std::int64_t first, std::int64_t last) { std::fill(x + first, x + last, 1.0f); });
  }
}

std::int64_t Dense::bytes(std::int64_t rows, std::int64_t vocab) { return 3 * rows * vocab * 4; }

namespace {
bool kept(std::int32_t target) { return target >= 0; }
std::int64_t count_kept(const std::int32_t* targets, std::int64_t rows) {
  return std::count_if(targets, targets + rows, kept);
}
}  // namespace

// z_ -> p_ = softmax, logp_ = log p -> mean of -logp_[y] over kept rows
double Dense::loss_forward(const std::int32_t* targets) {
  const DenseKernels& kernels = dense_kernels();
  team_.parallel_for(rows_, [&](std::int64_t i, int) {
    kernels.softmax_row(z_.as<float>() + i * vocab_, p_.as<float>() + i * vocab_, vocab_);
  });
  team_.parallel_for(rows_, [&](std::int64_t i, int) {
    kernels.log_row(p_.as<float>() + i * vocab_, logp_.as<float>() + i * vocab_, vocab_);
  });
  double sum = 0;
  for (std::int64_t i = 0; i < rows_; ++i) {
    if (kept(targets[i])) sum -= logp_.as<float>()[i * vocab_ + targets[i]];
  }
  return sum / static_cast<double>(std::max<std::int64_t>(1, count_kept(targets, rows_)));
}

// p_ -> D in z_, through dL/dlog p and dL/dp in logp_
void Dense::loss_backward(const std::int32_t* targets) {
  const DenseKernels& kernels = dense_kernels();
  const float step = -1.0f / static_cast<float>(std::max<std::int64_t>(1, count_kept(targets, rows_)));
  team_.parallel_for(rows_, [&](std::int64_t i, int) {
    float* const g = logp_.as<float>() + i * vocab_;
    std::fill(g, g + vocab_, 0.0f);
    if (kept(targets[i])) g[targets[i]] = step;
  });
  team_.parallel_for(rows_, [&](std::int64_t i, int) {
    kernels.log_backward_row(p_.as<float>() + i * vocab_, logp_.as<float>() + i * vocab_, vocab_);
  });
  team_.parallel_for(rows_, [&](std::int64_t i, int) {
    kernels.softmax_backward_row(p_.as<float>() + i * vocab_, logp_.as<float>() + i * vocab_,
                                 z_.as<float>() + i * vocab_, vocab_);
  });
}

double Dense::linear(const Matrix& x, const Matrix& w, const std::int32_t* targets, float* dx, float* dw,
                     DType low_precision) {
  const double start = now();
  product_(x, w.transposed(), z_.as<float>());
  seconds_products = now() - start;
  round_to(team_, low_precision, z_.as<float>(), rows_ * vocab_);
  const double loss = loss_forward(targets);
  seconds_forward = now() - start;
  seconds_backward = 0;
  if (dx == nullptr) return loss;
  loss_backward(targets);
  round_to(team_, low_precision, z_.as<float>(), rows_ * vocab_);
  const double products = now();
  const Matrix d{z_.data(), DType::f32, rows_, vocab_, vocab_};
  product_(d, w, dx);
  product_(d.transposed(), x, dw);
  round_to(team_, low_precision, dx, x.rows * x.cols);
  round_to(team_, low_precision, dw, w.rows * w.cols);
  seconds_products += now() - products;
  seconds_backward = now() - start - seconds_forward;
  return loss;
}

double Dense::logits(const Matrix& z, const std::int32_t* targets, void* d) {
  const double start = now();
  convert(team_, z.data, z.dtype, z_.data(), DType::f32, rows_ * vocab_);
  const double loss = loss_forward(targets);
  seconds_forward = now() - start;
  seconds_backward = 0;
  seconds_products = 0;
  if (d == nullptr) return loss;
  loss_backward(targets);
  convert(team_, z_.data(), DType::f32, d, z.dtype, rows_ * vocab_);
  seconds_backward = now() - start - seconds_forward;
  return loss;
}

void round_to(Team& team, DType dtype, float* x, std::int64_t n) {
  if (dtype == DType::bf16) {
    for_chunks(team, n, [x](std::int64_t first, std::int64_t last) {
      for (std::int64_t i = first; i < last; ++i) x[i] = bfloat16(x[i]);
    });
  } else if (dtype == DType::f16) {
    for_chunks(team, n, [x](std::int64_t first, std::int64_t last) {
      for (std::int64_t i = first; i < last; ++i) x[i] = float16(x[i]);
    });
  }
}

void convert(Team& team, const void* from, DType from_type, void* to, DType to_type, std::int64_t n) {
  for_chunks(team, n, [&](std::int64_t first, std::int64_t last) {
    if (from_type == DType::f32) {
      if (to_type == DType::bf16) return convert_range<float, bfloat16>(from, to, first, last);
      if (to_type == DType::f16) return convert_range<float, float16>(from, to, first, last);
      return convert_range<float, float>(from, to, first, last);
    }
    if (from_type == DType::bf16) return convert_range<bfloat16, float>(from, to, first, last);
    convert_range<float16, float>(from, to, first, last);
  });
}

}  // namespace logitless::bench
