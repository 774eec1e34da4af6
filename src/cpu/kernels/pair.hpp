// A student's and a teacher's logits side by side, a leaf of 256 columns at a time. Two exponentials an element and
// walk; JSD takes logarithms one by one (some 10 ns an element, where its two products take hundreds).
#pragma once

namespace logitless::cpu::LL_ISA {

inline PairNumbers pair_leaf(const float* z, const float* u, std::int64_t n, float inverse_tau) {
  F32 const by(inverse_tau), least(-INFINITY);
  F32 top_s = least, top_t = least;
  for_lanes(n, [&](std::int64_t i, int count) {
    // The logits come second: a NaN then stays.
    top_s = maximum(top_s, load_some(z + i, count, -INFINITY) * by);
    top_t = maximum(top_t, load_some(u + i, count, -INFINITY) * by);
  });
  PairNumbers out{};
  out.ms = max_of(top_s);
  out.mt = max_of(top_t);
  F32 const ms(reference_of(out.ms)), mt(reference_of(out.mt));
  F32 ss(0.0F), ts = ss, cs = ss, st = ss, tt = ss, ct = ss;
  for_lanes(n, [&](std::int64_t i, int count) {
    F32 const gap_s = load_some(z + i, count, -INFINITY) * by - ms,
              gap_t = load_some(u + i, count, -INFINITY) * by - mt;
    F32 const es = exp2_of(gap_s * F32(contract::log2e<float>())), et = exp2_of(gap_t * F32(contract::log2e<float>()));
    ss = ss + es;
    ts = ts + weighted(es, gap_s);
    cs = cs + weighted(es, gap_t);
    st = st + et;
    tt = tt + weighted(et, gap_t);
    ct = ct + weighted(et, gap_s);
  });
  out.ss = sum_of(ss);
  out.ts = sum_of(ts);
  out.cs = sum_of(cs);
  out.st = sum_of(st);
  out.tt = sum_of(tt);
  out.ct = sum_of(ct);
  return out;
}

// log p and log q of n classes to buffers of n.
inline void pair_logs(const float* z, const float* u, std::int64_t n, const PairRow& row, float* log_p, float* log_q) {
  F32 const by(row.inverse_tau), ms(row.ms), mt(row.mt), log_ss(row.log_ss), log_st(row.log_st);
  for_lanes(n, [&](std::int64_t i, int count) {
    store_some((load_some(z + i, count) * by - ms) - log_ss, log_p + i, count);
    store_some((load_some(u + i, count) * by - mt) - log_st, log_q + i, count);
  });
}
inline void exponentials(const float* x, std::int64_t n, float* out) {
  for_lanes(n, [&](std::int64_t i, int count) {
    store_some(exp2_of(load_some(x + i, count) * F32(contract::log2e<float>())), out + i, count);
  });
}

inline void pair_mixture(const float* z, const float* u, std::int64_t n, const PairRow& row, float* p_sum,
                         float* q_sum) {
  alignas(64) float p[leaf_columns], q[leaf_columns];
  pair_logs(z, u, n, row, p, q);
  exponentials(p, n, p);
  exponentials(q, n, q);
  double of_p = 0.0, of_q = 0.0;
  for (std::int64_t j = 0; j < n; ++j) {
    of_p += static_cast<double>(p[j] * contract::mixed_log_ratio(p[j], p[j], q[j], row.beta));
    of_q += static_cast<double>(q[j] * contract::mixed_log_ratio(q[j], p[j], q[j], row.beta));
  }
  *p_sum = static_cast<float>(of_p);
  *q_sum = static_cast<float>(of_q);
}

inline void pair_gradient(const float* z, const float* u, std::int64_t n, const PairRow& row, float* d) {
  alignas(64) float log_p[leaf_columns], log_q[leaf_columns], p[leaf_columns], q[leaf_columns];
  pair_logs(z, u, n, row, log_p, log_q);
  exponentials(log_p, n, p);
  exponentials(log_q, n, q);
  if (row.divergence == contract::Divergence::jsd)
    for (std::int64_t j = 0; j < n; ++j) q[j] = contract::jsd_element(p[j], q[j], row.beta, row.k);
  F32 const g(row.g), k(row.k), slope(row.slope), masked(-INFINITY);
  for_lanes(n, [&](std::int64_t i, int count) {
    F32 const x = load_some(z + i, count), pj = load_some(p + i, count), qj = load_some(q + i, count);
    F32 add = qj;
    if (row.divergence == contract::Divergence::forward_kl) add = contract::forward_element(pj, qj);
    if (row.divergence == contract::Divergence::reverse_kl)
      add = if_equal(pj, F32(0.0F), pj,
                     contract::reverse_element(pj, load_some(log_p + i, count) - load_some(log_q + i, count), k));
    add = add * g;
    if (row.slope != 0.0F) add = if_equal(x, masked, F32(0.0F), add * contract::softcap_slope(x, slope));
    store_some(load_some(d + i, count) + add, d + i, count);
  });
}

}  // namespace logitless::cpu::LL_ISA
